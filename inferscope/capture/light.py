"""A session that Kineto has no part in: torch's older recorder of operators, which costs a request a twentieth.

Kineto takes about 0.65 ms of CPU for a session that records nothing, two thirds of it to calibrate its clocks four times, and about 3 us for
each operator; torch's older recorder (`_enable_profiler_legacy`) takes 7 us and 1.5 us an operator. It knows operators and annotations of
its own thread and of those that work for it, nothing of a device, and it touches no state of the process: a session that is never stopped
ends with its thread, two on two threads do not meet, exit and fork need no care. What Kineto alone can do (device, types of inputs, stacks,
all threads) stays with Kineto, and so does everything where torch no longer has this.
"""

from __future__ import annotations

import json
import os
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from inferscope.clock import NS_PER_S
from inferscope.pace import Pace

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["Light", "Recorded", "available", "give_up"]

_STRANGE_NS: Final = NS_PER_S
"""Difference between torch's clock and ours above which ours is believed."""
_OTHERS: Final = 1 << 22
"""Added to torch's own numbers of threads, whose native ids it does not tell: no Linux thread has an id so large."""
_ANNOTATION: Final = 7  # RecordScope::USER_SCOPE
_NEEDED: Final = ("_enable_profiler_legacy", "_disable_profiler_legacy", "_ProfilerDisableOptions")
_gone = ""


def available(torch: Any) -> bool:
    """Whether this torch has the recorder, and it has not failed in this process."""
    native = getattr(torch._C, "_autograd", None)  # noqa: SLF001  (no public name)
    return not _gone and all(hasattr(native, name) for name in _NEEDED)


def give_up(reason: str) -> None:
    """Leave everything to Kineto from now on: it failed."""
    global _gone  # noqa: PLW0603  (torch is the process's)
    _gone = reason


class Light:
    """One session on the calling thread; with the words of `torch.autograd.profiler.profile` that `Session` uses.

    Args:
        torch: The application's.
        shapes: Whether the dimensions of operators' inputs are recorded; of lists of tensors they are not.
    """

    __slots__ = ("_before_ns", "_native", "_shapes", "_torch", "flag", "kineto_results")

    def __init__(self, torch: Any, *, shapes: bool = False) -> None:
        self.flag = False
        """What torch's flag is set to at the end: True while a profiler of the application records by then."""
        self.kineto_results: Recorded | None = None
        self._shapes = shapes
        self._torch, self._native, self._before_ns = torch, torch._C._autograd, 0  # noqa: SLF001  (no public name)

    def __enter__(self) -> None:
        """Start.

        Raises:
            RuntimeError: A profiler is active on this thread.
        """
        kinds = self._torch._C._profiler  # noqa: SLF001  (no public name)
        config = kinds.ProfilerConfig(kinds.ProfilerState.CPU, self._shapes, False, False, False, False, kinds._ExperimentalConfig())  # noqa: SLF001, FBT003
        self._before_ns = time.time_ns()
        self._native._enable_profiler_legacy(config)  # noqa: SLF001  (no public name)
        # Compiled code names its regions only while this flag is set.
        self._torch.autograd.profiler._is_profiler_enabled = True  # noqa: SLF001  (as `_run_on_profiler_start`)

    def __exit__(self, *_: object) -> None:
        """Stop, and take what was recorded."""
        found = self._stop(consolidate=True)
        self.kineto_results = Recorded(found, self._before_ns, shapes=self._shapes)

    def drop(self) -> None:
        """Stop, and leave what was recorded to torch to free: a list of it is what costs most."""
        self._stop(consolidate=False)

    def _stop(self, *, consolidate: bool) -> Any:
        self._torch.autograd.profiler._is_profiler_enabled = self.flag  # noqa: SLF001  (as `_run_on_profiler_stop`)
        return self._native._disable_profiler_legacy(self._native._ProfilerDisableOptions(True, consolidate))  # noqa: SLF001, FBT003


class Recorded:
    """What one session recorded, until it is saved.

    Args:
        lists: torch's events, a list for each thread: ranges that begin and end, and a mark in that of the session's thread.
        before_ns: Unix time just before the session started.
        shapes: Whether they hold dimensions.
    """

    __slots__ = ("_before_ns", "_lists", "_shapes", "_thread")

    def __init__(self, lists: Sequence[Sequence[Any]], before_ns: int, *, shapes: bool = False) -> None:
        self._lists, self._before_ns, self._shapes = lists, before_ns, shapes
        self._thread = threading.get_native_id()

    def save(self, path: str) -> int:
        """Write a trace as Kineto does, leaving the interpreter to others in between.

        Returns:
            The longest time that it was kept from them, ns.

        Raises:
            OSError: The file cannot be written.
            ValueError: torch recorded no beginning.
        """
        mark = next((event for events in self._lists for event in events if event.kind() == "mark"), None)
        if mark is None:
            msg = "no beginning was recorded"
            raise ValueError(msg)
        began = round(mark.start_us() * 1e3)
        if abs(began - self._before_ns) > _STRANGE_NS:
            began = self._before_ns
        base = began - began % NS_PER_S
        pause, longest, since = Pace(), 0, time.perf_counter_ns()
        with open(path, "w", encoding="utf-8") as file:  # noqa: PTH123  (as torch is given it)
            file.write('{"schemaVersion": 1, "deviceProperties": [], "displayTimeUnit": "ms", ')
            file.write(f'"baseTimeNanoseconds": {base}, "traceEvents": [\n')
            for thread, events in self._threads(mark):
                for line in _lines(events, mark, (began - base) / 1e3, thread, shapes=self._shapes):
                    file.write(line)
                    longest = max(longest, time.perf_counter_ns() - since)
                    pause()
                    since = time.perf_counter_ns()
            file.write(_name(self._thread) + "\n]}\n")
        return longest

    def _threads(self, mark: Any) -> Iterator[tuple[int, Sequence[Any]]]:
        own = mark.thread_id()
        for events in self._lists:
            if events:
                number = events[0].thread_id()
                yield (self._thread if number == own else _OTHERS + number), events


def _name(thread: int) -> str:
    return json.dumps({"ph": "M", "name": "thread_name", "pid": os.getpid(), "tid": thread, "args": {"name": f"thread {thread}"}})


def _lines(events: Sequence[Any], mark: Any, offset_us: float, thread: int, *, shapes: bool) -> Iterator[str]:
    """A line for each range, in the order of their beginnings; one that was open at either end of the session is left out."""
    begun: dict[int, Any] = {}
    ends: dict[int, float] = {}
    for place, event in enumerate(events):
        kind = event.kind()
        if kind == "push":
            begun[event.handle()] = place
        elif kind == "pop" and (start := begun.pop(event.handle(), None)) is not None:
            ends[start] = mark.cpu_elapsed_us(event)
        if not place % 64:
            yield ""
    pid = os.getpid()
    for number, (place, end) in enumerate(sorted(ends.items())):
        event = events[place]
        start = mark.cpu_elapsed_us(event)
        row: dict[str, Any] = {
            "ph": "X",
            "cat": "user_annotation" if event.scope() == _ANNOTATION else "cpu_op",
            "name": event.name(),
            "pid": pid,
            "tid": thread,
            "ts": round(offset_us + start, 3),
            "dur": round(end - start, 3),
            "args": {"External id": number + 1, "Sequence number": event.sequence_nr(), "Ev Idx": number},
        }
        if shapes:
            row["args"]["Input Dims"] = event.shapes()
        yield json.dumps(row) + ",\n"
