"""What a retained request's work did on its devices, as spans with the device's own times.

A device's clock is known on the host's only so well: every span carries the half width of the interval that holds its start. Its parent is the
stage that issued it, which may have ended before the device began: the two overlap only where the caller waited.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from inferscope import semconv
from inferscope.clock import NS_PER_S
from inferscope.export.otlp.traces import KEEP, TraceSpan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inferscope.device.harvest import DeviceSpan
    from inferscope.export.otlp.traces import Identity
    from inferscope.types import Column, RequestRecord

__all__ = ["ALIGNMENT_ERROR", "DEVICE", "GAP", "SHARED", "STREAM", "device_spans"]

DEVICE: Final = "inferscope.device"
STREAM: Final = "inferscope.device.stream"
ALIGNMENT_ERROR: Final = "inferscope.device.alignment.error"
"""Half the width of the interval that holds the start, seconds."""
GAP: Final = "inferscope.device.gap"
"""Idle time of the stream before it, as far as our spans show, seconds."""
SHARED: Final = "inferscope.device.shared"
"""Several requests had spans pending on the stream: the time may hold others' work."""
_FIRST: Final = 1 << 20
"""Positions of device spans in the ids, after any that a record has."""


def device_spans(
    record: RequestRecord, columns: Sequence[Column], identity: Identity, offset_ns: int, work: Sequence[DeviceSpan]
) -> tuple[TraceSpan, ...]:
    """Children of the stages of a request.

    Args:
        record: The request.
        columns: Owners of time by column index.
        identity: Gives the ids.
        offset_ns: What to add to the host's clock for Unix time.
        work: Its device spans; those whose start or end is not known are left out.
    """
    trace_id, _ = identity.trace(record)
    return tuple(
        TraceSpan(
            trace_id=trace_id,
            span_id=identity.span(record, _FIRST + number),
            parent_id=identity.span(record, _parent(record, columns, each)),
            name=f"{each.name} on {each.device}",
            start_unix_ns=each.start_ns + offset_ns,
            end_unix_ns=each.start_ns + each.exec_ns + offset_ns,
            attributes=_attributes(each),
        )
        for number, each in enumerate(work)
        if each.start_ns is not None and each.exec_ns is not None
    )


def _parent(record: RequestRecord, columns: Sequence[Column], work: DeviceSpan) -> int:
    """The innermost stage or copy that was open when the work was issued, by its name where there is one; -1 for the request."""
    found, named = -1, -1
    for index, span in enumerate(record.spans):
        column = columns[span.column]
        if span.start_ns <= work.issue_ns <= span.end_ns and column.kind in {"stage", "copy"}:
            found = index
            named = index if work.name in {column.name, column.label} else named
    return named if named >= 0 else found


def _attributes(work: DeviceSpan) -> tuple[tuple[str, str | bool | int | float], ...]:
    optional = (
        (ALIGNMENT_ERROR, work.error_ns),
        (semconv.DEVICE_QUEUE_DURATION, work.queue_wait_ns),
        (GAP, work.gap_ns),
    )
    return (
        (semconv.ATTR_STAGE, work.name),
        (semconv.ATTR_CLOCK, "device"),
        (DEVICE, work.device),
        (STREAM, work.stream),
        (SHARED, work.shared_stream),
        (KEEP, True),
        *((name, value / NS_PER_S) for name, value in optional if value is not None),
    )
