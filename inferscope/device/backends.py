"""What is known of each kind of device, and the watch over graph captures.

One code path serves every backend: `torch.Event`, `torch.Stream` and `torch.accelerator`. What differs stands in one row a backend. Capture
safety comes first: a query from any thread ends a capture in CUDA's global mode (pytorch#103503, #104555), on ROCm in every mode (#176251).
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

__all__ = ["BACKENDS", "Backend", "CaptureWatch", "captures", "cuda_query", "in_use", "relax_cuda_thread"]

_RELAXED: Final = 2  # cudaStreamCaptureModeRelaxed
_ACCELERATORS: Final = ("cuda", "xpu", "mtia")
_NOT_READY: Final = 600  # cudaErrorNotReady


@dataclass(frozen=True, slots=True)
class Backend:
    """One kind of device.

    Attributes:
        off: Why its events are not used; empty when they are.
        relax: Called once in the harvesting thread, so that captures begun by C++ code, which the watch cannot see, survive its queries.
        queries: Makes a question whether an event is done that leaves the interpreter's lock to others; None where there is none.
    """

    off: str = ""
    relax: Callable[[], bool] | None = None
    queries: Callable[[], Callable[[Any], bool] | None] | None = None


def _loaded(name: str) -> str | None:
    """Path of a shared library that this process has loaded."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
            path = line.rpartition(" ")[2]
            if f"/{name}" in path:
                return path
    return None


def relax_cuda_thread() -> bool:
    """Exchange this thread's capture mode for the relaxed one (`cudaThreadExchangeStreamCaptureMode`); False where that is not possible."""
    path = _loaded("libcudart.so")
    if path is None:
        return False
    exchange = getattr(ctypes.CDLL(path), "cudaThreadExchangeStreamCaptureMode", None)
    if exchange is None:
        return False
    mode = ctypes.c_int(_RELAXED)
    return bool(exchange(ctypes.byref(mode)) == 0)


def cuda_query() -> Callable[[Any], bool] | None:
    """`cudaEventQuery` through ctypes, which releases the interpreter's lock; torch's own `query` holds it, and with a driver lock held elsewhere
    (an allocation, a module that loads) the whole interpreter with it (pytorch#109074). None where the runtime is not found.
    """
    path = _loaded("libcudart.so")
    runtime = None if path is None else ctypes.CDLL(path)
    if runtime is None or not hasattr(runtime, "cudaEventQuery") or not hasattr(runtime, "cudaGetLastError"):
        return None
    ask, forget = runtime.cudaEventQuery, runtime.cudaGetLastError
    ask.argtypes = [ctypes.c_void_p]

    def done(event: Any) -> bool:
        status = ask(event.event_id)
        if status == 0:
            return True
        forget()  # as torch does: "not ready" stays this thread's last error otherwise
        if status != _NOT_READY:
            raise RuntimeError(f"cudaEventQuery: {status}")
        return False

    return done


BACKENDS: Final[dict[str, Backend]] = {
    "cpu": Backend(off="the host has no device clock"),
    "meta": Backend(off="meta tensors run nowhere"),
    # elapsed_time can block, and a record commits the command buffer (pytorch#196395).
    "mps": Backend(off="reading an event can block on MPS"),
    "cuda": Backend(relax=relax_cuda_thread, queries=cuda_query),
}
"""Rows that differ from the default one; what is not listed is tried, and its first span shows whether it works."""


def in_use() -> bool:
    """Whether the application has initialised an accelerator; asks flags of torch's alone, no driver and no library that is not loaded.

    What knows more (`torch.accelerator`) counts devices on the way, after which a process cannot fork any more (pytorch#190708).
    """
    torch: Any = sys.modules.get("torch")
    try:
        names = (*_ACCELERATORS, torch._C._get_privateuse1_backend_name())  # noqa: SLF001  (its public twin changes the name)
        return any(module.is_initialized() for name in names if (module := getattr(torch, name, None)) is not None)
    except Exception:  # noqa: BLE001  (no torch, one that is being imported, or a backend without the flag)
        return False


@dataclass(slots=True)
class CaptureWatch:
    """Which graph captures are open in this process, told by the patched `capture_begin` and `capture_end`.

    `quiet()` holds a lock that a beginning capture waits for, so that no capture begins between the question and the query.
    """

    _open: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet[Any])
    _lock: threading.Lock = field(default_factory=threading.Lock)
    seen: int = 0
    """Captures since start."""

    def begin(self, graph: Any) -> None:
        """A capture into `graph` is about to begin; waits for a running slice of queries (at most 0.3 ms)."""
        with self._lock:
            self._open.add(graph)
            self.seen += 1

    def end(self, graph: Any) -> None:
        """It ended, or did not begin."""
        with self._lock:
            self._open.discard(graph)

    @property
    def open(self) -> int:
        """Captures that are open now."""
        return len(self._open)

    @contextlib.contextmanager
    def quiet(self) -> Generator[bool]:
        """Whether no capture is open; none begins inside the block."""
        with self._lock:
            yield not self._open

    def after_fork(self) -> None:
        """A forked child has no captures, and perhaps a lock that nobody will release."""
        self._lock = threading.Lock()
        self._open = weakref.WeakSet()


captures: Final = CaptureWatch()
