"""The device: a CUDA card when there is one, else inferscope's simulated accelerator, which torch takes for a real device, else (it wants a
C++ compiler) a stand-in that keeps a card's rules about copies.

What matters here is how a copy from host memory reaches a card. From *pageable* memory the driver carries it through its own staging
buffer: the caller waits, and everybody who copies from pageable memory takes turns, first come, first served. From *pinned* memory the card fetches
the bytes itself: the call returns at once, and a large transfer of somebody else is interleaved rather than waited for.
The stand-in does just that with sleeps of bytes / bandwidth, and notes the truth of every copy.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from inferscope import InferscopeError
from inferscope.integration import record_copy

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Copy", "CudaDevice", "Device", "Lane", "Simulated", "StandIn", "choose"]

KEPT: Final = 500_000
"""Copies whose truth is kept."""


@dataclass(frozen=True, slots=True)
class Copy:
    """The truth of one copy; instants in ns on the `time.perf_counter_ns` clock."""

    direction: str
    nbytes: int
    pageable: bool
    sync: bool
    asked_ns: int
    """When the caller asked."""
    start_ns: int
    """When its turn came."""
    end_ns: int
    """When the bytes had arrived."""
    returned_ns: int
    """When the caller could go on."""
    thread_id: int = 0
    """Native id of the thread that asked."""


class Device(Protocol):
    """What the service needs of a device."""

    torch_device: str
    """Where the model's weights belong."""

    @property
    def copies(self) -> deque[Copy]:
        """The truth of the latest copies."""
        ...

    def to_device(self, tensor: torch.Tensor, *, non_blocking: bool = False) -> torch.Tensor:
        """A copy on the device; with `non_blocking` and pinned memory it returns before the bytes have arrived."""
        ...

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the host; returns when it is there."""
        ...

    def pinned(self, *shape: int) -> torch.Tensor:
        """A float32 buffer in pinned host memory."""
        ...

    def own_stream(self) -> AbstractContextManager[Any]:
        """Inside, this thread's work on the device has a queue of its own instead of the common one."""
        ...

    def usual_stream(self) -> AbstractContextManager[Any]:
        """Inside, this thread's work goes where it goes when nobody says anything."""
        ...

    def kernel(self, milliseconds: float) -> None:
        """Queues work that keeps this queue of the device busy for that long, after what it already holds."""
        ...

    def synchronize(self) -> None:
        """Waits until this thread's queue is empty."""
        ...

    def table(self, milliseconds: float) -> torch.Tensor:
        """Pageable memory that takes about that long to copy to the device."""
        ...


class Lane:
    """Takes one transfer after another, in the order of asking."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free_ns = 0

    def reserve(self, duration_ns: int) -> tuple[int, int]:
        """Start and end of a transfer of that length that is asked for now."""
        with self._lock:
            start = max(time.perf_counter_ns(), self._free_ns)
            self._free_ns = start + duration_ns
            return start, self._free_ns


def sleep_until(instant_ns: int) -> None:
    """Sleeps to an instant of the `time.perf_counter_ns` clock, at once when it has passed."""
    left = instant_ns - time.perf_counter_ns()
    if left > 0:
        time.sleep(left / 1e9)


def _site() -> str:
    """`function (file:line)` of the innermost caller outside this module, as an integration would tell it."""
    frame = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
    while frame.f_back is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return f"{frame.f_code.co_name} ({frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno})"


class StandIn:
    """A small accelerator behind a narrow link, played with sleeps; tensors stay in host memory, results are torch's own.

    Args:
        pageable_bytes_s: bandwidth through the staging buffer.
        pinned_bytes_s: bandwidth from and to pinned memory.
        call_us: fixed cost of a pageable copy, of which a pinned one has a fifth.
    """

    def __init__(self, *, pageable_bytes_s: float = 1e8, pinned_bytes_s: float = 4e8, call_us: float = 300.0) -> None:
        self.torch_device = "cpu"
        self.copies: deque[Copy] = deque(maxlen=KEPT)
        self._pageable_bytes_s, self._pinned_bytes_s, self._call_ns = pageable_bytes_s, pinned_bytes_s, int(call_us * 1000)
        self._staging, self._fetch, self._store = Lane(), Lane(), Lane()
        self._pinned: dict[int, torch.Tensor] = {}
        self._queue = threading.local()

    def duration_ns(self, nbytes: int, *, pageable: bool) -> int:
        """How long a transfer of that size takes once its turn has come."""
        if pageable:
            return self._call_ns + int(nbytes / self._pageable_bytes_s * 1e9)
        return self._call_ns // 5 + int(nbytes / self._pinned_bytes_s * 1e9)

    def to_device(self, tensor: torch.Tensor, *, non_blocking: bool = False) -> torch.Tensor:
        """See `Device`."""
        asked = time.perf_counter_ns()
        pageable = tensor.untyped_storage().data_ptr() not in self._pinned
        lane = self._staging if pageable else self._fetch
        start, end = lane.reserve(self.duration_ns(tensor.nbytes, pageable=pageable))
        result = tensor.clone()
        sync = pageable or not non_blocking
        if sync:
            sleep_until(end)
        self._queue.busy_until = max(end, getattr(self._queue, "busy_until", 0))
        self._note(Copy("h2d", tensor.nbytes, pageable, sync, asked, start, end, time.perf_counter_ns(), threading.get_native_id()))
        return result

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Device`; the way back has a lane of its own, as on a card."""
        asked = time.perf_counter_ns()
        self.synchronize()
        start, end = self._store.reserve(self.duration_ns(tensor.nbytes, pageable=False))
        result = tensor.clone()
        sleep_until(end)
        self._note(
            Copy(
                "d2h",
                tensor.nbytes,
                pageable=False,
                sync=True,
                asked_ns=asked,
                start_ns=start,
                end_ns=end,
                returned_ns=time.perf_counter_ns(),
                thread_id=threading.get_native_id(),
            )
        )
        return result

    def _note(self, copy: Copy) -> None:
        self.copies.append(copy)
        record_copy(copy.direction, copy.nbytes, copy.asked_ns, copy.returned_ns, sync=copy.sync, pageable=copy.pageable, site=_site())

    def pinned(self, *shape: int) -> torch.Tensor:
        """See `Device`; kept for the process's life."""
        buffer = torch.zeros(*shape)
        self._pinned[buffer.untyped_storage().data_ptr()] = buffer
        return buffer

    def own_stream(self) -> AbstractContextManager[Any]:
        """See `Device`; here each thread has its own queue anyway."""
        return nullcontext()

    def usual_stream(self) -> AbstractContextManager[Any]:
        """See `Device`."""
        return nullcontext()

    def kernel(self, milliseconds: float) -> None:
        """See `Device`."""
        begin = max(time.perf_counter_ns(), getattr(self._queue, "busy_until", 0))
        self._queue.busy_until = begin + int(milliseconds * 1e6)

    def synchronize(self) -> None:
        """See `Device`."""
        sleep_until(getattr(self._queue, "busy_until", 0))

    def table(self, milliseconds: float) -> torch.Tensor:
        """See `Device`."""
        return torch.zeros(int(milliseconds / 1e3 * self._pageable_bytes_s / 4))


class CudaDevice:
    """The card itself; copies are plain `Tensor.to` calls, which the copies integration sees."""

    _PROBE_BYTES: Final = 1 << 26
    _PROBE_CYCLES: Final = 20_000_000

    def __init__(self) -> None:
        self.torch_device = "cuda"
        self.copies: deque[Copy] = deque(maxlen=KEPT)
        self._device = torch.device("cuda")
        self._streams = threading.local()
        cuda: Any = torch.cuda  # parts of it carry no types
        self._spin, self._new_stream = cuda._sleep, cuda.Stream  # noqa: SLF001  the only kernel of a chosen length
        probe = torch.zeros(self._PROBE_BYTES // 4)
        self._pageable_bytes_s = self._PROBE_BYTES / min(self._timed(lambda: probe.to(self._device)) for _ in range(3))
        self._cycles_s = self._PROBE_CYCLES / min(self._timed(lambda: self._spin(self._PROBE_CYCLES)) for _ in range(2))

    @staticmethod
    def _timed(call: Any) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    def to_device(self, tensor: torch.Tensor, *, non_blocking: bool = False) -> torch.Tensor:
        """See `Device`; start and end on the card are not known here, so the caller's instants stand for them."""
        asked = time.perf_counter_ns()
        result = tensor.to(self._device, non_blocking=non_blocking)
        returned = time.perf_counter_ns()
        pageable = not tensor.is_pinned()
        sync = pageable or not non_blocking
        self.copies.append(Copy("h2d", tensor.nbytes, pageable, sync, asked, asked, returned, returned, threading.get_native_id()))
        return result

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Device`."""
        asked = time.perf_counter_ns()
        result = tensor.cpu()
        returned = time.perf_counter_ns()
        facts = (True, True, asked, asked, returned, returned, threading.get_native_id())
        self.copies.append(Copy("d2h", tensor.nbytes, *facts))
        return result

    def pinned(self, *shape: int) -> torch.Tensor:
        """See `Device`."""
        return torch.zeros(*shape, pin_memory=True)

    def own_stream(self) -> AbstractContextManager[Any]:
        """See `Device`."""
        if not hasattr(self._streams, "own"):
            self._streams.own = self._new_stream()
        stream: AbstractContextManager[Any] = torch.cuda.stream(self._streams.own)
        return stream

    def usual_stream(self) -> AbstractContextManager[Any]:
        """See `Device`: the default stream, which all threads share."""
        return nullcontext()

    def kernel(self, milliseconds: float) -> None:
        """See `Device`; spins on the card for the cycles of that time."""
        self._spin(int(milliseconds / 1e3 * self._cycles_s))

    def synchronize(self) -> None:
        """See `Device`."""
        torch.cuda.current_stream().synchronize()

    def table(self, milliseconds: float) -> torch.Tensor:
        """See `Device`; sized by the bandwidth measured at the start."""
        return torch.zeros(int(milliseconds / 1e3 * self._pageable_bytes_s / 4))


class Simulated:
    """inferscope's simulated accelerator at the stand-in's bandwidths: copies are `Tensor.to`, the truth is the simulator's own log.

    Args:
        pageable_bytes_s: bandwidth through the staging buffer.
        pinned_bytes_s: bandwidth from and to pinned memory.
        call_us: fixed cost of a pageable copy, of which a pinned one has a fifth.

    Raises:
        inferscope.InferscopeError: it cannot be compiled here; the message says what is missing.
    """

    def __init__(self, *, pageable_bytes_s: float = 1e8, pinned_bytes_s: float = 4e8, call_us: float = 300.0) -> None:
        from inferscope.testing import accelerator

        self._sim = accelerator.load()
        self._sim.configure(pageable_gb_s=pageable_bytes_s / 1e9, h2d_gb_s=pinned_bytes_s / 1e9, d2h_gb_s=pinned_bytes_s / 1e9)
        self._sim.configure(pageable_us=call_us, copy_us=call_us / 5)
        self.torch_device = self._sim.name
        self._pageable_bytes_s = pageable_bytes_s
        self._device = torch.device(self._sim.name)
        self._streams = threading.local()
        self.to_device: Callable[..., torch.Tensor] = functools.partial(torch.Tensor.to, device=self._device)
        """See `Device`; no function of its own stands between `Tensor.to` and the line of the service that asks for the copy."""

    @property
    def copies(self) -> deque[Copy]:
        """See `Device`."""
        return deque(
            (
                Copy(
                    each.kind,
                    each.nbytes,
                    each.pageable,
                    each.blocking,
                    each.issue_ns,
                    each.start_ns,
                    each.end_ns,
                    each.returned_ns,
                    each.thread_id,
                )
                for each in self._sim.operations()
                if each.kind in {"h2d", "d2h"}
            ),
            maxlen=KEPT,
        )

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Device`."""
        return tensor.cpu()

    def pinned(self, *shape: int) -> torch.Tensor:
        """See `Device`."""
        return torch.zeros(*shape).pin_memory()

    def own_stream(self) -> AbstractContextManager[Any]:
        """See `Device`."""
        if not hasattr(self._streams, "own"):
            self._streams.own = torch.Stream(device=self._device)
        stream: AbstractContextManager[Any] = self._streams.own
        return stream

    def usual_stream(self) -> AbstractContextManager[Any]:
        """See `Device`: one for each thread, as CUDA has with per-thread default streams; they take turns for the staging buffer only."""
        return self.own_stream()

    def kernel(self, milliseconds: float) -> None:
        """See `Device`."""
        self._sim.kernel(milliseconds, "model")

    def synchronize(self) -> None:
        """See `Device`."""
        torch.accelerator.current_stream().synchronize()

    def table(self, milliseconds: float) -> torch.Tensor:
        """See `Device`."""
        return torch.zeros(int(milliseconds / 1e3 * self._pageable_bytes_s / 4))


def choose(name: str) -> Device:
    """The device called `auto`, `cuda`, `cpu` (the stand-in) or `simulated`.

    `auto` is a card when there is one, else the simulated accelerator, else, where that cannot be compiled, the stand-in; it says which.

    Raises:
        ValueError: another name, or `cuda` where torch sees no card.
        inferscope.InferscopeError: `simulated` where it cannot be compiled; the message says what is missing.
    """
    if name not in {"auto", "cuda", "cpu", "simulated"}:
        raise ValueError(f"the device is auto, cuda, cpu or simulated, not {name!r}")
    if name == "cpu":
        return StandIn()
    if name != "simulated" and torch.cuda.is_available():
        return CudaDevice()
    if name == "cuda":
        raise ValueError("torch sees no CUDA device; --device auto takes the simulated accelerator")
    try:
        return Simulated()
    except InferscopeError as error:
        if name == "simulated":
            raise
        print(f"the stand-in takes the device's place: {error}", flush=True)
        return StandIn()
