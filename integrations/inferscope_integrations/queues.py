"""Waits between threads and tasks: how long an item lay in a `queue.Queue`, and how late the event loop runs.

`queue.Queue` items are the application's and are neither wrapped nor changed; a queue that was named with `watch_queue` keeps the instants
of its puts beside them. The loop's lag is measured from inside: a callback that asks to run in 0.1 s says how much later it ran.
"""

from __future__ import annotations

import asyncio
import importlib
import queue
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, ClassVar, Final

from inferscope.clock import now_ns
from inferscope.integration import Integration, record_wait

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferscope.patching import Ledger, Patch

__all__ = ["AsyncioIntegration", "QueueIntegration", "UvloopIntegration", "watch_queue"]

_PERIOD_S: Final = 0.1
_LAG: Final = "event_loop"
_named: weakref.WeakKeyDictionary[queue.Queue[Any], tuple[str, deque[int]]] = weakref.WeakKeyDictionary()


def watch_queue(name: str, watched: queue.Queue[Any]) -> queue.Queue[Any]:
    """Measure how long items lie in `watched`, as `queue:NAME`; takes effect with `instrument("queue")`.

    Args:
        name: The name of the series.
        watched: A `queue.Queue` that hands items out in the order of their arrival. Items that are in it already are not measured.

    Returns:
        The same object.

    Raises:
        TypeError: Not a `queue.Queue`, or one that reorders (`LifoQueue`, `PriorityQueue`): the wait of an item cannot be told there.
    """
    if isinstance(watched, (queue.LifoQueue, queue.PriorityQueue)) or not hasattr(watched, "mutex"):
        message = f"watch_queue({name!r}, …) takes a queue.Queue that keeps the order of arrival, not a {type(watched).__name__}"
        raise TypeError(message)
    with watched.mutex:
        _named[watched] = (name, deque([0] * len(watched.queue)))
    return watched


class QueueIntegration(Integration):
    """Waits in the queues that were named with `watch_queue`."""

    name: ClassVar[str] = "queue"
    serves: ClassVar[bool] = False  # every program imports it
    target: ClassVar[str] = "queue"

    def patch(self, ledger: Ledger) -> None:
        """Replace `Queue._put` and `Queue._get`, which run under the queue's own lock; queues that reorder have their own."""

        def make_put(original: Any, patch: Patch) -> Callable[..., Any]:
            def _put(self: Any, item: Any) -> None:
                original(self, item)
                entry = _named.get(self) if _named and patch.active else None
                if entry is not None:
                    entry[1].append(now_ns())

            return _put

        def make_get(original: Any, patch: Patch) -> Callable[..., Any]:
            def _get(self: Any) -> Any:
                item = original(self)
                entry = _named.get(self) if _named and patch.active else None
                if entry is not None and entry[1]:
                    put_ns = entry[1].popleft()
                    if put_ns:
                        record_wait(entry[0], put_ns, now_ns())
                return item

            return _get

        ledger.replace(queue.Queue, "_put", make_put)
        ledger.replace(queue.Queue, "_get", make_get)
        for watched, (_, instants) in list(_named.items()):
            with watched.mutex:  # items that came while nobody looked have no instant
                instants.clear()
                instants.extend([0] * len(watched.queue))


class AsyncioIntegration(Integration):
    """How late callbacks run, as `queue:event_loop`: ten readings a second on each running loop of asyncio's own."""

    name: ClassVar[str] = "asyncio"
    serves: ClassVar[bool] = False  # every program imports it
    target: ClassVar[str] = "asyncio"

    def patch(self, ledger: Ledger) -> None:
        """Replace `BaseEventLoop.run_forever`, through which every way to run a loop goes."""
        ledger.replace(asyncio.BaseEventLoop, "run_forever", _running)


class UvloopIntegration(Integration):
    """The same on uvloop's loops, whose own `run_forever` is what each way to run one ends in."""

    name: ClassVar[str] = "uvloop"
    serves: ClassVar[bool] = False  # a client may use it, too
    target: ClassVar[str] = "uvloop"
    distribution: ClassVar[str] = "uvloop"
    versions: ClassVar[tuple[tuple[int, ...], tuple[int, ...] | None]] = ((0, 19), None)

    def patch(self, ledger: Ledger) -> None:
        """Put `run_forever` on `uvloop.Loop`, the Python class over the loop that is C."""
        ledger.replace(importlib.import_module("uvloop").Loop, "run_forever", _running)


def _running(original: Any, patch: Patch) -> Callable[..., Any]:
    def run_forever(self: Any) -> Any:
        if not patch.active:
            return original(self)
        lag = _Lag(self, patch)
        lag.wait()
        try:
            return original(self)
        finally:
            lag.end()

    return run_forever


class _Lag:
    """A timer that measures its own lateness; it keeps no loop running and ends with the loop's run."""

    __slots__ = ("_due", "_handle", "_loop", "_patch")

    def __init__(self, loop: asyncio.AbstractEventLoop, patch: Patch) -> None:
        self._loop = loop
        self._patch = patch
        self._due = 0.0
        self._handle: asyncio.TimerHandle | None = None

    def wait(self) -> None:
        self._due = time.perf_counter() + _PERIOD_S
        try:
            self._handle = self._loop.call_later(_PERIOD_S, self._measure)
        except Exception:  # noqa: BLE001  (a closed loop says so to its owner, in the call that follows)
            self._handle = None

    def end(self) -> None:
        if self._handle is not None:
            self._handle.cancel()

    def _measure(self) -> None:
        if not self._patch.active:
            return
        end_ns = now_ns()
        record_wait(_LAG, min(end_ns, int(self._due * 1e9)), end_ns)
        self.wait()
