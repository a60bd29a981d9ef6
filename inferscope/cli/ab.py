"""`inferscope ab`: two versions in one session, block by block in turn; the comparison that may be called verified."""

from __future__ import annotations

import contextlib
import hashlib
import shlex
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from inferscope.bench import compare, golden, interleave, probe, runs
from inferscope.bench.compare import INCOMPARABLE, INCONCLUSIVE, INCORRECT, Verdict
from inferscope.bench.generators import Generators
from inferscope.bench.inprocess import GOLDEN
from inferscope.bench.result import LoadPlan
from inferscope.bench.targets import Service, ServiceError, free_port
from inferscope.cli import inside, proof, quantities
from inferscope.cli.output import emit
from inferscope.cli.progress import Progress
from inferscope.errors import InferscopeError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Generator, Sequence

    from inferscope.bench.compare import Block
    from inferscope.bench.result import LoadResult

HELP = """Compare two versions of a service, started by commands, in blocks that take turns: A B B A A B …

{port} in the commands and the URL is a free port on 127.0.0.1. Judged at --pairs pairs of blocks and, while a metric is undecided,
each time their number has doubled, up to --max-time. Outputs are compared first: a version that answers otherwise is not faster.
Exit: 0 nothing is worse, 1 regressed or failed, 3 undecided, 4 other outputs, 5 the machine changed meanwhile."""

_LAGGING: Final = 0.25
"""So many blocks may be generator-bound before the comparison says nothing."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this verb."""
    parser.add_argument("--a", required=True, metavar="CMD", help="what starts the version that is there, with {port}")
    parser.add_argument("--b", required=True, metavar="CMD", help="what starts the candidate, with {port}")
    parser.add_argument("--url", default="http://127.0.0.1:{port}/", help="what is asked (http://127.0.0.1:{port}/)")
    parser.add_argument("--health", default="/healthz", metavar="PATH", help="answers 200 once it serves (/healthz)")
    parser.add_argument(
        "--start-time", type=quantities.seconds, default=120.0, metavar="T", help="a version may take so long to serve (120s)"
    )
    parser.add_argument(
        "--alternate", action="store_true", help="start and stop a version for each block, when both do not fit side by side"
    )
    parser.add_argument("--inputs", type=Path, metavar="FILE", help="one JSON body a line to POST; none means GET")
    parser.add_argument("--rate", type=quantities.rate, metavar="R", help="requests a second, open loop; without it, a closed loop")
    parser.add_argument(
        "--concurrency", type=quantities.count, metavar="N", help="clients of a closed loop (1); connections of an open one (256)"
    )
    parser.add_argument("--block", type=quantities.seconds, default=5.0, metavar="T", help="length of a block (5s)")
    parser.add_argument("--settle", type=quantities.seconds, default=0.5, metavar="T", help="left out at the beginning of a block (500ms)")
    parser.add_argument("--warmup", type=quantities.seconds, default=5.0, metavar="T", help="load before the first block of a version (5s)")
    parser.add_argument(
        "--pairs",
        "--blocks",
        type=quantities.blocks,
        default=interleave.LEAST_PAIRS,
        metavar="N",
        help="before the first look, at least 20 (20)",
    )
    parser.add_argument(
        "--order", choices=("abba",), default="abba", help="of the blocks: A B, then B A, so that a steady drift cancels (abba)"
    )
    parser.add_argument("--no-extend", action="store_true", help="judge once, at --pairs pairs, with a little more of the 5 %% to spend")
    parser.add_argument("--max-time", type=quantities.seconds, default=1800.0, metavar="T", help="no pair starts later (30m)")
    quantities.gate_arguments(parser)
    parser.add_argument("--precision", default="fp32", help=f"{', '.join(golden.PRECISIONS)}: how exact outputs must agree (fp32)")
    parser.add_argument("--rtol", type=quantities.automatic, metavar="auto|X", help="relative tolerance (by precision)")
    parser.add_argument("--atol", type=quantities.automatic, metavar="auto|X", help="absolute tolerance (by precision)")
    parser.add_argument("--ignore-outputs", action="store_true", help="do not compare what the versions answer")
    parser.add_argument(
        "--max-lag", type=quantities.seconds, default=1e-3, metavar="T", help="bearable P99 of the generator's own lateness (1ms)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of arrivals, inputs and resampling (0)")
    parser.add_argument("--run", type=Path, metavar="FILE", help="a run of version a by 'inferscope bench', for the evidence")
    parser.add_argument("--md", nargs="?", const="-", metavar="FILE", help="as Markdown")
    parser.add_argument("--junit", metavar="FILE", help="as JUnit XML")
    parser.add_argument(
        "--no-inside",
        action="store_true",
        help="do not ask the inferscope in the versions, if there is one, why their tails are what they are",
    )
    proof.arguments(parser)


@dataclass(slots=True)
class _Version:
    """One of the two: its process, where it is asked, and whether it has been warmed."""

    name: interleave.Arm
    service: Service
    url: str
    within: inside.Inside
    """Its own state directory, where an inferscope in it keeps evidence."""


def _version(options: argparse.Namespace, name: interleave.Arm, scratch: Path) -> _Version:
    command = options.a if name == "a" else options.b
    if "{port}" not in command:
        raise InferscopeError(f"--{name} {command}: has no {{port}}, so it cannot be told where to listen")
    port = free_port()
    try:
        words = [word.replace("{port}", str(port)) for word in shlex.split(command)]
    except ValueError as error:
        raise InferscopeError(f"--{name} {command}: {error}") from error
    state = scratch / f"state-{name}"
    state.mkdir()
    environment = {"INFERSCOPE_STATE_DIR": str(state)}
    service = Service(words, port, environment, Path.cwd(), scratch / f"{name}.log", options.start_time, options.health)
    return _Version(name, service, options.url.replace("{port}", str(port)), inside.Inside(state))


def _start(version: _Version) -> None:
    try:
        version.service.start()
    except OSError as error:
        raise ServiceError(f"version {version.name}: {version.service.command[0]} cannot be started ({error.strerror})") from error
    except ServiceError as error:
        raise ServiceError(f"version {version.name}: {error}") from error


@dataclass(slots=True)
class _Session:
    """Both versions under one plan."""

    options: argparse.Namespace
    bodies: tuple[bytes, ...]
    versions: dict[interleave.Arm, _Version]
    generators: Generators
    lagging: list[str] = field(default_factory=list[str])
    results: dict[interleave.Arm, list[LoadResult]] = field(default_factory=lambda: {"a": [], "b": []})
    """Every request of every block."""
    blocks: int = 0

    def plan(self, version: _Version, seconds: float) -> LoadPlan:
        """The load of a block."""
        options = self.options
        mode: Literal["open", "closed"] = "open" if options.rate else "closed"
        connections = options.concurrency or (256 if options.rate else 1)
        return LoadPlan(version.url, options.rate or 1.0, seconds, options.seed, "poisson", connections, 10.0, mode)

    @contextlib.contextmanager
    def serving(self, version: _Version) -> Generator[None]:
        """With `--alternate` the version runs, warm, inside the block only; else it runs anyway."""
        if not self.options.alternate:
            yield
            return
        try:
            _start(version)
            self.warm(version)
            yield
        finally:
            version.service.stop()

    def warm(self, version: _Version) -> None:
        """Load that is not measured."""
        probe.ask(version.url, self.bodies[0] if self.bodies else None)
        self.generators.measure(self.plan(version, self.options.warmup), self.bodies)

    def block(self, arm: interleave.Arm, pair: int) -> Block:
        """Measure one block."""
        version = self.versions[arm]
        with self.serving(version):
            self.check(version)
            limit_ms = self.options.max_lag * 1e3
            plan, settle = self.plan(version, self.options.block), self.options.settle
            found, bound = interleave.measure_block(partial(self._measured, arm), plan, self.bodies, pair, settle, limit_ms=limit_ms)
            self.check(version)
        self.blocks += 1
        if bound:
            self.lagging.append(bound)
        return found

    def _measured(self, arm: interleave.Arm, plan: LoadPlan, bodies: Sequence[bytes]) -> LoadResult:
        self.results[arm].append(self.generators.measure(plan, bodies))
        return self.results[arm][-1]

    @staticmethod
    def check(version: _Version) -> None:
        """Raise when the version has ended."""
        try:
            version.service.check()
        except ServiceError as error:
            raise ServiceError(f"version {version.name}: {error}") from error

    def causes(self) -> dict[str, Any]:
        """Why each version's tail is what it is, where there is an inferscope in it that says."""
        found: dict[str, Any] = {}
        for name, version in self.versions.items():
            if version.within.there:
                once = replace(self.plan(version, 10.0), mode="closed", connections=1, requests=inside.EXTRA)
                found[name] = version.within.ask(partial(self.generators.measure, once, self.bodies))
        return found

    def outputs(self) -> golden.Agreement:
        """Whether both answer the same."""
        answers: dict[str, list[Any]] = {}
        for name, version in self.versions.items():
            with self.serving(version):
                answers[name] = probe.answers(version.url, self.bodies[:GOLDEN])
        rule = golden.tolerance(self.options.precision, self.options.rtol, self.options.atol)
        return golden.agree(answers["a"], answers["b"], rule)


def run(options: argparse.Namespace) -> int:
    """Compare them; the exit code is that of the worst verdict."""
    options.gate = quantities.gates(options, "ab")
    if options.settle >= options.block:
        sys.stderr.write(f"inferscope ab: --settle {options.settle:g}s leaves nothing of a block of {options.block:g}s\n")
        return 64
    bodies = quantities.lines(options.inputs) if options.inputs else ()
    progress = Progress(quiet=options.json == "-" or options.md == "-")
    before = runs.machine()
    with _orderly(), tempfile.TemporaryDirectory(prefix="inferscope-ab-") as scratch, Generators() as generators:
        value, verdicts, results = _compare(options, bodies, Path(scratch), generators, progress)
        after = runs.machine()
        if before["sha256"] != after["sha256"]:
            changed = ", ".join(name for name in before if before[name] != after.get(name) and name != "sha256")
            verdicts.insert(0, _whole("machine", INCOMPARABLE, f"changed meanwhile: {changed}"))
        value |= {"fingerprint": before, "written_unix_ns": time.time_ns(), "verdicts": [each.to_json() for each in verdicts]}
        cause: dict[str, Any] = value.get("inside", {}).get("a", {})
        incident = Path(cause["path"]) if cause.get("path") else None
        kept = proof.write(options, value, incident=incident, **_runs(options, value, results, Path(scratch)))
        if kept is not None:
            value["evidence"] = kept
    value.pop("samples", None)  # every request of every block is in the evidence, and nowhere else
    _show(options, value, verdicts)
    return compare.exit_code(verdicts)


def _runs(
    options: argparse.Namespace, value: dict[str, Any], results: dict[interleave.Arm, list[LoadResult]], scratch: Path
) -> dict[str, Path]:
    """The runs for the evidence: that of --run, else the blocks of each version as one run."""
    if options.evidence is None:
        return {}
    found: dict[str, Path] = {} if options.run is None else {"run": options.run}
    names: tuple[tuple[interleave.Arm, str], ...] = (("a", "run"), ("b", "candidate"))
    for arm, name in names:
        if results[arm] and name not in found:
            found[name] = scratch / f"{name}.json"
            proof.save_blocks(found[name], str(value[arm]), results[arm], value)
    return found


@contextlib.contextmanager
def _orderly() -> Generator[None]:
    """SIGTERM unwinds, so that the services that were started end too."""

    def end(number: int, _: object) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _whole(metric: str, word: str, why: str) -> Verdict:
    return Verdict(metric, word, None, None, None, None, None, 0.95, 0.0, 0, "interleaved", why)


def _compare(
    options: argparse.Namespace, bodies: tuple[bytes, ...], scratch: Path, generators: Generators, progress: Progress
) -> tuple[dict[str, Any], list[Verdict], dict[interleave.Arm, list[LoadResult]]]:
    versions: dict[interleave.Arm, _Version] = {"a": _version(options, "a", scratch), "b": _version(options, "b", scratch)}
    session = _Session(options, bodies, versions, generators)
    value: dict[str, Any] = {
        "schema": 1,
        "kind": "inferscope.comparison",
        "method": "interleaved",
        "order": options.order,
        "a": options.a,
        "b": options.b,
        "gates": [asdict(gate) for gate in options.gate],
        "extend": not options.no_extend,
        "seed": options.seed,
        "inputs_sha256": hashlib.sha256(b"\n".join(bodies)).hexdigest() if bodies else None,
    }
    with versions["a"].service, versions["b"].service:
        if not options.alternate:
            for version in versions.values():
                with progress.part(f"version {version.name}: starting, warming up", options.warmup):
                    _start(version)
                    session.warm(version)
        if not options.ignore_outputs:
            agreement = session.outputs()
            value["outputs"] = {**agreement.to_json(), "text": agreement.text()}
            if not agreement.correct:
                return value, [_whole("outputs", INCORRECT, agreement.text().removeprefix("INCORRECT, "))], session.results
        seconds = 2 * options.pairs * options.block
        with progress.part(f"blocks of {options.block:g} s in turn, {options.pairs} pairs first, at least {seconds:g} s", seconds):
            found = interleave.until_decided(
                session.block, options.gate, pairs=options.pairs, extend=not options.no_extend, max_s=options.max_time, seed=options.seed
            )
        if not options.no_inside and not options.alternate:
            with progress.part("asking the versions why their tails are what they are"):
                value["inside"] = session.causes()
    verdicts = found.verdicts
    if len(session.lagging) > _LAGGING * session.blocks:
        why = f"{len(session.lagging)} of {session.blocks} blocks are {session.lagging[-1]}"
        verdicts = [_withheld(each, why) for each in verdicts]
    value |= {"pairs": found.pairs, "looks": found.looks, "generator_bound_blocks": len(session.lagging)}
    value["samples"] = {arm: [interleave.kept(each) for each in blocks] for arm, blocks in found.blocks.items()}
    value["blocks"] = {arm: [interleave.summary(each) for each in blocks] for arm, blocks in found.blocks.items()}
    return value, verdicts, session.results


def _withheld(verdict: Verdict, why: str) -> Verdict:
    return compare.withhold(verdict, why) if verdict.word != INCONCLUSIVE else verdict


def _bottleneck(found: dict[str, Any]) -> list[str]:
    """What each tail is made of: after a fix another cause comes first."""
    causes = {name: inside.top_cause(found.get(name)) for name in ("a", "b")}
    return [f"top cause of {name}: {cause}" for name, cause in causes.items() if cause]


def _show(options: argparse.Namespace, value: dict[str, Any], verdicts: list[Verdict]) -> None:
    remarks = (
        [f"interleaved blocks, order A B B A, looks at {', '.join(map(str, value.get('looks', [])))} pairs"] if value.get("looks") else []
    )
    if verdicts[-1].metric != "outputs":
        remarks += [f"outputs {value['outputs']['text']}"] if "outputs" in value else ["outputs were not compared"]
    remarks += _bottleneck(value.get("inside", {}))
    if "evidence" in value:
        remarks.append(f"evidence: {value['evidence']['path']}, root hash {value['evidence']['root_sha256']}")
    quantities.write_verdicts(options, f"A/B: {options.a} against {options.b}", verdicts, remarks, value.get("evidence"))
    shown = "\n".join([*(each.text() for each in verdicts), *remarks])
    emit(options, value, "" if options.md == "-" else shown)
