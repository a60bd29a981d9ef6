"""Locks: who held what others waited for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from inferscope.diagnose.findings import Texts, of_share
from inferscope.diagnose.host import STATES
from inferscope.diagnose.waits import UNNAMED_LOCK
from inferscope.types import Evidence, Finding

if TYPE_CHECKING:
    from collections.abc import Iterable

    from inferscope.diagnose.findings import Context
    from inferscope.types import Share

__all__ = ["lock_contention", "slow_holder"]

_OFF_CPU: Final = 0.20
"""Part of a hold that its holder waits, from which the wait is worth naming."""
_LEAST_NS: Final = 50_000_000
_WAITS: Final = {"gil": "the interpreter", "sleep": "sleep", "io": "input or output", "log": "a log handler"}


def lock_contention(context: Context) -> Iterable[Finding]:
    """LOCK_CONTENTION: slow requests wait for a named lock; the advice names the site whose hold started the queue."""
    for share in context.shares("lock"):
        yield _unnamed(context, share) if share.name == UNNAMED_LOCK.label else _finding(context, share)


def slow_holder(context: Context) -> Iterable[Finding]:
    """LOCK_HOLDER_SLOW: who holds the lock does not work, but waits itself."""
    for share in context.shares("lock"):
        rows = [row for row in context.horizon.locks if f"lock:{row.lock}" == share.name]
        top = max(rows, key=lambda row: row.wait_ns, default=None)
        if top is None:
            continue
        name = top.site.rpartition(":")[0]
        times = next((times for times in context.horizon.host.sites if times.site.rstrip(")") == name), None)
        if times is None:
            continue
        waits = {state: times.blocked_ns[number] for number, state in enumerate(STATES) if state in _WAITS}
        total = times.cpu_ns + times.delay_ns + sum(waits.values())
        state = max(waits, key=lambda key: waits[key])
        if total < _LEAST_NS or waits[state] < _OFF_CPU * total:
            continue
        texts = Texts(
            where=top.site,
            claim=f"The holder of {top.lock} at {top.site} waits {100 * waits[state] / total:.0f} % of its time there for {_WAITS[state]}, and all others with it.",
            refute_by=f"Do the waiting at {top.site} before the lock is taken, on one replica: if waits for {top.lock} stay, the hold is long for another reason.",
            fix=f"Fetch, read or compute before taking {top.lock}; hold it only to swap the result in.",
            rollback="Return to waiting under the lock.",
        )
        evidence = (
            Evidence(f"holder's time in {_WAITS[state]}", round(100 * waits[state] / total, 1), "%"),
            Evidence("holder's time on a CPU", round(100 * times.cpu_ns / total, 1), "%"),
            Evidence("holder's time sampled", round(total / 1e6, 1), "ms"),
        )
        yield of_share(context, share, "LOCK_HOLDER_SLOW", "scheduling", texts, evidence)


def _unnamed(context: Context, share: Share) -> Finding:
    texts = Texts(
        where="a lock without a name",
        claim=f"Slow requests wait {share.tail_ms:.1f} ms for a lock, a condition or a pool that has no name here.",
        refute_by="Name the locks on this path: if none of them takes over this time, it is a native pool's.",
        fix="Wrap the locks that requests take with inferscope.lock(name, lock): the next incident names the holder.",
        rollback="Unwrap them.",
    )
    evidence = (
        Evidence("wait in a slow request", round(share.tail_ms, 2), "ms"),
        Evidence("slow requests sampled", context.waits.slow, "requests"),
    )
    return of_share(context, share, "LOCK_CONTENTION", "scheduling", texts, evidence, confidence="medium")


def _finding(context: Context, share: Share) -> Finding:
    lock = share.name.partition(":")[2]
    waits: dict[str, list[int]] = {}
    inside: dict[str, dict[tuple[str | None, str | None], int]] = {}
    for row in (row for row in context.horizon.locks if row.lock == lock):
        held = waits.setdefault(row.site, [0, 0, 0])
        held[0] += row.waits
        held[1] += row.wait_ns
        held[2] = max(held[2], row.longest_hold_ns)
        owners = inside.setdefault(row.site, {})
        owners[row.request, row.stage] = owners.get((row.request, row.stage), 0) + row.wait_ns
    evidence = [Evidence("wait in a slow request", round(share.tail_ms, 2), "ms")]
    total = sum(held[1] for held in waits.values())
    if not total:
        where, claim = f"lock {lock}", f"Slow requests wait {share.tail_ms:.1f} ms for the lock {lock}; no holder was seen."
    else:
        where = max(waits, key=lambda site: waits[site][1])
        count, wait, longest = waits[where]
        rooted, owner = 100 * wait / total, _owner(*max(inside[where], key=lambda each: inside[where][each]))
        claim = f"Slow requests wait {share.tail_ms:.1f} ms for the lock {lock}; {rooted:.0f} % of all waiting began with holds at {where}{f' in {owner}' if owner else ''}."
        evidence += [
            Evidence("waiting rooted at this site", round(rooted, 1), "%"),
            Evidence("waits rooted at this site", count, "waits"),
            Evidence("longest hold at this site", round(longest / 1e6, 2), "ms"),
            Evidence("holder's site", where, ""),
            Evidence("holder's request and stage", owner or "none: no request was open there", ""),
        ]
    texts = Texts(
        where=where,
        claim=claim,
        refute_by=f"Shorten the hold at {where} on one replica: if waits for {lock} above the objective stay, another holder is the root.",
        fix=f"Move the slow work out of the hold on {lock}: build the new state outside, then swap a reference under the lock; readers take a snapshot.",
        rollback="Return to doing the work under the lock.",
    )
    return of_share(context, share, "LOCK_CONTENTION", "scheduling", texts, evidence, confidence="high" if total else "medium")


def _owner(request: str | None, stage: str | None) -> str:
    """The holder's request and stage in words; empty when it was in neither."""
    return ", ".join(part for part in (f"stage {stage}" if stage else "", f"request {request}" if request else "") if part)
