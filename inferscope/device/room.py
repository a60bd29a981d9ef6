"""The device room as one object: what `runtime` builds, starts, ticks and stops. No threads here.

Two callers: a harvesting thread (`harvest`, every `period_s`) and a monitoring one (`monitor`, once a second: the driver may hold it for a while).
Both do nothing, and ask nothing, until an integration has seen a tensor on a device.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final

from inferscope import guard
from inferscope.clock import now_ns
from inferscope.device.backends import in_use
from inferscope.device.copies import CopyTimes
from inferscope.device.events import DeviceTimer, timer
from inferscope.device.harvest import Harvester
from inferscope.device.memory import AllocatorMonitor, Memory
from inferscope.device.monitor import Card, DriverMonitor, identity_of, monitor_for
from inferscope.device.spans import SpanTimes

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferscope.device.harvest import DeviceSpan
    from inferscope.record.core import Recorder

__all__ = ["DeviceRoom"]

PERIOD_S: Final = 0.02
REST_S: Final = 0.2
"""While nothing is pending."""
IDLE_S: Final = 1.0
"""While no device is in use."""
LOOKS: Final = 900
"""Looks at cards and allocators that are kept: a quarter of an hour."""
SPANS: Final = 4096
"""Latest spans of requests that are kept."""


class DeviceRoom:
    """Harvester, copies, allocator and driver of one process.

    Args:
        recorder: Gets the series `device` and `device.queue`.
        spans_from: The integrations' timer; another one in tests.
    """

    def __init__(self, recorder: Recorder | None, spans_from: DeviceTimer = timer) -> None:
        self._timer = spans_from
        self._started = False
        self.harvester = Harvester(spans_from, recorder)
        self.copies = CopyTimes()
        self.totals = SpanTimes()
        self._period_s = PERIOD_S
        self._driver: DriverMonitor | None = None
        self._allocator = AllocatorMonitor(spans_from)
        self._memory: list[Memory] = []
        self._cards: tuple[Card, ...] = ()
        self._uuids: dict[Any, str | None] = {}
        """By device, as the driver calls its card; None where it does not know it."""
        self._looks: deque[tuple[int, tuple[Card, ...], list[Memory]]] = deque(maxlen=LOOKS)
        self._spans: deque[tuple[int, str, int, int, int, int]] = deque(maxlen=SPANS)
        self.harvester.sinks += [self.copies.add, self.totals.add, self._keep]

    @property
    def period_s(self) -> float:
        """How long the harvesting thread may wait until it calls again."""
        return self._period_s if self._timer.channels else IDLE_S

    def start(self) -> None:
        """Let the integrations take device spans once the application uses a device: a service without one pays nothing."""
        self._started = True
        self._wake()

    def _wake(self) -> None:
        if self._started and not self._timer.enabled and in_use():
            self.harvester.start()

    def harvest(self, breathe: Callable[[], object] = lambda: None) -> int:
        """Deliver what devices finished; see `Harvester.run_once`."""
        self._wake()
        delivered = self.harvester.run_once(breathe) if self._timer.enabled else 0
        self._period_s = PERIOD_S if delivered or self.harvester.pending else min(2 * self._period_s, REST_S)
        return delivered

    def monitor(self) -> None:
        """Read the driver where a device in use has one, and the allocators."""
        devices = list(self._timer.channels)
        if not devices:
            return
        for device in devices:
            if device not in self._uuids:
                self._uuids[device] = self._find(device)
        if self._driver is not None:
            self._cards = self._driver.run_once()
        self._memory = self._allocator.sample(self._left)
        self._looks.append((now_ns(), self._cards, self._memory))

    def _keep(self, span: DeviceSpan) -> None:
        """Keep where a request's work stood on the device."""
        request = getattr(span.request, "id", None)
        if request is not None and span.start_ns is not None and span.exec_ns is not None:
            self._spans.append((request, span.name, span.issue_ns, span.start_ns, span.exec_ns, span.queue_wait_ns or 0))

    def _find(self, device: Any) -> str | None:
        """The driver's name for a device; the first device that has one decides which driver is asked."""
        identity = identity_of(device)
        if identity is None:
            return None
        if self._driver is None:
            self._driver = monitor_for(device)
        self._driver.run_once()
        return self._driver.find(identity)

    def _left(self, device: Any) -> tuple[int, int] | None:
        """Free and total bytes of a device's card."""
        uuid = self._uuids.get(device)
        for card in self._cards:
            if card.uuid == uuid and card.memory_used_bytes is not None and card.memory_total_bytes is not None:
                return card.memory_total_bytes - card.memory_used_bytes, card.memory_total_bytes
        return None

    def stop(self) -> None:
        """Take no more spans, deliver what is finished, let go of the driver."""
        self._started = False
        self.harvester.stop()
        with guard.guard("nvml"):
            if self._driver is not None:
                self._driver.close()

    def levels(self, from_ns: int, to_ns: int) -> tuple[float | None, tuple[Memory, ...]]:
        """Busy fraction of the busiest card in use, device-wide from the driver or None, and each allocator as it was last read."""
        in_use = [uuid for uuid in self._uuids.values() if uuid is not None]
        return None if self._driver is None else self._driver.busy(in_use, from_ns, to_ns), tuple(self._memory)

    def evidence(self, from_ns: int, to_ns: int) -> dict[str, Any]:
        """What an incident keeps of a period.

        Returns:
            `busy` is device-wide and comes from the driver, else None; `own_spans` is only what this process's timed spans cover, by device: it
            shows that a card was busy, never that it was idle. `totals` are of all spans (`SpanTimes.evidence`), `error_ns` is how well a start is
            known. `faults` are XID errors of the cards in use. `looks` are [instant, clock Hz by card, reasons of slower clocks by card,
            allocators' running totals by device], `spans` [request id, name, issue, start, execution, wait in the queue] of the latest
            requests, ns.
        """
        in_use = [uuid for uuid in self._uuids.values() if uuid is not None]
        driver = self._driver
        busy = None if driver is None else driver.busy(in_use, from_ns, to_ns)
        return {
            "busy": busy,
            "source": None if driver is None or busy is None else driver.name,
            "own_spans": self.harvester.busy(from_ns, to_ns),
            "totals": self.totals.evidence(),
            "error_ns": self.totals.error_bar_ns(),
            "copies": self.copies.evidence(),
            "memory": [row._asdict() for row in self._memory],
            "memory_by_stage": self._timer.memory.evidence(self._memory),
            "cards": [card._asdict() | {"work": card.work._asdict()} for card in self._cards if card.uuid in in_use],
            "looks": [
                [
                    moment,
                    {card.uuid: card.clock_hz for card in cards if card.uuid in in_use},
                    {card.uuid: list(card.slowed) for card in cards if card.uuid in in_use and card.slowed is not None},
                    {row.device: row._asdict() for row in memory},
                ]
                for moment, cards, memory in list(self._looks)
                if from_ns <= moment <= to_ns
            ],
            "spans": [list(span) for span in list(self._spans) if from_ns <= span[2] <= to_ns],
            "faults": [] if driver is None else [fault._asdict() for fault in driver.faults(from_ns, to_ns) if fault.uuid in in_use],
        }

    def status(self) -> dict[str, Any]:
        """State and totals by device, and of the driver."""
        driver = self._driver
        return {
            "devices": self.harvester.status(),
            "settled_ns": {} if self.harvester.settler is None else dict(self.harvester.settler.settled_ns),
            "driver": "not asked" if driver is None else f"off: {driver.off}" if driver.off else f"on: {driver.name}",
        }

    def after_fork(self) -> None:
        """In a forked child: nothing of the parent's devices is ours."""
        self.harvester.after_fork()
        self.copies.reset()
        self.totals.reset()
        self._driver, self._started = None, False
        self._memory, self._cards, self._uuids = [], (), {}
        self._looks.clear()
        self._spans.clear()
