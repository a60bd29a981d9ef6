"""What requests themselves bring: size, failures and repeats, and input or output on their way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from inferscope.diagnose.findings import MINIMUM_SHARE, Texts, of_share, plain
from inferscope.diagnose.places import costliest
from inferscope.diagnose.rules.traces import owner
from inferscope.types import Evidence, Finding

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from inferscope.diagnose.findings import Context
    from inferscope.diagnose.host import HostRequest
    from inferscope.types import FloatArray, Share

__all__ = ["input_size", "io_in_request", "new_shapes", "retries"]

_FEW: Final = 10
_ORDERED: Final = 0.85
"""Probability that a slow request is larger than an ordinary one, from which size explains it; 0.5 is no relation."""
_RATIO: Final = 1.5
_MORE: Final = 0.5
_FAILED: Final = 0.20
_MOSTLY: Final = 0.5


def input_size(context: Context) -> Iterable[Finding]:
    """INPUT_SIZE: requests that are slow in a stage or copy are the large ones."""
    (slow, amounts), (ordinary, others) = context.kept(slow=True), context.kept(slow=False)
    shares = [share for kind in ("stage", "device", "copy") for share in context.shares(kind)]
    share = max(shares, key=lambda share: share.share, default=None)
    if share is None:
        return
    column = context.horizon.labels.index(share.name)
    # of the slow ones, those that lost their time there: others may be slow for another reason
    there = [column < len(r.vector) and r.vector[column] >= 0.5 * r.vector.max() for r in slow]
    sizes, weights_ = _sizes([r for r, chosen in zip(slow, there, strict=True) if chosen], amounts[there])
    usual, usual_weights = _sizes(ordinary, others)
    if len(sizes) < _FEW or len(usual) < _FEW:
        return
    larger = sum(
        w * float(usual_weights[usual < size].sum() + 0.5 * usual_weights[usual == size].sum())
        for size, w in zip(sizes, weights_, strict=True)
    )
    probability = float(larger / (weights_.sum() * usual_weights.sum()))
    typical, large = float(np.median(usual)), float(np.median(sizes))
    if probability < _ORDERED or large < _RATIO * typical:
        return
    texts = Texts(
        where=share.name,
        claim=f"Requests that are slow in {share.name} are large ones: median size {large:.3g} against {typical:.3g} of ordinary ones.",
        refute_by="Replay the slow requests at an ordinary size: if they stay slow, size only coincides with the cause.",
        fix="Cap or bucket the size, send large requests to a pool of their own, or give them an objective of their own (cls=).",
        rollback="Remove the cap or the second pool.",
    )
    evidence = (
        Evidence("probability that a slow request is larger than an ordinary one", round(probability, 3), ""),
        Evidence("median size of a slow request", round(large, 3), ""),
        Evidence("median size of an ordinary request", round(typical, 3), ""),
        Evidence("slow requests compared", len(sizes), "requests"),
    )
    yield of_share(context, share, "INPUT_SIZE", "compute", texts, evidence)


def _sizes(requests: Sequence[HostRequest], amounts: FloatArray) -> tuple[FloatArray, FloatArray]:
    known = [(r.size, w) for r, w in zip(requests, amounts.tolist(), strict=True) if r.size is not None]
    return np.array([size for size, _ in known], dtype=np.float64), np.array([weight for _, weight in known], dtype=np.float64)


def new_shapes(context: Context) -> Iterable[Finding]:
    """DYNAMIC_SHAPES: requests that are slow in the model bring shapes that it met for the first time."""
    share = owner(context)
    (slow, amounts), (ordinary, others) = context.kept(slow=True), context.kept(slow=False)
    first, usual = _new(slow, amounts), _new(ordinary, others)
    if share is None or first is None or usual is None or first[0] < _MOSTLY or first[0] < 2 * usual[0]:
        return
    shapes = len({r.shape for r in (*slow, *ordinary) if r.shape is not None})
    texts = Texts(
        where=f"{share.name}, {shapes} shapes seen",
        claim=f"{100 * first[0]:.0f} % of the slow requests bring a shape that the model meets for the first time, {100 * usual[0]:.1f} % of the others: it compiles, tunes or allocates for them.",
        refute_by="Send a slow request's shape twice: if the second is as slow, its shape is not what makes it slow.",
        fix="Pad inputs to a few buckets, warm every bucket before readiness, and mark dimensions that vary as dynamic.",
        rollback="Return to exact shapes.",
    )
    evidence = (
        Evidence("slow requests with a shape new to the process", round(100 * first[0], 1), "%"),
        Evidence("ordinary requests with one", round(100 * usual[0], 1), "%"),
        Evidence("shapes among retained requests", shapes, "shapes"),
        Evidence("slow requests whose shape is known", first[1], "requests"),
    )
    yield of_share(context, share, "DYNAMIC_SHAPES", "compute", texts, evidence)


def _new(requests: Sequence[HostRequest], amounts: FloatArray) -> tuple[float, int] | None:
    """(part of the requests whose shape was new, requests whose shape is known), when there are enough."""
    known = [(r.new_shape, w) for r, w in zip(requests, amounts.tolist(), strict=True) if r.new_shape is not None]
    if len(known) < _FEW:
        return None
    return sum(weight for new, weight in known if new) / sum(weight for _, weight in known), len(known)


def retries(context: Context) -> Iterable[Finding]:
    """RETRY_OR_ERROR: slow requests run a stage again, or fail."""
    repeated = _repeated(context)
    failing = _failing(context)
    if repeated is None and failing is None:
        return
    evidence: list[Evidence] = []
    claims: list[str] = []
    share = None
    if repeated is not None:
        name, share, often, usual = repeated
        evidence += [
            Evidence(f"runs of {name} in a slow request", round(often, 2), "runs"),
            Evidence(f"runs of {name} in all requests", round(usual, 2), "runs"),
        ]
        claims.append(f"Slow requests run {name} {often:.1f} times, all requests {usual:.2f} times on average")
    if failing is not None:
        bad, fine, kind = failing
        evidence += [
            Evidence("slow requests that failed", round(100 * bad, 1), "%"),
            Evidence("ordinary requests that failed", round(100 * fine, 1), "%"),
            Evidence("most frequent error", kind, ""),
        ]
        claims.append(f"{100 * bad:.0f} % of the slow requests failed with {kind}, {100 * fine:.1f} % of the others")
    texts = Texts(
        where=share.name if share is not None else "failing requests",
        claim=f"{'; '.join(claims)}.",
        refute_by="Switch retries off on one replica: if requests above the objective stay, repeats do not make them slow.",
        fix="Bound attempts and their total time by what the objective leaves, retry with jitter against another backend, and look at why the first attempt fails.",
        rollback="Return to the earlier retry policy.",
    )
    if share is not None:
        yield of_share(context, share, "RETRY_OR_ERROR", "communication", texts, evidence)
        return
    severity = "medium" if context.objective_broken else "low"
    yield plain("RETRY_OR_ERROR", "communication", texts, evidence, severity=severity, confidence="low")


def _repeated(context: Context) -> tuple[str, Share, float, float] | None:
    """(stage, its share, runs in a slow request, runs in any) of the stage that slow requests repeat most."""
    slow = [request for request in context.kept(slow=True)[0] if request.spans]
    if len(slow) < _FEW or not context.horizon.count:
        return None
    found: list[tuple[str, Share, float, float]] = []
    for share in (share for share in context.attribution.shares if share.share >= MINIMUM_SHARE and share.kind in {"stage", "io"}):
        name = share.name.removeprefix("io:")
        if name not in context.horizon.labels:
            continue
        column = context.horizon.labels.index(name)
        often = sum(span.column == column for request in slow for span in request.spans) / len(slow)
        usual = context.horizon.stages.get(name, 0) / context.horizon.count
        if usual > 0 and often >= _RATIO * usual and often - usual >= _MORE:
            found.append((name, share, often, usual))
    return max(found, key=lambda row: row[1].share, default=None)


def _failing(context: Context) -> tuple[float, float, str] | None:
    (slow, amounts), (ordinary, others) = context.kept(slow=True), context.kept(slow=False)
    if len(slow) < _FEW or len(ordinary) < _FEW:
        return None
    bad = float(amounts[[r.error is not None for r in slow]].sum() / amounts.sum())
    fine = float(others[[r.error is not None for r in ordinary]].sum() / others.sum())
    kinds = [r.error for r in slow if r.error is not None]
    return (bad, fine, max(set(kinds), key=kinds.count)) if bad >= _FAILED and bad >= 3 * fine else None


def io_in_request(context: Context) -> Iterable[Finding]:
    """IO_IN_REQUEST: slow requests block in reads, writes or sleeps inside a stage."""
    for share in context.shares("io"):
        stage = share.name.partition(":")[2]
        place = costliest(context.horizon, stage, context.threshold_ns)
        at = "" if place is None else f" at {place.site}"
        texts = Texts(
            where=f"stage {stage}{at}",
            claim=f"Slow requests block {share.tail_ms:.1f} ms in input, output, sleep or a log handler inside {stage}{at}, ordinary ones {share.body_ms:.2f} ms.",
            refute_by=f"Leave the file, socket or log call in {stage} out on one replica: if the time stays, it blocks on something else.",
            fix="Take it out of the request: logging through QueueHandler, files and sockets in a thread of their own, results cached or asked for ahead, a time limit on each call.",
            rollback="Return to the direct call.",
        )
        evidence = [
            Evidence("blocked in a slow request", round(share.tail_ms, 2), "ms"),
            Evidence("blocked in an ordinary request", round(share.body_ms, 2), "ms"),
            Evidence("slow requests sampled", context.waits.slow, "requests"),
        ]
        if place is not None:
            evidence.append(Evidence(f"sampled time of slow requests{at}", round(100 * place.part, 1), "%"))
        yield of_share(context, share, "IO_IN_REQUEST", "communication", texts, evidence)
