"""Tiers 2 and 3: short windows in which every thread of the process is recorded.

With torch up to 2.13 a stop while another thread is inside an operator crashes the process. Hence, always and on every torch: the
callbacks are removed first, then whatever was in flight at that moment has to finish, then the session is stopped. Requests are what is
known to be in flight; threads that run operators outside of any request are not, which is why windows are opt-in where torch lacks the fix.
"""

from __future__ import annotations

import re
import threading
import time
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from inferscope.capture import session
from inferscope.clock import NS_PER_MS, NS_PER_S, now_ns

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from inferscope.capture.session import Options

    Flight = Callable[[], Sequence[tuple[Any, ...]]]

__all__ = ["Pacing", "Window", "is_fixed"]

DRAIN_S: Final = 2.0
"""How long what was in flight may take to finish before the window is parked."""
SETTLE_S: Final = 0.002
"""Between the last one's end and the stop."""
FORK_S: Final = 0.1
"""How long a fork waits for a window to end."""
OLD_NS: Final = 2 * NS_PER_S
"""A request that has been open for this long would keep a window from being stopped: none is opened beside it."""
_FIRST_FIXED: Final = (2, 14)
_RAW_POINTER: Final = re.compile(r"static\s+auto\s*\*\s*get\(\)\s*\{\s*return\s+singleton\(\)\.state_\.get\(\)")


@lru_cache(maxsize=8)
def _is_fixed(version: str, header: str) -> bool:
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or (int(numbers[1]), int(numbers[2])) < _FIRST_FIXED:
        return False
    try:
        return _RAW_POINTER.search(Path(header).read_text(encoding="utf-8", errors="replace")) is None
    except OSError:
        return False


def is_fixed(torch: Any) -> bool:
    """Whether this torch survives the stop of a session of all threads (pytorch#187141, #187483, #188172).

    By version and by what its own header says of the shared state: the crash comes from handing it out as a raw pointer. What cannot be
    shown counts as not fixed.
    """
    header = Path(getattr(torch, "__file__", None) or "/").parent / "include/torch/csrc/profiler/util.h"
    return _is_fixed(str(getattr(torch, "__version__", "")), str(header))


class Pacing:
    """How long the next window may be, from what the last ones cost: stops and saves take time by the event, not by the millisecond.

    Args:
        events: Most events in a window.
        stop_ns: Longest stop.
        longest_ns: Longest window.
    """

    FIRST_NS: Final = 10 * NS_PER_MS
    LEAST_NS: Final = 1 * NS_PER_MS

    def __init__(self, events: int, stop_ns: int, longest_ns: int) -> None:
        self.events, self.stop_ns, self.longest_ns = events, stop_ns, longest_ns
        self._stop_ratio: float | None = None
        self._rate: float | None = None
        """Events a nanosecond of window."""

    @property
    def next_ns(self) -> int:
        """Length of the next window: the first is short, none is more than twice as long as what was measured."""
        if self._stop_ratio is None:
            return min(self.FIRST_NS, self.longest_ns)
        longest = min(self.longest_ns, 2 * self._measured_ns)
        if self._stop_ratio > 0.0:
            longest = min(longest, int(self.stop_ns / self._stop_ratio))
        if self._rate:
            longest = min(longest, int(self.events / self._rate))
        return max(self.LEAST_NS, longest)

    def stopped(self, window_ns: int, stop_ns: int) -> None:
        """A window was stopped."""
        self._measured_ns = max(window_ns, self.LEAST_NS)
        ratio = stop_ns / self._measured_ns
        # Up at once, down slowly: traffic that came back must not meet a window of a quiet moment.
        self._stop_ratio = ratio if self._stop_ratio is None else max(ratio, 0.5 * (ratio + self._stop_ratio))

    def counted(self, window_ns: int, events: int) -> None:
        """A window was written and its events counted."""
        self._rate = max(events / max(window_ns, 1), 0.5 * (self._rate or 0.0))


class Window:
    """One session of all threads; opened, silenced and closed by one thread of ours, asked to stop by any.

    Args:
        asked: What it records; `all_threads` is set.
        in_flight: The open requests, as the recorder's `_open` gives them.
        clock: Nanoseconds, monotonic.
    """

    def __init__(self, asked: Options, in_flight: Flight, clock: Callable[[], int] = now_ns) -> None:
        self.asked = asked
        self.native = threading.get_native_id()
        self.results: Any = None
        self.opened_ns = self.silent_ns = self.end_ns = 0
        self.start_cost_ns = self.stop_cost_ns = self.stop_cpu_ns = self.drain_ns = 0
        self.yielded = self.abandoned = self.parked = self.truncated = False
        self.device_stopped = self.tail_lost = False
        self.why_no_device: str | None = None
        self.threads: set[int] = set()
        """Native ids of the threads whose requests were open meanwhile."""
        self._in_flight, self._clock = in_flight, clock
        self._awaited: set[int] = set()
        self._exempt: set[int] = set()
        self._stop, self._over = threading.Event(), threading.Event()
        self._touching = threading.Lock()
        self._torch: Any = None
        self.profile: Any = None

    @property
    def device(self) -> str | None:
        """What is recorded beside the CPU."""
        return self.asked.device

    @property
    def length_ns(self) -> int:
        """How long it recorded."""
        return self.silent_ns - self.opened_ns

    # On the thread that drives it

    def open(self, torch: Any) -> None:
        """Start recording every thread; whatever torch raises passes."""
        begun = self._clock()
        self._torch = torch
        with self._touching:
            self.profile = session.profiler(torch, self.asked)
            self.profile.__enter__()
        self.opened_ns = self._clock()
        self.start_cost_ns = self.opened_ns - begun
        self._mark()

    def wait(self, seconds: float) -> None:
        """Let it record, unless somebody wants it to stop."""
        self._stop.wait(seconds)

    def silence(self) -> None:
        """Remove the callbacks and note what is in flight."""
        with self._touching:
            self._silence()

    def _silence(self) -> None:
        if self.abandoned or self.silent_ns:
            return
        session.silence(self._torch)
        self.silent_ns = self._clock()
        self._awaited = self._mark()

    def _mark(self) -> set[int]:
        """Take what is open out of the statistics, and give its ids."""
        found: set[int] = set()
        for number, _, _, _, thread, carrier, request in self._in_flight():
            found.add(number)
            self.threads.add(thread)
            if not carrier:
                request.profiled = True
        return found

    @property
    def drained(self) -> bool:
        """Whether everything that was in flight when the callbacks went has finished, but for whoever waits for us."""
        if self._awaited:
            self._awaited &= {row[0] for row in self._in_flight() if row[4] not in self._exempt}
        return not self._awaited

    def drain(self, seconds: float) -> bool:
        """Wait until `drained`, for at most so long."""
        deadline = time.monotonic() + seconds
        while not self.drained:
            if self.abandoned or time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        self.drain_ns = self._clock() - self.silent_ns
        time.sleep(SETTLE_S)
        return True

    def close(self, *, wait_for_device: bool = True) -> bool:
        """Stop; only when `drained`. False when it was abandoned or closed before."""
        with self._touching:
            if self.abandoned or self.end_ns:
                return False
            if not self.yielded:
                self._mark()  # the stop holds the interpreter: whoever is open waits for it
            begun, cpu = self._clock(), time.thread_time_ns()
            profile, self.profile = self.profile, None
            if self.device is not None:
                stopped = getattr(self._torch.autograd, "_is_kineto_stopped", None)
                self.device_stopped = bool(stopped is not None and stopped())
                if not wait_for_device:
                    profile.use_device, self.tail_lost = None, True
            try:
                profile.__exit__(None, None, None)
                self.results = None if self.yielded else profile.kineto_results
            finally:
                self.end_ns = self._clock()
                self.stop_cost_ns = self.end_ns - begun
                self.stop_cpu_ns = time.thread_time_ns() - cpu
                self._over.set()
        return True

    # On any thread

    def ask_to_stop(self) -> None:
        """Record no longer."""
        self._stop.set()

    def yield_to(self, thread: int) -> None:
        """The application's own profiler waits on the thread with that native id: that thread's requests cannot end before we do."""
        self.yielded = True
        self._exempt.add(thread)
        self._stop.set()

    def leave(self, seconds: float) -> None:
        """The process ends: wait for the stop."""
        self._stop.set()
        self._over.wait(seconds)

    def abandon(self, reason: str) -> bool:
        """Give up stopping it; False when it is closed. Nothing is recorded any more, and this process captures no more."""
        if not self._touching.acquire(timeout=session.TOUCH_S):
            return False
        try:
            if self.end_ns:
                return False
            if not self.silent_ns:
                session.silence(self._torch)
            session.poison(reason)
            self.abandoned = True
            self._stop.set()
            self._over.set()
        finally:
            self._touching.release()
        return True

    # Around a fork

    def give_way(self, thread: int) -> bool:
        """Stop, because the thread with that native id forks; False when that does not happen in `FORK_S`."""
        if not self.parked:
            self.yield_to(thread)
            self._over.wait(FORK_S)
        return self._over.is_set()

    def hold(self) -> bool:
        """Keep torch's profiler from being touched while the process forks, with nothing recording; False when that takes too long.

        A child could not remove the callbacks itself: the lock over them is taken by every thread for a moment after each change, and a child
        may have a copy of it that a thread held which does not exist there. Hence they go here, and threads get a moment to notice.
        """
        if not self._touching.acquire(timeout=session.TOUCH_S):
            return False
        if self.opened_ns and not self.end_ns:
            self._silence()
            time.sleep(SETTLE_S)
        return True

    def let_go(self) -> None:
        """After `hold`."""
        self._touching.release()

    def forget(self) -> None:
        """In a forked child: it is the parent's."""
        self._touching = threading.Lock()
        self.abandoned = True
