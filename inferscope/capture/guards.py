"""Reasons not to capture, and the gate through which the application's own profiler always goes first.

Each check answers a crash or a blind spot that was seen in production somewhere; a capture that is refused costs nothing, one that should
have been refused costs the process.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import sys
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from inferscope import guard
from inferscope.capture import session

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["REASONS", "ProfilerGate", "arm_refusal", "disk_low", "kineto_active", "memory_low", "profiler_active", "session_refusal"]

REASONS: Final[Mapping[str, str]] = {
    "torch_not_imported": "the application has not imported torch",
    "torch_not_usable": "this torch was built without Kineto, or its profiler starts in a way that we do not know",
    "user_profiler": "the application's own profiler is active",
    "kineto_daemon": "KINETO_USE_DAEMON is set, which profiles on its own account",
    "finalizing": "the interpreter is shutting down",
    "disk_low": "too little free disk space",
    "memory_low": "too little free memory",
    "breach_expired": "the breach is too old",
    "greenlets": "gevent or eventlet switches inside synchronous code",
    "poisoned": "an earlier session could not be stopped in this process",
    "cuda_cold": "CUDA is in use and no CUPTI warm-up ran before the service was ready",
    "cuda_unused": "CUDA holds no memory of this process yet",
    "cuda_old": "CUDA before 12.6, where the end of a session beside CUDA graphs crashes",
    "cupti_occupied": "another tool (Nsight, compute-sanitizer, rocprof) owns CUPTI",
    "cupti_monitor": "torch's own CUPTI monitor records the GPU in this process; the incident has a window of it",
    "rocm": "sessions beside graphs are not safe with ROCm",
    "no_kernels": "sessions that were to record the GPU saw no kernel",
    "kineto_cpu_only": "the first session of this process ran before CUDA was in use, which decides for Kineto",
    "all_threads_unsafe": "stopping a session of all threads crashes this torch; CaptureBudget(all_threads=True) takes the risk",
    "core_needed": "requests in flight are known to the C core only, which is not in use",
    "long_requests": "a request has been open for too long to wait for its end",
    "stall": "the estimated stall is above what was allowed",
    "graph_capture": "a CUDA graph is being captured on this stream, where a stop would synchronise",
    "device_pause": "the previous session that recorded the GPU ended a moment ago",
    "busy": "captures for another incident are under way",
    "cooldown": "captures for the previous incident ended a moment ago",
    "tripped": "the breaker is open",
    "disabled": "captures are off in this process",
    "per_hour": "the hourly number of incidents is used up",
}
"""What each refusal means, for people."""

DISK_RESERVE_BYTES: Final = 64 * 1024 * 1024
_SYMBOL: Final = "_ZN5torch8autograd8profiler29isProfilerEnabledInMainThreadEv"


@functools.cache
def _native_probe(library: str) -> Callable[[], bool] | None:
    """The C++ function that knows of every thread's profiler; None where this torch does not have it."""
    try:
        function = getattr(ctypes.PyDLL(library), _SYMBOL)
    except (OSError, AttributeError):
        return None
    function.restype = ctypes.c_bool
    function.argtypes = []
    probe: Callable[[], bool] = function
    return probe


def profiler_active(torch: Any) -> bool:
    """Whether any profiler records in this process, ours included.

    The Python flag goes False when any of several profilers stops, the C++ one does not; either is enough. The older recorder sets
    neither: it is known on its own thread, where it would refuse ours.
    """
    if getattr(torch.autograd.profiler, "_is_profiler_enabled", False) or torch.autograd._profiler_enabled():  # noqa: SLF001
        return True
    return kineto_active(torch)


def kineto_active(torch: Any) -> bool:
    """Whether Kineto records in this process, on whichever thread; False where this torch does not tell."""
    probe = _native_probe(str(Path(torch.__file__ or "").parent / "lib" / "libtorch_cpu.so"))
    return probe is not None and bool(probe())


def greenlets() -> bool:
    """Whether synchronous code can be suspended here."""
    gevent = sys.modules.get("gevent.monkey")
    if gevent is not None and gevent.is_module_patched("threading"):
        return True
    eventlet = sys.modules.get("eventlet.patcher")
    return eventlet is not None and bool(eventlet.is_monkey_patched("thread"))


def disk_low(directory: Path, reserve: int = DISK_RESERVE_BYTES) -> bool:
    """Whether `directory`'s file system has less than `reserve` bytes left, or cannot be asked."""
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent  # the incident's own directory is made a moment later
    try:
        return shutil.disk_usage(directory).free < reserve
    except OSError:
        return True


def _read_int(path: str) -> int | None:
    try:
        return int(Path(path).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None  # absent, or "max"


def available_bytes() -> int | None:
    """Memory that this process can still have: the machine's and its control group's, whichever is less; None when nobody says."""
    found: list[int] = []
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    except (OSError, ValueError, IndexError):
        pass
    for limit, used in (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")):
        most, now = _read_int(f"/sys/fs/cgroup/{limit}"), _read_int(f"/sys/fs/cgroup/{used}")
        if most is not None and now is not None:
            found.append(max(0, most - now))
    return min(found) if found else None


def memory_low(reserve_bytes: int) -> bool:
    """Whether less than `reserve_bytes` are free; False when that is unknown."""
    available = available_bytes()
    return available is not None and available < reserve_bytes


def session_refusal(torch: Any) -> str | None:
    """What can have changed since arming: asked before each session."""
    if sys.is_finalizing():
        return "finalizing"
    if session.poisoned():
        return "poisoned"
    return "user_profiler" if profiler_active(torch) else None


def _usable(torch: Any) -> bool:
    """Whether sessions can be saved, and users' profilers met at the one place that all of them pass."""
    return bool(torch.autograd.kineto_available()) and hasattr(torch.autograd.profiler.profile, "_prepare_trace")


def arm_refusal(directory: Path, *, age_ns: int, ttl_ns: int, free_memory_bytes: int) -> str | None:
    """The first reason not to arm for an incident in `directory` whose breach was detected `age_ns` ago; None when there is none.

    A profiler of the application does not keep an incident from being armed: it may end any moment, and each session asks again.
    """
    torch = session.loaded_torch()
    checks: tuple[tuple[str, Callable[[], bool]], ...] = (
        ("torch_not_imported", lambda: torch is None),
        ("torch_not_usable", lambda: not _usable(torch)),
        ("poisoned", lambda: bool(session.poisoned())),
        ("finalizing", sys.is_finalizing),
        ("kineto_daemon", lambda: bool(os.environ.get("KINETO_USE_DAEMON"))),
        ("greenlets", greenlets),
        ("breach_expired", lambda: age_ns > ttl_ns),
        ("disk_low", lambda: disk_low(directory)),
        ("memory_low", lambda: memory_low(free_memory_bytes)),
    )
    return next((reason for reason, holds in checks if holds()), None)


class ProfilerGate:
    """Stands in every door through which a profiler of torch starts, for as long as captures are on.

    A profiler that the application starts waits until ours is stopped, and while it lives none of ours starts. It stands there before any
    incident: a scheduled profiler is prepared long before it records, and no flag shows it.

    Args:
        ours: Whether a profiler object is ours.
        arrived: Called on the application's thread before its profiler starts; returns when nothing of ours records any more.
    """

    def __init__(self, ours: Callable[[Any], bool], arrived: Callable[[], None]) -> None:
        self._ours = ours
        self._arrived = arrived
        self._users: list[weakref.ref[Any]] = []
        self._ranges = 0
        self._installed: list[tuple[Any, str, Any, Any]] = []

    def install(self, torch: Any) -> None:
        """Put the wrappers in place; a second call does nothing."""
        if self._installed:
            return
        profiler = torch.autograd.profiler
        self._wrap(profiler.profile, "_prepare_trace", self._enter)
        # Prepared before we came, or scheduled: it begins to record now.
        self._wrap(profiler.profile, "_start_trace", self._enter)
        # The older recorder bears no second one on its thread; ours is such a one.
        older = getattr(sys.modules.get("torch.autograd.profiler_legacy"), "profile", None)
        for kind in (getattr(profiler, "emit_nvtx", None), getattr(profiler, "emit_itt", None), older):
            if kind is not None:
                self._wrap(kind, "__enter__", self._begin_ranges)
                self._wrap(kind, "__exit__", self._end_ranges)

    def _wrap(self, target: Any, name: str, meet: Callable[[Any], None]) -> None:
        original = target.__dict__.get(name)
        if original is None:
            return

        @functools.wraps(original)
        def passage(profile: Any, *args: Any) -> Any:
            try:
                if self._installed:
                    meet(profile)
            except Exception as error:  # noqa: BLE001  (host safety: the application's profiler starts whatever happens to us)
                guard.failed("capture", error)
            return original(profile, *args)

        self._installed.append((target, name, original, passage))
        setattr(target, name, passage)

    def remove(self) -> None:
        """Restore the originals, but where somebody wrapped one again on top of us: there ours stays as a passage."""
        installed, self._installed = self._installed, []
        for target, name, original, passage in installed:
            if target.__dict__.get(name) is passage:
                setattr(target, name, original)

    def _enter(self, profile: Any) -> None:
        if self._ours(profile):
            return
        # Known before we look at our own session: a thread about to start one sees either the lock taken or this entry.
        self._users = [ref for ref in self._users if (held := ref()) is not None and held is not profile] + [weakref.ref(profile)]
        self._arrived()

    def _begin_ranges(self, _profile: Any) -> None:
        self._ranges += 1
        self._arrived()

    def _end_ranges(self, _profile: Any) -> None:
        self._ranges = max(0, self._ranges - 1)

    def occupied(self) -> bool:
        """Whether a profiler of the application is prepared or running; a scheduled one is prepared long before it records."""
        if self._ranges:
            return True
        return any(profile is not None and profile.kineto_results is None for profile in [ref() for ref in self._users])
