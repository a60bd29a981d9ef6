"""What is special about sessions that record a GPU: when they may, when they record the CPU alone, and what they leave behind.

CUPTI has room for one subscriber, is slow to start, ends asynchronously, loses events without a word, and before CUDA 12.6 its end beside
CUDA graphs crashed processes. And the first session of a process decides for its life whether Kineto sees the GPU. Hence a warm-up with
one small kernel before the service is ready, and a reason in the evidence of each session that had to do without.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from inferscope.capture import session
from inferscope.capture.monitor import monitor_runs
from inferscope.capture.session import Options
from inferscope.clock import NS_PER_S
from inferscope.device.backends import captures

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["PAUSE_NS", "Gpu", "injected", "occupied"]

PAUSE_NS: Final = 5 * NS_PER_S
"""Between two sessions that record a GPU: CUPTI ends the first one asynchronously and a quick second races it (kineto#1554)."""
BLIND_AFTER: Final = 2
"""Sessions in a row without a kernel after which the GPU is given up."""
OLDEST_CUDA: Final = (12, 6)
"""Before it, CUPTI's end beside CUDA graphs crashes or hangs (pytorch#75504, #112507, #135003)."""
_INJECTION: Final = (
    "CUDA_INJECTION64_PATH",
    "NSYS_PROFILING_SESSION_ID",
    "NVTX_INJECTION64_PATH",
    "QUADD_INJECTION_PROXY",
    "CUPTI_INJECTION_PATH",
    "ROCP_TOOL_LIB",
)
_TOOLS: Final = (
    b"libToolsInjection",
    b"libnsys",
    b"libInterceptorInjection",
    b"libsanitizer-collection",
    b"librocprofiler",
    b"libnvperf_host",
)
"""Libraries of Nsight Systems, Nsight Compute, compute-sanitizer and rocprof; one of them in the process has taken CUPTI's place."""
_LAUNCHES: Final = 40


def injected(environ: Mapping[str, str] | None = None) -> bool:
    """Whether Nsight, compute-sanitizer or the like was told by the environment to own CUPTI."""
    environ = os.environ if environ is None else environ
    return any(environ.get(name) for name in _INJECTION)


def occupied(environ: Mapping[str, str] | None = None, maps: Path = Path("/proc/self/maps")) -> bool:
    """Whether another tool owns CUPTI, by the environment or by its library in this process. Reads a file of ours: not for a request's thread."""
    if injected(environ):
        return True
    try:
        content = maps.read_bytes()
    except OSError:
        return False
    return any(tool in content for tool in _TOOLS)


def _version(text: object) -> tuple[int, ...]:
    parts = str(text or "").split(".")[:2]
    return tuple(int(part) for part in parts if part.isdigit())


class Gpu:
    """What is known of the GPU as something to record.

    Args:
        clock: Nanoseconds, monotonic.
    """

    def __init__(self, clock: Callable[[], int]) -> None:
        self.warmed = False
        """Whether a warm-up ran and a kernel was seen."""
        self.expected = True
        """Whether a warm-up may still come: until the service is ready."""
        self.why: str | None = None
        """Why sessions record the CPU alone for the rest of this process; a key of `guards.REASONS`."""
        self.tax: float | None = None
        """By how much launches became slower through the warm-up, as a fraction; None while unmeasured."""
        self.from_ns = 0
        """When the next session may record the GPU."""
        self._clock = clock
        self._without = 0
        self._first_was_cpu = False

    def choose(self, torch: Any) -> tuple[str | None, str | None, str | None]:
        """(device to record beside the CPU, why nothing may be recorded, why the GPU is left out); keys of `guards.REASONS`."""
        cuda = getattr(torch, "cuda", None)
        if cuda is None or not cuda.is_initialized():
            return None, None, None
        if captures.open or cuda.is_current_stream_capturing():
            return None, "graph_capture", None
        why = self.why or self._left_out(torch)
        if why is not None:
            return None, None, why
        if not self.warmed:
            # While a warm-up can still come, a session of the CPU alone would make it useless.
            return (None, "cuda_cold", None) if self.expected else (None, None, "cuda_cold")
        return (None, None, "device_pause") if self._clock() < self.from_ns else ("cuda", None, None)

    def _left_out(self, torch: Any) -> str | None:
        if injected():
            return "cupti_occupied"
        if monitor_runs():
            return "cupti_monitor"
        version = getattr(torch, "version", None)
        if getattr(version, "hip", None):
            return "rocm"
        cuda = _version(getattr(version, "cuda", None))
        return "cuda_old" if cuda and cuda < OLDEST_CUDA else None

    def opened(self, device: str | None) -> None:
        """A session opens: the first one of the process decides what Kineto sees."""
        if device is None and not self.warmed:
            self._first_was_cpu = True

    def closed(self, device: str | None, end_ns: int) -> None:
        """A session ended."""
        if device is not None:
            self.from_ns = end_ns + PAUSE_NS

    def saw(self, kernels: int) -> bool:
        """A trace that was to hold the GPU is written; True when it is the one too many without a kernel."""
        self._without = 0 if kernels else self._without + 1
        if self._without < BLIND_AFTER or self.why is not None:
            return False
        self.why = "no_kernels"
        return True

    def warm_up(self, torch: Any) -> str | None:
        """Let CUPTI start with one small kernel on a device in use; on a thread of ours, before readiness. Takes up to seconds.

        The caller holds `session.lock`. A beginning graph capture waits meanwhile; while one is open nothing is done.

        Returns:
            None when sessions may record the GPU from now on, else a key of `guards.REASONS`; `why` is set when it is for good.
        """
        if self.why is None and occupied():
            self.why = "cupti_occupied"
        self.why = self.why or self._left_out(torch)
        if self.why is not None:
            return self.why
        index = _in_use(torch)
        if index is None:
            return "cuda_unused"
        with captures.quiet() as quiet:
            if not quiet:
                return "graph_capture"
            with torch.cuda.device(index), torch.no_grad():
                kernels, self.tax = _trial(torch)
        self.from_ns = self._clock() + PAUSE_NS
        if kernels == 0:
            self.why = "kineto_cpu_only" if self._first_was_cpu else "no_kernels"
            return self.why
        self.warmed = True
        return None

    def status(self) -> dict[str, Any]:
        """As JSON types."""
        return {"warmed": self.warmed, "cpu_only": self.why, "launch_tax": None if self.tax is None else round(self.tax, 3)}


def _in_use(torch: Any) -> int | None:
    """A device that holds memory of this process already: no context is made where the application has none."""
    return next((index for index in range(torch.cuda.device_count()) if torch.cuda.memory_reserved(index)), None)


def _launch_ns(tensor: Any) -> int:
    """The quickest of some launches of a small kernel, ns."""
    best = 1 << 62
    for _ in range(_LAUNCHES):
        begun = time.perf_counter_ns()
        tensor.add_(1)
        best = min(best, time.perf_counter_ns() - begun)
    return best


def _trial(torch: Any) -> tuple[int | None, float]:
    """(kernels seen or None when the trace cannot be written, how much slower launches are afterwards)."""
    tensor = torch.zeros(8, device="cuda")
    before = _launch_ns(tensor)
    profile = session.profiler(torch, Options(device="cuda"))
    profile.__enter__()
    tensor.add_(1)
    profile.__exit__(None, None, None)  # waits for that device
    after = _launch_ns(tensor)
    kernels: int | None = None
    with contextlib.suppress(OSError), tempfile.TemporaryDirectory(prefix="inferscope-") as scratch:
        path = Path(scratch) / "trial.json"
        profile.kineto_results.save(str(path))
        kernels = path.read_bytes().count(b'"cat": "kernel"')
    return kernels, after / before - 1.0
