"""Ranks that wait for each other in collectives."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from inferscope.diagnose.findings import Texts
from inferscope.diagnose.rules.traces import contrast, said
from inferscope.types import Evidence, Finding

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from inferscope.diagnose.findings import Context
    from inferscope.diagnose.traces.values import TraceSummary
    from inferscope.types import CaptureSummary

__all__ = ["stragglers"]

_OF_WINDOW: Final = 0.1
_LAST: Final = 0.6
_ONE_SIDED: Final = ("broadcast", "send", "recv")
"""In these, who waits waits for the sender by design: between requests it does so for ever."""


def stragglers(context: Context) -> Iterable[Finding]:
    """NCCL_STRAGGLER: one rank arrives last at most collectives, and the others wait for it."""
    last = _last(context.captures)
    waiting = [(summary, trace) for summary, trace in context.captures if last is None or trace.rank != last[0]]
    # of one trace only what lies beyond the fastest collective is waiting; captures are compared with each other as a whole
    found = contrast(
        replace(context, captures=tuple(waiting)),
        lambda trace: None if not trace.collectives else trace.collective_wait_ms if len(waiting) == 1 else trace.collective_ms,
    )
    if found is None or (last is None and found.part < _OF_WINDOW) or (last is not None and last[1] < _LAST):
        return
    if last is None:
        where = "collectives"
        claim = f"Collectives take {found.trace.collective_ms:.2f} ms of {'the trace' if found.alone else 'a captured request'}, {found.slow:.2f} ms of it in waiting: other ranks come late."
        evidence: tuple[Evidence, ...] = ()
    else:
        rank, part, count, late = last
        where = f"rank {rank}"
        claim = f"Rank {rank} arrives last at {100 * part:.0f} % of {count} collectives, {late:.2f} ms after the first on average; the others wait for it."
        evidence = (
            Evidence(f"collectives at which rank {rank} was last", round(100 * part, 1), "%"),
            Evidence("collectives compared", count, ""),
            Evidence("its mean delay behind the first", round(late, 3), "ms"),
        )
    texts = Texts(
        where=where,
        claim=claim,
        refute_by="Swap the hosts of two ranks: if the late rank stays with its number and not with its host, its share of the work is larger, not its host slower.",
        fix="Look at the late rank's own findings (CPU, input, clocks), and even out the work between ranks.",
        rollback="Return to the earlier placement.",
    )
    rows = (*evidence, *found.evidence("time in collectives"))
    yield said(context, "NCCL_STRAGGLER", "communication", texts, found, rows, sure="medium" if last is None else "high")


def _last(captures: Sequence[tuple[CaptureSummary, TraceSummary]]) -> tuple[int, float, int, float] | None:
    """(rank, part of the collectives at which it was last, collectives, its mean delay in ms) from traces of several ranks on one machine's clock."""
    found = [held for held in _together(captures) if len(held) > 1]
    if not found:
        return None
    lasts = [max(held, key=lambda rank: held[rank]) for held in found]
    rank = max(set(lasts), key=lasts.count)
    late = [held[rank] - min(held.values()) for held, who in zip(found, lasts, strict=True) if who == rank]
    return rank, lasts.count(rank) / len(found), len(found), sum(late) / len(late) / 1e6


def _together(captures: Sequence[tuple[CaptureSummary, TraceSummary]]) -> list[dict[int, int]]:
    """When each rank began each collective (unix ns): told apart by their number, or, where the trace has none, by overlapping in time."""
    numbered: dict[tuple[str, str, int], dict[int, int]] = {}
    timed: dict[tuple[str, str], list[tuple[int, int, int]]] = {}
    for _, trace in captures:
        for row in trace.collectives if trace.rank is not None else ():
            if any(word in row.name.lower() for word in _ONE_SIDED):
                continue
            if row.sequence >= 0:
                numbered.setdefault((row.group, row.name, row.sequence), {}).setdefault(trace.rank or 0, row.start_unix_ns)
            else:
                timed.setdefault((row.group, row.name), []).append(
                    (row.start_unix_ns, row.start_unix_ns + round(row.ms * 1e6), trace.rank or 0)
                )
    found = list(numbered.values())
    for rows in timed.values():
        until = 0
        for start, end, rank in sorted(rows):
            if start < until and rank not in found[-1]:  # a rank is in one collective at a time
                found[-1][rank] = start
                until = max(until, end)
            else:
                found.append({rank: start})
                until = end
    return found
