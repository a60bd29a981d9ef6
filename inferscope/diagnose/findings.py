"""What a rule sees, what it returns, and the bar that every finding has to pass.

A rule is a function from `Context` to findings. It names a measured value for each claim, says what would refute it, and leaves severity to
`grade`: high and medium need a broken objective and an interval that stays above the threshold, so a healthy service hears nothing loud.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

from inferscope.diagnose.waits import Waits
from inferscope.types import Evidence

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from inferscope.diagnose.attribution import Attribution
    from inferscope.diagnose.evidence import Horizon
    from inferscope.diagnose.trace import TraceSummary
    from inferscope.diagnose.whatif import Plan
    from inferscope.types import Breach, CaptureSummary, Finding, Share

__all__ = ["MINIMUM_SHARE", "Context", "Rule", "evaluate", "grade", "model_label", "share_evidence"]

MINIMUM_SHARE: Final = 0.10
"""A column below a tenth of the excess is not worth advice."""

_HIGH_SHARE: Final = 0.30
_MODEL_NAMES: Final = ("forward", "model", "inference", "infer", "predict", "generate", "decode")
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
        label for label in labels if label in kinds and (kinds[label][0] == "device" or (kinds[label][0] == "stage" and _is_model(label)))
    ]
    return max(found, key=lambda label: kinds[label][1], default=None)


def _is_model(label: str) -> bool:
    return any(part in _MODEL_NAMES for part in label.lower().replace(":", ".").replace("_", ".").split("."))


def evaluate(context: Context, rules: Iterable[Rule]) -> tuple[Finding, ...]:
    """All findings, by severity, then share."""
    findings = [finding for rule in rules for finding in rule(context)]
    return tuple(sorted(findings, key=lambda finding: (_ORDER[finding.severity], -(finding.share or 0.0), finding.id)))
