"""Who had the device while slow requests' work stood in its queue: this process's own work, or somebody else's.

A card that another process uses gives our work its turn and then takes long over it: work of a request that is no larger than others lasts many times
what it usually does, while no other request of ours has the device. Work whose request is larger, or behind which another one stands, is our own.
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
_PART: Final = 0.25
"""Of the threshold, from which stretched work counts."""
_SEEN: Final = 0.10
"""Of the slow requests that have to show it."""
_LARGER: Final = 1.5
_LARGE: Final = 0.90


class Turns(NamedTuple):
    """What slow requests' work waited for on the device; numbers of slow requests."""

    alone: int
    """Their own work lasted long with no other request on the device, although they are no larger than others."""
    heavy: int
    """The same, and they are larger or nobody knows their size."""
    behind: str
    """The work of other requests that had the device most of the time that slow ones stood in the queue; empty when none had."""
    requests: int

    @property
    def foreign(self) -> bool:
        """Whether somebody else's work is seen."""
        return self.alone > self.heavy and self.alone >= max(3, _SEEN * self.requests)


def turns(context: Context, slow: Sequence[HostRequest], ordinary: Sequence[HostRequest]) -> Turns | None:
    """Look at who had the device; None when too few slow requests were timed there."""
    spans = context.horizon.device.spans
    timed = {(r.slot, r.id): r for r in slow if (r.slot, r.id) in spans}
    if len(timed) < _FEW:
        return None
    usual, by_slot, least = _usual(spans), _by_slot(spans), _PART * context.threshold_ns
    sizes = sorted(r.size for r in ordinary if r.size is not None)
    large = _LARGER * sizes[int(_LARGE * (len(sizes) - 1))] if sizes else None
    found = [0, 0]
    had: dict[str, float] = {}
    for key, request in timed.items():
        own = spans[key]
        end = max(span.start_ns + span.exec_ns for span in own)
        beside = [o for owner, o in by_slot[key[0]] if owner != key and o.start_ns < end and o.start_ns + o.exec_ns > own[0].issue_ns]
        for other in beside:
            had[other.name] = had.get(other.name, 0.0) + sum(_both(other, span.issue_ns, span.start_ns) for span in own)
        if any(_surplus(span, usual) >= least and not _explained(span, _surplus(span, usual), beside) for span in own):
            found[large is None or request.size is None or request.size > large] += 1
    behind = max(had, key=lambda name: had[name], default="")
    return Turns(found[0], found[1], behind if had.get(behind) else "", len(timed))


def _explained(span: DeviceSpan, surplus: float, beside: Sequence[DeviceSpan]) -> bool:
    """Whether another request's work lies within a span for half of its surplus: launched between its marks, or taking turns with it."""
    return any(_both(other, span.start_ns, span.start_ns + span.exec_ns) >= 0.5 * surplus for other in beside)


def _surplus(span: DeviceSpan, usual: Mapping[str, float]) -> float:
    """Time beyond what its kind of work usually takes, when that is a multiple of it."""
    return span.exec_ns - usual[span.name] if span.exec_ns >= _TIMES * usual[span.name] else 0.0


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
