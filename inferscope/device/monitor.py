"""What the driver of a card says of it, whoever made it: one protocol, two libraries behind it (`nvml`, `amd`).

This is the only device-wide evidence, since others may share the card. The driver's lock is held during a call (MangoHud#2104), so one thread asks,
at most once a second, few cheap things, and never a request's. What a card or a container does not tell is None, never zero. A card that
is lost is not asked again.
"""

from __future__ import annotations

import abc
from collections import deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from inferscope.clock import NS_PER_S, now_ns
from inferscope.device.gpm import Work

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["Card", "CardFault", "DriverMonitor", "Identity", "identity_of", "monitor_for"]

PERIOD_NS: Final = NS_PER_S
RARELY: Final = 10
"""Power and temperature are asked at every tenth look only: the driver passes them on to a slow microcontroller (MangoHud#1307)."""
KEPT: Final = 900
"""Samples a card that `busy` looks back on: a quarter of an hour."""
FAULTS: Final = 64
"""Faults that are remembered."""


class Identity(NamedTuple):
    """How torch knows a card: the driver's order is not that of CUDA_VISIBLE_DEVICES, so an index says nothing."""

    uuid: str | None
    """Without `GPU-` or `MIG-` before it."""
    pci: str | None
    """Domain, bus and device, as `0000:3b:00`."""


class Card(NamedTuple):
    """One card, or one MIG instance, at one moment; None is unknown."""

    uuid: str
    utilization: float | None
    """Fraction of the driver's last period in which any kernel, of any process, was resident."""
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    clock_hz: int | None
    """Of the processors."""
    slowed: tuple[str, ...] | None
    """Why the clocks are lower than asked for."""
    lost: bool
    memory_clock_hz: int | None = None
    power_w: float | None = None
    """At most ten samples old."""
    temperature_c: float | None = None
    """At most ten samples old."""
    work: Work = Work()
    """What its parts did, on cards that tell."""


class CardFault(NamedTuple):
    """A fault that the driver reported."""

    uuid: str
    seen_ns: int
    """When we heard of it: at most a second after it happened."""
    xid: int
    """NVIDIA's number (79: the card has fallen off the bus)."""


class DriverMonitor(abc.ABC):
    """Asks one driver; `run_once` from one thread of ours.

    Args:
        clock: For tests.

    Attributes:
        name: Of the library, as the evidence names its source.
        off: Why nothing is asked; empty while it is.
    """

    name: str = ""

    def __init__(self, clock: Callable[[], int] = now_ns) -> None:
        self.off = ""
        self._clock = clock
        self._library: Any = None
        self._handles: dict[str, Any] = {}
        self._pci: dict[str, str] = {}
        self._silent: dict[str, set[str]] = {}
        self._lost: set[str] = set()
        self._asked = -PERIOD_NS
        self._looks = 0
        self._cards: tuple[Card, ...] = ()
        self._slow: dict[str, tuple[float | None, float | None]] = {}
        self._busy: dict[str, deque[tuple[int, float]]] = {}
        self._faults: deque[CardFault] = deque(maxlen=FAULTS)

    # -- what a driver's library has to say ---------------------------------------------------------------------------------------

    @abc.abstractmethod
    def _open(self) -> str:
        """Load the library and fill `_handles` and `_pci`; why it cannot be used, or nothing."""

    @abc.abstractmethod
    def _read(self, uuid: str) -> Card:
        """One card now."""

    @abc.abstractmethod
    def _power_and_temperature(self, uuid: str) -> tuple[float | None, float | None]:
        """In watts and degrees Celsius."""

    @abc.abstractmethod
    def _failed(self, uuid: str, call: str, error: Exception) -> None:
        """Keep in mind what a failing call says of the card: lost, or never answering this."""

    def _listen(self) -> Iterable[tuple[str, int]]:
        """Faults since the last look, as (uuid, number); default: this library reports none."""
        return ()

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of the driver."""

    # -- what is the same for all -------------------------------------------------------------------------------------------------

    def open(self) -> bool:
        """Load the driver's library and find the cards; whether there is something to ask."""
        if not self._handles and not self.off:
            self.off = self._open()
            if not self.off and not self._handles:
                self.off = "the driver shows no card"
        return not self.off

    def run_once(self) -> tuple[Card, ...]:
        """The cards now; those of the last time when it was less than a second ago."""
        now = self._clock()
        if now - self._asked < PERIOD_NS or not self.open():
            return self._cards
        self._asked = now
        cards: list[Card] = []
        for uuid in self._handles:
            if self._looks % RARELY == 0:
                self._slow[uuid] = self._power_and_temperature(uuid)
            power, temperature = self._slow.get(uuid, (None, None))
            cards.append(self._read(uuid)._replace(power_w=power, temperature_c=temperature))
        self._looks += 1
        self._cards = tuple(card._replace(lost=card.uuid in self._lost) for card in cards)
        for card in self._cards:
            if card.utilization is not None:
                self._busy.setdefault(card.uuid, deque(maxlen=KEPT)).append((now, card.utilization))
        self._faults.extend(CardFault(uuid, now, number) for uuid, number in self._listen())
        return self._cards

    def _ask(self, uuid: str, call: str, *args: Any) -> Any:
        """The answer to one call of the library; None when it failed now or is known to fail always."""
        silent = self._silent.setdefault(uuid, set())
        if uuid in self._lost or call in silent:
            return None
        try:
            return getattr(self._library, call)(self._handles[uuid], *args)
        except AttributeError:  # this library is too old to have the call
            silent.add(call)
        except Exception as error:  # noqa: BLE001  (unknown, this time or for good)
            self._failed(uuid, call, error)
        return None

    def find(self, identity: Identity) -> str | None:
        """The key of the card that torch knows so; None when the driver has no such card."""
        if identity.uuid is not None:
            for uuid in self._handles:
                if uuid.lower().removeprefix("gpu-").removeprefix("mig-") == identity.uuid.lower():
                    return uuid
        if identity.pci is not None:
            return next((uuid for uuid, pci in self._pci.items() if pci == identity.pci), None)
        return None

    def busy(self, uuids: Iterable[str], from_ns: int, to_ns: int) -> float | None:
        """Mean utilisation of the busiest of these cards over a period; None when none told."""
        means: list[float] = []
        for uuid in uuids:
            seen = [share for moment, share in self._busy.get(uuid, ()) if from_ns <= moment <= to_ns]
            if seen:
                means.append(sum(seen) / len(seen))
        return max(means, default=None)

    def faults(self, from_ns: int, to_ns: int) -> list[CardFault]:
        """Faults heard of in a period."""
        return [fault for fault in self._faults if from_ns <= fault.seen_ns <= to_ns]


def identity_of(device: Any) -> Identity | None:
    """What identifies a device that the application uses; None when its backend does not tell.

    Args:
        device: A `torch.device` with an index.
    """
    try:
        import torch

        api: Any = torch  # parts of it carry no types
        properties = api.get_device_module(device.type).get_device_properties(device.index)
    except Exception:  # noqa: BLE001  (a backend without properties, or a lost device)
        return None
    uuid = getattr(properties, "uuid", None)
    domain, bus, slot = (getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device"))
    pci = None if domain is None or bus is None or slot is None else f"{domain:04x}:{bus:02x}:{slot:02x}"
    return None if uuid is None and pci is None else Identity(None if uuid is None else str(uuid), pci)


def monitor_for(device: Any) -> DriverMonitor:
    """The library that speaks for a device: AMD's for a ROCm build of torch, else NVIDIA's."""
    import torch

    if device.type == "cuda" and getattr(torch.version, "hip", None):
        from inferscope.device.amd import AmdMonitor

        return AmdMonitor()
    from inferscope.device.nvml import NvmlMonitor

    return NvmlMonitor()
