"""The one session a process may have: who may open it, who closes it, and what happens when nobody can.

Opened and closed by the recorder's hooks on the application's threads; asked to stop by the application's own profiler, by a fork, by
exit and by `disarm`. A stop is only ever done by the thread that started.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from inferscope.capture import guards, session
from inferscope.capture.budget import Spending
from inferscope.capture.session import Machine, Session, State
from inferscope.clock import NS_PER_MS, NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferscope.capture.budget import CaptureBudget

__all__ = ["Counts", "Recording"]

USER_WAIT_S: Final = 2.0
"""How long the application's own profiler waits for ours to stop; after that ours is abandoned."""
EXIT_WAIT_S: Final = 0.5
SLOWEST_STALL_NS: Final = 50 * NS_PER_MS
"""CPU time of one start and stop above which it counts as a fault."""
DEVICE_PAUSE_NS: Final = 5 * NS_PER_S
"""Between two sessions that record a GPU: CUPTI ends the first one asynchronously and a quick second races it."""
_STOP_TARGET_NS: Final = 5 * NS_PER_MS
_STOP_FLOOR_NS: Final = NS_PER_MS // 2
_LIMITS_NS: Final = (5 * NS_PER_MS, 2000 * NS_PER_MS)
_FIRST_LIMIT_NS: Final = 500 * NS_PER_MS


@dataclass(slots=True)
class Counts:
    """What happened; running totals."""

    sessions: int = 0
    kept: int = 0
    dropped: int = 0
    saved: int = 0
    save_failed: int = 0
    empty: int = 0
    busy: int = 0
    """Drawn requests that found another session open."""
    unopened: int = 0
    """Drawn requests without a region to record."""
    yielded: int = 0
    abandoned: int = 0
    truncated: int = 0
    stalls_ns: dict[str, int] = field(default_factory=lambda: {"start": 0, "stop": 0, "save": 0})
    refused: dict[str, int] = field(default_factory=dict[str, int])

    def refuse(self, reason: str) -> None:
        """Count a refusal by its guard."""
        self.refused[reason] = self.refused.get(reason, 0) + 1


class Recording:
    """State, costs and the session of one process.

    Args:
        budget: What captures may cost.
        set_armed: Sets the recorder's `armed`.
        clock: Nanoseconds, monotonic.
    """

    def __init__(self, budget: CaptureBudget, set_armed: Callable[[bool], None], clock: Callable[[], int]) -> None:
        self.machine = Machine(clock)
        self.counts = Counts()
        self.spending = Spending(budget)
        self.mutex = threading.RLock()
        """Held for bookkeeping only, never while torch works."""
        self.warmed = False
        """Whether a CUPTI warm-up ran."""
        self.session: Session | None = None
        self.gate = guards.ProfilerGate(self._is_ours, self._user_arrived)
        self._armed = False
        self._torch: Any = None
        self._budget = budget
        self._set_armed = set_armed
        self._clock = clock
        self._cooled_ns = 0
        self._stop_ratio = 0.0
        self._device_from_ns = 0
        self.machine.move(State.IDLE)

    # Arming

    def begin(self, torch: Any) -> None:
        """Let hooks come and guard the door."""
        with self.mutex:
            self._armed, self._torch = True, torch
            self.machine.move(State.ARMED)
        self.gate.install(torch)
        self._set_armed(True)  # noqa: FBT003  (the recorder's switch)

    def end(self) -> None:
        """Open no more sessions; one under way ends at the next hook on its thread and is dropped."""
        with self.mutex:
            if not self._armed:
                return
            self._armed = False
            self._cooled_ns = self._clock() + int(self._budget.cooldown_s * NS_PER_S)
            running = self.session
            if running is not None:
                running.stop_wanted = running.discard = True
            elif self.machine.state in {State.ARMED, State.EXPORTING}:
                self.machine.move(State.COOLDOWN)
        if running is None:
            self._quiet()

    def _quiet(self) -> None:
        # Not before the last session is closed: until then its thread is met through the hooks, and users through the gate.
        self._set_armed(False)  # noqa: FBT003  (the recorder's switch)
        self.gate.remove()

    def disable(self, reason: str) -> None:
        """Switch captures off for good: at shutdown and at exit."""
        self.end()
        self.stop_here()
        running = self.session
        if running is not None and not self._alive(running):
            self._bury(running)
        elif running is not None and session.lock.acquire(timeout=EXIT_WAIT_S):
            session.lock.release()
        with self.mutex:
            self.machine.reason = reason
            self.machine.move(State.DISABLED)
        self._quiet()

    def after_fork(self) -> None:
        """In a forked child: nothing records here, and no lock may be one that another thread held."""
        session.renew_lock()
        self.mutex = threading.RLock()
        self.session = None
        self._armed = False
        self.machine.reason = "forked"
        self.machine.move(State.DISABLED)
        self._quiet()

    def warm_up(self) -> str | None:
        """Initialise CUPTI with an empty session on this thread, away from requests and before any graph is captured.

        Without it no session opens once CUDA is in use. Takes up to seconds the first time.

        Returns:
            None when sessions may now record the device, else why not, in words.
        """
        torch = session.loaded_torch()
        if torch is None or not torch.cuda.is_initialized():
            return "CUDA is not in use"
        if guards.injected():
            return "another tool owns CUPTI"
        held = session.lock
        if not held.acquire(blocking=False):
            return guards.REASONS["busy"]
        try:
            reason = "user_profiler" if self.gate.occupied() else guards.session_refusal(torch)
            if reason is not None:
                return guards.REASONS[reason]
            session.run_empty(torch, "cuda")
            self.warmed = True
        finally:
            held.release()
        return None

    # Sessions

    def open(self, request: Any, region: str) -> Session | None:
        """Open a session on this thread for a drawn request, unless a guard denies it or another one is open."""
        held = session.lock
        if not held.acquire(blocking=False):
            self.counts.busy += 1
            return None
        device, reason = guards.choose_device(self._torch, warmed=self.warmed)
        if device is not None and self._clock() < self._device_from_ns:
            reason = "device_pause"
        reason = reason or ("user_profiler" if self.gate.occupied() else guards.session_refusal(self._torch))
        with self.mutex:
            if reason is not None or not self._armed or not self.machine.move(State.RECORDING):
                held.release()
                self.counts.refuse(reason or "disabled")
                return None
            running = self.session = Session(request.id, region, self._limit_ns(), self._clock)
        request.profiled = True
        self.counts.sessions += 1
        try:
            running.open(self._torch, device)
        except Exception as error:
            running.discard, running.end_ns = True, self._clock()
            self._after(running, held)
            self.fault(f"start: {type(error).__name__}")
            raise
        if running.stop_wanted:
            self.close(running)
        return running

    def _limit_ns(self) -> int:
        """CPU time of the longest session whose stop should stay near 5 ms, from what earlier stops took: a stop costs by the event."""
        if self._stop_ratio <= 0.0:
            return _FIRST_LIMIT_NS
        return min(max(int(_STOP_TARGET_NS / self._stop_ratio), _LIMITS_NS[0]), _LIMITS_NS[1])

    def close(self, running: Session) -> None:
        """Stop the session; on its own thread only, once."""
        held = session.lock
        try:
            if not running.close():
                running.mute()
                return
        except Exception as error:
            self._after(running, held)
            self.fault(f"stop: {type(error).__name__}")
            raise
        ratio = max(running.stop_cpu_ns - _STOP_FLOOR_NS, 0) / max(running.cpu_ns, NS_PER_MS)
        self._stop_ratio = ratio if self._stop_ratio == 0.0 else 0.8 * self._stop_ratio + 0.2 * ratio
        if running.device is not None:
            self._device_from_ns = running.end_ns + DEVICE_PAUSE_NS
        if running.discard or running.yielded:
            running.results = None
        self._after(running, held)
        if running.start_cpu_ns + running.stop_cpu_ns > SLOWEST_STALL_NS:
            self.fault("stall")

    def _after(self, running: Session, held: threading.Lock) -> None:
        """Account for a session that ended and let the next one in."""
        with self.mutex:
            self.machine.move(State.YIELDED if running.yielded else State.STOPPING)
            self.counts.yielded += running.yielded
            self.counts.truncated += running.truncated
            self.counts.stalls_ns["start"] += running.start_cost_ns
            self.counts.stalls_ns["stop"] += running.stop_cost_ns
            self.spending.spend(running.start_cost_ns + running.stop_cost_ns, self._clock())
            self.session = None
            self.machine.move(State.ARMED if self._armed else State.COOLDOWN)
            over = not self._armed
        held.release()
        if over:
            self._quiet()

    def nudge(self) -> None:
        """Called by every hook: stop a session of this thread that was asked to stop or has grown too long."""
        running = self.session
        if running is None or running.thread != threading.get_ident() or not running.opened_ns:
            return
        if running.abandoned:
            self.session = None
            running.mute()
        elif running.stop_wanted:
            self.close(running)
        elif running.overlong():
            running.truncated = True
            self.close(running)

    def stop_here(self) -> None:
        """Stop and drop a session of this very thread, if there is one."""
        running = self.session
        if running is not None and running.thread == threading.get_ident() and running.opened_ns and not running.closed:
            running.discard = True
            self.close(running)

    # The application's own profiler

    def _is_ours(self, profile: Any) -> bool:
        running = self.session
        return running is not None and running.profile is profile

    def _user_arrived(self) -> None:
        """The application starts its own profiler on this thread: ours goes first."""
        running = self.session
        if running is not None:
            running.yielded = running.discard = running.stop_wanted = True
            self.stop_here()
        if session.lock.acquire(timeout=USER_WAIT_S):
            session.lock.release()
            return
        running = self.session
        if running is not None and running.abandon("poisoned"):
            self._poisoned()
        elif session.lock.acquire(timeout=USER_WAIT_S):
            # It was being closed at that moment, which takes milliseconds.
            session.lock.release()

    def _poisoned(self) -> None:
        """A session of ours will never be stopped: nothing else may start, and its thread silences it at its next hook."""
        with self.mutex:
            self.counts.abandoned += 1
            self.machine.trip("poisoned", for_good=True)
            self._armed = False
        session.lock.release()
        self._quiet()

    @staticmethod
    def _alive(running: Session) -> bool:
        # Not from `sys._current_frames`: on 3.11 it can hang the process when it starts a collection under the interpreter's list lock.
        return os.path.exists(f"/proc/self/task/{running.native}") or not os.path.isdir("/proc/self/task")  # noqa: PTH110, PTH112  (once a tick)

    def _bury(self, running: Session) -> None:
        """A thread died with its session open; without this the process would crash at exit."""
        if running.abandon("poisoned"):
            session.run_empty(self._torch)
            self.session = None
            self._poisoned()

    # Time and failures

    def tick(self, now: int) -> None:
        """Let time pass: end of cooldown and of the breaker, a session whose thread died."""
        running = self.session
        if running is not None and not running.abandoned and not self._alive(running):
            self._bury(running)
        with self.mutex:
            self.machine.recover()
            if self.machine.state is State.COOLDOWN and now >= self._cooled_ns:
                self.machine.move(State.IDLE)

    def fault(self, reason: str) -> None:
        """Count a failure of ours; the third within a minute opens the breaker."""
        if self.machine.fault(reason):
            with self.mutex:
                self.machine.trip(reason)
            self.end()
