"""What spans took on their devices, in sums: what an incident keeps of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from inferscope.device.harvest import DeviceSpan

__all__ = ["SpanTimes"]

ROWS: Final = 64
"""Names by device that are kept apart."""
BARS: Final = 256
"""Error bars that the median is of."""


class _Row:
    __slots__ = ("count", "cross", "errors", "exec", "gap", "gaps", "host", "placed", "queue", "shared")

    def __init__(self) -> None:
        self.count = self.exec = self.host = self.placed = self.queue = self.gaps = self.gap = 0.0
        self.cross = self.shared = self.errors = 0


class SpanTimes:
    """Sums over timed spans by device and name; a sink of the harvester."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str], _Row] = {}
        self._bars: list[int] = []
        self._next = 0

    def add(self, span: DeviceSpan) -> None:
        """Count one span."""
        key = (span.device, span.name)
        row = self._rows.get(key)
        if row is None:
            row = self._rows.setdefault(key if len(self._rows) < ROWS else (span.device, "other"), _Row())
        row.cross += span.cross_stream
        row.shared += span.shared_stream
        if span.exec_ns is None:
            row.errors += 1
            return
        weight = span.weight
        row.count += weight
        row.exec += weight * span.exec_ns
        row.host += weight * span.host_ns
        if span.queue_wait_ns is not None:
            row.placed += weight
            row.queue += weight * span.queue_wait_ns
        if span.gap_ns is not None:
            row.gaps += weight
            row.gap += weight * span.gap_ns
        if span.error_ns is not None:
            self._note_bar(span.error_ns)

    def _note_bar(self, error_ns: int) -> None:
        if len(self._bars) < BARS:
            self._bars.append(error_ns)
        else:
            self._bars[self._next % BARS] = error_ns
            self._next += 1

    def evidence(self) -> list[dict[str, Any]]:
        """Running totals, weighted to all spans.

        Returns:
            One row for each device and name. `queue_ns` is what stood before spans in their streams, None where no start was known; `gap_ns` what
            their streams idled before them, as far as our spans show, over `gaps` of them; `errors` are spans that could not be read.
        """
        return [
            {
                "device": device,
                "name": name,
                "count": round(row.count),
                "exec_ns": round(row.exec),
                "host_ns": round(row.host),
                "queue_ns": round(row.queue * row.count / row.placed) if row.placed else None,
                "gaps": round(row.gaps),
                "gap_ns": round(row.gap) if row.gaps else None,
                "cross_stream": row.cross,
                "shared_stream": row.shared,
                "errors": row.errors,
            }
            for (device, name), row in list(self._rows.items())
        ]

    def error_bar_ns(self) -> int | None:
        """Half the width of the interval that holds a start, median of the latest spans; None before the first."""
        bars = sorted(self._bars)
        return bars[len(bars) // 2] if bars else None

    def reset(self) -> None:
        """Start afresh, in a forked child."""
        self._rows, self._bars, self._next = {}, [], 0
