"""`inferscope bench`: load on a function or an address, and what it says with which certainty."""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import urlsplit

from inferscope.bench import acceptance, child, golden, ladder, load, metrics, probe, runs, text
from inferscope.bench.fingerprint import file_sha256, source
from inferscope.bench.inprocess import GOLDEN
from inferscope.bench.load import LoadPlan, LoadResult
from inferscope.bench.process import usage
from inferscope.bench.targets import ServiceError
from inferscope.cli import quantities
from inferscope.cli.output import emit
from inferscope.cli.progress import Progress
from inferscope.errors import ConfigurationError, InferscopeError

HELP = """Put load on TARGET and measure it: module:function (called in a process of its own, with inferscope on), or http(s)://address.

With --rate the load is open: requests come when they are due, whatever the service does, and latency counts from there.
Without it the loop is closed: each of --concurrency clients waits for its answer, and the tail is optimistic.
Exit: 0 well, 1 nothing was answered, 2 an objective is broken, 3 invalid or inconclusive, 4 wrong outputs."""

_REPORT: Final = "p50,p95,p99,p999,throughput,jitter,error_rate,cpu,memory,gpu_mem"
_REPEAT: Final = 2000
_OPEN_S: Final = 30.0


def _warm_up(value: str) -> int | None:
    return None if value == "auto" else 0 if value == "0" else quantities.count(value)


def _report(value: str) -> list[str]:
    names = [each.strip() for each in value.split(",")]
    unknown = [each for each in names if each not in text.REPORTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"nothing is called {', '.join(unknown)}; there are {', '.join(text.REPORTS)}")
    return names


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this verb."""
    parser.add_argument("target", metavar="TARGET", type=_target, help="module:function or http(s)://host:port/path")
    subject = parser.add_argument_group("what is measured (recorded; a function gets what it asks for by these names)")
    subject.add_argument("--model", help="name of the model, or its file, which is then hashed")
    subject.add_argument("--precision", default="fp32", help=f"{', '.join(golden.PRECISIONS)}: decides how exact outputs must be (fp32)")
    subject.add_argument("--batch-size", type=quantities.count, metavar="N", help="inputs a call; more than 1 gives a function a list")
    subject.add_argument("--input-len", type=quantities.count, metavar="N")
    subject.add_argument("--inputs", type=Path, metavar="FILE", help="one JSON value a line: bodies to POST, or arguments; none means GET")
    amount = parser.add_argument_group("how much load")
    amount.add_argument("--mode", choices=("open", "closed"), help="default open when --rate is given")
    amount.add_argument("--rate", type=quantities.rate, metavar="R", help="requests a second")
    amount.add_argument("--arrival", default="poisson", metavar="HOW", help="poisson, constant or trace:FILE (poisson)")
    amount.add_argument(
        "--concurrency", type=quantities.count, metavar="N", help="closed: clients (1); open: connections or threads at most (256, 32)"
    )
    amount.add_argument(
        "--ladder", type=quantities.ladder, metavar="1,2,4", help="one run each: clients, or requests a second with --mode open"
    )
    amount.add_argument("--warmup", type=_warm_up, default=None, metavar="auto|N", help="leading requests to leave out (auto: MSER-5)")
    amount.add_argument("--repeat", type=quantities.count, metavar="N", help=f"requests to measure ({_REPEAT} in a closed loop)")
    amount.add_argument(
        "--duration", type=quantities.seconds, metavar="T", help=f"time to measure, as in 30s ({_OPEN_S:g}s in an open loop)"
    )
    amount.add_argument("--max-time", type=quantities.seconds, default=600.0, metavar="T", help="a run ends then at the latest (600s)")
    amount.add_argument("--seed", type=int, default=0, help="of arrivals and the order of inputs (0)")
    check = parser.add_argument_group("what must hold")
    check.add_argument(
        "--slo",
        type=quantities.checked(acceptance.parse_objective),
        action="append",
        default=[],
        metavar="OBJECTIVE",
        help='as in "p99<=20ms"; may be repeated',
    )
    check.add_argument("--golden", type=Path, metavar="FILE", help="outputs must agree with these")
    check.add_argument("--save-golden", type=Path, metavar="FILE", help="keep the outputs of the first inputs as golden ones")
    check.add_argument("--rtol", type=float, help="relative tolerance (by precision)")
    check.add_argument("--atol", type=float, help="absolute tolerance (by precision)")
    check.add_argument(
        "--max-lag", type=quantities.seconds, default=1e-3, metavar="T", help="P99 of the generator's own lateness that is bearable (1ms)"
    )
    out = parser.add_argument_group("what to write")
    out.add_argument("--report", type=_report, default=_REPORT.split(","), metavar="P,Q", help=f"what to show ({_REPORT})")
    out.add_argument("-o", "--output", type=Path, metavar="FILE", help="the run with every request, for compare and history")
    out.add_argument("--md", nargs="?", const="-", metavar="FILE", help="as Markdown")
    out.add_argument("--pid", type=int, help="process of the service, for CPU and memory")


@dataclass(frozen=True, slots=True)
class _Inputs:
    lines: tuple[bytes, ...]
    sha256: str | None

    def values(self) -> list[Any]:
        return [json.loads(line) for line in self.lines]


def _inputs(path: Path | None) -> _Inputs:
    if path is None:
        return _Inputs((), None)
    lines = quantities.lines(path)
    return _Inputs(lines, hashlib.sha256(b"\n".join(lines)).hexdigest())


def _target(value: str) -> str:
    if not _is_address(value) and not re.fullmatch(r"[\w.]+:[\w.]+", value):
        raise argparse.ArgumentTypeError(f"{value!r} is neither module:function nor http(s)://host:port/path")
    return value


def _is_address(target: str) -> bool:
    return urlsplit(target).scheme in {"http", "https"}


def _plan(options: argparse.Namespace) -> LoadPlan:
    """The plan of a run without its ladder; warm-up comes on top of what is to be measured."""
    mode: Literal["open", "closed"] = options.mode or ("open" if options.rate else "closed")
    if mode == "open" and not options.rate and not options.ladder:
        raise ConfigurationError("mode", "open", "an open loop needs --rate")
    if mode == "closed" and options.rate:
        raise ConfigurationError("rate", options.rate, "a closed loop has no rate; leave it out or say --mode open")
    rate = options.rate or 1.0
    address = _is_address(options.target)
    connections = options.concurrency or (1 if mode == "closed" else 256 if address else 32)
    repeat = options.repeat or (_REPEAT if mode == "closed" and not options.duration else 0)
    extra = max(200, repeat // 4) if options.warmup is None else options.warmup
    if repeat:
        seconds, requests = ((repeat + extra) / rate * 2 + 5 if mode == "open" else options.max_time), repeat + extra
    else:
        measured = options.duration or _OPEN_S
        seconds, requests = measured * 1.25 if options.warmup is None else measured + (extra / rate if mode == "open" else 0.0), 0
    return LoadPlan(options.target, rate, min(seconds, options.max_time), options.seed, options.arrival, connections, 10.0, mode, requests)


def run(options: argparse.Namespace) -> int:
    """Measure; the exit code says what did not hold."""
    objectives: list[acceptance.Objective] = options.slo
    rule = golden.tolerance(options.precision, options.rtol, options.atol)
    expected = golden.read(options.golden) if options.golden else None
    try:
        plan = _plan(options)
    except ConfigurationError as error:
        sys.stderr.write(f"inferscope bench: {error}\n")
        return 64
    inputs = _inputs(options.inputs)
    progress = Progress(quiet=options.json == "-")
    if options.ladder:
        return _climb(options, plan, inputs, objectives, progress)
    result, outside = _measure(options, plan, inputs, progress)
    document = _document(options, plan, inputs, result, outside)
    document["acceptance"] = [{**found.to_json(), "text": found.text()} for found in _accepted(objectives, result, document)]
    outputs = outside.get("outputs", [])
    agreement = None
    if expected is not None:
        agreement = golden.agree(expected["outputs"], outputs, rule)
        if expected.get("inputs_sha256") != inputs.sha256:
            agreement.wrong = max(agreement.wrong, 1)
            agreement.problems.insert(0, "these are not the inputs that the golden outputs were made from")
        document["golden"] = {**agreement.to_json(), "text": agreement.text(), "sha256": document["settings"]["golden_sha256"]}
    if options.save_golden:
        golden.save(options.save_golden, outputs, precision=options.precision, inputs_sha256=inputs.sha256)
    if options.output:
        runs.save(options.output, document, result)
    _show(options, document)
    if agreement is not None and not agreement.correct:
        return 4
    if document["metrics"]["requests"] == document["metrics"]["failed"]:
        raise ServiceError(_nothing(options.target, result, document))
    return 3 if document["problems"] else acceptance.exit_code(_accepted(objectives, result, document))


def _accepted(objectives: list[acceptance.Objective], result: LoadResult, document: dict[str, Any]) -> list[acceptance.Acceptance]:
    return [acceptance.accept(each, result, skip=document["warmup"]["cut"]) for each in objectives]


def _nothing(target: str, result: LoadResult, document: dict[str, Any]) -> str:
    errors: dict[str, int] = document["errors"]
    kinds = ", ".join(f"{name} {count} times" for name, count in errors.items())
    codes = result.summary()["status"]
    return f"{target}: no request was answered well ({kinds or ', '.join(f'status {code}: {count}' for code, count in codes.items())})"


def _measure(options: argparse.Namespace, plan: LoadPlan, inputs: _Inputs, progress: Progress) -> tuple[LoadResult, dict[str, Any]]:
    """The load, and what is known beside it: outputs, errors, CPU, memory, stages."""
    checked = bool(options.golden or options.save_golden)
    label = f"{plan.url}: {f'{plan.rate:g} requests/s' if plan.mode == 'open' else f'{plan.connections} clients'}"
    if not _is_address(options.target):
        settings = {name: getattr(options, name) for name in ("batch_size", "input_len", "precision", "model", "seed")}
        with progress.part(label, plan.seconds if not plan.requests else None):
            return child.measure(plan, options.target, settings, inputs.values(), golden=checked, limit_s=options.max_time)
    outside: dict[str, Any] = {}
    probe.ask(options.target, inputs.lines[0] if inputs.lines else None)
    if checked:
        outside["outputs"] = probe.answers(options.target, inputs.lines[:GOLDEN])
    before, began = usage(options.pid) if options.pid else None, time.perf_counter()
    with progress.part(label, plan.seconds if not plan.requests else None):
        try:
            result = load.measure(plan, inputs.lines)
        except subprocess.CalledProcessError as error:
            said = error.stderr.decode(errors="replace").strip().splitlines()
            raise InferscopeError(said[-1] if said else f"the load generator ended with status {error.returncode}") from error
    after = usage(options.pid) if options.pid else None
    if before is not None and after is not None:
        outside["cpu_cores"] = (after.cpu_s - before.cpu_s) / (time.perf_counter() - began)
        dynamic = max(after.peak_bytes - before.resident_bytes, 0)
        outside["memory"] = {"static_bytes": before.resident_bytes, "peak_bytes": after.peak_bytes, "dynamic_bytes": dynamic}
    return result, outside


def _document(options: argparse.Namespace, plan: LoadPlan, inputs: _Inputs, result: LoadResult, outside: dict[str, Any]) -> dict[str, Any]:
    cut, method = metrics.warm_up(result, options.warmup)
    found = metrics.describe(result, skip=cut, items=options.batch_size or 1, lag_limit_ms=options.max_lag * 1e3)
    settings: dict[str, Any] = {
        "target": options.target,
        **{name: getattr(options, name) for name in ("model", "precision", "batch_size", "input_len")},
        **{name: value for name, value in asdict(plan).items() if name != "url"},
        "rate": plan.rate if plan.mode == "open" else None,
        "inputs_sha256": inputs.sha256,
        "golden_sha256": file_sha256(options.golden) if options.golden else None,
        "model_sha256": file_sha256(Path(options.model)) if options.model and Path(options.model).is_file() else None,
    }
    problems = [found["generator_bound"]] if found["generator_bound"] else []
    return {
        "written_unix_ns": time.time_ns(),
        "settings": settings,
        "source": source(Path.cwd()),
        "fingerprint": runs.machine(),
        "warmup": {"cut": cut, "method": method},
        "metrics": found,
        "problems": problems,
        "valid": not problems,
        "process": {name: outside.get(name) for name in ("cpu_cores", "memory")},
        "device": None,
        "errors": outside.get("errors", {}),
        "stages": outside.get("stages", []),
    }


def _show(options: argparse.Namespace, document: dict[str, Any]) -> None:
    if options.md:
        text.put("--md", options.md, text.run_markdown(document, options.report))
    shown = "" if options.md == "-" else "\n".join(text.run_lines(document, options.report))
    emit(options, document, shown)


def _climb(options: argparse.Namespace, plan: LoadPlan, inputs: _Inputs, objectives: list[acceptance.Objective], progress: Progress) -> int:
    """One run a rung, up to the first that is broken; the knee is the last rung that was worth it."""
    rungs: list[dict[str, Any]] = []
    for rung in options.ladder:
        each = replace(plan, rate=float(rung)) if plan.mode == "open" else replace(plan, connections=rung)
        result, outside = _measure(options, each, inputs, progress)
        document = _document(options, each, inputs, result, outside)
        accepted = [found.to_json() for found in _accepted(objectives, result, document)]
        rungs.append({"rung": rung, "metrics": document["metrics"], "acceptance": accepted, "problems": document["problems"]})
        if ladder.over(rungs[-1], objectives):
            break
    value: dict[str, Any] = {"target": options.target, "mode": plan.mode, "ladder": rungs, "knee": ladder.knee(rungs)}
    unit = "requests/s" if plan.mode == "open" else "clients"
    head = (unit, "throughput/s", "P50", "P99", "errors", "objectives")
    rows = [_rung(each) for each in rungs]
    knee = f"knee: {value['knee']} {unit}" if value["knee"] is not None else "knee: none, the first rung does not hold"
    if options.md:
        text.put("--md", options.md, f"{text.markdown_table(head, rows)}\n\n{knee}\n")
    lines = [f"{options.target}", *("".join(f"{cell:>14}" for cell in row) for row in [head, *rows]), knee]
    emit(options, value, "" if options.md == "-" else "\n".join(lines))
    return 0 if value["knee"] is not None else 2


def _rung(each: dict[str, Any]) -> tuple[str, ...]:
    latency, share = each["metrics"]["latency"], each["metrics"]["error_rate"]["share"]
    rate = each["metrics"]["throughput"]["requests_per_s"]
    words = ", ".join(found["word"] for found in each["acceptance"]) or "-"
    return (
        str(each["rung"]),
        "n/a" if rate is None else f"{rate:.1f}",
        text.milliseconds(latency["p50"]["ms"]),
        text.milliseconds(latency["p99"]["ms"]),
        "n/a" if share is None else f"{100 * share:.2f} %",
        words,
    )
