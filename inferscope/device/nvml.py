"""What the NVIDIA driver says of each card, through nvidia-ml-py: the only device-wide evidence, since others may share the card.

The driver's lock is held during a call (MangoHud#2104), so one thread asks, at most once a second, few cheap things, and never a request's. What a
card or a container does not tell is None, never zero: utilisation of a MIG parent, memory without permission. A card that is lost is not asked
again.
"""

from __future__ import annotations

import contextlib
import importlib
from collections import deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from inferscope.clock import NS_PER_S, now_ns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["Card", "NvmlMonitor", "uuid_of"]

PERIOD_NS: Final = NS_PER_S
KEPT: Final = 900
"""Samples a card that `busy` looks back on: a quarter of an hour."""
_NEVER: Final = frozenset({"NVMLError_NotSupported", "NVMLError_NoPermission", "NVMLError_FunctionNotFound"})
_SLOWED: Final = {
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal": 0x20,
    "hw_thermal": 0x40,
    "hw_power_brake": 0x80,
}
"""Bits of `nvmlDeviceGetCurrentClocksEventReasons` that mean slower clocks than asked for (nvml.h)."""


class Card(NamedTuple):
    """One card at one moment; None is unknown."""

    uuid: str
    utilization: float | None
    """Fraction of the driver's last period in which any kernel, of any process, was resident."""
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    clock_hz: int | None
    """Streaming multiprocessors'."""
    slowed: tuple[str, ...] | None
    """Why the clocks are lower than asked for."""
    lost: bool


def uuid_of(device: Any) -> str | None:
    """UUID of a CUDA device that the application uses: NVML's order is not that of CUDA_VISIBLE_DEVICES."""
    if device.type != "cuda":
        return None
    try:
        import torch

        api: Any = torch  # parts of it carry no types
        return f"GPU-{api.cuda.get_device_properties(device.index).uuid}"
    except Exception:  # noqa: BLE001  (an older torch, or a lost device)
        return None


class NvmlMonitor:
    """Asks the driver; `run_once` from one thread of ours.

    Args:
        clock: For tests.

    Attributes:
        off: Why nothing is asked; empty while it is.
    """

    def __init__(self, clock: Callable[[], int] = now_ns) -> None:
        self.off = ""
        self._clock = clock
        self._nvml: Any = None
        self._handles: dict[str, Any] = {}
        self._silent: dict[str, set[str]] = {}
        self._lost: set[str] = set()
        self._asked = -PERIOD_NS
        self._cards: tuple[Card, ...] = ()
        self._busy: dict[str, deque[tuple[int, float]]] = {}

    def open(self) -> bool:
        """Load the driver's library and find the cards; whether there is something to ask."""
        if self._nvml is not None or self.off:
            return not self.off
        try:
            nvml: Any = importlib.import_module("pynvml")
        except ImportError:
            self.off = "nvidia-ml-py is not installed"
            return False
        try:
            nvml.nvmlInit()
            handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
            self._handles = {_text(nvml.nvmlDeviceGetUUID(handle)): handle for handle in handles}
        except Exception as error:  # noqa: BLE001  (no driver, no permission: said in the status)
            self.off = f"the driver's library cannot be used ({type(error).__name__})"
            return False
        self._nvml = nvml
        if not self._handles:
            self.off = "the driver shows no card"
        return not self.off

    def run_once(self) -> tuple[Card, ...]:
        """The cards now; those of the last time when it was less than a second ago."""
        now = self._clock()
        if now - self._asked < PERIOD_NS or not self.open():
            return self._cards
        self._asked = now
        self._cards = tuple(self._read(uuid) for uuid in self._handles)
        for card in self._cards:
            if card.utilization is not None:
                self._busy.setdefault(card.uuid, deque(maxlen=KEPT)).append((now, card.utilization))
        return self._cards

    def _read(self, uuid: str) -> Card:
        nvml = self._nvml
        used = self._ask(uuid, "nvmlDeviceGetUtilizationRates")
        memory = self._ask(uuid, "nvmlDeviceGetMemoryInfo")
        clock = self._ask(uuid, "nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM)
        reasons = self._ask(uuid, "nvmlDeviceGetCurrentClocksEventReasons")
        if reasons is None:  # its name before R535
            reasons = self._ask(uuid, "nvmlDeviceGetCurrentClocksThrottleReasons")
        share = None if used is None else used.gpu / 100
        return Card(
            uuid=uuid,
            utilization=share if share is not None and 0 <= share <= 1 else None,  # more than 100 % has been seen (nvtop#110)
            memory_used_bytes=None if memory is None else int(memory.used),
            memory_total_bytes=None if memory is None else int(memory.total),
            clock_hz=None if clock is None else int(clock) * 1_000_000,
            slowed=None if reasons is None else tuple(name for name, bit in _SLOWED.items() if reasons & bit),
            lost=uuid in self._lost,
        )

    def _ask(self, uuid: str, name: str, *args: Any) -> Any:
        silent = self._silent.setdefault(uuid, set())
        if uuid in self._lost or name in silent:
            return None
        try:
            return getattr(self._nvml, name)(self._handles[uuid], *args)
        except Exception as error:  # noqa: BLE001  (unknown, this time or for good)
            kind = type(error).__name__
            if kind == "NVMLError_GpuIsLost":
                self._lost.add(uuid)
            elif kind in _NEVER or isinstance(error, AttributeError):
                silent.add(name)
            return None

    def busy(self, uuids: Iterable[str], from_ns: int, to_ns: int) -> float | None:
        """Mean utilisation of the busiest of these cards over a period; None when none told."""
        means: list[float] = []
        for uuid in uuids:
            seen = [share for moment, share in self._busy.get(uuid, ()) if from_ns <= moment <= to_ns]
            if seen:
                means.append(sum(seen) / len(seen))
        return max(means, default=None)

    def close(self) -> None:
        """Let go of the driver."""
        if self._nvml is not None:
            with contextlib.suppress(Exception):
                self._nvml.nvmlShutdown()
            self._nvml = None
        self._handles.clear()


def _text(value: str | bytes) -> str:
    """Older releases of nvidia-ml-py return bytes."""
    return value.decode() if isinstance(value, bytes) else value
