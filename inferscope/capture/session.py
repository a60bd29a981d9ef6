"""One profiler session on one thread, and the states that captures go through.

What kills a process with torch 2.13, each reproduced on that version, where Kineto records: two thread-local sessions that overlap on two threads, whichever
stops first; a session that is still open when the interpreter exits on its thread, or whose thread has died. What does not: a session
that is never stopped while others come and go. Hence one lock for the process, a stop on the thread that started, and `abandon` as
the last resort.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from inferscope.capture.light import Light
from inferscope.capture.stops import Stall
from inferscope.clock import NS_PER_S, now_ns

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = [
    "FAULT_LIMIT",
    "TRANSITIONS",
    "Machine",
    "Options",
    "Session",
    "State",
    "is_ours",
    "loaded_torch",
    "lock",
    "poison",
    "poisoned",
    "profiler",
    "renew_lock",
    "run_empty",
    "silence",
]

FAULT_LIMIT: Final = 3
"""Faults within `FAULT_PERIOD_NS` that trip the breaker."""
FAULT_PERIOD_NS: Final = 60 * NS_PER_S
LONGEST_NS: Final = 30 * NS_PER_S
"""Age at which a session is stopped at the next hook whatever it recorded: its region was probably never left."""
TOUCH_S: Final = 0.2
"""How long somebody waits for a start or stop of all threads that is under way: these take milliseconds."""
TRIPPED_NS: Final = 3600 * NS_PER_S
"""How long the breaker stays open."""


class State(Enum):
    """Where captures stand."""

    DISABLED = "disabled"
    IDLE = "idle"
    ARMED = "armed"
    """An incident is open: requests are drawn."""
    RECORDING = "recording"
    DRAINING = "draining"
    """A window's callbacks are removed; what was inside an operator then has to leave it before the stop."""
    PARKED = "parked"
    """What was inside did not leave in time: nothing is recorded any more, and nothing is stopped until it has left."""
    STOPPING = "stopping"
    EXPORTING = "exporting"
    """A kept profile is being written."""
    YIELDED = "yielded"
    """The application's own profiler arrived while we recorded: ours was stopped for it."""
    COOLDOWN = "cooldown"
    TRIPPED = "tripped"
    """The breaker is open."""


_RESTING: Final = frozenset({State.IDLE, State.ARMED, State.COOLDOWN, State.TRIPPED})
TRANSITIONS: Final[Mapping[State, frozenset[State]]] = {
    State.DISABLED: frozenset({State.IDLE}),
    State.IDLE: frozenset({State.ARMED, State.EXPORTING, State.TRIPPED, State.DISABLED}),
    State.ARMED: frozenset({State.RECORDING, State.EXPORTING, State.COOLDOWN, State.TRIPPED, State.DISABLED}),
    State.RECORDING: frozenset({State.DRAINING, State.STOPPING, State.YIELDED, State.TRIPPED, State.DISABLED}),
    State.DRAINING: frozenset({State.PARKED, State.STOPPING, State.YIELDED, State.TRIPPED, State.DISABLED}),
    State.PARKED: frozenset({State.STOPPING, State.YIELDED, State.TRIPPED, State.DISABLED}),
    State.STOPPING: frozenset({State.ARMED, State.COOLDOWN, State.TRIPPED, State.DISABLED}),
    State.EXPORTING: _RESTING | {State.DISABLED},
    State.YIELDED: frozenset({State.ARMED, State.COOLDOWN, State.TRIPPED, State.DISABLED}),
    State.COOLDOWN: frozenset({State.IDLE, State.ARMED, State.EXPORTING, State.TRIPPED, State.DISABLED}),
    State.TRIPPED: frozenset({State.IDLE, State.EXPORTING, State.DISABLED}),
}
"""Where each state may go; everything else is refused and counted."""


class Machine:
    """The state, its counted transitions and the breaker.

    Args:
        clock: Nanoseconds, monotonic.
    """

    def __init__(self, clock: Callable[[], int] = now_ns) -> None:
        self.state = State.DISABLED
        self.reason = ""
        """Why it is TRIPPED or DISABLED."""
        self.counts: dict[tuple[State, State], int] = {}
        self.refused = 0
        """Transitions that the table does not have: a programming error of ours, survived."""
        self._clock = clock
        self._faults: deque[int] = deque(maxlen=FAULT_LIMIT)
        self._tripped_until: int | None = None

    def move(self, to: State) -> bool:
        """Go to `to` if the table allows it; staying where one is counts as done."""
        here = self.state
        if here is to:
            return True
        if to not in TRANSITIONS[here]:
            self.refused += 1
            return False
        self.state = to
        self.counts[here, to] = self.counts.get((here, to), 0) + 1
        return True

    def trip(self, reason: str, *, for_good: bool = False) -> None:
        """Open the breaker, for `TRIPPED_NS` or for the process's life."""
        self.reason = reason
        self._tripped_until = None if for_good else self._clock() + TRIPPED_NS
        self.move(State.TRIPPED)

    def fault(self, reason: str) -> bool:
        """Count a failure; returns True when it is one too many within the period."""
        now = self._clock()
        self._faults.append(now)
        return len(self._faults) == FAULT_LIMIT and now - self._faults[0] < FAULT_PERIOD_NS and bool(reason)

    def recover(self) -> None:
        """Close the breaker when its time is over."""
        if self.state is State.TRIPPED and self._tripped_until is not None and self._clock() >= self._tripped_until:
            self._faults.clear()
            self.reason = ""
            self.move(State.IDLE)


lock = threading.Lock()
"""Held while a session of ours records and while a profile of ours is written; taken without waiting on a request's path."""
_poisoned = ""


def poisoned() -> str:
    """Why this process can never capture again, or an empty string."""
    return _poisoned


def renew_lock() -> None:
    """In a forked child: the holder of the old one does not exist here."""
    global lock  # noqa: PLW0603  (one lock a process is the point)
    lock = threading.Lock()


def loaded_torch() -> Any | None:
    """torch, if the application has imported it; we never do."""
    torch = sys.modules.get("torch")
    # A module that is still being imported has no profiler yet.
    return torch if getattr(getattr(getattr(torch, "autograd", None), "profiler", None), "profile", None) is not None else None


def poison(reason: str) -> None:
    """Note that a session of ours will never be stopped: this process captures no more."""
    global _poisoned  # noqa: PLW0603  (the profiler's state is the process's)
    _poisoned = reason


_MARK: Final = "_inferscope"


@dataclass(frozen=True, slots=True)
class Options:
    """What a session records.

    Args:
        device: "cuda" records the GPU beside the CPU. Default None.
        shapes: Dimensions of operators' inputs; a stop then takes about four times as long by the event.
        stacks: Python functions, with file and line; two to four times as many events. For operators only.
        all_threads: Every thread of the process instead of the calling one.
        light: Operators of the calling thread alone, without Kineto; see `light`.
    """

    device: str | None = None
    shapes: bool = False
    stacks: bool = False
    all_threads: bool = False
    light: bool = False


def _config(torch: Any, asked: Options) -> Any:
    """What has no public name. A torch that does not know a word gets the rest; one that cannot record all threads raises."""
    config = torch._C._profiler._ExperimentalConfig  # noqa: SLF001  (see above)
    needed = {"profile_all_threads": True} if asked.all_threads else {}
    wanted: dict[str, bool] = {}
    if not asked.stacks:
        wanted["trace_only"] = True  # from torch 2.13; before, event objects are built lazily, which we never ask for
    if asked.device is not None:
        wanted["enable_cuda_sync_events"] = True
    while wanted:
        try:
            return config(**needed, **wanted)
        except TypeError:
            wanted.popitem()
    return config(**needed)


def profiler(torch: Any, asked: Options) -> Any:
    """A fresh profiler of torch's, not started: an object is used once.

    Raises:
        TypeError: This torch cannot record all threads.
    """
    if asked.light:
        return Light(torch, shapes=asked.shapes)
    options: dict[str, Any] = {"use_kineto": True, "experimental_config": _config(torch, asked)}
    if asked.device is not None:
        options["use_device"] = asked.device
    if asked.shapes:
        options["record_shapes"] = True
    if asked.stacks:
        options["with_stack"] = True
    made = torch.autograd.profiler.profile(**options)
    setattr(made, _MARK, True)
    return made


def is_ours(profile: Any) -> bool:
    """Whether a profiler was made by `profiler`, in whichever room of this process."""
    return bool(getattr(profile, _MARK, False))


def _stop(profile: Any, *, keep: bool, flag: bool) -> Any:
    """Stop a profiler; returns what it recorded, or None when that is not wanted and can be left where it is."""
    if isinstance(profile, Light):
        profile.flag = flag
        if not keep:
            profile.drop()
            return None
    profile.__exit__(None, None, None)
    return profile.kineto_results


class Session:
    """A thread-local profile: `open` and `close` on the same thread, with `lock` held by the caller until it is over.

    Args:
        request_id: The request it belongs to.
        region: Name of the synchronous region.
        limit_ns: CPU time of this thread after which the next hook on it stops the session, so that a stop stays cheap (it costs by the event,
            and a thread that waits makes none).
    """

    __slots__ = (
        "_claim", "_clock", "_profile", "_torch", "abandoned", "allow_ns", "asked", "cpu_ns", "device_stopped", "discard", "end_ns", "limit_ns", "lost_ns", "muted",
        "native", "opened_ns", "region", "request_id", "results", "start_cost_ns", "start_cpu_ns", "stop_cost_ns", "stop_cpu_ns",
        "stop_wanted", "tail_lost", "thread", "truncated", "why_no_device", "yielded",
    )  # fmt: skip

    def __init__(self, request_id: int, region: str, limit_ns: int, clock: Callable[[], int] = now_ns) -> None:
        self.request_id = request_id
        self.region = region
        self.limit_ns = limit_ns
        self.asked = Options()
        self.allow_ns = 0
        """Longest stop that somebody allowed; 0 when nobody was asked."""
        self.why_no_device: str | None = None
        """Why the GPU is not recorded although it is in use; a key of `guards.REASONS`."""
        self.device_stopped = False
        """Whether Kineto's buffers for the device were full, after which it records no more."""
        self.tail_lost = False
        """Whether the device was not waited for at the stop, so that the last kernels may be missing."""
        self.thread = threading.get_ident()
        self.native = threading.get_native_id()
        self.results: Any = None
        """What the profiler recorded, until it is saved or dropped."""
        self.opened_ns = 0
        self.end_ns = 0
        self.start_cost_ns = 0
        self.stop_cost_ns = 0
        self.lost_ns = 0
        """What the application lost by both, see `Stall`."""
        self.cpu_ns = 0
        """Thread CPU time between start and stop; before the stop, the reading at the start."""
        self.start_cpu_ns = 0
        self.stop_cpu_ns = 0
        """Thread CPU time: what of the stall was ours and not the scheduler's."""
        self.stop_wanted = False
        self.truncated = False
        self.yielded = False
        self.discard = False
        self.abandoned = False
        self.muted = False
        self._clock = clock
        self._torch: Any = None
        self._profile: Any = None
        self._claim = threading.Lock()

    @property
    def profile(self) -> Any:
        """The profiler object, to tell ours from the application's."""
        return self._profile

    @property
    def device(self) -> str | None:
        """What is recorded beside the CPU."""
        return self.asked.device

    @property
    def closed(self) -> bool:
        """Whether the profiler is stopped."""
        return self.end_ns != 0

    def open(self, torch: Any, asked: Options) -> None:
        """Start recording on this thread; whatever torch raises passes."""
        stall = Stall(self._clock)
        self._torch, self.asked = torch, asked
        self._profile = profiler(torch, asked)
        self._profile.__enter__()
        self.start_cost_ns, self.start_cpu_ns, self.lost_ns = stall.end()
        self.opened_ns = stall.begun_ns + self.start_cost_ns
        self.cpu_ns = time.thread_time_ns()

    def overlong(self) -> bool:
        """Whether it has grown too long; asked on its own thread."""
        return time.thread_time_ns() - self.cpu_ns > self.limit_ns or self._clock() - self.opened_ns > LONGEST_NS

    def close(self, *, wait_for_device: bool = True, others: bool = False) -> bool:
        """Stop recording; on the thread of `open` only. False when it was closed or abandoned before.

        Args:
            wait_for_device: Whether torch may synchronise the device, which breaks a graph that another thread is capturing. Default True.
            others: Whether a profiler of the application records by now. Default False.
        """
        if not self._claim.acquire(blocking=False):
            return False
        self.cpu_ns, stall = time.thread_time_ns() - self.cpu_ns, Stall(self._clock)
        profile, self._profile = self._profile, None
        if self.device is not None:
            stopped = getattr(self._torch.autograd, "_is_kineto_stopped", None)
            self.device_stopped = bool(stopped is not None and stopped())
            if not wait_for_device:
                profile.use_device, self.tail_lost = None, True
        try:
            self.results = _stop(profile, keep=not self.discard, flag=others)
        finally:
            self.stop_cost_ns, self.stop_cpu_ns, lost_ns = stall.end()
            self.lost_ns += lost_ns
            self.end_ns = stall.begun_ns + self.stop_cost_ns
        return True

    def abandon(self, reason: str) -> bool:
        """Give up stopping it, from any thread; False when it is being closed. But for a light one, this process captures no more."""
        if not self._claim.acquire(blocking=False):
            return False
        if not self.asked.light:
            poison(reason)
        self.abandoned = True
        return True

    def lost(self, *, occupied: bool) -> None:
        """Its thread is gone, and a light session with it, but for the flag; `occupied` when that belongs to another profiler."""
        self.end_ns = self._clock()
        if self.asked.light and not occupied:
            self._torch.autograd.profiler._is_profiler_enabled = False  # noqa: SLF001  (as torch's own)

    def mute(self) -> None:
        """On the thread of an abandoned session: remove its callbacks, or its buffers would grow for the thread's life (200 B an event)."""
        if self.abandoned and not self.muted and threading.get_ident() == self.thread:
            self.muted = True
            silence(self._torch)


def silence(torch: Any) -> None:
    """Remove the callbacks of the session in force; what was recorded stays."""
    kinds = {torch.autograd.ProfilerActivity.CPU}
    version = getattr(torch, "version", None)
    if getattr(version, "cuda", None) is None and getattr(version, "hip", None) is None:
        # Without a GPU to record these change nothing, and spare a line on the application's stderr.
        kinds |= {torch.autograd.ProfilerActivity.CUDA, torch.autograd.ProfilerActivity.XPU}
    torch.autograd._toggle_collection_dynamic(False, kinds)  # noqa: SLF001, FBT003  (no public name)


def run_empty(torch: Any) -> None:
    """Start and stop at once, on this thread.

    After a thread died with its session open, this takes the place of the leaked one, which exit would trip over.
    """
    profile = profiler(torch, Options())
    profile.__enter__()
    profile.__exit__(None, None, None)
