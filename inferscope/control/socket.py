"""The owner's way in: a Unix socket beside the worker's evidence, `STATE_DIR/<service>/<slot>/control.sock`.

The socket is 0600 in the worker's own directory, and who connects is asked of the kernel: the service's own user and root may, nobody
else. It is put in place by a rename, so that it never lies there with other rights, and it replaces an older one only when nobody listens.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import sys
import time
from typing import TYPE_CHECKING, Any, Final, cast

from inferscope.control.protocol import LINE_BYTES, Actor, RequestError, encode, parse, reply
from inferscope.errors import InferscopeError

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping
    from pathlib import Path

    from inferscope.control.desk import Desk

__all__ = ["NAME", "Call", "UnixClient", "UnixSocket", "foreign", "peer", "someone_listens"]

NAME: Final = "control.sock"
_BACKLOG: Final = 64
_SHORT: Final = 100
"""Bytes of a path that fit into a socket address everywhere (108 on Linux, 104 elsewhere)."""
_UCRED: Final = struct.Struct("3i")
_OVERFLOW_UID: Final = 65534
"""How the kernel shows a user that this user namespace does not have."""
_ANSWER_BYTES: Final = 64 << 20


@contextlib.contextmanager
def _address(path: Path) -> Generator[str]:
    """`path` as a socket address: through an open directory where it is too long for one.

    Raises:
        OSError: It is too long and this system offers no way around.
    """
    if len(os.fsencode(path)) <= _SHORT:
        yield str(path)
        return
    if not sys.platform.startswith("linux"):
        raise OSError(0, "the path is too long for a socket")
    descriptor = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{path.name}"
    finally:
        os.close(descriptor)


def someone_listens(path: Path) -> bool:
    """Whether a process accepts connections there."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(0)
        try:
            with _address(path) as address:
                probe.connect(address)
        except BlockingIOError:
            return True  # its backlog is full
        except OSError:
            return False
        return True


def foreign(path: Path) -> str | None:
    """Why `path` cannot be trusted as ours, in words; None when it can, or when nothing lies there."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"{path} cannot be looked at ({error.strerror})"
    if found.st_uid not in {os.geteuid(), 0}:
        return f"{path} belongs to user {found.st_uid}, not to this one ({os.geteuid()}); remove it"
    if not stat.S_ISSOCK(found.st_mode):
        return f"{path} is no socket; remove it"
    return None


def _unsafe_directory(directory: Path) -> str | None:
    try:
        found = directory.lstat()
    except OSError as error:
        return f"{directory} cannot be used ({error.strerror})"
    if not stat.S_ISDIR(found.st_mode):
        return f"{directory} is no directory"
    if found.st_uid != os.geteuid():
        return f"{directory} belongs to user {found.st_uid}, not to this one ({os.geteuid()})"
    if found.st_mode & 0o022:
        return f"{directory} can be written by other users; chmod 700 it"
    return None


class UnixSocket:
    """The listening socket.

    Args:
        directory: The worker's own, `STATE_DIR/<service>/<slot>`.

    Raises:
        InferscopeError: It cannot be made safely, or another process listens there; the message is one line.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / NAME
        refusal = _unsafe_directory(directory) or foreign(self.path)
        if refusal is None and someone_listens(self.path):
            refusal = f"{self.path} is served by another process"
        if refusal is not None:
            raise InferscopeError(refusal)
        temporary = directory / f".{NAME}.{os.getpid()}.tmp"
        self.listener = socket.socket(socket.AF_UNIX)
        try:
            with contextlib.suppress(FileNotFoundError):
                temporary.unlink()
            with _address(temporary) as address:
                self.listener.bind(address)
            temporary.chmod(0o600)
            self.listener.listen(_BACKLOG)
            self._inode = temporary.lstat().st_ino
            temporary.rename(self.path)
        except OSError as error:
            self.listener.close()
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise InferscopeError(f"{self.path} cannot be made ({error.strerror or error})") from error

    def remove(self) -> None:
        """Take the name away, if it is still ours; the listening socket is closed by its server."""
        with contextlib.suppress(OSError):
            if self.path.lstat().st_ino == self._inode:
                self.path.unlink()


def peer(sock: socket.socket) -> tuple[Actor, str | None]:
    """Who is at the other end, and why they may not ask anything; None when they may."""
    if not hasattr(socket, "SO_PEERCRED"):
        # Elsewhere the rights of socket and directory are what keeps others out.
        return Actor("socket"), None
    pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    # The kernel says 0 for a process that this pid namespace cannot see: a debug container, say. Its user is checked like any other.
    actor = Actor("socket", uid, pid or None, None if pid else "another pid namespace")
    if uid in {0, os.geteuid()}:
        return actor, None
    if uid == _OVERFLOW_UID:
        return actor, "your user does not exist in this service's user namespace; ask from its own container"
    return actor, f"user {uid} may not control a service of user {os.geteuid()}"


class UnixClient:
    """One connection: requests and answers, a line each, in order.

    Args:
        desk: Who answers.
        actor: Who asks.
        refusal: Why they may not.
    """

    def __init__(self, desk: Desk, actor: Actor, refusal: str | None) -> None:
        self._desk, self._actor, self._refusal = desk, actor, refusal
        self._inbox = bytearray()
        self.closing = False

    @property
    def pending(self) -> bool:
        """Whether a line has begun."""
        return bool(self._inbox)

    def receive(self, data: bytes) -> None:
        """Take what arrived."""
        self._inbox += data

    def answer(self) -> bytes | None:
        """Answer the next line; None when none is complete."""
        if self._refusal is not None:
            self.closing = True
            return encode(reply(None, None, "denied", why=self._refusal))
        end = self._inbox.find(b"\n", 0, LINE_BYTES)
        if end < 0:
            if len(self._inbox) < LINE_BYTES:
                return None
            self.closing = True
            self._inbox.clear()
            return encode(self._desk.malformed(f"a request is at most {LINE_BYTES} bytes, with its newline", None, None))
        line = bytes(self._inbox[:end])
        del self._inbox[: end + 1]
        try:
            answer = self._desk.submit(parse(line), self._actor)
        except RequestError as error:
            answer = self._desk.malformed(error.why, error.id, error.op)
        return encode(self._with_namespace(answer))

    def _with_namespace(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Say it where the caller's process id means nothing here, so that nobody looks for it in this container."""
        if self._actor.pid is None and self._actor.peer is not None:
            return {**answer, "note": "you ask from another pid namespace: the audit trail has your user, not your process"}
        return answer


class Call:
    """The other end: a connection to a worker's socket, for the command line.

    Args:
        path: The worker's socket.
        timeout_s: Longest wait for one answer, seconds; default 5.

    Raises:
        InferscopeError: Nobody answers there, or it cannot be trusted.
    """

    def __init__(self, path: Path, timeout_s: float = 5.0) -> None:
        self.path = path
        refusal = _foreign_to_caller(path)
        if refusal is not None:
            raise InferscopeError(refusal)
        self._timeout_s = timeout_s
        self._inbox = b""
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(timeout_s)
        try:
            self._connect(time.monotonic() + timeout_s)
        except OSError as error:
            self._socket.close()
            raise InferscopeError(
                f"nobody answers at {path} ({error.strerror or type(error).__name__}); is the service running?"
            ) from error

    def _connect(self, deadline: float) -> None:
        with _address(self.path) as address:
            while True:
                try:
                    self._socket.connect(address)
                except BlockingIOError:  # its backlog is full: the kernel does not wait for a socket with a timeout
                    if time.monotonic() >= deadline:
                        raise
                    time.sleep(0.01)
                else:
                    return

    def ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Send one request and return its answer.

        Raises:
            InferscopeError: No answer in time, or none that can be read.
        """
        import json

        deadline = time.monotonic() + self._timeout_s
        try:
            self._socket.sendall(encode(message))
            while b"\n" not in self._inbox:
                self._socket.settimeout(max(0.001, deadline - time.monotonic()))
                data = self._socket.recv(1 << 20)
                if not data or len(self._inbox) > _ANSWER_BYTES:
                    raise InferscopeError(f"{self.path}: the service ended the connection")
                self._inbox += data
        except TimeoutError as error:
            raise InferscopeError(f"{self.path}: no answer within {self._timeout_s:g} s") from error
        except OSError as error:
            if b"\n" not in self._inbox:
                raise InferscopeError(f"{self.path}: the service ended the connection ({error.strerror})") from error
        line, _, self._inbox = self._inbox.partition(b"\n")
        try:
            answer: Any = json.loads(line)
        except ValueError as error:
            raise InferscopeError(f"{self.path}: the answer cannot be read") from error
        if not isinstance(answer, dict):
            raise InferscopeError(f"{self.path}: the answer cannot be read")
        return cast("dict[str, Any]", answer)

    @property
    def pid(self) -> int | None:
        """The process that answers, in this pid namespace; None when it cannot be seen."""
        if not hasattr(socket, "SO_PEERCRED"):
            return None
        return int(_UCRED.unpack(self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))[0]) or None

    def close(self) -> None:
        """End the connection."""
        self._socket.close()


def _foreign_to_caller(path: Path) -> str | None:
    """Why whoever calls must not trust that socket: root follows a service's own user, others only themselves and root."""
    try:
        found = path.lstat()
    except OSError as error:
        return f"no service answers at {path} ({error.strerror})"
    if not stat.S_ISSOCK(found.st_mode):
        return f"{path} is no socket"
    if os.geteuid() != 0 and found.st_uid not in {os.geteuid(), 0}:
        return f"{path} belongs to user {found.st_uid}; ask as that user or as root"
    return None
