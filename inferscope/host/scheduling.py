"""CPU time and run-queue delay of threads, from `/proc/self/task/TID/schedstat` through descriptors that stay open.

Field 1 is time on a CPU, field 2 time runnable without one, both ns; it takes no capability and costs the measured thread nothing. A read
through a kept descriptor is about 1 us, opening the file each time would be 40. Kernels without CONFIG_SCHED_INFO and some sandboxes
have no such file: that is found out once and said.
"""

from __future__ import annotations

import ctypes
import os
import resource
import threading
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["SECONDS", "Reader", "Schedstat", "Scheduling", "Second", "ThreadTimes", "is_telemetry", "parse"]

SECONDS: Final = 900
"""Ticks that are remembered: the longest horizon."""
_TASKS: Final = "/proc/self/task"
_MOST: Final = 512
"""Descriptors kept at most; further threads are read through a descriptor of the moment."""
_TELEMETRY: Final = ("inferscope-", "otel", "opentelemetry", "ddtrace", "datadog", "sentry", "newrelic")


class ThreadTimes(NamedTuple):
    """Running totals of one thread, ns."""

    cpu_ns: int
    delay_ns: int
    slices: int
    """How often it was given a CPU."""


class Second(NamedTuple):
    """The process between two ticks; differences, ns."""

    end_ns: int
    wall_ns: int
    cpu_ns: int
    delay_ns: int
    """Run-queue delay of all threads."""
    native_cpu_ns: int
    """Part of `cpu_ns` of threads that Python did not start, such as the pools of numeric libraries."""
    native_delay_ns: int
    telemetry_cpu_ns: int
    """Part of `cpu_ns` of threads that only measure, ours and those of other libraries, by their names."""
    threads: int
    voluntary: int
    involuntary: int
    """Context switches of the process."""


def is_telemetry(name: str) -> bool:
    """Whether a thread's name says that it only measures."""
    return name.lower().startswith(_TELEMETRY)


class Reader:
    """`pread` that keeps the interpreter: giving it up for a call of 1 us would cost up to 5 ms to get it back, for every file. One thread."""

    def __init__(self) -> None:
        call = ctypes.PyDLL(None).pread
        call.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_long]
        call.restype = ctypes.c_ssize_t
        self._call = call
        self._buffer = ctypes.create_string_buffer(256)

    def __call__(self, file: int) -> bytes:
        """The first 255 bytes.

        Raises:
            OSError: The thread behind the file ended.
        """
        length = int(self._call(file, self._buffer, 255, 0))
        if length < 0:
            raise OSError
        return self._buffer.raw[:length]


class Schedstat:
    """Reads threads of this process, from one thread of ours; `reason` says why it cannot, if so."""

    def __init__(self, tasks: str = _TASKS) -> None:
        self._tasks = tasks
        self._files: dict[int, int] = {}
        self._read = Reader()
        self.reason: str | None = None
        if self.read(threading.get_native_id() if tasks == _TASKS else 0) is None:
            self.reason = f"{tasks}/TID/schedstat cannot be read here"

    def threads(self) -> list[int]:
        """Native ids of all threads; descriptors of those that ended are closed."""
        try:
            alive = [int(name) for name in os.listdir(self._tasks)]  # noqa: PTH208  (names, every second: no objects around them)
        except (OSError, ValueError):
            return []
        for gone in self._files.keys() - set(alive):
            self._close(gone)
        return alive

    def read(self, thread: int) -> ThreadTimes | None:
        """Totals of one thread; None when it ended or cannot be read."""
        text = self.raw(thread)
        return None if text is None else parse(text)

    def raw(self, thread: int) -> bytes | None:
        """The same as the kernel writes it; equal texts mean that the thread did not run in between."""
        try:
            file = self._files.get(thread)
            if file is None:
                file = os.open(f"{self._tasks}/{thread}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
                if len(self._files) >= _MOST:
                    try:
                        return self._read(file)
                    finally:
                        os.close(file)
                self._files[thread] = file
            return self._read(file)
        except OSError:
            self._close(thread)
            return None

    def _close(self, thread: int) -> None:
        file = self._files.pop(thread, None)
        if file is not None:
            with suppress(OSError):
                os.close(file)

    def close(self) -> None:
        """Close every descriptor; reading opens them anew."""
        for thread in list(self._files):
            self._close(thread)


def parse(text: bytes) -> ThreadTimes:
    """Totals from the text of a `schedstat` file."""
    cpu, delay, slices = text.split()[:3]
    return ThreadTimes(int(cpu), int(delay), int(slices))


class Scheduling:
    """What the process's threads got of the CPUs, tick by tick; for one thread of ours."""

    def __init__(self, schedstat: Schedstat | None = None) -> None:
        self._schedstat = schedstat or Schedstat()
        self._last: dict[int, ThreadTimes] = {}
        self._before = (0, 0, 0)
        self.seconds: deque[Second] = deque(maxlen=SECONDS)

    @property
    def reason(self) -> str | None:
        """Why nothing is measured, if so."""
        return self._schedstat.reason

    def tick(self, now_ns: int) -> Second | None:
        """Read all threads; the first tick, which has nothing to compare with, gives None."""
        if self.reason is not None:
            return None
        python = {thread.native_id: thread.name for thread in threading.enumerate()}
        sums = [0] * 5
        current: dict[int, ThreadTimes] = {}
        for thread in self._schedstat.threads():
            times = self._schedstat.read(thread)
            if times is None:
                continue
            current[thread] = times
            old = self._last.get(thread, ThreadTimes(0, 0, 0))
            _add(sums, times.cpu_ns - old.cpu_ns, times.delay_ns - old.delay_ns, python.get(thread))
        usage = resource.getrusage(resource.RUSAGE_SELF)
        before, self._before = self._before, (now_ns, usage.ru_nvcsw, usage.ru_nivcsw)
        self._last = current
        if not before[0]:
            return None
        switches = (usage.ru_nvcsw - before[1], usage.ru_nivcsw - before[2])
        second = Second(now_ns, now_ns - before[0], sums[0], sums[1], sums[2], sums[3], sums[4], len(current), *switches)
        self.seconds.append(second)
        return second

    def within(self, from_ns: int, to_ns: int) -> Iterable[Second]:
        """Ticks that end in the time."""
        return [second for second in list(self.seconds) if from_ns < second.end_ns <= to_ns]

    def reset(self) -> None:
        """Forget the parent's threads: for a forked child."""
        self._schedstat.close()
        self._last, self._before = {}, (0, 0, 0)
        self.seconds.clear()


def _add(sums: list[int], cpu: int, delay: int, name: str | None) -> None:
    """Add one thread's differences to (cpu, delay, native cpu, native delay, telemetry cpu); `name` is None for one that Python did not start."""
    sums[0] += cpu
    sums[1] += delay
    if name is None:
        sums[2] += cpu
        sums[3] += delay
    elif is_telemetry(name):
        sums[4] += cpu
