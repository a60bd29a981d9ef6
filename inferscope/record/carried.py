"""What a worker process recorded, on its way to the process whose requests waited for it.

The waiting side listens at a datagram socket that only this user can open; the working side sends what its carrier or batch packed, before
the library's own answer goes its way. What the library sends is not touched, and where nobody listens the datagrams go nowhere. Instants are
CLOCK_MONOTONIC, which the processes of one machine share; a socket's path means nothing on another machine.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing.util
import os
import socket
import stat
import struct
from typing import TYPE_CHECKING, Any, Final, final

from inferscope.record import core

if TYPE_CHECKING:
    from pathlib import Path

    from inferscope.record.pure.splice import Packed

__all__ = ["Inbox", "Outbox"]

_LARGEST: Final = 16384
"""Bytes of a datagram: 64 spans and their names take a quarter of it."""
_WAITING: Final = 1024
_START: Final = struct.Struct("<q")


def _ours(path: Path) -> bool:
    """Whether a directory is this user's and nobody else's."""
    found = path.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)


@final
class Inbox:
    """Receives what workers packed, in the process whose requests wait.

    Args:
        path: Of the socket; its folder is made, for this user alone.
        queue: Name of the wait between handing a request over and its work's begin.

    Attributes:
        pid: The process that listens; a forked child needs an inbox of its own.
        waiting: {uid: (request, when it was handed over in ns)} of requests whose work is elsewhere.

    Raises:
        PermissionError: The folder is somebody else's.
        OSError: There can be no socket at this path.
    """

    def __init__(self, path: Path, queue: str) -> None:
        self.pid = os.getpid()
        self.path = path
        self.waiting: dict[str, tuple[Any, int]] = {}
        self._queue = queue
        path.parent.mkdir(mode=0o700, exist_ok=True)
        if not _ours(path.parent):
            message = f"{path.parent} is not this user's own"
            raise PermissionError(message)
        path.unlink(missing_ok=True)
        self._socket = _socket()
        self._socket.bind(str(path))
        multiprocessing.util.Finalize(None, self.close, exitpriority=-2)  # processes of multiprocessing run no exit handlers

    def close(self) -> None:
        """Take the socket's name away; the folder goes with the last one."""
        if os.getpid() == self.pid:
            self._socket.close()
            with contextlib.suppress(OSError):
                self.path.unlink()
                self.path.parent.rmdir()

    def collect(self) -> None:
        """Hang what has arrived into the requests that waited for it."""
        while True:
            try:
                data = self._socket.recv(_LARGEST)
            except OSError:
                break
            head, _, spans = data.partition(b"\n")
            uid, pid, columns, truncated = json.loads(head)
            request, submitted_ns = self.waiting.pop(uid, (None, 0))
            if request is not None:
                began_ns = _START.unpack_from(spans)[0]
                core.default.interval("queue", self._queue, submitted_ns, began_ns, request=request)
                core.default.splice((pid, tuple((kind, name) for kind, name in columns), spans, bool(truncated)), request)
        if len(self.waiting) > _WAITING:  # requests that ended without an answer
            self.waiting = {uid: entry for uid, entry in self.waiting.items() if entry[0].open}


@final
class Outbox:
    """Sends what a worker packed; never blocks and never raises."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None

    def send(self, path: Path, uid: str, packed: Packed | None) -> None:
        """Send the work done for the request `uid` to the inbox at `path`; None sends nothing."""
        if packed is None:
            return
        pid, columns, spans, truncated = packed
        if self._socket is None:
            self._socket = _socket()
        with contextlib.suppress(OSError):  # nobody listens, or is too slow to
            if _ours(path.parent):
                self._socket.sendto(json.dumps([uid, pid, columns, truncated]).encode() + b"\n" + spans, str(path))

    def close(self) -> None:
        """Send nothing any more."""
        opened, self._socket = self._socket, None
        if opened is not None:
            opened.close()
