"""A closed loop: each of a few clients waits for its answer before it asks again.

It measures capacity and hides stalls: while the server stands still nobody asks, so half a second of silence becomes a handful of slow
requests. Its tail is optimistic and is labelled so.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import numpy as np

from inferscope.bench.open_loop import OpenLoopDriver

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inferscope.bench.open_loop import Connection
    from inferscope.types import FloatArray

__all__ = ["ClosedLoopDriver", "corrected"]

_MOST_CORRECTED = 20_000_000


class ClosedLoopDriver(OpenLoopDriver):
    """Keeps `connections` requests under way until the time is up or the payloads are used up.

    Args:
        host: where to connect.
        port: where to connect.
        payloads: whole requests, in the order in which they are sent.
        seconds: when to send no more.
        connections: clients, each with one request under way.
        drain_s: how long to wait for the last answers.
        tls: speak HTTPS; certificates are checked.
    """

    def __init__(
        self, host: str, port: int, payloads: Sequence[bytes], *, seconds: float, connections: int, drain_s: float, tls: bool = False
    ) -> None:
        super().__init__(host, port, payloads, [0] * len(payloads), connections=connections, drain_s=drain_s, tls=tls)
        self._seconds = seconds
        self._sending = 0

    async def run(self) -> None:
        """Runs until all is sent and answered, or the time and the drain are over."""
        self._loop = asyncio.get_running_loop()
        self._settled, self._emptied = asyncio.Event(), asyncio.Event()
        now = time.perf_counter_ns()
        self.patience.begin(now)
        self._deadline_ns = now + int(self._seconds * 1e9)
        await asyncio.gather(*(self._connect() for _ in range(self._limit)))
        if self._sending or self.connections:
            await self._wait(self._seconds + self._drain_s)
        self._limit = 0
        await self._close()
        self._forget(self._next)

    def idle_again(self, connection: Connection) -> None:
        """The client's next request, if there is to be one."""
        now = time.perf_counter_ns()
        if self._next < len(self._payloads) and now < self._deadline_ns and self._limit:
            index = self._next
            self._next += 1
            self._sending += 1
            self.intended_ns[index] = self.launched_ns[index] = now
            connection.send(index, self._payloads[index])
        elif not self._sending:
            self._settled.set()

    def answered(self, index: int | None, status: int, now: int) -> None:
        """Notes the outcome of a request."""
        if index is not None:
            self.status[index], self.done_ns[index] = status, now if status else 0
            self.patience.ended(now, answered=bool(status), sent=True)
            self._sending -= 1

    def lost(self, connection: Connection, index: int | None, status: int, now: int) -> None:
        """A closed connection; the client opens another, unless the server refuses everybody."""
        self.connections.discard(connection)
        if not self.connections:
            self._emptied.set()
        self.answered(index, status, now)
        if self._limit and time.perf_counter_ns() < self._deadline_ns and self._next < len(self._payloads):
            self._grow()
        elif not self._sending:
            self._settled.set()

    def connect_failed(self) -> None:
        """Nobody listens: counted as a failed request, and tried again while others still get through."""
        index = self._next
        if index < len(self._payloads) and self._limit:
            self._next += 1
            self.intended_ns[index] = self.launched_ns[index] = time.perf_counter_ns()
        current = asyncio.current_task()
        if not self.connections and all(task is current or task.done() for task in self._opening):
            self.stopped = "the target is gone: nobody listens there any more" if any(self.status) else ""
            self._settled.set()


def corrected(latency: FloatArray, expected: float) -> FloatArray:
    """Closed-loop latencies with those added that nobody measured while the server stood still (HdrHistogram's correction).

    Args:
        latency: shape (requests,).
        expected: time between two requests of one client when all is well, in the same unit; the median latency serves.

    Returns:
        The latencies and, for each above `expected`, latency - expected, latency - 2·expected, … down to `expected`. An approximation:
        only an open loop measures what users would have seen.
    """
    if expected <= 0 or latency.size == 0:
        return latency
    missing = np.maximum(np.floor(latency / expected).astype(np.int64) - 1, 0)
    total = int(missing.sum())
    if not 0 < total <= _MOST_CORRECTED:
        return latency
    position = np.arange(total) - np.repeat(np.cumsum(missing) - missing, missing)
    added = np.repeat(latency, missing) - (position + 1) * expected
    return np.concatenate([latency, added])
