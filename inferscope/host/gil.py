"""What threads wait for, sampled: the interpreter lock, another lock, input and output, or sleep.

CPython parks a thread that wants the interpreter in a futex inside its exported `_PyRuntime` object; a futex anywhere else is a lock, a
condition or a native pool. `/proc/self/task/TID/syscall` says which call a thread is in and with which arguments, and needs no capability
for the process's own threads. Tried on CPython 3.8 to 3.13; it is off where the interpreter has no such lock.

A sampler in Python holds the interpreter when it looks, so whoever computed before is seen waiting for it. Times are therefore never
taken from counting states: each interval is divided by the kernel's own totals (CPU time, run-queue delay), and a state only names what
is left, the blocked time. The thread that had to give the interpreter up to the sampler keeps its previous state.
"""

from __future__ import annotations

import os
import platform
import struct
import sys
import threading
from array import array
from contextlib import suppress
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING, Any, Final

from inferscope.clock import now_ns
from inferscope.host.chapters import Chapter, Held
from inferscope.host.interpreter import runtime_range
from inferscope.host.places import Places
from inferscope.host.scheduling import Reader, Schedstat, ThreadTimes, parse
from inferscope.pace import PAUSE_S, Pace
from inferscope.record import core

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["PERIOD_S", "STATES", "Sampler", "classify"]

PERIOD_S: Final = 0.010
STATES: Final = ("running", "gil", "lock", "sleep", "io", "log")
"""By their numbers in samples; `running` is on a CPU or ready for one, `log` waits for the lock of a logging handler."""
ROW: Final = struct.Struct("<IIII")
"""One interval: end in us after the first sample, CPU us, run-queue us, length in us << 3 | state. The kernel counts a run-queue delay when
it ends, so an interval can hold more of it than its length: the rest belongs to the intervals before."""
RUNNING, GIL, LOCK, SLEEP, IO, LOG = range(6)
_ROWS: Final = 200_000
"""Intervals kept in all; then sampling stops taking new ones."""
_THREADS: Final = 64
_SITES: Final = 16
_SHORT_NS: Final = 1_000_000
_LOGGING: Final[dict[tuple[str, str], Any]] = dict.fromkeys((("Handler.acquire", "__init__.py"), ("_acquireLock", "__init__.py")))
"""Where the standard library's logging waits for a lock, as `_within` names functions."""
_MEET_NS: Final = 100_000_000
"""How often threads that Python did not start are looked for, and how long a wait for the interpreter that was seen speaks for what is not."""
_FEW: Final = 3
_NOTHING: Final = ThreadTimes(0, 0, 0)
_ENDED: Final = 1024
"""Threads that ended in a chapter, from which new ones are met every 100 ms only: a thread for each request would fill the evidence."""
_HOLD_NS: Final = 150_000
"""How long threads are read without a pause; what is concluded from it takes half as long again. A look at 16 busy threads is 0.7 ms."""
_FORCED_NS: Final = 3_000_000
"""A sampler that is this late made a computing thread give the interpreter up (its switch interval is 5 ms)."""
_CALLS: Final = {
    "x86_64": (frozenset({202, 449, 455}), frozenset({35, 230})),
    "aarch64": (frozenset({98, 449, 455}), frozenset({101, 115})),
}
"""Numbers of futex and sleep calls."""


def classify(line: bytes, runtime: tuple[int, int], machine: str = platform.machine()) -> int:
    """The state of a thread from its `syscall` file; an index into `STATES`."""
    words = line.split()
    if not words or words[0] == b"running":
        return RUNNING
    call = int(words[0])
    futexes, sleeps = _CALLS[machine]
    if call in futexes and len(words) > 1:
        return GIL if runtime[0] <= int(words[1], 16) < runtime[1] else LOCK
    if call < 0:
        return RUNNING  # a page fault or the like: no call to name
    return SLEEP if call in sleeps else IO


def _unavailable() -> str | None:
    if getattr(sys, "_is_gil_enabled", lambda: True)() is False:
        return "this interpreter runs without an interpreter lock"
    if platform.machine() not in _CALLS:
        return f"system call numbers of {platform.machine()} are not known"
    if runtime_range() is None:
        return "the address of _PyRuntime cannot be found"
    try:
        Path(f"/proc/self/task/{threading.get_native_id()}/syscall").read_bytes()
    except OSError as error:
        return f"/proc/self/task/TID/syscall cannot be read here ({error.strerror})"
    return None


class _Thread:
    """One sampled thread: its descriptor, last totals and intervals."""

    __slots__ = ("at", "file", "ident", "last_ns", "name", "place", "places", "rows", "state", "text", "times")

    def __init__(self, file: int, times: ThreadTimes, now: int) -> None:
        self.file, self.times, self.last_ns = file, times, now
        self.name: str | None = None
        self.ident: int | None = None
        self.state = RUNNING
        self.at: tuple[str, str] | None = None
        self.text = b""
        self.rows = array("I")
        self.place = 0
        self.places = array("H")
        """Where it was at the end of each of `rows`."""

    def meet(self, thread: threading.Thread | None) -> None:
        """Learn its Python side."""
        if thread is not None:
            self.name, self.ident = thread.name, thread.ident


class Sampler:
    """Samples all threads while armed. `sample()` is called every `PERIOD_S` by one thread of ours, whose own id is left out.

    `rest()` ends a run of samples and keeps the descriptors; the next `sample()` begins a run of its own, and nothing is said of the time between.
    """

    def __init__(self, schedstat: Schedstat | None = None) -> None:
        self._schedstat = schedstat or Schedstat()
        self.reason: str | None = self._schedstat.reason or _unavailable()
        self._runtime = runtime_range() or (0, 0)
        self._read = Reader()
        self._threads: dict[int, _Thread] = {}
        self._python: set[int | None] = set()
        self._gone: list[Held] = []
        self._rows = self.samples = self.dropped = 0
        self._resting = False
        self._spans: list[list[int]] = []
        self.places = Places()
        """What code the sampled threads were in."""
        self.sites: dict[tuple[str, str], list[int]] = {}
        """Functions (name, file) that are looked for on the stacks: microseconds on a CPU, in a run queue, and blocked by state."""
        self.armed = False
        self.first_ns = self.last_ns = self._own_delay_ns = self._met_ns = 0
        self._waited = 0, -_FEW
        """When, and in which sample, somebody was last seen to wait for the interpreter."""

    def arm(self) -> bool:
        """Start afresh; False when nothing can be sampled here, `reason` says why."""
        self.disarm()
        self._begin()
        self._met_ns = 0
        self.armed = self.reason is None
        return self.armed

    def _begin(self) -> None:
        self.sites = {}
        self.places = Places()
        self._gone, self._spans = [], []
        self._rows = self.samples = self.dropped = self.first_ns = self.last_ns = 0
        self._waited = 0, -_FEW

    def rest(self) -> None:
        """Sample no more for a while."""
        if self._resting or not self.armed:
            return
        self._resting = True
        for held in list(self._threads.values()):
            self._catch_up(held, self.last_ns)

    def turn(self) -> Chapter:
        """Begin a chapter with the threads that are known; gives the one that ends."""
        self.rest()
        chapter = self.chapter()
        self._begin()
        for held in list(self._threads.values()):
            held.rows, held.places = array("I"), array("H")
        return chapter

    def chapter(self) -> Chapter:
        """What was seen since `arm` or the last `turn`."""
        threads = list(self._gone)
        for thread, held in list(self._threads.items()):
            rows, places = held.rows, held.places
            if not self._resting and held.state != RUNNING and self.last_ns - held.last_ns >= _SHORT_NS:  # it still waits
                rows = rows + array("I", _row(self.last_ns - self.first_ns, 0, 0, self.last_ns - held.last_ns, held.state))
                places = places + array("H", [held.place])
            if rows:
                threads.append(Held(thread, held.name, rows, places))
        return Chapter(self.first_ns, self.last_ns, [*self._spans], self.samples, self.dropped, threads, self.places, self.sites)

    def disarm(self) -> None:
        """Stop; what was sampled stays until the next `arm`."""
        self.armed = False
        for thread, held in list(self._threads.items()):
            self._retire(thread, held)

    def reset(self) -> None:
        """Forget everything: for a forked child."""
        self.arm()
        self.armed = False
        self._schedstat.close()

    def sample(self) -> None:
        """Look at every thread once."""
        if not self.armed:
            return
        moment = now_ns()
        self.first_ns = self.first_ns or moment
        if self._resting or not self._spans:
            self._wake(moment)
        self._spans[-1][1] = moment
        late = self._lateness(moment)
        fresh = self._born()
        if fresh or moment - self._met_ns >= _MEET_NS:
            self._met_ns = moment
            self._meet(fresh)
        self.samples += 1
        before, self.last_ns = self.last_ns, moment
        left = list(self._threads.items())
        while left and self.armed:
            left = self._part(left, before, late)
            if left:
                late = self._pause()

    def _part(self, left: list[tuple[int, _Thread]], before: int, late: int) -> list[tuple[int, _Thread]]:
        """Look at threads for as long as the interpreter may be held; gives those that are left."""
        seen: list[tuple[_Thread, int, ThreadTimes]] = []
        began, waiting, done = now_ns(), 0, 0
        for thread, held in left:
            if done and now_ns() - began > _HOLD_NS:
                break
            done += 1
            text = self._schedstat.raw(thread)
            if text is None:
                self._retire(thread, held)
            elif text == held.text and held.state != RUNNING:
                waiting += held.state == GIL  # it never ran, so it waits where it waited: noted when it moves
            else:
                held.text = text
                self._catch_up(held, before)
                seen.append((held, self._look(held), parse(text)))
        if self.sites:
            self._locate(seen)
        forced = _holder(seen) if late > _FORCED_NS else None
        waiting += sum(state == GIL and held is not forced for held, state, _ in seen)
        # on a machine short of CPUs who waits for the interpreter is mostly seen ready to ask for it again
        if waiting:
            self._waited = self.last_ns, self.samples
        contended = self.last_ns - self._waited[0] <= _MEET_NS or self.samples - self._waited[1] < _FEW
        for held, state, times in seen:
            held.place = self.places.look(held.ident)
            self._note(held, RUNNING if held is forced else state, times, now_ns(), others_wait=contended)
        return left[done:]

    def _pause(self) -> int:
        """Let others have the interpreter; how long it then took to get it back, without our own wait for a CPU."""
        delay, asleep = self._own_delay(), now_ns()
        sleep(PAUSE_S)
        return now_ns() - asleep - int(PAUSE_S * 1e9) - (self._own_delay() - delay)

    def _wake(self, moment: int) -> None:
        """Begin a run of samples: threads are met as they are now, and this sample is not late."""
        self._resting, self.last_ns = False, 0
        self._spans.append([moment, moment])
        pause = Pace()
        for thread, held in list(self._threads.items()):
            pause()
            held.text = self._schedstat.raw(thread) or b""
            if not held.text:
                self._retire(thread, held)
                continue
            held.times, held.last_ns, held.state, held.at = parse(held.text), now_ns(), self._look(held), None

    def _catch_up(self, held: _Thread, until: int) -> None:
        """Note the time up to an earlier sample in which a thread only waited."""
        if held.state == RUNNING or until - held.last_ns < _SHORT_NS:
            return
        if held.at is not None:
            self.sites[held.at][2 + held.state] += (until - held.last_ns) // 1000
        self._note(held, held.state, held.times, until, others_wait=False)

    def look_for(self, sites: Iterable[str]) -> None:
        """Say what threads do while they are in these functions, `function (file:line)`: where locks are held that others wait for."""
        for site in sites:
            name, _, place = site.partition(" (")
            key = (name, place.rpartition(":")[0])
            if key not in self.sites and len(self.sites) < _SITES:
                self.sites[key] = [0] * (2 + len(STATES))

    def _locate(self, seen: list[tuple[_Thread, int, ThreadTimes]]) -> None:
        for held, state, times in seen:
            held.at = self._within(held, self.sites)
            if held.at is None:
                continue
            length, cpu, delay = self.last_ns - held.last_ns, times.cpu_ns - held.times.cpu_ns, times.delay_ns - held.times.delay_ns
            row = self.sites[held.at]
            row[0] += cpu // 1000
            row[1] += delay // 1000
            row[2 + state] += max(0, length - cpu - delay) // 1000

    def _within(self, held: _Thread, wanted: dict[tuple[str, str], Any]) -> tuple[str, str] | None:
        """Which of the functions `wanted` a thread is in; None with the pure core.

        Only the C core can walk another thread's stack without letting go of the interpreter. Walked from Python, a stack moves between
        two steps, and CPython 3.11 then crashes in `f_back`: seen in a service under load, with the core dump to show for it.
        """
        search: Callable[..., tuple[str, str] | None] | None = getattr(core.default, "_within", None)
        return search(held.ident or 0, wanted) if search is not None else None

    def _lateness(self, moment: int) -> int:
        """How much later than asked this sample comes, without our own wait for a CPU: the wait for the interpreter."""
        delay = self._own_delay()
        waited, self._own_delay_ns = delay - self._own_delay_ns, delay
        return moment - self.last_ns - int(PERIOD_S * 1e9) - waited if self.last_ns else 0

    def _own_delay(self) -> int:
        own = self._schedstat.read(threading.get_native_id())
        return own.delay_ns if own is not None else 0

    def _look(self, held: _Thread) -> int:
        if held.name is None:
            return RUNNING  # a native thread: its times count, what it waits for does not
        try:
            state = classify(self._read(held.file), self._runtime)
        except (OSError, ValueError):
            return RUNNING
        return LOG if state == LOCK and self._within(held, _LOGGING) is not None else state

    def _note(self, held: _Thread, state: int, times: ThreadTimes, end: int, *, others_wait: bool) -> None:
        length = end - held.last_ns
        cpu, delay = times.cpu_ns - held.times.cpu_ns, times.delay_ns - held.times.delay_ns
        # a thread that was seen computing names its blocked time by where it waited before, or by what other computing threads wait for
        named = state or held.state or (GIL if others_wait and held.name is not None else RUNNING)
        if self._rows < _ROWS:
            self._rows += 1
            held.rows.extend(_row(end - self.first_ns, cpu, delay, length, named))
            held.places.append(held.place)
        else:
            self.dropped += 1
        held.times, held.last_ns, held.state = times, end, state

    def _born(self) -> set[int | None]:
        """Python threads that began since the last sample: a pool that is started for 50 ms at a time would else be gone before it is met."""
        before, self._python = self._python, {thread.native_id for thread in threading.enumerate()}
        return self._python - before if self.last_ns and len(self._gone) < _ENDED else set()

    def _meet(self, fresh: set[int | None]) -> None:
        python, pause = {thread.native_id: thread for thread in threading.enumerate()}, Pace()
        for thread in self._schedstat.threads():
            known = self._threads.get(thread)
            if known is not None:
                known.meet(python.get(thread))  # a thread that is just starting is not in the list yet
                continue
            if thread == threading.get_native_id() or len(self._threads) >= _THREADS:
                continue
            pause()
            times = self._schedstat.read(thread)
            if times is None:
                continue
            with suppress(OSError):
                file = os.open(f"/proc/self/task/{thread}/syscall", os.O_RDONLY | os.O_CLOEXEC)
                born = thread in fresh  # all that it did, it did since the last sample
                held = self._threads[thread] = _Thread(file, _NOTHING if born else times, self.last_ns if born else now_ns())
                held.meet(python.get(thread))
                held.state = self._look(held)

    def _retire(self, thread: int, held: _Thread) -> None:
        if self._threads.pop(thread, None) is None:
            return  # it was disarmed meanwhile
        self._catch_up(held, self.last_ns)
        with suppress(OSError):
            os.close(held.file)
        if held.rows:
            self._gone.append(Held(thread, held.name, held.rows, held.places))

    def rows(self) -> dict[int, tuple[str | None, array[int]]]:
        """Intervals by native thread id, with its Python name: four numbers each, see `ROW`."""
        return {thread: (name, rows) for thread, (name, rows, _) in self.chapter().intervals().items()}


def _row(end_ns: int, cpu_ns: int, delay_ns: int, length_ns: int, state: int) -> tuple[int, int, int, int]:
    return (end_ns // 1000, max(cpu_ns, 0) // 1000, max(delay_ns, 0) // 1000, min(max(length_ns, 0) // 1000, 0x1FFFFFFF) << 3 | state)


def _holder(seen: list[tuple[_Thread, int, ThreadTimes]]) -> _Thread | None:
    """Who computed until the sampler asked: of the threads that wait for the interpreter, the one that used most CPU meanwhile."""
    waiting = [(times.cpu_ns - held.times.cpu_ns, index) for index, (held, state, times) in enumerate(seen) if state == GIL]
    if not waiting:
        return None
    used, index = max(waiting)
    return seen[index][0] if used >= _FORCED_NS // 2 else None
