"""Waiting that is nobody's work: queues and garbage collection."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from inferscope.diagnose.findings import grade, share_evidence
from inferscope.types import Evidence, Finding

if TYPE_CHECKING:
    from collections.abc import Iterable

    from inferscope.diagnose.evidence import SlowRequest
    from inferscope.diagnose.findings import Context
    from inferscope.types import Share

__all__ = ["consequences", "gc_pauses", "occupants", "queueing"]

_LOADED: Final = 0.30
"""Share of an ordinary request spent queueing from which the service is loaded rather than stalled."""
_GC_SHARE: Final = 0.05
_WAITS: Final = frozenset({"queue", "unattributed", "other"})


def queueing(context: Context) -> Iterable[Finding]:
    """QUEUEING: slow requests waited before the service touched them; says what occupied the workers meanwhile."""
    for share in context.shares("queue"):
        yield _queue(context, share)


def _queue(context: Context, share: Share) -> Finding:
    loaded = _is_loaded(context, share)
    evidence = [share_evidence(share), Evidence("wait in a slow request", round(share.tail_ms, 2), "ms")]
    evidence.append(Evidence("wait in an ordinary request", round(share.body_ms, 2), "ms"))
    busy = occupants(context, share.name)
    total = sum(busy.values())
    cause = max(busy, key=lambda label: busy[label], default=None)
    if loaded:
        claim = f"Even ordinary requests wait {share.body_ms:.1f} ms in {share.name}: the service is loaded beyond its workers."
        fix = "Add workers or replicas, or shed load before it queues; then look at the tail again."
    elif cause is not None:
        claim = f"Requests wait in {share.name} while the workers are occupied, mostly by {cause}: a consequence, not a cause of its own."
        fix = f"Fix {cause} first; this wait shrinks with it."
        evidence.append(Evidence(f"workers' time in {cause} during these waits", round(100 * busy[cause] / total, 1), "%"))
    else:
        claim = f"Slow requests wait {share.tail_ms:.1f} ms in {share.name}."
        fix = "Look at what the workers did meanwhile (no position of another request overlaps these waits); add workers if they were busy."
    severity, confidence = grade(context, share, confidence="high" if loaded else "medium")
    if cause is not None and not loaded and severity == "high":
        severity = "medium"  # the cause comes first
    return Finding(
        id="QUEUEING",
        class_="scheduling",
        severity=severity,
        confidence=confidence,
        where=share.name,
        claim=claim,
        evidence=tuple(evidence),
        share=share.share,
        what_if_p99_ms=context.plan.p99_ms(share.name),
        refute_by="Double the workers on one replica: if waits above the objective stay, arrivals are bursts that no number of workers absorbs.",
        fix=fix,
        rollback="Return to the earlier number of workers.",
    )


def _is_loaded(context: Context, share: Share) -> bool:
    body = context.attribution.body_ms
    return body > 0 and share.body_ms / body >= _LOADED


def consequences(context: Context) -> tuple[tuple[str, str], ...]:
    """(queue, cause) for each queue in the excess whose waits another cause explains by occupying the workers."""
    found: list[tuple[str, str]] = []
    for share in context.shares("queue"):
        busy = occupants(context, share.name)
        if busy and not _is_loaded(context, share):
            found.append((share.name, max(busy, key=lambda label: busy[label])))
    return tuple(found)


def occupants(context: Context, queue: str) -> dict[str, int]:
    """Nanoseconds by label that other slow requests spent, at their innermost, while some request waited in that queue."""
    labels, kinds = context.horizon.labels, [column.kind for column in context.horizon.columns]
    found: dict[str, int] = {}
    records = context.horizon.slowest
    for waiting in records:
        for span in (span for span in waiting.spans if labels[span.column] == queue):
            for other in records:
                if other is waiting or other.slot != waiting.slot:
                    continue
                for column, overlap in _innermost(other, span.start_ns, span.end_ns):
                    if kinds[column] not in _WAITS:
                        found[labels[column]] = found.get(labels[column], 0) + overlap
    return found


def _innermost(record: SlowRequest, start_ns: int, end_ns: int) -> Iterable[tuple[int, int]]:
    parents = {span.parent for span in record.spans}
    for position, span in enumerate(record.spans):
        overlap = min(span.end_ns, end_ns) - max(span.start_ns, start_ns)
        if position not in parents and overlap > 0:
            yield span.column, overlap


def gc_pauses(context: Context) -> Iterable[Finding]:
    """GC_PAUSE: collections own a part of the excess, or one pause alone takes half of the objective."""
    shares = {share.name: share for share in context.shares("gc", -1.0)}
    rows = {f"gc:gen{row[0]}": row for row in context.horizon.gc}
    owner = next((label for label, share in shares.items() if share.share >= _GC_SHARE and label in rows), None)
    label = owner or max(rows, key=lambda name: rows[name][3], default="")
    share, worst = shares.get(label), rows.get(label)
    longest_ms = worst[3] / 1e6 if worst else 0.0
    owns = owner is not None
    if worst is None or not (owns or longest_ms >= context.breach.threshold_ms / 2 > 0):
        return
    severity, confidence = grade(context, share, _GC_SHARE) if share is not None and owns else ("low", "high")
    evidence = [
        Evidence("longest pause", round(longest_ms, 2), "ms"),
        Evidence("collections of that generation", worst[1], "collections"),
        Evidence("time in them", round(worst[2] / 1e6, 2), "ms"),
    ]
    if share is not None:
        evidence.insert(0, share_evidence(share))
    yield Finding(
        id="GC_PAUSE",
        class_="scheduling",
        severity=severity,
        confidence=confidence,
        where=f"garbage collector, generation {worst[0]}",
        claim=f"A collection of generation {worst[0]} stopped every thread for {longest_ms:.1f} ms; there were {worst[1]} in the horizon.",
        evidence=tuple(evidence),
        share=share.share if share is not None else None,
        what_if_p99_ms=context.plan.p99_ms(share.name) if share is not None else None,
        refute_by="Call gc.freeze() after warm-up on one replica: if slow requests stay, collections only coincide with them.",
        fix="Call gc.collect() and gc.freeze() after warm-up, raise the threshold of generation 2, and cut reference cycles made per request.",
        rollback="gc.unfreeze() and the earlier gc.set_threshold() values.",
    )
