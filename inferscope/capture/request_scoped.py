"""Tier 1: a profile of one synchronous region of one request, on one thread, kept when the request turned out slow.

The recorder's four hooks call this from the application's threads. A request is drawn at its start while an incident is open; the session
opens at the outermost region that cannot be suspended and closes when that region is left; what was recorded is kept or dropped when the
request has finished. Everything else (saving, expiry, the breaker's end) happens in `run_once` on a thread of ours.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from inferscope import guard
from inferscope.capture import guards, session
from inferscope.capture.budget import CaptureBudget
from inferscope.capture.drawing import Armed, Drawn
from inferscope.capture.lifecycle import follow_process
from inferscope.capture.monitor import Monitor
from inferscope.capture.recording import Recording
from inferscope.capture.saving import Kept, Shelf
from inferscope.capture.session import Options, State
from inferscope.capture.target import Target, synchronous
from inferscope.capture.windows import Windows
from inferscope.clock import NS_PER_MS, NS_PER_S, now_ns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from inferscope.capture.session import Session
    from inferscope.capture.window import Flight
    from inferscope.types import CaptureSummary, Column, RequestRecord

__all__ = ["RequestScopedCapture", "Target", "synchronous"]

DRAWN_LIMIT: Final = 64
"""Drawn requests that may be open at once."""
REGIONS_LIMIT: Final = 8
"""Regions of one request among which the recorded one is chosen."""
RECENT_LIMIT: Final = 16
"""Latest starts that are looked at for one that is late."""
_LATE: Final = 0.6
"""Part of the objective after which a request that is still open counts as late."""
TAX_LIMIT: Final = 0.1
"""Slow-down of launches after CUPTI's start that is said aloud."""
SHAPE_TRIES: Final = 4
"""Sessions with shapes that are tried for each that may be kept: most requests are not slow, and each costs its request about 1 ms more."""
UNSAVED_LIMIT: Final = 4
"""Kept profiles in memory above which no request is drawn."""


class RequestScopedCapture:
    """Captures of one process. Hooks swallow nothing themselves: the recorder contains and counts what they raise.

    Args:
        budget: What it may cost. Default `CaptureBudget()`.
        set_armed: Sets the recorder's `armed`. Default: nothing is told.
        columns: Gives the recorder's columns, to name the spans in side files. Default: none are known.
        in_flight: Gives the open requests, as the recorder's `_open` does. Default None: unknown, so no windows.
        clock: Nanoseconds, monotonic; replaced in tests.
    """

    def __init__(
        self,
        budget: CaptureBudget | None = None,
        *,
        set_armed: Callable[[bool], None] = lambda _: None,
        columns: Callable[[], Sequence[Column]] = tuple,
        in_flight: Flight | None = None,
        clock: Callable[[], int] = now_ns,
    ) -> None:
        self.budget = budget or CaptureBudget()
        self.recording = Recording(self.budget, set_armed, clock)
        self.shelf = Shelf(self.recording, clock)
        self.windows = Windows(self.recording, self.shelf, in_flight, clock)
        self.monitor = Monitor(clock)
        self._columns = columns
        self._clock = clock
        self._armed: Armed | None = None
        self._drawn: dict[int, Drawn] = {}
        self._recent: deque[tuple[Any, int]] = deque(maxlen=RECENT_LIMIT)
        self._regions = 1
        # Read when Kineto is first used: silences two lines on stderr for each capture. Set now, while few threads read the environment.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        follow_process(self)

    # Arming

    @property
    def state(self) -> State:
        """Where captures stand."""
        return self.recording.machine.state

    @property
    def complete(self) -> bool:
        """Whether nothing more is wanted for the current incident."""
        armed = self._armed
        if armed is None:
            return True
        if not self.windows.complete:
            return False
        if armed.target.plan.windows:
            return True
        if armed.target.keep_all:
            return armed.slow + armed.body >= self.budget.slow + self.budget.body
        return armed.slow >= self.budget.slow and armed.body >= self.budget.body

    @property
    def pending(self) -> int:
        """Profiles that are not on disk yet."""
        return len(self.shelf) + len(self.windows)

    def arm(self, target: Target) -> str | None:
        """Begin to draw requests for an incident.

        Returns:
            None, or why not, in words; the incident then goes on without profiles.
        """
        now = self._clock()
        reason = self._arm_refusal(target, now)
        if reason is not None:
            self.recording.counts.refuse(reason)
            return guards.REASONS[reason]
        plan, torch = target.plan, session.loaded_torch()
        armed = Armed(target, now + int(self.budget.armed_s * NS_PER_S))
        if plan.tier == 3:
            armed.asked = Options(shapes=plan.shapes, stacks=plan.stacks)
            armed.allow_ns = int((plan.allow_stall_ms or 1.0) * NS_PER_MS)
        if plan.windows or (self.budget.windows and not target.keep_all and self.windows.refusal(torch, self.budget) is None):
            self.windows.arm(target, plan, self.budget)
        self._armed = armed
        self.monitor.begin()
        self.recording.begin(torch, hooks=not plan.windows)
        return None

    def _arm_refusal(self, target: Target, now: int) -> str | None:
        self.tick(now)
        state = self.state
        if state in {State.DISABLED, State.TRIPPED}:
            return str(state.value)
        if state is State.COOLDOWN and not target.keep_all:
            return "cooldown"
        if state not in {State.IDLE, State.COOLDOWN, State.EXPORTING} or self._armed is not None:
            return "busy"
        reason = guards.arm_refusal(
            target.directory,
            age_ns=0 if target.detected_ns is None else now - target.detected_ns,
            ttl_ns=int(self.budget.armed_s * NS_PER_S),
            free_memory_bytes=self.budget.free_memory_mb << 20,
        )
        if reason is None and target.plan.windows:
            reason = self.windows.refusal(session.loaded_torch(), self.budget)
        if reason is None and not self.recording.spending.open_incident(now):
            return "per_hour"
        return reason

    def succeed(self, before: RequestScopedCapture) -> None:
        """Take over what is known of the GPU from the captures that this one replaces: a warm-up happens once a process."""
        self.recording.gpu = before.recording.gpu

    def disarm(self) -> None:
        """Draw no more; a session under way ends at the next hook on its thread and is dropped, kept profiles are still saved."""
        self._armed = None
        self._recent.clear()
        self.windows.disarm()
        self.recording.end()

    def disable(self, reason: str) -> None:
        """Switch captures off for good: at shutdown and at exit. Waits at most 0.5 s for a session under way."""
        self._armed = None
        self.windows.disarm()
        self.recording.disable(reason)

    def after_fork(self) -> None:
        """In a forked child: captures are off, what the parent recorded is the parent's."""
        self._armed = None
        self._drawn = {}
        self._recent.clear()
        self.shelf.clear()
        self.windows.clear()
        self.recording.after_fork()

    # The recorder's hooks, on the application's threads

    def on_start(self, request: Any) -> bool:
        """Decide whether a request is drawn; called for each while armed."""
        recording, armed = self.recording, self._armed
        recording.nudge()
        if armed is None or armed.target.plan.windows or (armed.target.request and request.name != armed.target.request):
            return False
        if len(self._drawn) >= DRAWN_LIMIT:
            self._forget()
            return False
        if self.shelf.unsaved > UNSAVED_LIMIT or not recording.mutex.acquire(blocking=False):
            return False
        try:
            now = self._clock()
            likely = self._somebody_is_late(request, armed, now)
            if now >= armed.until_ns or not recording.spending.draw(now, likely=likely):
                return False
        finally:
            recording.mutex.release()
        self._drawn[request.id] = Drawn(armed, now, int(random.random() * self._regions), likely)  # noqa: S311  (no secret)
        return True

    def _somebody_is_late(self, request: Any, armed: Armed, now: int) -> bool:
        """Whether a request that started a little earlier is on its way to being slow: what holds it will probably hold this one.

        Only one in a hundred requests may be slow, but they come together: behind one lock, one copy, one pause.
        """
        late_ns = int(_LATE * armed.target.threshold_ns)
        late = any(other.open and other.id == number and now - other.start_ns > late_ns for other, number in self._recent)
        self._recent.append((request, request.id))
        return late

    def _forget(self) -> None:
        """Drop requests that were discarded by the application, which end without a word."""
        oldest = self._clock() - 60 * NS_PER_S
        for number, drawn in list(self._drawn.items()):
            if drawn.at_ns < oldest and (drawn.session is None or drawn.session.closed):
                self._drawn.pop(number, None)

    def on_enter(self, request: Any, name: str, kind: str) -> None:
        """Open the session at an outermost region that runs through on this thread."""
        self.recording.nudge()
        drawn = self._drawn.get(request.id)
        if drawn is None:
            return
        thread = threading.get_ident()
        if drawn.outer is not None:
            drawn.depth += drawn.thread == thread and drawn.outer == name
            return
        caller = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]  (CPython's own way to ask where a caller stands)
        if kind != "call" and not (kind == "with" and synchronous(caller)):
            return
        drawn.outer, drawn.thread, drawn.depth = name, thread, 1
        drawn.regions += 1
        if drawn.session is None and drawn.regions - 1 == drawn.pick and drawn.armed is self._armed:
            armed = drawn.armed
            shapes = armed.shaped < self.budget.shaped and armed.shape_tries < SHAPE_TRIES * self.budget.shaped
            drawn.session = self.recording.open(request, name, armed.asked, shapes=shapes, allow_ns=armed.allow_ns)
            armed.shape_tries += drawn.session is not None and drawn.session.asked.shapes

    def on_exit(self, request: Any, name: str, kind: str) -> None:  # noqa: ARG002  (the hook's signature)
        """Close the session when its own region is left, on its thread."""
        drawn = self._drawn.get(request.id)
        if drawn is not None and drawn.outer == name and drawn.thread == threading.get_ident():
            drawn.depth -= 1
            if drawn.depth == 0:
                drawn.outer = None
                profile = drawn.session
                if profile is not None and profile is self.recording.session and profile.thread == drawn.thread:
                    self.recording.close(profile, unwanted=self._unwanted(drawn.armed, profile, request))
        self.recording.nudge()

    def on_finish(self, request: Any, wall_ns: int) -> None:
        """Keep or drop what was recorded."""
        drawn = self._drawn.pop(request.id, None)
        if drawn is None:
            return
        counts, profile = self.recording.counts, drawn.session
        self._regions = min(max(self._regions, drawn.regions), REGIONS_LIMIT)
        if profile is None:
            counts.unopened += 1
            return
        request.profiled = True
        if not profile.closed:  # its region was left on another thread, or never: its own thread stops it at the next hook
            profile.discard = profile.stop_wanted = True
            self.recording.nudge()
            counts.dropped += 1
            return
        # The recorder reads the end before it calls `on_exit` for the request itself, so that stop is not in the wall time.
        stall = profile.start_cost_ns + (0 if profile.region == request.name else profile.stop_cost_ns)
        self.recording.spending.learn(likely=drawn.likely, slow=wall_ns - stall > drawn.armed.target.threshold_ns)
        slow = self._verdict(drawn.armed, profile, wall_ns - stall)
        if slow is None:
            profile.results = None
            counts.dropped += 1
            return
        counts.kept += 1
        target = drawn.armed.target
        drawn.armed.shaped += profile.asked.shapes and drawn.armed.asked is None
        name, tier = f"{target.prefix}-r{request.id}", target.plan.tier
        kept = Kept(name, target.directory, profile, slow, request.name, wall_ns, request.start_ns, tier=tier, requests=(request.id,))
        kept.likely = drawn.likely
        self.shelf.put(kept)

    def _unwanted(self, armed: Armed, profile: Session, request: Any) -> bool:
        """Whether it is the request that ends now, surely neither slow nor one to compare with."""
        wall_ns = self._clock() - request.start_ns - profile.start_cost_ns
        if profile.region != request.name or armed.target.keep_all or wall_ns > armed.target.threshold_ns:
            return False
        middle = armed.target.body_ns() if armed.body < self.budget.body else None
        return middle is None or wall_ns < middle[0]

    def _verdict(self, armed: Armed, profile: Session, wall_ns: int) -> bool | None:
        """True to keep as slow, False to keep as ordinary, None to drop; `wall_ns` is without our own stall."""
        if armed is not self._armed or profile.discard or profile.yielded or profile.results is None:
            return None
        target = armed.target
        slow = wall_ns > target.threshold_ns
        middle = None if slow or target.keep_all else target.body_ns()
        with self.recording.mutex:
            if target.keep_all:
                wanted = not self.complete
            elif slow:
                wanted = armed.slow < self.budget.slow
            else:
                wanted = armed.body < self.budget.body and middle is not None and middle[0] <= wall_ns <= middle[1]
            if not wanted:
                return None
            armed.slow += slow
            armed.body += not slow
        return slow

    # Our own thread

    def tick(self, now: int | None = None) -> None:
        """Let time pass: expiry, end of cooldown and of the breaker, a session whose thread died."""
        now = self._clock() if now is None else now
        armed = self._armed
        if armed is not None and (now >= armed.until_ns or self.complete):
            self.disarm()
        self.recording.tick(now)

    def run_once(self) -> tuple[CaptureSummary, ...]:
        """Record a window if it is time, write what was kept; returns the captures that became complete on disk.

        At most about one trace per 5 ms of budget a call.
        """
        self.recording.follow()
        self.tick()
        self.windows.run_once(self._columns)
        return self.shelf.work()

    def warm_up(self, *, ready: bool) -> None:
        """Let CUPTI start once CUDA is in use, unless the service is `ready`: then it is too late. On a thread of ours."""
        gpu = self.recording.gpu
        if gpu.warmed or not gpu.expected or gpu.why is not None:
            return
        if ready:
            gpu.expected = False
        elif self.recording.warm_up() is None and gpu.tax is not None and gpu.tax > TAX_LIMIT:
            guard.log_once(
                "capture.tax",
                f"kernel launches are {gpu.tax:.0%} slower since CUPTI was started; TEARDOWN_CUPTI=1 ends that where CUDA is 12.6 or later",
            )

    def attach_records(self, records: Iterable[RequestRecord]) -> None:
        """Hand over retained requests; those that were captured fill the spans of their side files."""
        rows = tuple(records)
        self.windows.take_records(rows)
        if len(self.shelf):
            self.shelf.take_records(rows, self._columns())

    def status(self) -> dict[str, Any]:
        """State, totals and costs as JSON types."""
        recording = self.recording
        counts, machine = recording.counts, recording.machine
        totals = {name: value for name in counts.__slots__ if isinstance(value := getattr(counts, name), int)}
        return {
            "state": machine.state.value,
            "reason": machine.reason,
            "transitions": {f"{a.value}>{b.value}": n for (a, b), n in machine.counts.items()},
            "requests_seen": recording.spending.seen,
            "attempts": recording.spending.attempts,
            "pending": self.pending,
            **totals,
            "gpu": recording.gpu.status(),
            "windows": self.windows.status(),
            "refused": dict(counts.refused),
            "stall_ms": {key: round(value / NS_PER_MS, 3) for key, value in counts.stalls_ns.items()},
        }
