"""`inferscope bench`: load on a function or an address, and what it says with which certainty."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from inferscope.bench import acceptance, endpoint, golden, lengths, runs, text
from inferscope.bench.precision import parse_precision
from inferscope.bench.result import LoadPlan
from inferscope.bench.targets import ServiceError
from inferscope.cli import climbing, quantities, release, run_files, via_locust
from inferscope.cli.climbing import accepted
from inferscope.cli.measuring import Inputs, Session, document, is_address, read_inputs
from inferscope.cli.output import emit
from inferscope.cli.progress import Progress
from inferscope.errors import ConfigurationError

if TYPE_CHECKING:
    from inferscope.bench.result import LoadResult

HELP = """Put load on TARGET and measure it: module:function (called in a process of its own, with inferscope on), http(s)://host:port/path,
grpc://host:port/package.Service/Method, or triton://host:port/model.

With --rate the load is open: requests come when they are due, whatever the service does, and latency counts from there.
Without it the loop is closed: each of --concurrency clients waits for its answer, and the tail is optimistic.
Exit: 0 well, 1 nothing was answered or the target died, 2 an objective is broken, 3 invalid or inconclusive, 4 wrong outputs."""

_REPORT: Final = "p50,p95,p99,p999,throughput,jitter,error_rate,cpu,memory,gpu_util,gpu_mem"
_REPEAT: Final = 2000
_OPEN_S: Final = 30.0
_ROUND_S: Final = 10.0


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
    parser.add_argument("target", metavar="TARGET", type=_target, help=f"module:function, {endpoint.FORMS}")
    _subject(parser)
    _amount(parser)
    _check(parser)
    _out(parser)


def _subject(parser: argparse.ArgumentParser) -> None:
    subject = parser.add_argument_group("what is measured (recorded; a function gets what it asks for by these names)")
    subject.add_argument("--model", help="name of the model, or its file, which is then hashed")
    subject.add_argument("--precision", default="fp32", help=f"{', '.join(golden.PRECISIONS)}: decides how exact outputs must be (fp32)")
    subject.add_argument("--batch-size", type=quantities.count, metavar="N", help="inputs a call; more than 1 gives a function a list")
    subject.add_argument("--input-len", type=quantities.checked(lengths.parse_lengths), metavar="L",
                         help=f"{lengths.FORMS}; drawn for each request by --seed")  # fmt: skip
    subject.add_argument("--inputs", type=Path, metavar="FILE", help="one JSON value a line: bodies to POST, or arguments; none means GET")


def _amount(parser: argparse.ArgumentParser) -> None:
    amount = parser.add_argument_group("how much load")
    amount.add_argument("--mode", choices=("open", "closed"), help="default open when --rate is given")
    amount.add_argument("--rate", type=quantities.rate, metavar="R", help="requests a second")
    amount.add_argument("--arrival", default="poisson", metavar="HOW", help="poisson, constant or trace:FILE (poisson)")
    amount.add_argument(
        "--concurrency",
        "--max-inflight",
        type=quantities.count,
        metavar="N",
        help="closed: clients (1); open: connections or threads at most (256, 32)",
    )
    amount.add_argument(
        "--ladder", type=quantities.ladder, metavar="1,2,4", help="one run each: clients, or requests a second with --mode open"
    )
    amount.add_argument("--find-knee", action="store_true", help="double the clients until more of them bring no more throughput")
    amount.add_argument("--find-max-rate", "--find-max-qps", action="store_true", help="search the highest rate at which every --slo holds")
    amount.add_argument("--generators", type=quantities.count, default=1, metavar="N", help="generator processes that share the load (1)")
    amount.add_argument("--baseline", type=quantities.whole, default=20, metavar="N",
                        help="requests one at a time before the load, after a look at the idle service; 0 leaves both out (20)")  # fmt: skip
    amount.add_argument(
        "--timeout",
        type=quantities.seconds,
        default=10.0,
        metavar="T",
        help="a target, or a call, that answers nothing for so long is given up (10s)",
    )
    amount.add_argument("--locust", type=Path, metavar="FILE", help="write a Locust scenario with the same arrivals instead, see --workers")
    amount.add_argument("--workers", type=quantities.whole, metavar="N",
                        help="run the scenario: as the master of N workers, which connect from anywhere; 0 runs it here alone")  # fmt: skip
    amount.add_argument("--warmup", type=_warm_up, default=None, metavar="auto|N", help="leading requests to leave out (auto: MSER-5)")
    amount.add_argument("--cold-start", action="store_true", help="leave nothing out and ask nothing before: as --warmup 0 --baseline 0")
    amount.add_argument("--repeat", type=quantities.count, metavar="N", help=f"requests to measure ({_REPEAT} in a closed loop)")
    amount.add_argument(
        "--duration", type=quantities.seconds, metavar="T", help=f"time to measure, as in 30s ({_OPEN_S:g}s in an open loop)"
    )
    amount.add_argument("--until", type=quantities.checked(parse_precision), metavar="P99±5%%",
                        help="measure on, twice as long each time, until half the interval of a percentile is so small, or --max-time")  # fmt: skip
    amount.add_argument("--max-time", type=quantities.seconds, default=600.0, metavar="T", help="a run ends then at the latest (600s)")
    amount.add_argument("--seed", type=int, default=0, help="of arrivals and the order of inputs (0)")


def _check(parser: argparse.ArgumentParser) -> None:
    check = parser.add_argument_group("what must hold")
    check.add_argument(
        "--slo",
        "--sla",
        type=quantities.checked(acceptance.parse_objective),
        action="append",
        default=[],
        metavar="OBJECTIVE",
        help='as in "p99<=20ms"; may be repeated',
    )
    check.add_argument("--accept", type=quantities.checked(acceptance.parse_objective), action="append", default=[], metavar="OBJECTIVE",
                       help="as --slo, and write an acceptance record")  # fmt: skip
    check.add_argument("--release", metavar="NAME", help="what is accepted (default: the commit)")
    check.add_argument("--acceptance", type=Path, metavar="FILE", help="where the record goes (acceptance.json)")
    check.add_argument("--golden", type=Path, metavar="FILE", help="outputs must agree with these")
    check.add_argument("--save-golden", type=Path, metavar="FILE", help="keep the outputs of the first inputs as golden ones")
    check.add_argument("--rtol", type=quantities.automatic, metavar="auto|X", help="relative tolerance (by precision)")
    check.add_argument("--atol", type=quantities.automatic, metavar="auto|X", help="absolute tolerance (by precision)")
    check.add_argument("--ci", type=quantities.level, default=0.95, metavar="P", help="level of all intervals and bounds in percent (95)")
    check.add_argument("--blocks", type=quantities.blocks, metavar="N",
                       help="into how many spans of time a run is cut for its intervals, at least 20 (one a second)")  # fmt: skip
    check.add_argument(
        "--max-lag", type=quantities.seconds, default=1e-3, metavar="T", help="P99 of the generator's own lateness that is bearable (1ms)"
    )


def _out(parser: argparse.ArgumentParser) -> None:
    out = parser.add_argument_group("what to write")
    out.add_argument("--report", type=_report, default=_REPORT.split(","), metavar="P,Q", help=f"what to show ({_REPORT})")
    out.add_argument("-o", "--output", type=Path, metavar="FILE", help="the run with every request, for compare and history")
    out.add_argument("--md", nargs="?", const="-", metavar="FILE", help="as Markdown")
    out.add_argument("--html", metavar="FILE", help="a page with tables and curves that needs nothing else")
    out.add_argument("--hgrm", metavar="FILE", help="percentiles for HdrHistogram's plotter, without the warm-up; of a closed loop "
                     "also corrected ones, in NAME.corrected.hgrm")  # fmt: skip
    out.add_argument("--perfetto", metavar="FILE", help="the slowest requests on a time line beside CPU and memory, for ui.perfetto.dev")
    out.add_argument("--junit", metavar="FILE", help="objectives and outputs as JUnit XML")
    out.add_argument("--pid", type=int, help="process of the service, for CPU and memory (default: the one that listens here)")
    out.add_argument("--price", type=quantities.price, metavar="P", help="of an hour of the machine, for the cost of a million requests")
    out.add_argument("--state-dir", metavar="DIR", help="of a service with inferscope in it: its attribution of the tail is read there")


def _target(value: str) -> str:
    if not is_address(value) and not re.fullmatch(r"[\w.]+:[\w.]+", value):
        raise argparse.ArgumentTypeError(f"{value!r} is neither module:function nor {endpoint.FORMS}")
    return value


def _plan(options: argparse.Namespace) -> LoadPlan:
    """The plan of a run without its ladder; warm-up comes on top of what is to be measured."""
    mode: Literal["open", "closed"] = options.mode or ("open" if options.rate or options.find_max_rate else "closed")
    if sum(map(bool, (options.ladder, options.find_knee, options.find_max_rate))) > 1:
        raise ConfigurationError("ladder", options.ladder, "one of --ladder, --find-knee and --find-max-rate")
    if options.find_max_rate and (mode == "closed" or not [*options.slo, *options.accept]):
        raise ConfigurationError("find-max-rate", "on", "an open loop and an --slo that must hold")
    if options.until and (options.ladder or options.find_knee or options.find_max_rate or options.locust):
        raise ConfigurationError("until", options.until.text, "one load by our own generators: no ladder, no search, no --locust")
    if options.input_len is not None and options.input_len.fixed is None and not _takes_lengths(options):
        form = "a module:function that takes input_len, or triton:// without --inputs; elsewhere --inputs decides how long inputs are"
        raise ConfigurationError("input-len", options.input_len.text, form)
    if mode == "open" and not (options.rate or options.ladder or options.find_max_rate):
        raise ConfigurationError("mode", "open", "an open loop needs --rate")
    if mode == "closed" and options.rate:
        raise ConfigurationError("rate", options.rate, "a closed loop has no rate; leave it out or say --mode open")
    rate = options.rate or 1.0
    address = is_address(options.target)
    connections = options.concurrency or (1 if mode == "closed" else 256 if address else 32)
    repeat = options.repeat or (_REPEAT if mode == "closed" and not options.duration else 0)
    extra = max(200, repeat // 4) if options.warmup is None else options.warmup
    if repeat:
        seconds, requests = ((repeat + extra) / rate * 2 + 5 if mode == "open" else options.max_time), repeat + extra
    else:
        measured = options.duration or (_ROUND_S if options.until else _OPEN_S)
        seconds, requests = measured * 1.25 if options.warmup is None else measured + (extra / rate if mode == "open" else 0.0), 0
    return LoadPlan(
        options.target, rate, min(seconds, options.max_time), options.seed, options.arrival, connections, options.timeout, mode, requests
    )


def _takes_lengths(options: argparse.Namespace) -> bool:
    """Whether lengths can be drawn for the target's inputs."""
    return not is_address(options.target) or (options.target.startswith("triton:") and options.inputs is None)


def run(options: argparse.Namespace) -> int:
    """Measure; the exit code says what did not hold."""
    if options.cold_start:
        options.warmup, options.baseline = 0, 0
    objectives: list[acceptance.Objective] = [*options.slo, *options.accept]
    expected = golden.read(options.golden) if options.golden else None
    try:
        plan = _plan(options)
    except ConfigurationError as error:
        sys.stderr.write(f"inferscope bench: {error}\n")
        return 64
    inputs = read_inputs(options.inputs)
    if options.locust:
        return via_locust.write(options, plan, inputs)
    progress = Progress(quiet=options.json == "-")
    with Session(options, inputs, objectives, progress) as session:
        if options.ladder or options.find_knee or options.find_max_rate:
            return climbing.run(options, plan, session, inputs, objectives)
        outputs = session.outputs()
        result, outside = session.measure(plan)
    found = document(options, plan, inputs, result, outside, session.baseline)
    return _judged(options, found, result, outputs or outside.get("outputs", []), expected, objectives, inputs)


def _judged(
    options: argparse.Namespace,
    found: dict[str, Any],
    result: LoadResult,
    outputs: list[Any],
    expected: dict[str, Any] | None,
    objectives: list[acceptance.Objective],
    inputs: Inputs,
) -> int:
    """Objectives and outputs, what is written and shown, and the exit code."""
    verdicts = accepted(objectives, result, found)
    inside = found.pop("trace")  # large, and for --perfetto alone
    found["acceptance"] = [{**each.to_json(), "text": each.text()} for each in verdicts]
    agreement = _agreement(options, found, expected, outputs, inputs)
    if options.save_golden:
        golden.save(options.save_golden, outputs, precision=options.precision, inputs_sha256=inputs.sha256)
    if options.output:
        runs.save(options.output, found, result)
    if options.accept:
        release.write(options, found, result)
    run_files.write(options, found, result, inside)
    _show(options, found)
    if agreement is not None and not agreement.correct:
        return 4
    if found["metrics"]["requests"] == found["metrics"]["failed"]:
        raise ServiceError(_nothing(options.target, result, found))
    if found["partial"]:
        sys.stderr.write(f"inferscope bench: {options.target}: {result.stopped}; what was measured before is kept and marked partial\n")
        return 1
    unsure = found["problems"] or (found["until"] is not None and not found["until"]["reached"])
    return 3 if unsure else acceptance.exit_code(verdicts)


def _agreement(
    options: argparse.Namespace, found: dict[str, Any], expected: dict[str, Any] | None, outputs: list[Any], inputs: Inputs
) -> golden.Agreement | None:
    """How the outputs compare with the golden ones; None when there are none."""
    if expected is None:
        return None
    agreement = golden.agree(expected["outputs"], outputs, golden.tolerance(options.precision, options.rtol, options.atol))
    if expected.get("inputs_sha256", inputs.sha256) != inputs.sha256:
        agreement.wrong = max(agreement.wrong, 1)
        agreement.problems.insert(0, "these are not the inputs that the golden outputs were made from")
    found["golden"] = {**agreement.to_json(), "text": agreement.text(), "sha256": found["settings"]["golden_sha256"]}
    return agreement


def _nothing(target: str, result: LoadResult, found: dict[str, Any]) -> str:
    errors: dict[str, int] = found["errors"]
    kinds = ", ".join(f"{name} {count} times" for name, count in errors.items())
    codes = result.summary()["status"]
    stopped = f"; {result.stopped}" if result.stopped else ""
    return f"{target}: no request was answered well ({kinds or ', '.join(f'status {code}: {count}' for code, count in codes.items())}){stopped}"


def _show(options: argparse.Namespace, found: dict[str, Any]) -> None:
    if options.md:
        text.put("--md", options.md, text.run_markdown(found, options.report))
    if options.junit:
        text.put("--junit", options.junit, text.junit(found["settings"]["target"], text.run_cases(found)))
    shown = "" if options.md == "-" else "\n".join(text.run_lines(found, options.report))
    emit(options, found, shown)
