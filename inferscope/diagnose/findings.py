"""What a rule sees, what it returns, and the bar that every finding has to pass.

A rule is a function from `Context` to findings. It names a measured value for each claim, says what would refute it, and leaves severity to
`grade`: high and medium need a broken objective and an interval that stays above the threshold, so a healthy service hears nothing loud.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from inferscope.diagnose.waits import Waits, is_model, weights
from inferscope.types import Evidence, Finding

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from inferscope.diagnose.attribution import Attribution
    from inferscope.diagnose.evidence import Horizon
    from inferscope.diagnose.host import HostRequest
    from inferscope.diagnose.trace import TraceSummary
    from inferscope.diagnose.whatif import Plan
    from inferscope.types import Breach, CaptureSummary, FloatArray, Share

__all__ = ["MINIMUM_SHARE", "Context", "Rule", "Texts", "evaluate", "grade", "model_label", "of_share", "plain", "share_evidence"]

MINIMUM_SHARE: Final = 0.10
"""A column below a tenth of the excess is not worth advice."""

_HIGH_SHARE: Final = 0.30
_ORDER: Final = {"high": 0, "medium": 1, "low": 2, "info": 3}


@dataclass(frozen=True, slots=True)
class Context:
    """Everything that a rule may look at."""

    breach: Breach
    horizon: Horizon
    attribution: Attribution
    plan: Plan
    objective_broken: bool
    """Whether the objective's quantile lies above the threshold over the horizon."""
    captures: tuple[tuple[CaptureSummary, TraceSummary], ...] = ()
    waits: Waits = field(default_factory=Waits)
    """How time inside stages was divided into work and waits."""

    @property
    def usable(self) -> bool:
        """Whether shares have intervals."""
        return self.attribution.withheld is None

    @property
    def threshold_ns(self) -> float:
        """Requests above it are slow: the objective, or the first edge when there is none."""
        edges = self.horizon.edges_ns
        return self.breach.threshold_ms * 1e6 if self.breach.threshold_ms > 0 else float(edges[0]) if edges else float("inf")

    def kept(self, *, slow: bool) -> tuple[tuple[HostRequest, ...], FloatArray]:
        """Retained requests of one kind with the requests that each stands for."""
        chosen = [
            (r, w)
            for r, w in zip(self.horizon.host.requests, weights(self.horizon), strict=True)
            if (r.wall_ns > self.threshold_ns) is slow
        ]
        return tuple(request for request, _ in chosen), np.array([weight for _, weight in chosen], dtype=np.float64)

    def shares(self, kind: str, minimum: float = MINIMUM_SHARE) -> tuple[Share, ...]:
        """Columns of one kind that own at least `minimum` of the excess, largest first."""
        return tuple(share for share in self.attribution.shares if share.kind == kind and share.share >= minimum)


class Rule(Protocol):
    """One family of claims."""

    def __call__(self, context: Context, /) -> Iterable[Finding]:
        """Findings that the evidence supports; nothing when a value is missing."""
        ...


def grade(context: Context, share: Share, minimum: float = MINIMUM_SHARE, confidence: str = "high") -> tuple[str, str]:
    """Severity and confidence of a claim that rests on a column's share.

    Args:
        context: The evidence.
        share: The column's share.
        minimum: What the interval's lower end must reach for more than `low`.
        confidence: Confidence when the interval holds.
    """
    if not context.usable or share.ci is None or share.ci[0] < minimum:
        return "low", "low"
    if not context.objective_broken:
        return "low", confidence
    return ("high" if share.share >= _HIGH_SHARE else "medium"), confidence


def share_evidence(share: Share) -> Evidence:
    """The share as evidence, in percent of the tail's excess."""
    ci = None if share.ci is None else (round(100 * share.ci[0], 1), round(100 * share.ci[1], 1))
    return Evidence("share of the tail's excess", round(100 * share.share, 1), "%", ci)


def model_label(labels: Sequence[str], shares: Sequence[Share]) -> str | None:
    """The label of the model's own stage: device time or a stage called forward, model, predict and the like; the costliest if several."""
    kinds = {share.name: (share.kind, share.mean_share) for share in shares}
    found = [
        label for label in labels if label in kinds and (kinds[label][0] == "device" or (kinds[label][0] == "stage" and is_model(label)))
    ]
    return max(found, key=lambda label: kinds[label][1], default=None)


@dataclass(frozen=True, slots=True)
class Texts:
    """What a finding says in words; every one of them is needed."""

    where: str
    claim: str
    refute_by: str
    fix: str
    rollback: str


def of_share(
    context: Context,
    share: Share,
    id_: str,
    class_: str,
    texts: Texts,
    evidence: Iterable[Evidence],
    *,
    minimum: float = MINIMUM_SHARE,
    confidence: str = "high",
    severity: str | None = None,
) -> Finding:
    """A finding that rests on a column's share, which stands first in its evidence.

    Args:
        context: The evidence.
        share: The column's share; it grades the claim.
        id_: Of the rule.
        class_: `compute`, `memory`, `communication` or `scheduling`.
        texts: Words.
        evidence: What was measured beside the share.
        minimum: As for `grade`.
        confidence: As for `grade`.
        severity: Instead of the graded one.
    """
    graded, sure = grade(context, share, minimum, confidence)
    return plain(
        id_, class_, texts, (share_evidence(share), *evidence), severity=severity or graded, confidence=sure, share=share.share,
        what_if_p99_ms=context.plan.p99_ms(share.name),
    )  # fmt: skip


def plain(
    id_: str,
    class_: str,
    texts: Texts,
    evidence: Iterable[Evidence],
    *,
    severity: str,
    confidence: str,
    share: float | None = None,
    what_if_p99_ms: float | None = None,
) -> Finding:
    """A finding as its rule grades it itself."""
    return Finding(
        id=id_, class_=class_, severity=severity, confidence=confidence, where=texts.where, claim=texts.claim, evidence=tuple(evidence),
        share=share, what_if_p99_ms=what_if_p99_ms, refute_by=texts.refute_by, fix=texts.fix, rollback=texts.rollback,
    )  # fmt: skip


_SPECIFIC: Final[Mapping[str, frozenset[str]]] = {
    "INPUT_SIZE": frozenset({"MODEL_SLOW", "STAGE_SLOW"}),
    "RETRY_OR_ERROR": frozenset({"STAGE_SLOW", "IO_IN_REQUEST"}),
    "COLD_START": frozenset({"MODEL_SLOW", "STAGE_SLOW", "UNATTRIBUTED_HIGH", "IO_IN_REQUEST", "QUEUEING"}),
    "SATURATION": frozenset({"QUEUEING"}),
    "HEAD_OF_LINE": frozenset({"QUEUEING"}),
    "BATCH_TIMEOUT": frozenset({"QUEUEING"}),
    "BATCH_CAPACITY": frozenset({"QUEUEING"}),
    "THREAD_OVERSUB": frozenset({"MODEL_SLOW"}),
    "LOADER_COMPETES": frozenset({"MODEL_SLOW"}),
    **dict.fromkeys(
        (
            "CLOCK_THROTTLE",
            "MEM_FRAGMENTATION",
            "OOM_NEAR",
            "GPU_QUEUE_CONTENTION",
            "LAUNCH_BOUND",
            "NON_TENSOR_CORE",
            "COPY_COMPUTE_NO_OVERLAP",
            "NCCL_STRAGGLER",
            "DYNAMIC_SHAPES",
            "IMPLICIT_SYNC",
            "COMPUTE_BOUND",
            "BANDWIDTH_BOUND",
        ),
        frozenset({"MODEL_SLOW", "STAGE_SLOW", "INPUT_SIZE", "IO_IN_REQUEST", "COPY_WAIT", "D2H_SYNC_PAGEABLE", "H2D_SYNC_PAGEABLE"}),
    ),
    "MANY_SMALL_COPIES": frozenset({"COPY_WAIT"}),
    "D2H_IN_LOOP": frozenset({"D2H_SYNC_PAGEABLE", "COPY_WAIT"}),
}
"""A finding that says why, and those about the same time that only say where: they step down when it stands."""


def evaluate(context: Context, rules: Iterable[Rule]) -> tuple[Finding, ...]:
    """All findings, by severity, then share; what only says where comes after what says why."""
    findings = [finding for rule in rules for finding in rule(context)]
    general = {id(weaker) for finding in findings for weaker in findings if _explains(finding, weaker)}
    ranked = [replace(f, severity="medium") if id(f) in general and f.severity == "high" else f for f in findings]
    order = sorted(
        zip(findings, ranked, strict=True),
        key=lambda pair: (_ORDER[pair[1].severity], id(pair[0]) in general, -(pair[1].share or 0.0), pair[1].id),
    )
    return tuple(finding for _, finding in order)


def _explains(finding: Finding, weaker: Finding) -> bool:
    if weaker.id not in _SPECIFIC.get(finding.id, ()) or _ORDER[finding.severity] > _ORDER[weaker.severity]:
        return False
    # shares are compared as numbers: equal ones are the same column's
    return finding.share is None or finding.share == weaker.share or weaker.where in finding.where
