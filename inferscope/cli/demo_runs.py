"""The variants of `inferscope demo` under load: one alone, or the fixed one in blocks that take turns with the slow one."""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from inferscope.bench import compare, golden, interleave, runs
from inferscope.bench.evidence import Evidence
from inferscope.bench.generators import Generators
from inferscope.bench.process import usage
from inferscope.bench.result import LoadPlan, LoadResult, merged
from inferscope.bench.targets import Service, ServiceError, free_port, get, post
from inferscope.capture.bundle import list_incidents
from inferscope.cli import proof
from inferscope.cli.output import state_dir
from inferscope.control import workers
from inferscope.diagnose.incident import load
from inferscope.errors import EvidenceError, InferscopeError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Generator, Sequence

    from inferscope.cli.progress import Progress
    from inferscope.types import Incident

__all__ = ["EXAMPLE", "OBJECTIVE_MS", "RATE", "ROOT", "Variant", "alone", "busy", "pair"]

ROOT: Final = Path(__file__).resolve().parents[2]
EXAMPLE: Final = "examples.risk_scoring"
OBJECTIVE_MS: Final = 20.0
RATE: Final = 70.0
"""Requests a second, where a CPU is fast enough."""
SHARE: Final = 0.25
"""Of a CPU that the slow service may need: its causes are then where they were planted, and not in the queue for an interpreter that is never free."""
WARMUP_S: Final = 4.0
CHANGE: Final = "small copies merged into one pinned staging buffer, rules swapped by reference (examples/risk_scoring/fixed.py)"
ROLLBACK: Final = "serve examples/risk_scoring/slow.py again"
_DIAGNOSIS_S: Final = 60.0
_PROBES: Final = 24
_TIMED: Final = 60
_SETTLE: Final = 0.15
"""Of a block, left out at its beginning."""


@dataclass(slots=True)
class Variant:
    """One variant, measured."""

    variant: str
    load: LoadResult
    incident: Incident | None
    opened: list[str]
    """Ids of the incidents that this run opened."""
    truth: dict[str, Any]
    answers: list[Any]
    rate: float | None = None
    """Requests a second while it was asked; blocks that take turns leave pauses."""
    refused: str = ""
    """Why the service opened no incident for what it saw broken; empty when it did, or saw nothing."""


@dataclass(slots=True)
class _Served:
    """A variant's service while it runs."""

    variant: str
    service: Service
    state: Path
    known: set[Path]
    bodies: list[bytes]
    answers: list[Any]

    def finished(self, result: LoadResult) -> Variant:
        """What came of a load."""
        incident = _diagnosed(self.state, self.known)
        truth = json.loads(get(self.service.port, _truth_path(incident), 30.0)[1])
        opened = sorted(path.name for path in set(list_incidents(self.state)) - self.known)
        refused = "" if opened else _refusal(self.state, self.service.pid)
        return Variant(self.variant, result, incident, opened, truth, self.answers, result.summary()["rate"], refused)


@contextlib.contextmanager
def _serving(options: argparse.Namespace, variant: str, state: Path, scratch: Path, progress: Progress) -> Generator[_Served]:
    port = options.port if options.port and variant == options.variant else free_port()
    known = set(list_incidents(state))
    environ = {"INFERSCOPE_STATE_DIR": str(state), "INFERSCOPE_WARMUP_S": str(WARMUP_S), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", f"{EXAMPLE}.{variant}", "--port", str(port), "--device", options.device]
    command += ["--seed", str(options.seed), "--cache", str(state_dir(options) / "demo")]
    bodies = _bodies(options.seed)
    with Service(command, port, environ, ROOT, scratch / f"{variant}.log") as service:
        with progress.part(f"{variant}: starting the service (the model is trained at the first run)"):
            service.start()
        answers = [json.loads(post(port, "/score", body)[1]) for body in bodies[:_PROBES]]
        yield _Served(variant, service, state, known, bodies, answers)


def alone(options: argparse.Namespace, variant: str, progress: Progress) -> Variant:
    """One variant under load by itself."""
    with tempfile.TemporaryDirectory() as scratch_:
        scratch = Path(scratch_)
        with _serving(options, variant, state_dir(options), scratch, progress) as served:
            found = _loaded(options, served, scratch, progress)
        progress.done()
        return found


def _loaded(options: argparse.Namespace, served: _Served, scratch: Path, progress: Progress) -> Variant:
    """The variant after its load; of the slow one the diagnosis is waited for."""
    if options.rate is None:
        options.rate = _affordable(served)
    less = "" if options.rate >= RATE else f" (this machine's CPU is too slow for {RATE:g})"
    with progress.part(f"{served.variant}: {options.rate:g} requests/s for {options.seconds:g} s{less}", options.seconds):
        result = _drive(served, options, scratch)
    if served.variant == "slow":
        with progress.part("slow: waiting for the diagnosis"):
            served.service.wait_for(lambda: _diagnosed(served.state, served.known), _DIAGNOSIS_S)
    return served.finished(result)


def _affordable(served: _Served) -> float:
    """Requests a second, `RATE` or fewer, that need `SHARE` of a CPU; what one needs is measured, one after another."""
    pid = served.service.pid
    before = usage(pid)
    for body in served.bodies[_PROBES : _PROBES + _TIMED]:
        post(served.service.port, "/score", body)
    after = usage(pid)
    if before is None or after is None or after.cpu_s <= before.cpu_s:
        return RATE  # not measured here
    return min(RATE, max(1.0, float(round(SHARE * _TIMED / (after.cpu_s - before.cpu_s)))))


def pair(options: argparse.Namespace, progress: Progress) -> tuple[Variant, Variant, dict[str, Any]]:
    """The slow variant until it is explained, then both in blocks that take turns: what each is like, and the comparison."""
    with tempfile.TemporaryDirectory() as scratch_, contextlib.ExitStack() as stack:
        scratch = Path(scratch_)
        slow = stack.enter_context(_serving(options, "slow", state_dir(options), scratch, progress))
        explained = _loaded(options, slow, scratch, progress)
        # Of its own: workers of one service in one state directory would pool what they count.
        own = state_dir(options) / "demo" / "fixed"
        own.mkdir(parents=True, exist_ok=True)
        fixed = stack.enter_context(_serving(options, "fixed", own, scratch, progress))
        value, results = _in_turn(options, slow, fixed, progress)
        better = fixed.finished(merged(results["b"], results["b"][0].plan))
        better.rate = sum(each.status.size for each in results["b"]) / sum(each.plan.seconds for each in results["b"])
        value["outputs_equal"], value["outputs_compared"] = slow.answers == fixed.answers, len(slow.answers)
        value["evidence"] = _evidence(options, explained, slow, value, results)
        value.pop("samples")
        progress.done()
        return explained, better, value


def _in_turn(
    options: argparse.Namespace, slow: _Served, fixed: _Served, progress: Progress
) -> tuple[dict[str, Any], dict[interleave.Arm, list[LoadResult]]]:
    """20 pairs of blocks, A B B A, in the time of one load."""
    block_s = options.seconds / (2 * interleave.LEAST_PAIRS)
    gates = compare.parse_gates(compare.GATES)
    ports: dict[interleave.Arm, int] = {"a": slow.service.port, "b": fixed.service.port}
    results: dict[interleave.Arm, list[LoadResult]] = {"a": [], "b": []}
    late: list[str] = []
    with Generators() as generators:

        def measured(arm: interleave.Arm, plan: LoadPlan, bodies: Sequence[bytes]) -> LoadResult:
            results[arm].append(generators.measure(plan, bodies))
            return results[arm][-1]

        def block(arm: interleave.Arm, number: int) -> compare.Block:
            plan = LoadPlan(f"http://127.0.0.1:{ports[arm]}/score", options.rate, block_s, options.seed)
            found, why = interleave.measure_block(
                partial(measured, arm), plan, slow.bodies, number, _SETTLE * block_s, limit_ms=OBJECTIVE_MS / 4
            )
            late.extend([why] if why else [])
            for served in (slow, fixed):
                served.service.check()
            return found

        with progress.part(f"fixed and slow in turn: {2 * interleave.LEAST_PAIRS} blocks of {block_s:.2g} s", options.seconds):
            found = interleave.until_decided(block, gates, extend=False, max_s=86_400.0, seed=options.seed)
    agreement = golden.agree(slow.answers, fixed.answers, golden.tolerance("fp32"))
    return {
        "kind": "inferscope.comparison",
        "method": "interleaved",
        "order": "abba",
        "a": "slow",
        "b": "fixed",
        "gates": [asdict(gate) for gate in gates],
        "extend": False,
        "seed": options.seed,
        "inputs_sha256": hashlib.sha256(b"\n".join(slow.bodies)).hexdigest(),
        "looks": found.looks,
        "pairs": found.pairs,
        "generator_bound_blocks": len(late),
        "fingerprint": runs.machine(),
        "written_unix_ns": time.time_ns(),
        "outputs": {**agreement.to_json(), "text": agreement.text()},
        "verdicts": [each.to_json() for each in found.verdicts],
        "text": [each.text() for each in found.verdicts],
        "samples": {arm: [interleave.kept(each) for each in blocks] for arm, blocks in found.blocks.items()},
    }, results


def _evidence(
    options: argparse.Namespace, explained: Variant, slow: _Served, value: dict[str, Any], results: dict[interleave.Arm, list[LoadResult]]
) -> dict[str, Any] | None:
    """The chain from the objective to the comparison, kept under the state directory; None without an incident."""
    if not explained.opened:
        return None
    name = explained.opened[0]
    target = state_dir(options) / "evidence" / name
    chain = Evidence(target)
    with tempfile.TemporaryDirectory() as folder:
        run, candidate = Path(folder, "run.json"), Path(folder, "candidate.json")
        proof.save_blocks(run, f"{EXAMPLE}.slow", [explained.load], value)
        proof.save_blocks(candidate, f"{EXAMPLE}.fixed", results["b"], value)
        chain.objective([f"p99<={OBJECTIVE_MS:g}ms"])
        chain.run(run)
        incident = next(path for path in list_incidents(slow.state) if path.name == name)
        chain.incident(incident)
        chain.finding()
        chain.change(CHANGE, ROLLBACK, base=f"{EXAMPLE}.slow", candidate=f"{EXAMPLE}.fixed")
        chain.run(candidate, "candidate")
        chain.comparison({name: each for name, each in value.items() if name != "text"})
    return {"path": str(target), "root_sha256": chain.seal()}


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


def _refusal(state: Path, pid: int) -> str:
    """What keeps the service from opening an incident, in its own words."""
    for worker in workers.find(state, pid=pid):
        with contextlib.suppress(InferscopeError, KeyError):
            fleet = workers.request(worker, "status", "status", {})["result"]["fleet"]
            if fleet["waiting"]:
                return str(fleet["host_lock"])
    return ""


def _bodies(seed: int) -> list[bytes]:
    """Applicants of the data set's ranges, a JSON object each."""
    draw = random.Random(seed)  # noqa: S311  (applicants, not secrets)
    rows = [
        {"student": draw.random() < 0.3, "balance": round(draw.uniform(0, 2600), 2), "income": round(draw.uniform(800, 70000), 2)}
        for _ in range(512)
    ]
    return [json.dumps(row).encode() for row in rows]


def _drive(served: _Served, options: argparse.Namespace, scratch: Path) -> LoadResult:
    (scratch / "bodies.jsonl").write_bytes(b"\n".join(served.bodies) + b"\n")
    port, service = served.service.port, served.service
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


def busy(each: Variant) -> str | None:
    """A line when the load generator itself was starved: what its clients saw is then partly the machine's doing."""
    lag = each.load.summary()["lag_ms"]["p99"]
    if lag is None or lag <= OBJECTIVE_MS / 4:
        return None
    return f"{each.variant}: the load generator itself was late (P99 {lag:.1f} ms); the machine is busy with something else"
