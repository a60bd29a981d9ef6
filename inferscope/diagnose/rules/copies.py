"""Copies between host and device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from inferscope.diagnose.findings import grade, share_evidence
from inferscope.types import Evidence, Finding

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from inferscope.diagnose.evidence import CopySite
    from inferscope.diagnose.findings import Context
    from inferscope.types import Share

__all__ = ["synchronous_copies"]

_MOST: Final = 0.5
"""A site counts as pageable, or synchronous, when most of its copies are."""


def synchronous_copies(context: Context) -> Iterable[Finding]:
    """H2D_SYNC_PAGEABLE and D2H_SYNC_PAGEABLE: the host waits for copies from memory that the device cannot read directly."""
    for share in context.shares("copy"):
        sites = [site for site in context.horizon.copies if f"copy:{site.name}" == share.name and site.count]
        blocking = [site for site in sites if min(site.sync, site.pageable) >= _MOST * site.count]
        if blocking:
            yield _finding(context, share, blocking)


def _finding(context: Context, share: Share, sites: Sequence[CopySite]) -> Finding:
    direction = share.name.partition(":")[2]
    top = max(sites, key=lambda site: site.wall_ns)
    count, blocked = sum(site.count for site in sites), sum(site.wall_ns for site in sites)
    each_ms, kib = blocked / count / 1e6, sum(site.bytes for site in sites) / count / 1024
    severity, confidence = grade(context, share)
    to_host = direction.lower().startswith("d2h")
    return Finding(
        id=f"{'D2H' if to_host else 'H2D'}_SYNC_PAGEABLE",
        class_="communication",
        severity=severity,
        confidence=confidence,
        where=top.site,
        claim=f"Requests block on {direction} copies of pageable memory: {share.tail_ms:.1f} ms of a slow request, {share.body_ms:.2f} ms of an ordinary one.",
        evidence=(
            share_evidence(share),
            Evidence("copies that blocked the host", f"{sum(site.sync for site in sites)} of {count}", "copies"),
            Evidence("copies from pageable memory", f"{sum(site.pageable for site in sites)} of {count}", "copies"),
            Evidence("mean size of a copy", round(kib, 1), "KiB"),
            Evidence("mean time of a copy", round(each_ms, 3), "ms"),
            Evidence("call site", top.site, ""),
            *_pairs(context),
        ),
        share=share.share,
        what_if_p99_ms=context.plan.p99_ms(share.name),
        refute_by=f"Pin the source buffer at {top.site} on one replica: if the time in {share.name} above the objective stays, this is not the cause.",
        fix=_fix(to_host=to_host),
        rollback="Return to the pageable buffer: one line, no state.",
    )


def _fix(*, to_host: bool) -> str:
    if to_host:
        return (
            "Copy into a pinned buffer that is allocated once, with non_blocking=True, and wait for an event just before the CPU reads it: "
            "reading earlier would see old data."
        )
    return (
        "Allocate the staging buffer once with pin_memory=True, copy with non_blocking=True on a side stream, "
        "and keep the source alive until the copy's event is done."
    )


def _pairs(context: Context) -> Iterable[Evidence]:
    for summary, trace in context.captures:
        if trace.synchronous_copies:
            yield Evidence("pageable copies followed by a stream synchronise", trace.synchronous_copies, "pairs", None, summary.trace)
