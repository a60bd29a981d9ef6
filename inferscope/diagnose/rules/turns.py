"""Who had the device while slow requests' work stood in its queue: this process's own work, or somebody else's.

A card that another process uses too gives our work its turn and then takes long over it: spans of several kinds, copies and kernels alike, last
many times what they usually do, and what stands behind them waits for our own request by its place in the queue but for the neighbour in truth.
Heavy work of our own stretches one kind only.
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from inferscope.diagnose.device import DeviceSpan
    from inferscope.diagnose.findings import Context
    from inferscope.diagnose.host import HostRequest

__all__ = ["Turns", "turns"]

_FEW: Final = 10
_TIMES: Final = 2.0
"""A span this many times as long as the median of its name is stretched."""
_MOST: Final = 0.4
_ALIKE: Final = 0.15
"""Part of the stretched time that has to lie in other kinds of work than the first: then no one of them is what is heavy."""


class Turns(NamedTuple):
    """What slow requests' work waited for on the device; ms summed over those requests."""

    waited: float
    """In the queue, and in their own work beyond its usual length."""
    stretched: float
    """Part of it behind or in work of this process that took far longer than usual."""
    longest: str
    """The work of this process that had the device most of that time; empty when none had."""
    foreign: bool
    """Whether several kinds of this process's work were stretched alike."""
    requests: int


def turns(context: Context, slow: Sequence[HostRequest]) -> Turns | None:
    """Look at who had the device; None when too few slow requests were timed there."""
    spans = context.horizon.device.spans
    timed = [(r.slot, r.id) for r in slow if (r.slot, r.id) in spans]
    if len(timed) < _FEW:
        return None
    usual, by_slot = _usual(spans), _by_slot(spans)
    waited = 0.0
    stretched: dict[str, float] = {}
    had: dict[str, float] = {}
    for key in timed:
        own = spans[key]
        for span in own:
            surplus = span.exec_ns - usual[span.name]
            if span.exec_ns >= _TIMES * usual[span.name]:
                waited += surplus
                stretched[span.name] = stretched.get(span.name, 0.0) + surplus
        first, last = own[0].issue_ns, max(span.start_ns for span in own)
        for owner, other in by_slot[key[0]]:
            if owner == key or other.start_ns + other.exec_ns <= first or other.start_ns >= last:
                continue
            overlap = sum(_both(other, span.issue_ns, span.start_ns) for span in own)
            had[other.name] = had.get(other.name, 0.0) + overlap
            if other.exec_ns >= _TIMES * usual[other.name]:
                stretched[other.name] = stretched.get(other.name, 0.0) + min(overlap, other.exec_ns - usual[other.name])
        waited += sum(span.queue_ns for span in own)
    total = sum(stretched.values())
    alike = total > 0 and 1.0 - max(stretched.values()) / total >= _ALIKE
    longest = max(had, key=lambda name: had[name], default="")
    return Turns(waited / 1e6, total / 1e6, longest, alike and total >= _MOST * waited > 0, len(timed))


def _usual(spans: Mapping[tuple[int, int], tuple[DeviceSpan, ...]]) -> dict[str, float]:
    lengths: dict[str, list[int]] = {}
    for rows in spans.values():
        for span in rows:
            lengths.setdefault(span.name, []).append(span.exec_ns)
    return {name: max(float(median(values)), 1.0) for name, values in lengths.items()}


def _by_slot(spans: Mapping[tuple[int, int], tuple[DeviceSpan, ...]]) -> dict[int, list[tuple[tuple[int, int], DeviceSpan]]]:
    found: dict[int, list[tuple[tuple[int, int], DeviceSpan]]] = {}
    for key, rows in spans.items():
        found.setdefault(key[0], []).extend((key, span) for span in rows)
    return found


def _both(span: DeviceSpan, low: int, high: int) -> float:
    return float(max(0, min(span.start_ns + span.exec_ns, high) - max(span.start_ns, low)))
