"""Drives windows of all threads for an incident, on the capture thread: when, how long, and which are kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from inferscope.capture import guards, session
from inferscope.capture.saving import Kept
from inferscope.capture.session import Options, State
from inferscope.capture.window import DRAIN_S, OLD_NS, Pacing, Window, is_fixed
from inferscope.clock import NS_PER_MS, NS_PER_S
from inferscope.device.backends import captures
from inferscope.types import Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from inferscope.capture.budget import CaptureBudget
    from inferscope.capture.plan import Plan
    from inferscope.capture.recording import Recording
    from inferscope.capture.saving import Shelf
    from inferscope.capture.target import Target
    from inferscope.capture.window import Flight
    from inferscope.types import Column, RequestRecord

__all__ = ["Windows"]

STOP_NS: Final = 8 * NS_PER_MS
"""Longest stop that automatic windows aim at."""
GAP_NS: Final = NS_PER_S // 2
"""Between two windows."""
JUDGE_NS: Final = 5 * NS_PER_S // 2
"""How long a window waits for the records of the requests in it, which come with the aggregator's next tick."""
LOCK_S: Final = 0.05
"""How long a window waits for a session of a single request to end."""
HELD: Final = 3
"""Windows that wait for that at once: 1.3 KB an event."""
_FIXED_DRAIN_S: Final = 0.25
"""Where torch survives a stop under running operators, the wait is only for whole events."""


class Windows:
    """The windows of one process.

    Args:
        recording: State, costs and the other kind of session.
        shelf: Takes what is kept.
        in_flight: The recorder's `_open`; None where the core has none.
        clock: Nanoseconds, monotonic.
    """

    def __init__(self, recording: Recording, shelf: Shelf, in_flight: Flight | None, clock: Callable[[], int]) -> None:
        self._recording, self._shelf, self._in_flight, self._clock = recording, shelf, in_flight, clock
        self._target: Target | None = None
        self._plan: Plan | None = None
        self._wanted = self._kept = self._number = 0
        self._next_ns = 0
        self._pacing = Pacing(1, 1, 1)
        self._held: list[tuple[Window, Target, list[RequestRecord]]] = []
        self._parked: Window | None = None
        self.recorded = self.dropped = self.parked = 0

    def refusal(self, torch: Any, budget: CaptureBudget) -> str | None:
        """Why no window may be recorded in this process; a key of `guards.REASONS`."""
        if self._in_flight is None:
            return "core_needed"
        return None if budget.all_threads or is_fixed(torch) else "all_threads_unsafe"

    # On the worker and the capture thread

    def arm(self, target: Target, plan: Plan, budget: CaptureBudget) -> None:
        """Want windows for an incident."""
        longest = (plan.window_ms if plan.window_ms is not None else budget.window_ms) * NS_PER_MS
        stop = STOP_NS if plan.allow_stall_ms is None else int(plan.allow_stall_ms * NS_PER_MS)
        # What somebody allows in milliseconds bounds the events too: 14 us for one with shapes is the most that was measured.
        events = budget.events if plan.allow_stall_ms is None else max(budget.events, stop // 14_000)
        self._pacing = Pacing(events, stop, int(longest))
        self._target, self._plan, self._kept = target, plan, 0
        self._wanted = plan.requests if plan.windows else budget.windows
        self._next_ns = 0

    def disarm(self) -> None:
        """Want no more; what waits to be judged is still judged."""
        self._target = None

    def clear(self) -> None:
        """Drop what is not on the shelf: in a forked child."""
        self._target, self._parked = None, None
        self._held.clear()

    @property
    def complete(self) -> bool:
        """Whether nothing more is wanted."""
        return self._target is None or self._kept >= self._wanted

    def __len__(self) -> int:
        return len(self._held)

    def take_records(self, records: Iterable[RequestRecord]) -> None:
        """Hand over retained requests; those that overlap a held window say whether it is kept."""
        if not self._held:
            return
        for record in records:
            for window, _, found in self._held:
                if record.start_ns < window.silent_ns and record.start_ns + record.wall_ns > window.opened_ns:
                    found.append(record)

    def run_once(self, columns: Callable[[], Sequence[Column]]) -> None:
        """Record one window if it is time, judge those whose requests have finished, stop a parked one that has drained."""
        if self._parked is not None and (self._parked.abandoned or self._parked.drained):
            self._unpark(self._parked)
        now = self._clock()
        due = [row for row in self._held if self._is_due(row, now)]
        self._held = [row for row in self._held if not any(row is other for other in due)]
        for row in due:
            self._judge(*row, columns())
        target = self._target
        if target is None or self.complete or now < self._next_ns or len(self._held) >= HELD or self._shelf.unsaved > HELD:
            return
        if target.keep_all or self._recording.spending.solvent(now):
            self._record(target)

    def _is_due(self, row: tuple[Window, Target, list[RequestRecord]], now: int) -> bool:
        window, target, _ = row
        return target.keep_all or now - window.end_ns >= JUDGE_NS

    # One window

    def _record(self, target: Target) -> None:
        recording, torch, held = self._recording, session.loaded_torch(), session.lock
        if torch is None or self._in_flight is None or not held.acquire(timeout=LOCK_S):
            return
        plan = self._plan
        device, reason, without = recording.gpu.choose(torch)
        reason = reason or ("user_profiler" if recording.gate.occupied() else guards.session_refusal(torch)) or self._long(target)
        with recording.mutex:
            if reason is not None or not recording.armed or not recording.machine.move(State.RECORDING):
                held.release()
                recording.counts.refuse(reason or "disabled")
                return
            shapes, stacks = (plan.shapes, plan.stacks) if plan is not None else (False, False)
            asked = Options(device=device, shapes=shapes, stacks=stacks, all_threads=True)
            window = recording.window = Window(asked, self._in_flight, self._clock)
        window.why_no_device = without
        recording.gpu.opened(device)
        try:
            window.open(torch)
        except Exception as error:
            recording.account(window, held)
            recording.fault(f"start: {type(error).__name__}")
            raise
        if not recording.armed or recording.gate.occupied():
            window.ask_to_stop()
        window.wait(self._pacing.next_ns / NS_PER_S)
        window.silence()
        recording.machine.move(State.DRAINING)
        if window.drain(DRAIN_S if not is_fixed(torch) else _FIXED_DRAIN_S) or is_fixed(torch):
            self._stop(window, target)
        elif window.abandoned:
            recording.window = None  # the application's profiler could not wait; the lock was given back for it
        else:
            recording.machine.move(State.PARKED)
            window.parked = True
            self.parked += 1
            self._parked = window

    def _long(self, target: Target) -> str | None:
        """A request that runs for seconds would park the window."""
        if self._in_flight is None or is_fixed(session.loaded_torch()):
            return None
        oldest = self._clock() - max(OLD_NS, 4 * target.threshold_ns)
        return "long_requests" if any(row[3] < oldest for row in self._in_flight()) else None

    def _unpark(self, window: Window) -> None:
        self._parked = None
        if window.abandoned:
            self._recording.window = None
            return
        window.yielded = True  # too old to say anything about the incident
        self._stop(window, None)

    def _stop(self, window: Window, target: Target | None) -> None:
        recording, held = self._recording, session.lock
        try:
            if not window.close(wait_for_device=not captures.open):
                recording.window = None
                return
        except Exception as error:
            recording.account(window, held)
            recording.fault(f"stop: {type(error).__name__}")
            raise
        recording.account(window, held)
        self.recorded += 1
        self._pacing.stopped(window.length_ns, window.stop_cost_ns)
        self._next_ns = self._clock() + GAP_NS
        if window.results is None or target is None:
            self.dropped += 1
        else:
            self._held.append((window, target, []))
        if window.stop_cpu_ns > 4 * max(self._pacing.stop_ns, STOP_NS):
            recording.fault("stall")

    def _judge(self, window: Window, target: Target, records: list[RequestRecord], columns: Sequence[Column]) -> None:
        slow = [
            record for record in records if record.reasons & Reason.BREACH and (not target.request or record.key.request == target.request)
        ]
        if self._kept >= self._wanted or not (slow or target.keep_all):
            window.results = None
            self.dropped += 1
            return
        self._kept += 1
        self._number += 1
        self._recording.counts.kept += 1
        tier = self._plan.tier if self._plan is not None and self._plan.windows else 2
        kept = Kept(
            f"{target.prefix}-w{self._number}",
            target.directory,
            window,
            bool(slow),
            target.request or "",
            window.length_ns,
            window.opened_ns,
            tier=tier,
            requests=tuple(dict.fromkeys(record.id for record in slow or records))[:64],
            counted=lambda events: self._pacing.counted(window.length_ns, events),
        )
        for record in records:
            kept.take_record(record, columns)
        kept.recorded = True
        self._shelf.put(kept)

    def status(self) -> dict[str, Any]:
        """As JSON types."""
        return {
            "recorded": self.recorded,
            "kept": self._kept,
            "dropped": self.dropped,
            "parked": self.parked,
            "parked_now": self._parked is not None,
            "waiting": len(self._held),
            "next_ms": self._pacing.next_ns / NS_PER_MS,
        }
