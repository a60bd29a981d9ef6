"""The one session a process may have: who may open it, who closes it, and what happens when nobody can.

Opened and closed by the recorder's hooks on the application's threads; asked to stop by the application's own profiler, by a fork, by
exit and by `disarm`. A stop is only ever done by the thread that started.
"""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from inferscope.capture import guards, light, session
from inferscope.capture.budget import Counts, Spending
from inferscope.capture.gpu import Gpu
from inferscope.capture.session import Machine, Options, Session, State
from inferscope.capture.stops import LEARN_EVERY, Stops
from inferscope.clock import NS_PER_MS, NS_PER_S
from inferscope.device.backends import captures

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferscope.capture.budget import CaptureBudget
    from inferscope.capture.window import Window

__all__ = ["Counts", "Recording"]

USER_WAIT_S: Final = 2.0
"""How long the application's own profiler waits for ours to stop; after that ours is abandoned."""
_USER_STEP_S: Final = 0.02
EXIT_WAIT_S: Final = 0.5
SLOWEST_STALL_NS: Final = 50 * NS_PER_MS
"""CPU time of one start and stop above which it counts as a fault."""


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
        self.gpu = Gpu(clock)
        self.session: Session | None = None
        self.window: Window | None = None
        """A session of all threads, from its start until it is stopped; then `session` is None."""
        self.gate = guards.ProfilerGate(session.is_ours, self._user_arrived)
        self._armed = False
        self._torch: Any = None
        self._budget = budget
        self._set_armed = set_armed
        self._clock = clock
        self._cooled_ns = 0
        self._stops = Stops()
        self.machine.move(State.IDLE)

    # Arming

    @property
    def armed(self) -> bool:
        """Whether sessions may open."""
        return self._armed

    def follow(self) -> None:
        """Guard the door as soon as the application has torch: a profiler that it prepares before an incident must be known in one."""
        torch = session.loaded_torch()
        if torch is not None and self.machine.state is not State.DISABLED:
            self.gate.install(torch)

    def begin(self, torch: Any, *, hooks: bool = True) -> None:
        """Let hooks come, where sessions are to be opened by them, and guard the door."""
        with self.mutex:
            self._armed, self._torch = True, torch
            self.machine.move(State.ARMED)
        self.gate.install(torch)
        if hooks:
            self._set_armed(True)  # noqa: FBT003  (the recorder's switch)

    def end(self) -> None:
        """Open no more sessions; one under way ends at the next hook on its thread and is dropped."""
        with self.mutex:
            if not self._armed:
                return
            self._armed = False
            self._cooled_ns = self._clock() + int(self._budget.cooldown_s * NS_PER_S)
            running, window = self.session, self.window
            if running is not None:
                running.stop_wanted = running.discard = True
            elif window is not None:
                window.ask_to_stop()
            elif self.machine.state in {State.ARMED, State.EXPORTING}:
                self.machine.move(State.COOLDOWN)
        if running is None:
            self._quiet()

    def _quiet(self) -> None:
        # Not before the last session is closed: until then its thread is met through the hooks.
        self._set_armed(False)  # noqa: FBT003  (the recorder's switch)

    def disable(self, reason: str) -> None:
        """Switch captures off for good: at shutdown and at exit."""
        self.end()
        self.stop_here()
        if self.window is not None:
            self.window.leave(EXIT_WAIT_S)
        self._outlive()
        with self.mutex:
            self.machine.reason = reason
            self.machine.move(State.DISABLED)
        self._quiet()
        self.gate.remove()

    def _outlive(self) -> None:
        """Wait for a session of another thread to end, or for that thread to: it is there for a moment after it was joined."""
        deadline = self._clock() + int(EXIT_WAIT_S * NS_PER_S)
        while (running := self.session) is not None and self._clock() < deadline:
            if not self._alive(running):
                self._bury(running)
                return
            if session.lock.acquire(timeout=EXIT_WAIT_S / 10):
                session.lock.release()
                return

    def after_fork(self) -> None:
        """In a forked child: nothing records here, and no lock may be one that another thread held."""
        session.renew_lock()
        self.mutex = threading.RLock()
        if self.window is not None:
            self.window.forget()
        if self.session is not None:
            self.session.lost(occupied=self.gate.occupied())
        self.session = self.window = None
        self._armed = False
        self.machine.reason = "forked"
        self.machine.move(State.DISABLED)
        self._quiet()
        self.gate.remove()

    def warm_up(self) -> str | None:
        """Initialise CUPTI on this thread, away from requests; see `Gpu.warm_up`.

        Returns:
            None when sessions may now record the device, else why not: a key of `guards.REASONS`.
        """
        torch = session.loaded_torch()
        if torch is None or not torch.cuda.is_initialized():
            return "cuda_unused"
        held = session.lock
        if not held.acquire(blocking=False):
            return "busy"
        try:
            reason = "user_profiler" if self.gate.occupied() else guards.session_refusal(torch)
            return reason or self.gpu.warm_up(torch)
        finally:
            held.release()

    # Sessions

    def open(
        self, request: Any, region: str, asked: Options | None = None, *, shapes: bool = False, allow_ns: int | None = None
    ) -> Session | None:
        """Open a session on this thread for a drawn request, unless a guard denies it or another one is open.

        Args:
            request: The request.
            region: Name of the synchronous region.
            asked: What somebody asked to record; the device is chosen here. Default: as little as possible.
            shapes: Record shapes too if the stop is likely to stay below `SHAPES_STOP_NS`. Default False.
            allow_ns: How long a stop may take. Default None: about 5 ms.
        """
        held = session.lock
        if not held.acquire(blocking=False):
            self.counts.busy += 1
            return None
        device, reason, without = self.gpu.choose(self._torch)
        reason = reason or ("user_profiler" if self.gate.occupied() else guards.session_refusal(self._torch))
        with self.mutex:
            if reason is not None or not self._armed or not self.machine.move(State.RECORDING):
                held.release()
                self.counts.refuse(reason or "disabled")
                return None
            asked = asked or self._least(region, device, shapes=shapes)
            running = self.session = Session(request.id, region, self._stops.limit_ns(asked, allow_ns), self._clock)
        running.why_no_device, running.allow_ns = without, allow_ns or 0
        request.profiled = True
        self.counts.sessions += 1
        if not asked.light:
            self.gpu.opened(device)
        try:
            running.open(self._torch, replace(asked, device=device))
        except Exception as error:
            if asked.light:
                light.give_up(f"start: {type(error).__name__}")
            running.discard, running.end_ns = True, self._clock()
            self._after(running, held)
            self.fault(f"start: {type(error).__name__}")
            raise
        if running.stop_wanted:
            self.close(running)
        return running

    def _least(self, region: str, device: str | None, *, shapes: bool) -> Options:
        """What is recorded when nobody asked: operators, with shapes where those are cheap; without Kineto where that is not needed."""
        plain = device is None and light.available(self._torch)
        return Options(light=plain, shapes=shapes and self._stops.shapes_are_cheap(region))

    def close(self, running: Session, *, unwanted: bool = False) -> None:
        """Stop the session; on its own thread only, once. What is `unwanted` need not be fetched, but for some, which tell what that costs."""
        held = session.lock
        if unwanted and running.asked.light and self.counts.sessions % LEARN_EVERY and self._stops.knows(running.region):
            running.discard = True
        try:
            # A synchronisation breaks a graph that another thread captures.
            others = running.yielded and guards.kineto_active(self._torch)
            if not running.close(wait_for_device=not captures.open, others=others):
                running.mute()
                return
        except Exception as error:
            self._after(running, held)
            self.fault(f"stop: {type(error).__name__}")
            raise
        if not running.discard:
            self._stops.learn(running)
        self.gpu.closed(running.device, running.end_ns)
        if running.discard or running.yielded:
            running.results = None
        self._after(running, held)
        if running.start_cpu_ns + running.stop_cpu_ns > max(SLOWEST_STALL_NS, 2 * running.allow_ns):
            self.fault("stall")

    def _after(self, running: Session, held: threading.Lock) -> None:
        """Account for a session that ended and let the next one in."""
        with self.mutex:
            self.machine.move(State.YIELDED if running.yielded else State.STOPPING)
            self.counts.yielded += running.yielded
            self.counts.truncated += running.truncated
            self.counts.stalls_ns["start"] += running.start_cost_ns
            self.counts.stalls_ns["stop"] += running.stop_cost_ns
            self.spending.spend(running.lost_ns, self._clock())
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

    def _user_arrived(self) -> None:
        """The application starts its own profiler on this thread: ours goes first."""
        deadline = self._clock() + int(USER_WAIT_S * NS_PER_S)
        while True:
            # Asked again and again: a session may open between its look at the door and ours at it.
            running, window = self.session, self.window
            if running is not None:
                running.yielded = running.discard = running.stop_wanted = True
                self.stop_here()
            if window is not None:
                window.yield_to(threading.get_native_id())
            if session.lock.acquire(timeout=_USER_STEP_S):
                session.lock.release()
                return
            if self._clock() >= deadline:
                break
        left = self.session or self.window
        if isinstance(left, Session) and left.asked.light:
            return  # it is in nobody's way, and ends at the next hook on its thread
        if left is not None and left.abandon("poisoned"):
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
        """A thread died with its session open; unless it was a light one, the process would crash at exit without this."""
        if not running.abandon("poisoned"):
            return
        if running.asked.light:
            running.discard = True
            running.lost(occupied=self.gate.occupied())
            self.counts.abandoned += 1
            self._after(running, session.lock)
        else:
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

    def account(self, window: Window, held: threading.Lock) -> None:
        """Account for a session of all threads that was stopped, and let the next one in."""
        with self.mutex:
            if self.machine.state is not State.YIELDED:
                self.machine.move(State.YIELDED if window.yielded else State.STOPPING)
            self.counts.yielded += window.yielded
            self.counts.stalls_ns["start"] += window.start_cost_ns
            self.counts.stalls_ns["stop"] += window.stop_cost_ns
            self.spending.spend(window.start_cost_ns + window.stop_cost_ns, self._clock())
            self.window = None
            self.machine.move(State.ARMED if self._armed else State.COOLDOWN)
        self.gpu.closed(window.device, window.end_ns)
        held.release()

    def fault(self, reason: str) -> None:
        """Count a failure of ours; the third within a minute opens the breaker."""
        if self.machine.fault(reason):
            with self.mutex:
                self.machine.trip(reason)
            self.end()
