"""Locks: who held what others waited for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inferscope.diagnose.findings import grade, share_evidence
from inferscope.types import Evidence, Finding

if TYPE_CHECKING:
    from collections.abc import Iterable

    from inferscope.diagnose.findings import Context
    from inferscope.types import Share

__all__ = ["lock_contention"]


def lock_contention(context: Context) -> Iterable[Finding]:
    """LOCK_CONTENTION: slow requests wait for a named lock; the advice names the site whose hold started the queue."""
    for share in context.shares("lock"):
        yield _finding(context, share)


def _finding(context: Context, share: Share) -> Finding:
    lock = share.name.partition(":")[2]
    waits: dict[str, list[int]] = {}
    stages: dict[str, str] = {}
    for row in (row for row in context.horizon.locks if row.lock == lock):
        held = waits.setdefault(row.site, [0, 0, 0])
        held[0] += row.waits
        held[1] += row.wait_ns
        held[2] = max(held[2], row.longest_hold_ns)
        stages[row.site] = row.stage or ""
    severity, confidence = grade(context, share)
    evidence = [share_evidence(share), Evidence("wait in a slow request", round(share.tail_ms, 2), "ms")]
    total = sum(held[1] for held in waits.values())
    if not total:
        where, claim = f"lock {lock}", f"Slow requests wait {share.tail_ms:.1f} ms for the lock {lock}; no holder was seen."
        confidence = "medium" if confidence == "high" else confidence
    else:
        where = max(waits, key=lambda site: waits[site][1])
        count, wait, longest = waits[where]
        rooted, stage = 100 * wait / total, stages[where]
        inside = f" in stage {stage}" if stage else ""
        claim = f"Slow requests wait {share.tail_ms:.1f} ms for the lock {lock}; {rooted:.0f} % of all waiting began with holds at {where}{inside}."
        evidence += [
            Evidence("waiting rooted at this site", round(rooted, 1), "%"),
            Evidence("waits rooted at this site", count, "waits"),
            Evidence("longest hold at this site", round(longest / 1e6, 2), "ms"),
            Evidence("holder's site", where, ""),
        ]
    return Finding(
        id="LOCK_CONTENTION",
        class_="scheduling",
        severity=severity,
        confidence=confidence,
        where=where,
        claim=claim,
        evidence=tuple(evidence),
        share=share.share,
        what_if_p99_ms=context.plan.p99_ms(share.name),
        refute_by=f"Shorten the hold at {where} on one replica: if waits for {lock} above the objective stay, another holder is the root.",
        fix=f"Move the slow work out of the hold on {lock}: build the new state outside, then swap a reference under the lock; readers take a snapshot.",
        rollback="Return to doing the work under the lock.",
    )
