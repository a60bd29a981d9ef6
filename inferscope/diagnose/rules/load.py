"""More work than workers, work that blocks the line, batches that wait, and a process that has just begun."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np

from inferscope.diagnose.findings import Texts, of_share, plain
from inferscope.types import Evidence, Finding

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from inferscope.diagnose.findings import Context
    from inferscope.diagnose.host import HostRequest
    from inferscope.types import FloatArray, Share

__all__ = ["batching", "cold_start", "head_of_line", "saturation"]

_FULL: Final = 0.80
"""Arrivals times the ordinary service time, a worker, from which queues grow without any stall."""
_SHARED: Final = 0.05
_SLACK_NS: Final = 1_000_000
_LARGE: Final = 0.90
_BEHIND: Final = 0.50
_EVEN: Final = 0.75
_WARM_S: Final = 30.0
_EARLY: Final = 0.80
_FEW: Final = 10
_WANTED: Final = 0.7
"""Utilisation that leaves room for bursts (an M/M/c queue's waits grow steeply above it)."""
_POOL: Final = 3
_REGULAR: Final = 5
_GONE: Final = 0.25
"""Of the time seen, without a request served, after which a worker that served regularly is gone."""


def _queues(context: Context, *, batch: bool) -> tuple[Share, ...]:
    return tuple(share for share in context.shares("queue") if ("batch" in share.name) is batch)


def saturation(context: Context) -> Iterable[Finding]:
    """SATURATION: requests arrive faster than the workers serve ordinary ones."""
    shares = _queues(context, batch=False)
    blocks = context.horizon.blocks
    slow = blocks.tail_counts > 0
    workers = _workers(context)
    if not shares or not slow.any() or not workers:
        return
    share = shares[0]
    body_ms = sum(part.body_ms for part in context.attribution.shares if part.kind != "queue")
    rate = float(blocks.counts[slow].mean())
    load = rate * body_ms / 1e3 / workers
    if load < _FULL:
        return
    others = float(blocks.counts[~slow].mean()) if (~slow).any() else None
    stopped, served = _stopped(context), len(_served(context))
    served += max(0, stopped + workers - served)  # one that ended before any of its requests was kept
    serving = served - stopped
    needed = max(workers, -(-rate * body_ms / 1e3 // _WANTED))
    lost = f"{stopped} of {served} workers stopped serving" if stopped else ""
    texts = Texts(
        where=f"{share.name}{f', {lost}' if lost else ''}",
        claim=(
            f"{rate:.0f} requests/s of {body_ms:.1f} ms keep {workers} workers {100 * load:.0f} % busy{f', since {lost}' if lost else ''}: requests wait "
            f"{share.tail_ms:.1f} ms in {share.name} although none is slow in itself."
        ),
        refute_by="Send one replica a third less traffic: if requests above the objective stay, load is not the cause.",
        fix=(
            f"Find out why the worker stopped (its stack, its log) and bring it back; until then shed load to what {serving} workers serve."
            if stopped
            else f"Serve with {needed:.0f} workers or {needed / workers:.1f} times the replicas ({100 * _WANTED:.0f} % busy then), or shed load before it queues; a faster service helps by as much as it is faster."
        ),
        rollback="Return to the earlier number of replicas.",
    )
    evidence = [
        Evidence("arrivals in seconds with slow requests", round(rate, 1), "requests/s"),
        *([Evidence("arrivals in the other seconds", round(others, 1), "requests/s")] if others is not None else []),
        Evidence("service time of an ordinary request", round(body_ms, 2), "ms"),
        Evidence("workers", workers, "threads"),
        Evidence("utilisation of the workers", round(100 * load, 1), "%"),
        Evidence("workers for a utilisation of 70 %", round(needed), "threads"),
        *([Evidence("workers that served before and stopped", stopped, "threads")] if stopped else []),
    ]
    yield of_share(context, share, "SATURATION", "scheduling", texts, evidence)


def _stopped(context: Context) -> int:
    """Workers that served and then, long before the end, no more, while the others went on: by their requests, or by threads that ended."""
    served = _served(context)
    if len(served) < _POOL - 1:
        return 0
    end = max(spans[-1][1] for spans in served.values())
    begin = min(spans[0][0] for spans in served.values())
    silent = {thread for thread, spans in served.items() if len(spans) >= _REGULAR and spans[-1][1] < end - _GONE * (end - begin)}
    rows = {(row.slot, row.thread): row for row in context.horizon.host.threads}
    names = {_stem(row.name) for thread in served if (row := rows.get(thread)) is not None and row.name}
    if not rows or not names:
        return len(silent)
    first, last = min(float(row.starts[0]) for row in rows.values()), max(float(row.ends[-1]) for row in rows.values())
    ended = {
        thread
        for thread, row in rows.items()
        if row.name and _stem(row.name) in names and float(row.ends[-1]) < last - _GONE * (last - first)
    }
    pool = [row for row in rows.values() if row.name and _stem(row.name) in names]
    # threads of a pool come and go by design when most of them do
    return len(silent | ended) if 2 * len(ended) < len(pool) else len(silent)


def _silent(served: dict[tuple[int, int], list[tuple[int, int]]]) -> int:
    """Of the threads with retained requests, those that stopped."""
    end = max((spans[-1][1] for spans in served.values()), default=0)
    begin = min((spans[0][0] for spans in served.values()), default=0)
    return sum(len(spans) >= _REGULAR and spans[-1][1] < end - _GONE * (end - begin) for spans in served.values())


def _stem(name: str) -> str:
    return name.rstrip("0123456789-_ ")


def _served(context: Context) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """When each thread served a retained request, ascending, without its time in queues."""
    served: dict[tuple[int, int], list[tuple[int, int]]] = {}
    queues = [index for index, column in enumerate(context.horizon.columns) if column.kind == "queue"]
    for r in context.horizon.host.requests:
        elsewhere = {span.thread for span in r.spans} - {r.thread}
        if r.spans and elsewhere:
            for thread in elsewhere:
                own = [span for span in r.spans if span.thread == thread and span.column not in queues]
                if own:
                    served.setdefault((r.slot, thread), []).append((min(s.start_ns for s in own), max(s.end_ns for s in own)))
        elif r.cpu_ns is not None or r.spans:
            waited = sum(_queued(r.vector, column) for column in queues)
            served.setdefault((r.slot, r.thread), []).append((r.start_ns + waited, r.start_ns + r.wall_ns))
    for spans in served.values():
        spans.sort()
    return served


def _workers(context: Context) -> int | None:
    """Threads that serve one request at a time, without those that stopped; None where threads are shared, as an event loop is, so that they limit nothing."""
    shared = several = 0
    served = _served(context)
    for spans in served.values():
        several += len(spans) - 1
        shared += sum(later[0] < earlier[1] - _SLACK_NS for earlier, later in pairwise(spans))
    return None if several and shared > _SHARED * several else len(served) - _silent(served)


def head_of_line(context: Context) -> Iterable[Finding]:
    """HEAD_OF_LINE: small requests wait behind large ones."""
    shares = _queues(context, batch=False)
    sizes = [(r.size, r) for r in context.horizon.host.requests if r.size is not None]
    if not shares or len(sizes) < 2 * _FEW:
        return
    share = shares[0]
    ordinary, amount = context.kept(slow=False)
    known = [(r.size, w) for r, w in zip(ordinary, amount.tolist(), strict=True) if r.size is not None]
    if len(known) < _FEW:
        return
    limit = max(size for size, _ in known) if len(known) < 1 / (1 - _LARGE) else _quantile(known, _LARGE)
    column = context.horizon.labels.index(share.name)
    waited = behind = 0.0
    large = [r for size, r in sizes if size > 1.5 * limit]
    for waiting in context.kept(slow=True)[0]:
        for span in (span for span in waiting.spans if span.column == column and (waiting.size or 0.0) <= 1.5 * limit):
            waited += span.end_ns - span.start_ns
            behind += _covered(
                [
                    (r.start_ns + _queued(r.vector, column), r.start_ns + r.wall_ns)
                    for r in large
                    if r is not waiting and r.slot == waiting.slot
                ],
                span.start_ns,
                span.end_ns,
            )
    if not large or waited <= 0 or behind / waited < _BEHIND:
        return
    texts = Texts(
        where=share.name,
        claim=f"{100 * behind / waited:.0f} % of the time that slow requests wait in {share.name}, a request larger than {1.5 * limit:g} was being served.",
        refute_by="Send large requests to another replica: if small ones still wait, they do not wait for those.",
        fix="Serve large requests in a lane of their own (another pool or replica), cap the size, or split the work.",
        rollback="Return to one lane.",
    )
    evidence = (
        Evidence("waiting behind a large request", round(100 * behind / waited, 1), "%"),
        Evidence("size of an ordinary request, P90", round(limit, 2), ""),
        Evidence("median size of those in front", round(float(np.median([r.size or 0.0 for r in large])), 2), ""),
    )
    yield of_share(context, share, "HEAD_OF_LINE", "scheduling", texts, evidence)


def _queued(vector: FloatArray, column: int) -> int:
    return int(vector[column]) if column < len(vector) else 0


def _quantile(known: list[tuple[float, float]], q: float) -> float:
    values = sorted(known)
    left = q * sum(weight for _, weight in values)
    for value, weight in values:
        left -= weight
        if left <= 0:
            return value
    return values[-1][0]


def _covered(intervals: list[tuple[int, int]], start: int, end: int) -> float:
    """Length of the union of intervals within [start, end]."""
    total, until = 0, start
    for low, high in sorted(intervals):
        if high > until and low < end:
            total += min(high, end) - max(low, until)
            until = max(until, min(high, end))
    return float(total)


def batching(context: Context) -> Iterable[Finding]:
    """BATCH_TIMEOUT and BATCH_CAPACITY: requests wait for their batch, until its timer runs out or until the batches before are done."""
    for share in _queues(context, batch=True):
        column = context.horizon.labels.index(share.name)
        waits = [_queued(r.vector, column) / 1e6 for r in context.kept(slow=True)[0]]
        waits = [wait for wait in waits if wait > 0]
        if len(waits) < _FEW:
            continue
        low, high = (float(value) for value in np.quantile(waits, (0.25, 0.95)))
        timeout = low >= _EVEN * high
        texts = Texts(
            where=share.name,
            claim=(
                f"Slow requests wait about the same {high:.1f} ms in {share.name}: the batch's timer, not its size, sends it."
                if timeout
                else f"Slow requests wait {low:.1f} to {high:.1f} ms in {share.name}: batches before theirs are still being served."
            ),
            refute_by=(
                "Halve the batch's longest delay on one replica: if the waits do not halve, something else holds them."
                if timeout
                else "Add an instance of the model on one replica: if the waits stay, batches are not what they wait for."
            ),
            fix=(
                f"Lower the longest queue delay (about {high:.0f} ms now) below what the objective leaves, or the preferred batch size."
                if timeout
                else "Add an instance or replica, or raise the batch size while a batch's time grows slower than its size."
            ),
            rollback="Return to the earlier batching parameters.",
        )
        evidence = (
            Evidence("wait of slow requests, P25", round(low, 2), "ms"),
            Evidence("wait of slow requests, P95", round(high, 2), "ms"),
            Evidence("wait in an ordinary request", round(share.body_ms, 2), "ms"),
            *_batches(context),
        )
        yield of_share(context, share, "BATCH_TIMEOUT" if timeout else "BATCH_CAPACITY", "scheduling", texts, evidence, confidence="medium")


def _batches(context: Context) -> Iterable[Evidence]:
    """Service time of the batches, and of those that served several retained requests how they formed."""
    for row in context.horizon.batches:
        yield Evidence(f"service time of a batch ({row.name}), mean", round(row.sum_ns / row.count / 1e6, 2), "ms")
    shared = [waits for waits in _waits_by_batch(context) if len(waits) > 1]
    if shared:
        yield Evidence("retained requests linked to one batch, most", max(map(len, shared)), "requests")
        yield Evidence(
            "from a batch's first request to its last, median", round(float(np.median([max(w) - min(w) for w in shared])) / 1e6, 2), "ms"
        )
        yield Evidence("from its last request to its begin, median", round(float(np.median([min(w) for w in shared])) / 1e6, 2), "ms")


def _waits_by_batch(context: Context) -> Iterable[list[int]]:
    """How long each retained request of a batch had waited when the batch began, ns: requests with the same work at the same time on the same thread."""
    kinds = [column.kind for column in context.horizon.columns]
    found: dict[tuple[int, int, int, int], list[int]] = {}
    for r in context.horizon.host.requests:
        ends = {span.end_ns: span.end_ns - span.start_ns for span in r.spans if kinds[span.column] == "queue"}
        for span in r.spans:
            if kinds[span.column] == "batch" or (span.thread != r.thread and kinds[span.column] != "queue" and not _has_batch(r, kinds)):
                found.setdefault((r.slot, span.thread, span.start_ns, span.end_ns), []).append(ends.get(span.start_ns, 0))
    return found.values()


def _has_batch(request: HostRequest, kinds: Sequence[str]) -> bool:
    return any(kinds[span.column] == "batch" for span in request.spans)


def cold_start(context: Context) -> Iterable[Finding]:
    """COLD_START: slow requests are the first ones of the process."""
    first = context.horizon.host.first_request_ns
    (slow, amounts), (ordinary, others) = context.kept(slow=True), context.kept(slow=False)
    if first is None or len(slow) < _FEW or len(ordinary) < _FEW:
        return
    reach = min(_WARM_S, 0.3 * (context.horizon.to_unix_ns - first) / 1e9)
    early = _part([r.start_ns for r in slow], amounts, first, reach)
    usual = _part([r.start_ns for r in (*slow, *ordinary)], np.concatenate([amounts, others]), first, reach)
    if early < _EARLY or early < 2 * usual:
        return
    last = max((r.start_ns - first) / 1e9 for r in slow if (r.start_ns - first) / 1e9 <= reach)
    texts = Texts(
        where="process start",
        claim=f"{100 * early:.0f} % of the slow requests came within {last:.1f} s of the process's first one: it served before it was warm.",
        refute_by="Restart one replica and warm it before traffic: if its first requests are slow again, they are slow for another reason.",
        fix="Run the model on inputs of every expected shape before readiness is reported (inferscope.ready(True) marks it), and load lazily nothing.",
        rollback="Report readiness at start again.",
    )
    evidence = (
        Evidence(f"slow requests within {reach:.1f} s of the first request", round(100 * early, 1), "%"),
        Evidence("all requests within that time", round(100 * usual, 1), "%"),
        Evidence("last slow one of them", round(last, 1), "s after the first request"),
    )
    severity = "high" if context.objective_broken else "low"
    yield plain("COLD_START", "scheduling", texts, evidence, severity=severity, confidence="medium")


def _part(starts: list[int], amounts: FloatArray, first: int, reach_s: float) -> float:
    inside = np.array([(start - first) / 1e9 <= reach_s for start in starts])
    return float(amounts[inside].sum() / amounts.sum())
