"""Stages: the model's own, any other, and time that nothing measured."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Final

from inferscope.diagnose.findings import MINIMUM_SHARE, Texts, grade, model_label, of_share, share_evidence
from inferscope.diagnose.places import costliest
from inferscope.diagnose.waits import is_model
from inferscope.types import Evidence, Finding

if TYPE_CHECKING:
    from collections.abc import Iterable

    from inferscope.diagnose.findings import Context
    from inferscope.types import Share

__all__ = ["model_stage", "slow_stage", "unattributed"]

_UNATTRIBUTED: Final = 0.20


def model_stage(context: Context) -> Iterable[Finding]:
    """MODEL_NOT_THE_CAUSE: an interval that keeps the model's stage under a tenth of the tail's excess."""
    label = model_label(context.horizon.labels, context.attribution.shares)
    share = context.attribution.share(label) if label else None
    if share is None or not context.usable or share.ci is None or share.ci[1] >= MINIMUM_SHARE:
        return
    if any(is_model(other.name) for other in context.shares("stage")):
        return  # one of several models is slow
    what_if = context.plan.p99_ms(share.name)
    evidence = [
        share_evidence(share),
        Evidence("share of all request time, slow or not", round(100 * share.mean_share, 1), "%"),
        Evidence("time in a slow request", round(share.tail_ms, 2), "ms"),
        Evidence("time in an ordinary request", round(share.body_ms, 2), "ms"),
    ]
    evidence += _captured(context, share.name)
    if context.horizon.device_busy is not None:
        evidence.append(Evidence("device busy, from its driver", round(100 * context.horizon.device_busy, 1), "%"))
    yield Finding(
        id="MODEL_NOT_THE_CAUSE",
        class_="compute",
        severity="info",
        confidence="high",
        where=share.name,
        claim=f"{share.name} takes as long in slow requests ({share.tail_ms:.2f} ms) as in ordinary ones ({share.body_ms:.2f} ms): a faster model would not lower this tail.",
        evidence=tuple(evidence),
        share=share.share,
        what_if_p99_ms=what_if,
        refute_by=f"Serve a smaller model on one replica: if P99 falls by more than {share.tail_ms:.1f} ms, this is wrong.",
        fix="Leave the model as it is; work on the columns that own the excess.",
        rollback="Nothing to roll back.",
    )


def _captured(context: Context, label: str) -> Iterable[Evidence]:
    """Operator time of the stage in captured slow and healthy requests, when there are both."""
    held: dict[bool, list[float]] = {True: [], False: []}
    for summary, _ in context.captures:
        held[summary.slow].append(summary.stages.get(label, 0.0))
    if all(held.values()):
        for slow, name in ((True, "slow"), (False, "healthy")):
            yield Evidence(f"operator time in {len(held[slow])} captured {name} requests, median", round(median(held[slow]), 3), "ms")


def slow_stage(context: Context) -> Iterable[Finding]:
    """MODEL_SLOW and STAGE_SLOW: a stage's own work, not a wait inside it, is what slow requests have more of."""
    for share in (*context.shares("stage"), *context.shares("device")):
        yield _slow(context, share, model=share.kind == "device" or is_model(share.name))


def _slow(context: Context, share: Share, *, model: bool) -> Finding:
    place = costliest(context.horizon, share.name, context.threshold_ns)
    at = "" if place is None else f" at {place.site}"
    texts = Texts(
        where=f"{share.name}{at}",
        claim=f"Slow requests spend {share.tail_ms:.1f} ms in {share.name} itself, ordinary ones {share.body_ms:.2f} ms{f', most of it{at}' if at else ''}.",
        refute_by=f"Compare inputs of slow and ordinary requests: if {share.name} is slow for the same input too, something outside the stage delays it.",
        fix=_slow_fix(share.name, at),
        rollback="Remove the added stages or the cap.",
    )
    evidence = [
        Evidence("time in a slow request", round(share.tail_ms, 2), "ms"),
        Evidence("time in an ordinary request", round(share.body_ms, 2), "ms"),
    ]
    if place is not None:
        evidence.append(Evidence(f"sampled time of slow requests at {place.site}", round(100 * place.part, 1), "%"))
        evidence.append(Evidence("sampled time in the stage", round(place.sampled_ms, 1), "ms"))
    return of_share(context, share, "MODEL_SLOW" if model else "STAGE_SLOW", "compute", texts, evidence, confidence="medium")


def _slow_fix(stage: str, at: str) -> str:
    if at:
        return f"Make the work{at} cheaper or do it ahead; cap or bucket the input size if its time grows with it."
    return (
        f"Profile {stage} for slow requests (captures lie beside this diagnosis when one was kept); "
        "cap or bucket the input size if its time grows with it; split it into stages if it holds several steps."
    )


def unattributed(context: Context) -> Iterable[Finding]:
    """UNATTRIBUTED_HIGH: a fifth of the excess lies between the stages."""
    for share in context.shares("unattributed", _UNATTRIBUTED):
        severity, _ = grade(context, share, _UNATTRIBUTED)
        where = _largest_gap(context)
        yield Finding(
            id="UNATTRIBUTED_HIGH",
            class_="scheduling",
            severity="medium" if severity == "high" else severity,
            confidence="low",
            where=where,
            claim=f"{share.tail_ms:.1f} ms of a slow request lie in no stage, lock, copy or queue.",
            evidence=(share_evidence(share), Evidence("unattributed in an ordinary request", round(share.body_ms, 2), "ms")),
            share=share.share,
            what_if_p99_ms=None,
            refute_by="Add a stage there: if its time does not rise in slow requests, the gap is elsewhere.",
            fix=f"Put a stage around the code {where}, and name the locks it takes.",
            rollback="Remove the stage.",
        )


def _largest_gap(context: Context) -> str:
    """Where most uncovered time of the slowest requests lies, by the stage that ended before it."""
    gaps: dict[str, int] = {}
    labels = context.horizon.labels
    for record in context.horizon.slowest:
        cursor, after = record.start_unix_ns, "before the first stage"
        for span in sorted((span for span in record.spans if span.parent in {-1, 255}), key=lambda span: span.start_ns):
            gaps[after] = gaps.get(after, 0) + max(0, span.start_ns - cursor)
            if span.end_ns > cursor:
                cursor, after = span.end_ns, f"after {labels[span.column]}"
        gaps[after] = gaps.get(after, 0) + max(0, record.start_unix_ns + record.wall_ns - cursor)
    return max(gaps, key=lambda place: gaps[place], default="between the stages")
