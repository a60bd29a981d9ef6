"""Copies between host and device."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from inferscope.diagnose.findings import Texts, grade, of_share
from inferscope.types import Evidence, Finding, SpanFlag

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from inferscope.diagnose.evidence import CopySite
    from inferscope.diagnose.findings import Context
    from inferscope.types import Share

__all__ = ["reads_in_loop", "small_copies", "synchronous_copies", "waiting_copies"]

_MANY: Final = 8
_READS: Final = 4
_VALUES: Final = 2
_SMALL_BYTES: Final = 64 << 10
_SMALL_SHARE: Final = 0.05
_MOST: Final = 0.5
"""A site counts as pageable, or synchronous, when most of its copies are."""


def synchronous_copies(context: Context) -> Iterable[Finding]:
    """H2D_SYNC_PAGEABLE and D2H_SYNC_PAGEABLE: the host waits for copies from memory that the device cannot read directly."""
    for share in context.shares("copy"):
        sites = _of(context, share)
        blocking = [site for site in sites if min(site.sync, site.pageable) >= _MOST * site.count and not _reads(site)]
        if blocking:
            yield _finding(context, share, blocking)


def waiting_copies(context: Context) -> Iterable[Finding]:
    """COPY_WAIT: copies own the excess and block, though their memory is pinned; what they wait for is not known from here."""
    for share in context.shares("copy"):
        sites = _of(context, share)
        blocking = [site for site in sites if site.sync >= _MOST * site.count and site.pageable < _MOST * site.count]
        if blocking and len(blocking) == len(sites):
            top = max(blocking, key=lambda site: site.wall_ns)
            texts = Texts(
                where=top.site,
                claim=f"Requests wait {share.tail_ms:.1f} ms for {share.name}, from pinned memory: for the transfer, or for work queued before it.",
                refute_by="Copy on a stream of its own on one replica: if the wait stays, the transfer itself is slow.",
                fix=f"Pass non_blocking=True at {top.site}, copy on a side stream, and wait for an event only where the data is read.",
                rollback="Return to the blocking copy: one line, no state.",
            )
            yield of_share(context, share, "COPY_WAIT", "communication", texts, _counts(blocking), confidence="medium")


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
            texts = Texts(
                where=site.site,
                claim=f"Each request makes {often:.0f} copies of {each / 1024:.1f} KiB at {site.site}.",
                refute_by="Pack them on one replica: if the copies' time stays, bytes and not calls cost it.",
                fix="Pack the tensors into one staging buffer, copy once, and split by view on the other side.",
                rollback="Return to separate copies.",
            )
            evidence = (
                Evidence("copies a request", round(often, 1), "copies"),
                Evidence("mean size of a copy", round(each / 1024, 2), "KiB"),
                Evidence("mean time of a copy", round(site.wall_ns / site.count / 1e6, 3), "ms"),
            )
            yield replace(
                of_share(context, share, "MANY_SMALL_COPIES", "communication", texts, evidence, minimum=_SMALL_SHARE, confidence="medium"),
                severity="medium" if severity == "high" and not pinned else severity, confidence="medium",
            )  # fmt: skip


def reads_in_loop(context: Context) -> Iterable[Finding]:
    """D2H_IN_LOOP and IMPLICIT_SYNC: one line brings values back several times a request, by copies or by reading them, and the host waits each time."""
    for share in (share for share in context.shares("copy", _SMALL_SHARE) if share.name.startswith("copy:d2h")):
        sites = _of(context, share)
        total = sum(site.count for site in sites)
        for site in sites:
            often = context.horizon.copied.get(site.name, 0) / context.horizon.count * site.count / total
            if often < (_VALUES if _reads(site) else _READS) or site.sync < _MOST * site.count or site.bytes / site.count >= _SMALL_BYTES:
                continue
            implicit = _reads(site)
            what = "reads values off the device" if implicit else "reads from the device"
            texts = Texts(
                where=site.site,
                claim=f"{site.site} {what} {often:.1f} times a request and waits for it each time.",
                refute_by=(
                    "Run one replica under torch.cuda.set_sync_debug_mode('warn'): without warnings at this line the claim is wrong."
                    if implicit
                    else "Gather the values on the device and read once, on one replica: if the time stays, bytes and not waits cost it."
                ),
                fix=(
                    "Keep the decision on the device (torch.where, masks), or collect the values and read them once after the loop."
                    if implicit
                    else "Collect the results on the device and copy them once after the loop."
                ),
                rollback="Return to separate reads.",
            )
            evidence = (
                Evidence("reads a request", round(often, 1), "copies"),
                *([Evidence("reads of values (item, bool)", f"{site.implicit} of {site.count}", "copies")] if implicit else []),
                Evidence("mean size of a read", round(site.bytes / site.count / 1024, 2), "KiB"),
                Evidence("mean wait of a read", round(site.wall_ns / site.count / 1e6, 3), "ms"),
            )
            id_ = "IMPLICIT_SYNC" if implicit else "D2H_IN_LOOP"
            yield of_share(context, share, id_, "communication", texts, evidence, minimum=_SMALL_SHARE)


def _reads(site: CopySite) -> bool:
    """Whether most of a line's copies came of reading values."""
    return site.implicit >= _MOST * site.count


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
    to_host = direction.lower().startswith("d2h")
    texts = Texts(
        where=top.site,
        claim=f"Requests block on {direction} copies of pageable memory: {share.tail_ms:.1f} ms of a slow request, {share.body_ms:.2f} ms of an ordinary one.",
        refute_by=f"Pin the source buffer at {top.site} on one replica: if the time in {share.name} above the objective stays, this is not the cause.",
        fix=_fix(to_host=to_host),
        rollback="Return to the pageable buffer: one line, no state.",
    )
    evidence = (*_counts(sites), *_slowest(context, share), *_pairs(context))
    return of_share(context, share, f"{'D2H' if to_host else 'H2D'}_SYNC_PAGEABLE", "communication", texts, evidence)


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
