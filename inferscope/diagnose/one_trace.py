"""A trace by itself, from anybody's `torch.profiler`: the same rules that look at captures, without a request, an objective or a tail."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from inferscope.diagnose.attribution import Attribution
from inferscope.diagnose.evidence import Blocks, Horizon, Sampled
from inferscope.diagnose.findings import Context, Rule, evaluate
from inferscope.diagnose.rules.ranks import stragglers
from inferscope.diagnose.rules.traces import (
    bounds,
    copies_alone,
    launch_bound,
    matrix_units,
    pageable_copies,
    shape_churn,
    waits,
)
from inferscope.diagnose.trace import read_trace
from inferscope.diagnose.whatif import Plan
from inferscope.types import UNATTRIBUTED, Breach, CaptureSummary

if TYPE_CHECKING:
    from pathlib import Path

    from inferscope.diagnose.traces.values import TraceSummary
    from inferscope.types import Finding

__all__ = ["OneTrace", "explain_trace"]

_RULES: Final[tuple[Rule, ...]] = (waits, pageable_copies, launch_bound, shape_churn, matrix_units, bounds, copies_alone, stragglers)


@dataclass(frozen=True, slots=True)
class OneTrace:
    """What one file says."""

    name: str
    summary: TraceSummary
    findings: tuple[Finding, ...]
    """Graded `medium` at most: without an objective nothing says that it matters."""


def explain_trace(path: Path) -> OneTrace:
    """Read a trace and ask the rules about it.

    Raises:
        EvidenceError: As `read_trace`.
    """
    summary = read_trace(path)
    capture = CaptureSummary(path.name, 0, (), slow=True, events=summary.events, stall_ms=0.0, threads=summary.threads, trace="")
    nothing = Attribution((), "a trace alone: no requests to compare", "none", "none", 0, 0.0, 0.0, 0, ())
    context = Context(
        Breach("", "", "", 0.0, 0.99, 0, 0, 0, 0, 0, "manual", 0.0, 1.0),
        _horizon(),
        nothing,
        Plan((), (), None, ()),
        objective_broken=False,
        captures=((capture, summary),),
    )
    return OneTrace(path.name, summary, evaluate(context, _RULES))


def _horizon() -> Horizon:
    """A horizon without a request."""
    none, rows = np.zeros(0, np.int64), np.zeros((0, 1))
    return Horizon(
        columns=(UNATTRIBUTED,), from_unix_ns=0, to_unix_ns=0, seconds=0.0, edges_ns=(), count=0, errors=0, excluded=0, violations=(),
        latency=(), band_ids=none, band_lower=np.zeros(0), band_counts=none, band_sums=rows, blocks=Blocks(none, none, rows),
        reservoir=Sampled(np.zeros(0), np.zeros(0), rows, none), slowest=(), locks=(), copies=(), copied={}, gc=(), device_busy=None,
        status={}, process={}, slots=0, classes=0,
    )  # fmt: skip
