"""A plain HTTP/1.1 keep-alive client that sends each request at a given instant, as cheaply as asyncio can.

It serves `inferscope.bench.load` and knows no plan, no statistics: instants in, instants out.
"""

from __future__ import annotations

import asyncio
import selectors
import ssl
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from inferscope.bench.patience import Patience
from inferscope.bench.reply import ReplyParser

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

__all__ = ["LEAD_NS", "Connection", "Driver", "OpenLoopDriver", "ReplyParser", "drive"]

LEAD_NS: Final = 50_000_000
"""Between the first connections and the first arrival."""
_OPENED_BEFOREHAND: Final = 16
_AT_ONCE: Final = 64
"""So many late requests are launched before answers are read again."""


class Driver(Protocol):
    """What sends a schedule: after `run`, one number a request in each list; 0 = never happened."""

    intended_ns: list[int]
    launched_ns: list[int]
    sent_ns: list[int]
    done_ns: list[int]
    status: list[int]
    stopped: str
    """Why it stopped before the end; empty when it did not."""

    def run(self) -> Coroutine[Any, Any, None]:
        """Runs the schedule and waits for the last answers."""
        ...


class Connection(asyncio.Protocol):
    """One keep-alive connection with at most one request under way."""

    def __init__(self, driver: OpenLoopDriver) -> None:
        self._driver = driver
        self._parser = ReplyParser()
        self._transport: asyncio.WriteTransport | None = None
        self.request: int | None = None
        """Index of the request under way."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keeps the transport (asyncio calls this)."""
        self._transport = cast("asyncio.WriteTransport", transport)
        self._driver.connections.add(self)

    def send(self, index: int, payload: bytes) -> None:
        """Writes a request."""
        assert self._transport is not None  # noqa: S101  connected before it is handed out
        self.request = index
        self._driver.sent_ns[index] = now = time.perf_counter_ns()
        self._driver.patience.sent(now)
        self._transport.write(payload)

    def data_received(self, data: bytes) -> None:
        """Reads an answer (asyncio calls this)."""
        now = time.perf_counter_ns()
        try:
            status = self._parser.feed(data)
        except ValueError:
            self.close()
            return
        if status is not None:
            index, self.request = self.request, None
            self._driver.answered(index, status, now)
            if self._parser.close_after:
                self.close()
            else:
                self._driver.idle_again(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Settles what was under way (asyncio calls this)."""
        index, self.request = self.request, None
        status = self._parser.at_close() if exc is None else None
        self._driver.lost(self, index, status or 0, time.perf_counter_ns())

    def close(self) -> None:
        """Closes it, at once when an answer is still due."""
        if self._transport is not None:
            if self.request is None:
                self._transport.close()
            else:
                self._transport.abort()


class OpenLoopDriver:
    """Sends each request at its time; connections are reused last in, first out, so that few stay warm.

    Args:
        host: where to connect.
        port: where to connect.
        payloads: whole requests, one for each arrival, head and body.
        offsets_ns: when each is due, from the start, ascending.
        connections: how many may be open at once.
        drain_s: how long to wait for answers after the last arrival, and for any answer at all before it is given up.
        tls: speak HTTPS; certificates are checked.
        start_ns: when the schedule begins; default as soon as the first connections stand.

    After `run`, `intended_ns`, `launched_ns`, `sent_ns`, `done_ns` and `status` hold one number for each arrival; 0 = never happened.
    """

    def __init__(
        self,
        host: str,
        port: int,
        payloads: Sequence[bytes],
        offsets_ns: Sequence[int],
        *,
        connections: int,
        drain_s: float,
        tls: bool = False,
        start_ns: int | None = None,
    ) -> None:
        self._host, self._port, self._payloads, self._offsets = host, port, payloads, offsets_ns
        self._limit, self._drain_s, self._start_ns = connections, drain_s, start_ns
        self.patience = Patience(drain_s)
        self.stopped = ""
        self._idle: list[Connection] = []
        self.connections: set[Connection] = set()
        """What is open now."""
        self._waiting: deque[int] = deque()
        self._next: int = 0
        self._tls = ssl.create_default_context() if tls else None
        self._unsettled = len(offsets_ns)
        self._opening: set[asyncio.Task[None]] = set()
        self.intended_ns = [0] * len(offsets_ns)
        self.launched_ns = [0] * len(offsets_ns)
        self.sent_ns = [0] * len(offsets_ns)
        self.done_ns = [0] * len(offsets_ns)
        self.status = [0] * len(offsets_ns)

    async def run(self) -> None:
        """Runs the schedule and waits for the last answers."""
        self._loop = asyncio.get_running_loop()
        self._settled, self._emptied = asyncio.Event(), asyncio.Event()
        await asyncio.gather(*(self._connect() for _ in range(min(_OPENED_BEFOREHAND, self._limit))))
        start = time.perf_counter_ns() + LEAD_NS if self._start_ns is None else self._start_ns
        self.intended_ns = [start + offset for offset in self._offsets]
        self.patience.begin(start)
        self._pump()
        if self._unsettled:
            limit_s = (self.intended_ns[-1] - time.perf_counter_ns()) / 1e9 + self._drain_s
            await self._wait(limit_s)
        await self._close()
        if self.stopped:
            self._forget(self._next)

    async def _wait(self, limit_s: float) -> None:
        """Until everything is settled, the time is over, or the target is gone."""
        settled = self._loop.create_task(self._settled.wait())
        deadline = time.perf_counter_ns() + int(limit_s * 1e9)
        while (now := time.perf_counter_ns()) < deadline and not settled.done():
            await asyncio.wait([settled], timeout=min(0.5, (deadline - now) / 1e9))
            if not settled.done():
                self.stopped = self.patience.over(time.perf_counter_ns())
            if self.stopped:
                return

    def _forget(self, count: int) -> None:
        """Requests from `count` on were never launched."""
        for name in ("intended_ns", "launched_ns", "sent_ns", "done_ns", "status"):
            del getattr(self, name)[count:]

    async def _close(self) -> None:
        self._waiting.clear()
        for task in self._opening:
            task.cancel()
        if self.connections:
            self._emptied.clear()
            for connection in self.connections:
                connection.close()
            await asyncio.wait([self._loop.create_task(self._emptied.wait())], timeout=1)

    def _pump(self) -> None:
        """Launches what is due and sets the timer for the next."""
        for _ in range(_AT_ONCE):
            if self._next >= len(self.intended_ns) or self.stopped:
                return
            now = time.perf_counter_ns()
            wait_ns = self.intended_ns[self._next] - now
            if wait_ns > 0:
                self._loop.call_later(wait_ns / 1e9, self._pump)
                return
            index = self._next
            self._next += 1
            self.launched_ns[index] = now
            if self._idle:
                self._idle.pop().send(index, self._payloads[index])
            else:
                self._waiting.append(index)
                self._grow()
        self._loop.call_soon(self._pump)

    def _grow(self) -> None:
        if len(self.connections) + len(self._opening) < self._limit:
            task = self._loop.create_task(self._connect())
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _connect(self) -> None:
        try:
            transport, connection = await self._loop.create_connection(lambda: Connection(self), self._host, self._port, ssl=self._tls)
        except OSError:
            self.connect_failed()
            return
        if not transport.is_closing():
            self.idle_again(connection)

    def connect_failed(self) -> None:
        """Nobody listens: the longest waiting request failed."""
        if self._waiting:
            self.answered(self._waiting.popleft(), 0, time.perf_counter_ns())

    def idle_again(self, connection: Connection) -> None:
        """Gives a free connection to the longest waiting request."""
        if self._waiting:
            index = self._waiting.popleft()
            connection.send(index, self._payloads[index])
        else:
            self._idle.append(connection)

    def answered(self, index: int | None, status: int, now: int) -> None:
        """Notes the outcome of a request."""
        if index is None:
            return
        self.status[index], self.done_ns[index] = status, now if status else 0
        self.patience.ended(now, answered=bool(status), sent=bool(self.sent_ns[index]))
        self._unsettled -= 1
        if self._unsettled == 0:
            self._settled.set()

    def lost(self, connection: Connection, index: int | None, status: int, now: int) -> None:
        """Forgets a closed connection; its request, if any, failed."""
        self.connections.discard(connection)
        if not self.connections:
            self._emptied.set()
        if connection in self._idle:
            self._idle.remove(connection)
        self.answered(index, status, now)
        if self._waiting:
            self._grow()


def drive(driver: Driver) -> None:
    """Runs the driver in an event loop of its own, whose timers are exact to microseconds.

    `select()` takes microseconds where epoll rounds a timer up to the next millisecond; it also limits file descriptors to 1024.
    """
    loop = asyncio.SelectorEventLoop(selectors.SelectSelector())
    try:
        loop.run_until_complete(driver.run())
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
    finally:
        loop.close()
