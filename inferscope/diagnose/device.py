"""The part `device` of the evidence as values: looks at cards and allocators, and where requests' work stood on the device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["DeviceFacts", "DeviceSpan", "Look", "read_device"]


class Look(NamedTuple):
    """Cards and allocators at one moment; what is not told is missing."""

    slot: int
    at_ns: int
    """Unix."""
    clock_hz: Mapping[str, int]
    """By card."""
    slowed: Mapping[str, tuple[str, ...]]
    """Reasons of slower clocks, by card."""
    memory: Mapping[str, Mapping[str, Any]]
    """Allocators' numbers by device, as `inferscope.device.memory.Memory` names them."""


class DeviceSpan(NamedTuple):
    """One piece of a request's work on a device; ns."""

    name: str
    issue_ns: int
    start_ns: int
    exec_ns: int
    queue_ns: int
    """Between the call and the device's turn."""


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """All slots together; empty where nothing was measured."""

    looks: tuple[Look, ...] = ()
    spans: Mapping[tuple[int, int], tuple[DeviceSpan, ...]] = field(default_factory=dict[tuple[int, int], tuple[DeviceSpan, ...]])
    """By slot and request id."""
    memory: Mapping[str, int] = field(default_factory=dict[str, int])
    """Most that a run of each stage added to a device's memory, bytes, where that is known exactly."""


def read_device(documents: Sequence[Mapping[str, Any]]) -> DeviceFacts:
    """Read the part `device` of documents that have one."""
    looks: list[Look] = []
    spans: dict[tuple[int, int], list[DeviceSpan]] = {}
    grown: dict[str, int] = {}
    for document in documents:
        offset, slot = int(document.get("unix_offset_ns") or 0), int(document.get("slot") or 0)
        held: Mapping[str, Any] = document.get("device") or {}
        for at, clocks, slowed, memory in held.get("looks") or ():
            hz = {str(card): int(value) for card, value in clocks.items() if value is not None}
            why = {str(card): tuple(map(str, reasons)) for card, reasons in slowed.items()}
            looks.append(Look(slot, int(at) + offset, hz, why, memory))
        for entry in held.get("memory_by_stage") or ():
            if entry.get("dynamic_bytes") is not None:
                grown[str(entry["stage"])] = max(grown.get(str(entry["stage"]), 0), int(entry["dynamic_bytes"]))
        for request, name, issue, start, exec_, queue in held.get("spans") or ():
            row = DeviceSpan(str(name), int(issue) + offset, int(start) + offset, int(exec_), int(queue))
            spans.setdefault((slot, int(request)), []).append(row)
    return DeviceFacts(tuple(sorted(looks, key=lambda look: look.at_ns)), {key: tuple(rows) for key, rows in spans.items()}, grown)
