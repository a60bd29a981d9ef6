"""How numbers are written in every report."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from inferscope.types import CaptureSummary, Evidence, Incident, Share, WhatIf

__all__ = [
    "amount",
    "capture_line",
    "captures_lines",
    "count",
    "evidence_line",
    "excess_ms",
    "held",
    "load_line",
    "milliseconds",
    "misled",
    "number",
    "objective",
    "percent",
    "plus_minus",
    "stage_rows",
]

_CLEAR = 0.2
"""Part of all time from which a mean profile points at a column."""
_MISLEADS = 0.1
"""Part of the excess below which that is the wrong place to look."""


def number(value: float) -> str:
    """Three significant digits, without exponents."""
    size = abs(value)
    decimals = 0 if size >= 100 else 1 if size >= 10 else 2
    return f"{value if abs(value) >= 0.005 else 0.0:.{decimals}f}"


def milliseconds(value: float | None) -> str:
    """Milliseconds with their unit, or n/a."""
    return "n/a" if value is None else f"{number(value)} ms"


def count(value: int) -> str:
    """Digits in groups of three."""
    return f"{value:,}".replace(",", " ")


def percent(fraction: float) -> str:
    """A whole percentage; never a negative zero."""
    return f"{round(100 * fraction) + 0} %"


def plus_minus(share: Share) -> str:
    """Half the 95 % interval in points, or n/a."""
    if share.ci is None:
        return "± n/a"
    half = 50 * (share.ci[1] - share.ci[0])
    return f"± {round(half)}" if half >= 1 else "± <1"


def excess_ms(incident: Incident) -> float:
    """How much slower the tail is than the body."""
    return sum(share.tail_ms - share.body_ms for share in incident.attribution)


def held(incident: Incident) -> bool:
    """Whether the objective, if there is one, held over the horizon: no more requests above it than its quantile allows."""
    return incident.breach.threshold_ms <= 0 or incident.exceeding <= (1.0 - incident.breach.quantile) * incident.requests


def objective(incident: Incident) -> str:
    """The objective and whether it held."""
    if incident.breach.threshold_ms <= 0:
        return f"No objective for {incident.breach.request}"
    name = f"P{100 * incident.breach.quantile:g} of {incident.breach.request} at most {incident.breach.threshold_ms:g} ms"
    return f"{name}: {'HOLDS' if held(incident) else 'BROKEN'}"


def load_line(incident: Incident) -> str:
    """Rate, counts, errors, device."""
    share = 100 * incident.exceeding / incident.requests if incident.requests else 0.0
    busy = "n/a" if incident.device_busy is None else percent(incident.device_busy)
    parts = [
        f"{number(incident.throughput_rps)} requests/s",
        f"{count(incident.requests)} requests",
        f"{count(incident.exceeding)} above the objective ({share:.2g} %)",
        f"{count(incident.errors)} errors",
        f"device busy {busy}",
    ]
    if incident.excluded:
        parts.insert(2, f"{count(incident.excluded)} profiled")
    return " · ".join(parts)


def evidence_line(evidence: Evidence) -> str:
    """One measured value."""
    value = evidence.value if isinstance(evidence.value, str) else f"{evidence.value + 0.0:.6g}"
    unit = f" {evidence.unit}" if evidence.unit else ""
    interval = "" if evidence.ci is None else f" [{evidence.ci[0] + 0.0:g}, {evidence.ci[1] + 0.0:g}]"
    place = "" if evidence.artefact is None else f" ({evidence.artefact})"
    return f"{evidence.metric}: {value}{unit}{interval}{place}"


def what_if_line(entry: WhatIf) -> tuple[str, str]:
    """The causes and the estimate."""
    interval = "" if entry.ci is None else f" [{number(entry.ci[0])}, {number(entry.ci[1])}]"
    return " + ".join(entry.fix), milliseconds(entry.p99_ms) + interval + ("  meets the objective" if entry.meets_objective else "")


def capture_line(capture: CaptureSummary) -> str:
    """What was captured, and what it cost the captured request."""
    requests = ", ".join(str(request) for request in capture.requests) or "n/a"
    events = "n/a" if capture.events is None else count(capture.events)
    kind = "slow" if capture.slow else "healthy"
    stages = ", ".join(f"{name} {number(ms)} ms" for name, ms in sorted(capture.stages.items(), key=lambda item: -item[1]))
    joined = f"; operators by stage: {stages}" if stages else ""
    return f"{capture.id}: tier {capture.tier}, {kind} request {requests}, {events} events, stall {number(capture.stall_ms)} ms{joined}"


def misled(incident: Incident) -> str | None:
    """What a mean profile would have said, when that is wrong."""
    if incident.withheld is not None or not incident.attribution:
        return None
    top, mean = incident.attribution[0], max(incident.attribution, key=lambda share: share.mean_share)
    if mean.name == top.name or mean.mean_share < _CLEAR or mean.share >= _MISLEADS:
        return None
    return f"A mean profile would point at {mean.name} ({percent(mean.mean_share)} of all time), which owns {percent(mean.share)} of what slow requests take longer."


def amount(value: float | None) -> str:
    """Bytes with a unit, or n/a."""
    if value is None:
        return "n/a"
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if value >= size:
            return f"{number(value / size)} {unit}"
    return f"{value:.0f} B"


def stage_rows(incident: Incident) -> list[tuple[str, ...]]:
    """Stages with what they take beside time: name, then time, CPU and bytes of a slow and an ordinary request, then device memory."""
    return [
        (
            cost.name,
            f"{milliseconds(cost.slow_ms)} / {milliseconds(cost.ordinary_ms)}",
            f"{milliseconds(cost.slow_cpu_ms)} / {milliseconds(cost.ordinary_cpu_ms)}",
            f"{amount(cost.slow_bytes)} / {amount(cost.ordinary_bytes)}",
            amount(cost.device_bytes),
        )
        for cost in incident.stages
    ]


def captures_lines(captures: Sequence[CaptureSummary]) -> Iterator[str]:
    """All captures in a line a kind; a single one of its kind in full."""
    for slow in (True, False):
        kind = [capture for capture in captures if capture.slow is slow]
        if len(kind) == 1:
            yield capture_line(kind[0])
        elif kind:
            yield _captures_line(kind, "slow" if slow else "healthy")


def _captures_line(kind: Sequence[CaptureSummary], word: str) -> str:
    threads = len({thread for capture in kind for thread in capture.threads})
    stalls = [capture.stall_ms for capture in kind]
    events = [capture.events for capture in kind if capture.events is not None]
    names = {name for capture in kind for name in capture.stages}
    medians = {name: statistics.median(capture.stages.get(name, 0.0) for capture in kind) for name in names}
    stages = ", ".join(f"{name} {number(ms)} ms" for name, ms in sorted(medians.items(), key=lambda item: -item[1])[:4])
    return (
        f"{len(kind)} {word} requests on {threads} {'thread' if threads == 1 else 'threads'}: stall {number(min(stalls))} to "
        f"{number(max(stalls))} ms each, {f'{count(min(events))} to {count(max(events))} events' if events else 'events n/a'}"
        f"{f'; operators by stage, medians: {stages}' if stages else ''}"
    )
