"""One piece of work for several requests: a batcher's loop, a collated forward, a worker process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from inferscope import guard
from inferscope.record import core

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

    from typing_extensions import Self

    from inferscope.record.pure.splice import Packed

__all__ = ["Batch", "batch"]


@final
class Batch:
    """The context manager that `batch` gives.

    Args:
        requests: As for `batch`.
        name: As for `batch`.
        queued_ns: As for `batch`.
        recorder: Where it is counted.
    """

    __slots__ = ("_around", "_carrier", "_name", "_queued", "_recorder", "_requests")

    def __init__(self, requests: Iterable[Any], name: str, queued_ns: int | Iterable[int | None] | None, recorder: Any) -> None:
        self._recorder = recorder
        self._name = name
        self._requests = list(requests)
        if queued_ns is None or isinstance(queued_ns, int):
            self._queued: list[int | None] = [queued_ns] * len(self._requests)
        else:
            self._queued = list(queued_ns)
        self._carrier: Any = None
        self._around: Any = None

    @property
    def packed(self) -> Packed | None:
        """After the block: what was recorded, to be sent to the process whose requests waited for it.

        There, `inferscope.record.core.default.splice(packed, request)` hangs it into a request. Instants are CLOCK_MONOTONIC, which
        all processes of one machine share. A tuple of plain values, which pickles; None before the end and while recording is off.
        """
        packed: Packed | None = getattr(self._carrier, "packed", None)
        return packed

    def __enter__(self) -> Self:
        with guard.guard("batch"):
            recorder = self._recorder
            self._around = recorder.current()
            self._carrier = carrier = recorder.carrier(self._name)
            carrier.__enter__()
            # Work for a request whose spans hooks hear of is heard of too: NVTX ranges do not end where a batcher takes over.
            carrier.wanted = any(getattr(each, "wanted", False) for each in (*self._requests, self._around))
            start: int = carrier.start_ns
            for request, queued in zip(self._requests, self._queued, strict=False):
                idle = recorder.idle_since(request)
                since = idle if queued is None else queued
                if idle and since < start:
                    recorder.interval("queue", self._name, since, start, request=request)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with guard.guard("batch"):
            carrier, recorder = self._carrier, self._recorder
            if carrier is None:
                return
            carrier.__exit__(kind, error, trace)
            around = [] if self._around is None else [self._around]
            for request in {id(each): each for each in (*self._requests, *around)}.values():
                recorder.splice(carrier.packed, request)


def batch(requests: Iterable[Any], name: str = "batch", *, queued_ns: int | Iterable[int | None] | None = None) -> Batch:
    """Link requests to one piece of work that is done for all of them.

        with inferscope.request("score") as request:      # the request's thread or task
            queue.put((row, request, future))
            return future.result()

        rows, requests, futures = collect(queue)          # the batcher's thread
        with inferscope.batch(requests, name="forward"):
            results = model(stack(rows))

    The work is counted once in the series `batch` of its name, and each stage inside it once. Every request gets all of it as spans,
    because that is what it waited for: they take their time from whatever the request was in meanwhile, and the request's
    times still sum to its duration. What a request waited before the block is the queue of the same name. A request in whose
    thread the block runs is linked too. A request that has ended by the end of the block counts a late span, so hand results over
    after it. `with` is right around `await` too.

    Args:
        requests: What `inferscope.request()` gave; None among them is passed over.
        name: Of the work; low cardinality.
        queued_ns: When the requests were handed over (`time.perf_counter_ns`), one instant or one a request. Default: when each last
            began or ended a stage, or began itself.
    """
    return Batch(requests, name, queued_ns, core.default)
