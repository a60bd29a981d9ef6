"""The device room as one object: what `runtime` builds, starts, ticks and stops. No threads here.

Two callers: a harvesting thread (`harvest`, every `period_s`) and a monitoring one (`monitor`, once a second: the driver may hold it for a while).
Both do nothing, and ask nothing, until an integration has seen a tensor on a device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from inferscope import guard
from inferscope.device.copies import CopyTimes
from inferscope.device.events import DeviceTimer, timer
from inferscope.device.harvest import Harvester
from inferscope.device.memory import AllocatorMonitor, Memory
from inferscope.device.nvml import Card, NvmlMonitor, uuid_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferscope.record.core import Recorder

__all__ = ["DeviceRoom"]

PERIOD_S: Final = 0.02
IDLE_S: Final = 1.0


class DeviceRoom:
    """Harvester, copies, allocator and driver of one process.

    Args:
        recorder: Gets the series `device` and `device.queue`.
        spans_from: The integrations' timer; another one in tests.
    """

    def __init__(self, recorder: Recorder | None, spans_from: DeviceTimer = timer) -> None:
        self._timer = spans_from
        self.harvester = Harvester(spans_from, recorder)
        self.copies = CopyTimes()
        self.nvml = NvmlMonitor()
        self._allocator = AllocatorMonitor(spans_from)
        self._memory: list[Memory] = []
        self._cards: tuple[Card, ...] = ()
        self._uuids: dict[Any, str | None] = {}
        self.harvester.sinks.append(self.copies.add)

    @property
    def period_s(self) -> float:
        """How long the harvesting thread may wait until it calls again."""
        return PERIOD_S if self._timer.channels else IDLE_S

    def start(self) -> None:
        """Let the integrations take device spans."""
        self.harvester.start()

    def harvest(self, breathe: Callable[[], object] = lambda: None) -> int:
        """Deliver what devices finished; see `Harvester.run_once`."""
        return self.harvester.run_once(breathe)

    def monitor(self) -> None:
        """Read allocators, and the driver where a CUDA device is in use."""
        if not self._timer.channels:
            return
        self._memory = self._allocator.sample()
        for device in list(self._timer.channels):
            if device.type == "cuda" and device not in self._uuids:
                self._uuids[device] = uuid_of(device)
        if self._uuids:
            self._cards = self.nvml.run_once()

    def stop(self) -> None:
        """Take no more spans, deliver what is finished, let go of the driver."""
        self.harvester.stop()
        with guard.guard("nvml"):
            self.nvml.close()

    def evidence(self, from_ns: int, to_ns: int) -> dict[str, Any]:
        """What an incident keeps of a period.

        Returns:
            `busy` is device-wide and comes from the driver, else None; `own_spans` is only what this process's timed spans cover, by device: it
            shows that a card was busy, never that it was idle.
        """
        in_use = [uuid for uuid in self._uuids.values() if uuid is not None]
        busy = self.nvml.busy(in_use, from_ns, to_ns)
        return {
            "busy": busy,
            "source": None if busy is None else "nvml",
            "own_spans": self.harvester.busy(from_ns, to_ns),
            "copies": self.copies.evidence(),
            "memory": [row._asdict() for row in self._memory],
            "cards": [card._asdict() for card in self._cards if card.uuid in in_use],
        }

    def status(self) -> dict[str, Any]:
        """State and totals by device, and of the driver."""
        return {
            "devices": self.harvester.status(),
            "nvml": f"off: {self.nvml.off}" if self.nvml.off else "on" if self._uuids else "not asked",
        }

    def after_fork(self) -> None:
        """In a forked child: nothing of the parent's devices is ours."""
        self.harvester.after_fork()
        self.copies.reset()
        self.nvml = NvmlMonitor()
        self._memory, self._cards, self._uuids = [], (), {}
