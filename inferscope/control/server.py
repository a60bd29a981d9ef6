"""All listeners and connections of this room in one loop that never blocks on any of them.

One thread calls `serve_once`. Sockets do not block, a request has a largest size, a client has so long to finish sending and reading, and
there are so many clients: whoever is slow, silent or wrong costs a bounded buffer and nothing else.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CLIENT_LIMIT", "IDLE_S", "STALL_S", "Client", "Server"]

CLIENT_LIMIT: Final = 32
"""Open connections; one more is closed unread."""
STALL_S: Final = 5.0
"""How long a client may take for a request that it began, and to read an answer."""
IDLE_S: Final = 60.0
"""How long a connection may stay open without a request."""
_READ_BYTES: Final = 65_536
_A_ROUND: Final = 8
"""Requests of one client in one round of the loop: the others have their turn."""
_LINGER_S: Final = 0.5
"""After a refusal that did not read everything: how long we read on, or the client would see a reset instead of the answer."""


class Client(Protocol):
    """One connection's side of a protocol, without its socket."""

    closing: bool
    """Close when everything was sent."""

    def receive(self, data: bytes) -> None:
        """Take what arrived."""
        ...

    def answer(self) -> bytes | None:
        """The answer to the next complete request; None when there is none."""
        ...

    @property
    def pending(self) -> bool:
        """Whether a request has begun and is not complete."""
        ...


class _Connection:
    """A socket with its client and what it still has to send."""

    def __init__(self, sock: socket.socket, client: Client, now: float) -> None:
        self.sock, self.client = sock, client
        self.out = memoryview(b"")
        self.deadline = now + IDLE_S
        self.began: float | None = None
        self.lingering = False
        self.more = False
        """Whether another request may be complete already."""

    def events(self) -> int:
        """What the loop shall wait for; nothing more is read while an answer waits to be sent."""
        return selectors.EVENT_WRITE if self.out else selectors.EVENT_READ

    def step(self, now: float) -> bool:
        """Read, answer, send, as far as it goes without waiting; False when the connection is over."""
        more, self.more = self.more, False
        # Nothing more is read while complete requests wait: what a client can make us hold is bounded.
        if not self.out and not more and not self._read():
            return False
        for _ in range(_A_ROUND):
            if self.out and not self._send(now):
                break
            if self.lingering:
                return True
            if self.client.closing:
                self._linger(now)
                return True
            found = self.client.answer()
            if found is None:
                self._judge_time(now)
                return True
            self.out, self.deadline, self.began = memoryview(found), now + STALL_S, None
        else:
            self.more = not self.out
        return True

    def _judge_time(self, now: float) -> None:
        if not self.client.pending:
            self.began, self.deadline = None, now + IDLE_S
        elif self.began is None:
            self.began, self.deadline = now, now + STALL_S

    def _read(self) -> bool:
        try:
            data = self.sock.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return True
        except OSError:
            return False
        if data and not self.lingering:
            self.client.receive(data)
        return bool(data)

    def _send(self, now: float) -> bool:
        try:
            sent = self.sock.send(self.out)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            self.out, self.deadline = memoryview(b""), now
            return False
        self.out = self.out[sent:]
        if sent:
            self.deadline = now + STALL_S
        return not self.out

    def _linger(self, now: float) -> None:
        self.lingering, self.deadline = True, now + _LINGER_S
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)


class Server:
    """The loop.

    Args:
        clock: Seconds, monotonic; replaced in tests.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        self._listeners: list[socket.socket] = []
        self._connections: dict[int, _Connection] = {}
        self.turned_away = 0
        """Connections that were one too many."""
        self._lock = threading.Lock()
        """Held while the loop works: whoever closes from another thread leaves it to the loop."""
        self._closed = False
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.settimeout(0)
        self._selector.register(self._woken, selectors.EVENT_READ, None)

    def listen(self, listener: socket.socket, greet: Callable[[socket.socket, Any], Client]) -> None:
        """Accept on `listener`; `greet` (connection, address) makes each connection's client."""
        listener.settimeout(0)
        self._listeners.append(listener)
        self._selector.register(listener, selectors.EVENT_READ, greet)

    def wake(self) -> None:
        """End the wait of `serve_once` at once; from any thread and from a signal handler."""
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")

    def serve_once(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` seconds for something to do, and do what does not block."""
        with self._lock:
            if not self._closed:
                self._serve(timeout_s)
        if self._closed:
            self.close()

    def _serve(self, timeout_s: float) -> None:
        now = self._clock()
        waits = [max(0.0, connection.deadline - now) for connection in self._connections.values()]
        urgent = [connection for connection in self._connections.values() if connection.more]
        for key, _ in self._selector.select(0.0 if urgent else min([timeout_s, *waits])):
            if key.fileobj is self._woken:
                with contextlib.suppress(OSError):
                    self._woken.recv(4096)
            elif isinstance(key.data, _Connection):
                urgent = [other for other in urgent if other is not key.data]
                self._step(key.data)
            else:
                self._accept(key.fileobj, key.data)
        for connection in urgent:
            self._step(connection)
        now = self._clock()
        for connection in [held for held in self._connections.values() if now >= held.deadline]:
            self._drop(connection)

    def _accept(self, listener: Any, greet: Callable[[socket.socket, Any], Client]) -> None:
        try:
            sock, address = listener.accept()
        except OSError:
            return
        if len(self._connections) >= CLIENT_LIMIT:
            self.turned_away += 1
            sock.close()
            return
        try:
            sock.settimeout(0)
            client = greet(sock, address)
        except OSError:
            sock.close()
            return
        connection = _Connection(sock, client, self._clock())
        self._connections[sock.fileno()] = connection
        self._selector.register(sock, selectors.EVENT_READ, connection)
        self._step(connection)

    def _step(self, connection: _Connection) -> None:
        before = connection.events()
        if not connection.step(self._clock()):
            self._drop(connection)
        elif connection.events() != before or self._selector.get_key(connection.sock).events != connection.events():
            self._selector.modify(connection.sock, connection.events(), connection)

    def _drop(self, connection: _Connection) -> None:
        self._connections.pop(connection.sock.fileno(), None)
        with contextlib.suppress(OSError, KeyError, ValueError):
            self._selector.unregister(connection.sock)
        connection.sock.close()

    def close(self) -> None:
        """Close everything, from any thread: at once, or when the loop has finished what it does."""
        self._closed = True
        self.wake()
        if self._lock.acquire(blocking=False):
            try:
                self.drop()
            finally:
                self._lock.release()

    def drop(self) -> None:
        """Close this process's copies without asking the loop: in a forked child, which has none; the parent keeps serving."""
        # The selector first: taking sockets out of it one by one would take them out of the parent's as well.
        self._selector.close()
        for sock in [*self._listeners, *(held.sock for held in self._connections.values()), self._woken, self._waker]:
            sock.close()
        self._listeners, self._connections = [], {}
