"""Load through calls that await their answer (gRPC), open or closed; instants as `open_loop` keeps them."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING, Final

from inferscope.bench.open_loop import LEAD_NS
from inferscope.bench.patience import Patience

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

__all__ = ["CallDriver"]

_AT_ONCE: Final = 32


class CallDriver:
    """Makes each call at its time, or keeps some under way.

    Args:
        call: sends a payload and returns an HTTP-like status, 0 when there was no answer; never raises.
        payloads: what is sent, one for each request.
        offsets_ns: when each is due, from the start; None for a closed loop.
        connections: calls under way at most; in a closed loop, the clients.
        seconds: when a closed loop sends no more.
        drain_s: how long to wait for answers after the last call, and for any answer at all.
        start_ns: when the schedule begins; default soon.
        close: called at the end.
    """

    def __init__(
        self,
        call: Callable[[bytes], Awaitable[int]],
        payloads: Sequence[bytes],
        offsets_ns: Sequence[int] | None,
        *,
        connections: int,
        seconds: float,
        drain_s: float,
        start_ns: int | None = None,
        close: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._call, self._payloads, self._offsets, self._close = call, payloads, offsets_ns, close
        self._limit, self._seconds, self._drain_s, self._start_ns = connections, seconds, drain_s, start_ns
        count = len(payloads)
        self.intended_ns = [0] * count
        self.launched_ns = [0] * count
        self.sent_ns = [0] * count
        self.done_ns = [0] * count
        self.status = [0] * count
        self.stopped = ""
        self._next = 0
        self._waiting: deque[int] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self.patience = Patience(drain_s)

    async def run(self) -> None:
        """Runs until all is sent and answered, the time and the drain are over, or the target is gone."""
        self._loop = asyncio.get_running_loop()
        start = time.perf_counter_ns() + LEAD_NS if self._start_ns is None else self._start_ns
        self.patience.begin(start)
        if self._offsets is None:
            end = start + int(self._seconds * 1e9)
            for _ in range(min(self._limit, len(self._payloads))):
                self._begin(self._client(start, end))
        else:
            self.intended_ns = [start + offset for offset in self._offsets]
            end = self.intended_ns[-1] if self.intended_ns else start
            self._pump()
        await self._wait(end + int(self._drain_s * 1e9))
        unfinished = self._next
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._close is not None:
            await self._close()
        if self._offsets is None or self.stopped:
            for name in ("intended_ns", "launched_ns", "sent_ns", "done_ns", "status"):
                del getattr(self, name)[unfinished:]

    async def _wait(self, deadline: int) -> None:
        while (now := time.perf_counter_ns()) < deadline:
            pending = self._offsets is not None and self._next < len(self._payloads)
            if not self._tasks and not self._waiting and not pending:
                return
            if self._tasks and not pending:
                await asyncio.wait(self._tasks, timeout=min(0.25, (deadline - now) / 1e9))
            else:
                await asyncio.sleep(min(0.25, (deadline - now) / 1e9))
            self.stopped = self.patience.over(time.perf_counter_ns())
            if self.stopped:
                return

    def _begin(self, work: Awaitable[None]) -> None:
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _client(self, start: int, end: int) -> None:
        await asyncio.sleep(max(start - time.perf_counter_ns(), 0) / 1e9)
        while self._next < len(self._payloads) and (now := time.perf_counter_ns()) < end:
            index = self._next
            self._next += 1
            self.intended_ns[index] = self.launched_ns[index] = now
            await self._one(index)

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
            self.launched_ns[self._next] = now
            if len(self._tasks) < self._limit:
                self._begin(self._chain(self._next))
            else:
                self._waiting.append(self._next)
            self._next += 1
        self._loop.call_soon(self._pump)

    async def _chain(self, index: int) -> None:
        """A call, and then those that waited for a free place."""
        await self._one(index)
        while self._waiting and not self.stopped:
            await self._one(self._waiting.popleft())

    async def _one(self, index: int) -> None:
        self.sent_ns[index] = now = time.perf_counter_ns()
        self.patience.sent(now)
        status = await self._call(self._payloads[index])
        now = time.perf_counter_ns()
        self.status[index], self.done_ns[index] = status, now if status else 0
        self.patience.ended(now, answered=bool(status), sent=True)
