"""The slowest requests of an evidence document on a time line, as Chrome trace JSON that Perfetto opens.

Each slot is a process, each native thread a track; a request is a slice that holds its spans. Open the file in a local Perfetto
build when names must not leave the machine.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from inferscope.types import Column, SpanRecord

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

__all__ = ["render"]


def render(evidence: Sequence[Mapping[str, Any]]) -> str:
    """Write the slowest requests of every slot as a trace; instants are unix microseconds.

    Args:
        evidence: Parsed evidence documents, one a slot.
    """
    events = sorted((event for document in evidence for event in _slot(document)), key=lambda event: (event["ts"], -event.get("dur", 0.0)))
    # ASCII only, so that no control character of a name can break a reader
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, ensure_ascii=True, separators=(",", ":"))


def _slot(document: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    slot, offset = int(document.get("slot") or 0), int(document.get("unix_offset_ns") or 0)
    labels = [Column(*column).label for column in document["columns"]]
    yield {"ph": "M", "name": "process_name", "pid": slot, "tid": 0, "ts": 0, "args": {"name": f"slot {slot} (pid {document.get('pid')})"}}
    for entry in document["classes"]:
        for record in entry["slowest"]:
            yield from _request(record, str(entry["request"]), labels, slot, offset)


def _request(record: Mapping[str, Any], name: str, labels: Sequence[str], slot: int, offset: int) -> Iterable[dict[str, Any]]:
    thread, start = int(record.get("thread_id") or 0), int(record["start_ns"]) + offset
    arguments = {"id": record["id"], "wall_ms": record["wall_ns"] / 1e6, "size": record.get("size"), "error": record.get("error")}
    yield _slice(name, "request", start, int(record["wall_ns"]), slot, thread, arguments)
    for raw in record.get("spans") or ():
        span = SpanRecord(**raw) if isinstance(raw, dict) else SpanRecord(*raw)
        details = {"request": record["id"], "flags": span.flags, "aux": span.aux}
        yield _slice(labels[span.column], "span", span.start_ns + offset, span.end_ns - span.start_ns, slot, span.thread_id, details)


def _slice(
    name: str, category: str, start_ns: int, duration_ns: int, slot: int, thread: int, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": slot,
        "tid": thread,
        "ts": start_ns / 1e3,
        "dur": duration_ns / 1e3,
        "args": dict(arguments),
    }
