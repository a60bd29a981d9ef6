"""Retained requests to OpenTelemetry spans, off the request's path.

Only requests that were kept for a reason become spans: those above the objective, the profiled and a few of the slowest. A request is one
root span with its stages, copies and queues as children; waits for locks and garbage collections are events of the span they fell into.
Ids are a keyed hash of the record, so that an exemplar and the span it names agree without either keeping a table, and a record that is
sent twice has the same ids. The application's trace is joined where its span was sampled; else the root has no parent, and a link to the
span that nobody kept.
"""

from __future__ import annotations

import hashlib
import heapq
import os
import re
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from inferscope import semconv
from inferscope.clock import NS_PER_S
from inferscope.export.otlp.context import UNSAMPLED
from inferscope.export.otlp.metrics import class_attributes
from inferscope.types import Reason, SpanFlag

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from inferscope.export.otlp.series import Attributes
    from inferscope.types import Column, RequestRecord, SpanRecord

__all__ = [
    "KEEP",
    "REQUEST_LIMIT",
    "Identity",
    "Selection",
    "SpanEvent",
    "TraceSpan",
    "joined_trace",
    "linked_trace",
    "request_spans",
    "shared_work",
]

REQUEST_LIMIT: Final = 64
"""Requests of one export that become spans."""
SLOWEST_LIMIT: Final = 8
"""Of these, the ones that broke nothing: there are slowest requests at all times, and a healthy fleet should not pay for their traces."""
LINKS: Final = 16
"""Requests that a batch's span is linked to."""
KEEP: Final = "inferscope.keep"
"""Set on every span, for samplers in a collector: these requests were chosen already."""

_HEX: Final = re.compile(r"[0-9a-f]+")
_EVENTS: Final = {"lock": "inferscope.lock.wait", "gc": semconv.GC_PAUSE}
_REASONS: Final = ((Reason.BREACH, "breach"), (Reason.SLOWEST, "slowest"), (Reason.PROFILED, "profiled"))
_CHOSEN: Final = Reason.BREACH | Reason.SLOWEST | Reason.PROFILED


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """Something that happened inside a span."""

    name: str
    time_unix_ns: int
    attributes: Attributes


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """One span; ids in hex."""

    trace_id: str
    span_id: str
    parent_id: str | None
    name: str
    start_unix_ns: int
    end_unix_ns: int
    attributes: Attributes
    events: tuple[SpanEvent, ...] = ()
    links: tuple[tuple[str, str], ...] = ()
    """Trace and span ids."""
    error: bool = False


def joined_trace(record: RequestRecord) -> tuple[str, str] | None:
    """Trace and span id of the application's sampled span, where the record has ids of the right form."""
    return None if _unsampled(record) else _ids(record)


def linked_trace(record: RequestRecord) -> tuple[str, str] | None:
    """The same of a span that was not sampled: to join it would make orphans of ours, so it is only named."""
    return _ids(record) if _unsampled(record) else None


def _unsampled(record: RequestRecord) -> bool:
    return record.trace is not None and record.trace[2:] == (UNSAMPLED,)


def _ids(record: RequestRecord) -> tuple[str, str] | None:
    if record.trace is None or len(record.trace) < 2 or not all(map(_HEX.fullmatch, record.trace[:2])):
        return None
    trace, span = record.trace[:2]
    return (trace, span) if len(trace) == 32 and len(span) == 16 and trace.strip("0") and span.strip("0") else None


class Identity:
    """Ids of a process's records: unpredictable, unique over processes, the same each time for the same record."""

    def __init__(self) -> None:
        self._salt = os.urandom(16)

    def _digest(self, record: RequestRecord, part: int, size: int) -> str:
        text = f"{record.id}/{record.start_ns}/{part}".encode()
        return hashlib.blake2b(text, digest_size=size, key=self._salt).hexdigest()

    def trace(self, record: RequestRecord) -> tuple[str, str]:
        """Trace id and id of the request's own span."""
        joined = joined_trace(record)
        return (joined[0] if joined else self._digest(record, -2, 16)), self.span(record, -1)

    def span(self, record: RequestRecord, index: int) -> str:
        """Id of the span at `index` of the record; -1 is the request itself."""
        return self._digest(record, index, 8)


class Selection:
    """Which requests become spans: everything that was kept for a reason, at most `limit` between two exports, the slowest first.

    `offer` is called by the worker, `take` by the export thread.
    """

    def __init__(self, limit: int = REQUEST_LIMIT) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._strong: list[tuple[bool, int, int, RequestRecord]] = []
        self._slowest: list[tuple[bool, int, int, RequestRecord]] = []

    def offer(self, records: Iterable[RequestRecord]) -> None:
        """Consider records; those retained for the reservoir alone carry no spans and are passed over."""
        with self._lock:
            for record in records:
                if not record.reasons & _CHOSEN:
                    continue
                strong = bool(record.reasons & (Reason.BREACH | Reason.PROFILED))
                heap, limit = (self._strong, self._limit) if strong else (self._slowest, min(SLOWEST_LIMIT, self._limit))
                item = (record.profiled, record.wall_ns, record.id, record)
                if len(heap) < limit:
                    heapq.heappush(heap, item)
                else:
                    heapq.heappushpop(heap, item)

    def take(self) -> tuple[RequestRecord, ...]:
        """What was chosen since the last call, the most telling first."""
        with self._lock:
            strong, self._strong = self._strong, []
            slowest, self._slowest = self._slowest, []
        ordered = sorted(strong, reverse=True) + sorted(slowest, reverse=True)
        return tuple(item[-1] for item in ordered[: self._limit])


def shared_work(
    records: Iterable[RequestRecord], columns: Sequence[Column], identity: Identity
) -> dict[tuple[int, int], tuple[tuple[str, str], ...]]:
    """Links between requests that waited for one piece of work (`inferscope.batch`).

    Each of them has the work as a span of its own, at the same instants.

    Returns:
        By record id and index of the span: trace and span id of the same work in the other requests, at most `LINKS`.
    """
    found: dict[tuple[int, int, int], list[tuple[RequestRecord, int]]] = {}
    for record in records:
        for index, span in enumerate(record.spans):
            if columns[span.column].kind == "batch":
                found.setdefault((span.column, span.start_ns, span.end_ns), []).append((record, index))
    links: dict[tuple[int, int], tuple[tuple[str, str], ...]] = {}
    for members in found.values():
        if len(members) > 1:
            ids = [(record.id, index, (identity.trace(record)[0], identity.span(record, index))) for record, index in members]
            for number, index, own in ids:
                links[number, index] = tuple(other for _, _, other in ids if other != own)[:LINKS]
    return links


def request_spans(
    record: RequestRecord,
    columns: Sequence[Column],
    identity: Identity,
    offset_ns: int,
    sites: Mapping[int, str] | None = None,
    shared: Mapping[tuple[int, int], tuple[tuple[str, str], ...]] | None = None,
) -> tuple[TraceSpan, ...]:
    """The spans of one request, root first.

    Args:
        record: A retained request.
        columns: Owners of time by column index, at least as many as when the record was made.
        identity: Gives the ids.
        offset_ns: What to add to the record's clock for Unix time.
        sites: Code that held a lock, by the id in the wait's `aux`.
        shared: Links of work that several requests waited for, as `shared_work` gives them.
    """
    trace_id, root_id = identity.trace(record)
    joined, linked = joined_trace(record), linked_trace(record)
    kinds = [columns[span.column].kind for span in record.spans]
    events: dict[int, list[SpanEvent]] = {}
    children: list[tuple[int, SpanRecord, int]] = []
    for index, span in enumerate(record.spans):
        parent = _enclosing(record.spans, kinds, span.parent)
        if kinds[index] in _EVENTS:
            events.setdefault(parent, []).append(_event(span, columns[span.column], offset_ns, sites or {}))
        else:
            children.append((index, span, parent))
    root = TraceSpan(
        trace_id=trace_id,
        span_id=root_id,
        parent_id=joined[1] if joined else None,
        name=record.key.request,
        start_unix_ns=record.start_ns + offset_ns,
        end_unix_ns=record.start_ns + record.wall_ns + offset_ns,
        attributes=_root_attributes(record, columns),
        events=tuple(events.get(-1, ())),
        links=(linked,) if linked else (),
        error=record.error is not None,
    )
    return (
        root,
        *(
            TraceSpan(
                trace_id=trace_id,
                span_id=identity.span(record, index),
                parent_id=root_id if parent < 0 else identity.span(record, parent),
                name=columns[span.column].label,
                start_unix_ns=span.start_ns + offset_ns,
                end_unix_ns=max(span.start_ns, span.end_ns) + offset_ns,
                attributes=_attributes(span, columns[span.column]),
                events=tuple(events.get(index, ())),
                links=(shared or {}).get((record.id, index), ()),
                error=bool(span.flags & SpanFlag.ERROR),
            )
            for index, span, parent in children
        ),
    )


def _enclosing(spans: Sequence[SpanRecord], kinds: Sequence[str], parent: int) -> int:
    """The nearest ancestor that is a span and not an event; -1 for the request. Bounded, whatever a damaged record says."""
    for _ in spans:
        if not 0 <= parent < len(spans) or kinds[parent] not in _EVENTS:
            break
        parent = spans[parent].parent
    return parent if 0 <= parent < len(spans) and kinds[parent] not in _EVENTS else -1


def _event(span: SpanRecord, column: Column, offset_ns: int, sites: Mapping[int, str]) -> SpanEvent:
    lasted = ("inferscope.duration", (span.end_ns - span.start_ns) / NS_PER_S)
    if column.kind == "gc":
        digits = "".join(filter(str.isdecimal, column.name))
        about: Attributes = ((semconv.ATTR_GC_GENERATION, int(digits) if digits else column.name),)
    else:
        about = ((semconv.ATTR_LOCK, column.name), *((("inferscope.lock.holder", sites[span.aux]),) if span.aux in sites else ()))
    return SpanEvent(_EVENTS[column.kind], span.start_ns + offset_ns, (*about, lasted))


def _root_attributes(record: RequestRecord, columns: Sequence[Column]) -> Attributes:
    found: dict[str, Any] = dict(class_attributes(record.key))
    found |= {
        KEEP: True,
        "inferscope.request.retained": "+".join(name for bit, name in _REASONS if record.reasons & bit),
        "inferscope.request.items": record.items,
        "inferscope.request.truncated": record.truncated,
        "thread.id": record.thread_id,
    }
    optional = {
        "inferscope.request.size": record.size,
        "inferscope.request.cpu": None if record.cpu_ns is None else record.cpu_ns / NS_PER_S,
        semconv.ERROR_TYPE: record.error,
    }
    found |= {key: value for key, value in optional.items() if value is not None}
    for column, spent in zip(columns, record.vector, strict=False):
        if spent:  # the parts add up to the span's duration exactly
            found[f"inferscope.exclusive.{column.label}"] = spent / NS_PER_S
    return tuple(found.items())


def _attributes(span: SpanRecord, column: Column) -> Attributes:
    common: Attributes = ((KEEP, True), ("thread.id", span.thread_id))
    if column.kind == "copy":
        about: Attributes = (
            (semconv.ATTR_COPY_DIRECTION, column.name),
            (semconv.ATTR_COPY_SYNC, bool(span.flags & (SpanFlag.SYNC | SpanFlag.IMPLICIT_SYNC))),
            (semconv.ATTR_COPY_PINNED, not span.flags & SpanFlag.PAGEABLE),
            (semconv.COPY_IO, span.aux),
        )
    elif column.kind == "queue":
        about = ((semconv.ATTR_QUEUE, column.name),)
    elif column.kind == "stage":
        about = ((semconv.ATTR_STAGE, column.name),)
    else:
        about = (("inferscope.kind", column.kind),)
    return (*about, *common)
