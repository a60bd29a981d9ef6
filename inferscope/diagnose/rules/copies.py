"""Copies between host and device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from inferscope.diagnose.findings import grade, share_evidence
from inferscope.types import Evidence, Finding, SpanFlag

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from inferscope.diagnose.evidence import CopySite
    from inferscope.diagnose.findings import Context
    from inferscope.types import Share

__all__ = ["reads_in_loop", "small_copies", "synchronous_copies", "waiting_copies"]

_MANY: Final = 8
_READS: Final = 4
_SMALL_BYTES: Final = 64 << 10
_SMALL_SHARE: Final = 0.05
_MOST: Final = 0.5
"""A site counts as pageable, or synchronous, when most of its copies are."""


def synchronous_copies(context: Context) -> Iterable[Finding]:
    """H2D_SYNC_PAGEABLE and D2H_SYNC_PAGEABLE: the host waits for copies from memory that the device cannot read directly."""
    for share in context.shares("copy"):
        sites = _of(context, share)
        blocking = [site for site in sites if min(site.sync, site.pageable) >= _MOST * site.count]
        if blocking:
            yield _finding(context, share, blocking)


def waiting_copies(context: Context) -> Iterable[Finding]:
    """COPY_WAIT: copies own the excess and block, though their memory is pinned; what they wait for is not known from here."""
    for share in context.shares("copy"):
        sites = _of(context, share)
        blocking = [site for site in sites if site.sync >= _MOST * site.count and site.pageable < _MOST * site.count]
        if blocking and len(blocking) == len(sites):
            top = max(blocking, key=lambda site: site.wall_ns)
            severity, confidence = grade(context, share, confidence="medium")
            yield Finding(
                id="COPY_WAIT",
                class_="communication",
                severity=severity,
                confidence=confidence,
                where=top.site,
                claim=f"Requests wait {share.tail_ms:.1f} ms for {share.name}, from pinned memory: for the transfer, or for work queued before it.",
                evidence=(share_evidence(share), *_counts(blocking)),
                share=share.share,
                what_if_p99_ms=context.plan.p99_ms(share.name),
                refute_by="Copy on a stream of its own on one replica: if the wait stays, the transfer itself is slow.",
                fix=f"Pass non_blocking=True at {top.site}, copy on a side stream, and wait for an event only where the data is read.",
                rollback="Return to the blocking copy: one line, no state.",
            )


def small_copies(context: Context) -> Iterable[Finding]:
    """MANY_SMALL_COPIES: at least 8 copies a request from one line, of less than 64 KiB each."""
    for share in context.shares("copy", _SMALL_SHARE):
        sites = _of(context, share)
        total = sum(site.count for site in sites)
        for site in sites:
            # how many there were is known by name, which line made them as a part of the process's total
            often = context.horizon.copied.get(site.name, 0) / context.horizon.count * site.count / total
            each = site.bytes / site.count
            if often < _MANY or each >= _SMALL_BYTES or site.name.startswith("d2h"):
                continue
            severity, _ = grade(context, share, _SMALL_SHARE)
            pinned = site.pageable < _MOST * site.count  # copies that wait for pageable memory have a finding of their own
            yield Finding(
                id="MANY_SMALL_COPIES",
                class_="communication",
                severity="medium" if severity == "high" and not pinned else severity,
                confidence="medium",
                where=site.site,
                claim=f"Each request makes {often:.0f} copies of {each / 1024:.1f} KiB at {site.site}.",
                evidence=(
                    share_evidence(share),
                    Evidence("copies a request", round(often, 1), "copies"),
                    Evidence("mean size of a copy", round(each / 1024, 2), "KiB"),
                    Evidence("mean time of a copy", round(site.wall_ns / site.count / 1e6, 3), "ms"),
                ),
                share=share.share,
                what_if_p99_ms=context.plan.p99_ms(share.name),
                refute_by="Pack them on one replica: if the copies' time stays, bytes and not calls cost it.",
                fix="Pack the tensors into one staging buffer, copy once, and split by view on the other side.",
                rollback="Return to separate copies.",
            )


def reads_in_loop(context: Context) -> Iterable[Finding]:
    """D2H_IN_LOOP: one line brings values back from the device several times a request, and the host waits each time."""
    for share in (share for share in context.shares("copy", _SMALL_SHARE) if share.name.startswith("copy:d2h")):
        sites = _of(context, share)
        total = sum(site.count for site in sites)
        for site in sites:
            often = context.horizon.copied.get(site.name, 0) / context.horizon.count * site.count / total
            if often < _READS or site.sync < _MOST * site.count or site.bytes / site.count >= _SMALL_BYTES:
                continue
            severity, confidence = grade(context, share, _SMALL_SHARE)
            yield Finding(
                id="D2H_IN_LOOP",
                class_="communication",
                severity=severity,
                confidence=confidence,
                where=site.site,
                claim=f"{site.site} reads from the device {often:.1f} times a request and waits for it each time.",
                evidence=(
                    share_evidence(share),
                    Evidence("reads a request", round(often, 1), "copies"),
                    Evidence("mean size of a read", round(site.bytes / site.count / 1024, 2), "KiB"),
                    Evidence("mean wait of a read", round(site.wall_ns / site.count / 1e6, 3), "ms"),
                ),
                share=share.share,
                what_if_p99_ms=context.plan.p99_ms(share.name),
                refute_by="Gather the values on the device and read once, on one replica: if the time stays, bytes and not waits cost it.",
                fix="Collect the results on the device and copy them once after the loop.",
                rollback="Return to separate reads.",
            )


def _of(context: Context, share: Share) -> list[CopySite]:
    return [site for site in context.horizon.copies if f"copy:{site.name}" == share.name and site.count]


def _counts(sites: Sequence[CopySite]) -> tuple[Evidence, ...]:
    count = sum(site.count for site in sites)
    top = max(sites, key=lambda site: site.wall_ns)
    return (
        Evidence("copies that blocked the host", f"{sum(site.sync for site in sites)} of {count}", "copies"),
        Evidence("copies from pageable memory", f"{sum(site.pageable for site in sites)} of {count}", "copies"),
        Evidence("mean size of a copy", round(sum(site.bytes for site in sites) / count / 1024, 1), "KiB"),
        Evidence("mean time of a copy", round(sum(site.wall_ns for site in sites) / count / 1e6, 3), "ms"),
        Evidence("call site", top.site, ""),
    )


def _finding(context: Context, share: Share, sites: Sequence[CopySite]) -> Finding:
    direction = share.name.partition(":")[2]
    top = max(sites, key=lambda site: site.wall_ns)
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
            *_counts(sites),
            *_slowest(context, share),
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


def _slowest(context: Context, share: Share) -> Iterable[Evidence]:
    """How much of the slowest requests' copy time was synchronous and pageable, by the flags of the very copies."""
    column = context.horizon.labels.index(share.name)
    spans = [span for record in context.horizon.slowest for span in record.spans if span.column == column]
    total = sum(span.end_ns - span.start_ns for span in spans)
    if total > 0:
        both = SpanFlag.SYNC | SpanFlag.PAGEABLE
        held = sum(span.end_ns - span.start_ns for span in spans if span.flags & both == both)
        yield Evidence("copy time of the slowest requests that blocked on pageable memory", round(100 * held / total, 1), "%")


def _pairs(context: Context) -> Iterable[Evidence]:
    for summary, trace in context.captures:
        if trace.synchronous_copies:
            yield Evidence("pageable copies followed by a stream synchronise", trace.synchronous_copies, "pairs", None, summary.trace)
