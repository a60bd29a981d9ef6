"""`inferscope bench` on rising load: ladders, the knee, and the highest rate under the objectives."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from inferscope.bench import acceptance, ladder, text
from inferscope.cli.measuring import document
from inferscope.cli.output import emit
from inferscope.report import load_html

if TYPE_CHECKING:
    import argparse

    from inferscope.bench.result import LoadPlan, LoadResult
    from inferscope.cli.measuring import Inputs, Session

__all__ = ["accepted", "run"]

RUNG_S: Final = 10.0
_DOUBLES: Final = tuple(2**power for power in range(11))
_FIRST_RATE: Final = 10.0


def accepted(objectives: list[acceptance.Objective], result: LoadResult, found: dict[str, Any]) -> list[acceptance.Acceptance]:
    """A verdict on each objective, without the warm-up."""
    return [acceptance.accept(each, result, skip=found["warmup"]["cut"], level=found["settings"]["ci"]) for each in objectives]


class _Climb:
    """Measures rungs in one session."""

    def __init__(
        self, options: argparse.Namespace, plan: LoadPlan, session: Session, inputs: Inputs, objectives: list[acceptance.Objective]
    ) -> None:
        self._options, self._session, self._inputs, self._objectives = options, session, inputs, objectives
        self._plan = plan
        if not options.duration and not options.repeat and (options.find_knee or plan.mode == "open"):
            self._plan = replace(plan, seconds=min(RUNG_S, options.max_time), requests=0)

    def rung(self, rung: float, times: int = 1) -> ladder.Rung:
        """One run at so many clients or requests/s."""
        plan = replace(self._plan, seconds=self._plan.seconds * times)
        each = replace(plan, rate=float(rung)) if plan.mode == "open" else replace(plan, connections=int(rung))
        result, outside = self._session.measure(each)
        found = document(self._options, each, self._inputs, result, outside, None)
        return {
            "rung": rung,
            "metrics": {**found["metrics"], "offered_per_s": result.summary()["rate"] or rung},
            "acceptance": [row.to_json() for row in accepted(self._objectives, result, found)],
            "problems": found["problems"],
            "stopped": result.stopped,
            "process": found["process"],
            "device": found["device"],
            "curve": found["curve"],
            "stages": found["stages"],
        }


def run(options: argparse.Namespace, plan: LoadPlan, session: Session, inputs: Inputs, objectives: list[acceptance.Objective]) -> int:
    """Climb and say what was found; 2 when not even the first rung holds, 3 when the generator was what did not hold."""
    climb = _Climb(options, plan, session, inputs, objectives)
    unit = "requests/s" if plan.mode == "open" else "clients"
    value: dict[str, Any] = {"target": options.target, "mode": plan.mode, "knee": None, "max_rate": None, "limited_by": None}
    session.rest(plan)
    if options.find_max_rate:
        found = ladder.find_max_rate(climb.rung, options.rate or _first_rate(session))
        rungs, said = found.rungs, found.text()
        value |= {"max_rate": found.rate, "limited_by": found.limited_by, "beyond": found.beyond, "open": found.open}
        code = 0 if found.rate is not None else 3 if found.open is not None or found.limited_by == ladder.GENERATOR else 2
    else:
        rungs = ladder.climb(climb.rung, options.ladder or _DOUBLES, objectives, to_knee=options.find_knee)
        value["knee"] = ladder.knee(rungs)
        said = f"knee: {value['knee']} {unit}" if value["knee"] is not None else "knee: none, the first rung does not hold"
        code = 0 if value["knee"] is not None else 2
    value |= {"baseline": session.baseline, "ladder": rungs}
    _show(options, value, rungs, unit, said)
    return code


def _first_rate(session: Session) -> float:
    """A tenth of what one client at a time would reach."""
    if session.baseline is None and session.endpoint is not None:
        return _FIRST_RATE
    p50: float | None = session.baseline["single"]["p50_ms"] if session.baseline is not None else None
    return max(1.0, round(100.0 / p50, 1)) if p50 else _FIRST_RATE


def _show(options: argparse.Namespace, value: dict[str, Any], rungs: list[ladder.Rung], unit: str, said: str) -> None:
    head = (unit, "throughput/s", "P50", "P99", "errors", "CPU", "memory", "GPU", "objectives")
    rows = [_row(each) for each in rungs]
    remarks = [*text.baseline_lines(value["baseline"]), *(f"{each['rung']:g}: {problem}" for each in rungs for problem in each["problems"])]
    if options.md:
        text.put("--md", options.md, "\n".join([text.markdown_table(head, rows), "", said, *(f"- {line}" for line in remarks), ""]))
    if options.html:
        text.put("--html", options.html, load_html.render(_page(options, value, rungs, unit, said, (head, rows), remarks)))
    lines = [f"{options.target}", *("".join(f"{cell:>14}" for cell in row) for row in [head, *rows]), said, *remarks]
    emit(options, value, "" if options.md == "-" else "\n".join(lines))


def _page(
    options: argparse.Namespace,
    value: dict[str, Any],
    rungs: list[ladder.Rung],
    unit: str,
    said: str,
    table: tuple[tuple[str, ...], list[tuple[str, ...]]],
    remarks: list[str],
) -> load_html.Page:
    """The ladder as a page, with the resources of each rung."""
    metrics = [(float(each["rung"]), each["metrics"]) for each in rungs]
    points = [(load, found["throughput"]["requests_per_s"], found["latency"]["p99"]["ms"]) for load, found in metrics]
    curves = [(f"{each['rung']:g} {unit}", each["curve"]) for each in rungs if each["curve"]]
    found = value["knee"] is not None or value["max_rate"] is not None
    return load_html.Page(
        f"{options.target} · {value['mode']} loop", said, found, table[0], table[1], remarks,
        curves=curves, rungs=sorted(points), rung_unit=unit,
    )  # fmt: skip


def _row(each: ladder.Rung) -> tuple[str, ...]:
    latency, share = each["metrics"]["latency"], each["metrics"]["error_rate"]["share"]
    rate, cores = each["metrics"]["throughput"]["requests_per_s"], each["process"]["cpu_cores"]
    memory: dict[str, int] | None = each["process"]["memory"]
    device: dict[str, Any] = each["device"] or {}
    words = ", ".join(found["word"] for found in each["acceptance"]) or "-"
    utilization = device.get("utilization")
    return (
        f"{each['rung']:g}",
        "n/a" if rate is None else f"{rate:.1f}",
        text.milliseconds(latency["p50"]["ms"]),
        text.milliseconds(latency["p99"]["ms"]),
        "n/a" if share is None else f"{100 * share:.2f} %",
        "n/a" if cores is None else f"{cores:.2f} cores",
        "n/a" if memory is None else f"{memory['peak_bytes'] / 1e6:.0f} MB",
        "n/a" if utilization is None else f"{100 * utilization:.0f} %",
        words,
    )
