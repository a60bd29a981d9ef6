"""What copies cost on the device's side: the time the caller was blocked and the time the bytes travelled are different numbers.

A blocking copy's wall time is the drain of its stream, the staging and the transfer together. The device's events part them: `queue` is what
stood before the copy in its stream, `transfer` what lay between its two events. For a blocking copy the second event is recorded only after
the call returned, so that its transfer is an upper bound: by a launch (a few microseconds), by the time until its thread ran again, and, from
pageable memory, by the wait for the driver's staging buffer, which copies of all streams take turns for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from inferscope.types import SpanFlag

if TYPE_CHECKING:
    from inferscope.device.harvest import DeviceSpan

__all__ = ["PREFIX", "CopyTimes"]

PREFIX: Final = "copy:"
"""Copies are the spans whose name begins so; the direction follows."""


class CopyTimes:
    """Sums over timed copies by direction and kind; a sink of the harvester."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, bool, bool, bool], list[float]] = {}

    def add(self, span: DeviceSpan) -> None:
        """Count one span, if it is a copy."""
        if span.exec_ns is None or not span.name.startswith(PREFIX):
            return
        pageable, sync, implicit = (bool(span.flags & bit) for bit in (SpanFlag.PAGEABLE, SpanFlag.SYNC, SpanFlag.IMPLICIT_SYNC))
        key = (span.name[len(PREFIX) :], pageable, sync, implicit)
        row = self._rows.setdefault(key, [0.0] * 6)
        row[0] += span.weight
        row[1] += span.weight * span.nbytes
        row[2] += span.weight * span.host_ns
        row[3] += span.weight * span.exec_ns
        if span.queue_wait_ns is not None:
            row[4] += span.weight
            row[5] += span.weight * span.queue_wait_ns

    def evidence(self) -> list[dict[str, Any]]:
        """Running totals, weighted to all copies; `queue_ns` is None where no start was known, `bytes_per_s` is bytes over transfer time.

        Values that were read (`implicit`: `item`, `if tensor:`) are rows of their own: their few bytes say nothing of a bandwidth.
        """
        return [
            {
                "name": direction,
                "pageable": pageable,
                "sync": sync,
                "implicit": implicit,
                "count": round(count),
                "bytes": round(nbytes),
                "host_ns": round(host),
                "transfer_ns": round(transfer),
                "queue_ns": round(queued * count / placed) if placed else None,
                "bytes_per_s": nbytes / transfer * 1e9 if transfer else None,
            }
            for (direction, pageable, sync, implicit), (count, nbytes, host, transfer, placed, queued) in list(self._rows.items())
        ]

    def reset(self) -> None:
        """Start afresh, in a forked child."""
        self._rows.clear()
