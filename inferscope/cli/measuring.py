"""A target under load, for the verbs that measure: asked whether it answers, looked at while it works, and what it says of itself."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from inferscope.bench import acceptance, child, endpoint, hardware, metrics, runs
from inferscope.bench.fingerprint import file_sha256, source
from inferscope.bench.generators import Generators
from inferscope.bench.inprocess import GOLDEN, IDLE_S, SINGLE_S, baseline_of
from inferscope.bench.precision import rounds
from inferscope.bench.process import listening
from inferscope.bench.resources import Cards, Sampler, summary
from inferscope.cli import inside, quantities

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from typing_extensions import Self

    from inferscope.bench.precision import Precision
    from inferscope.bench.result import LoadPlan, LoadResult
    from inferscope.cli.progress import Progress

__all__ = ["Inputs", "Session", "document", "is_address", "latency_objective", "read_inputs"]

_LOCAL: Final = frozenset({"localhost", "127.0.0.1", "::1"})
_DRAWN: Final = 4096


@dataclass(frozen=True, slots=True)
class Inputs:
    """The lines of a file of inputs, and their hash."""

    lines: tuple[bytes, ...]
    sha256: str | None

    def values(self) -> list[Any]:
        """As JSON values."""
        return [json.loads(line) for line in self.lines]


def read_inputs(path: Path | None) -> Inputs:
    """The inputs, none without a file."""
    if path is None:
        return Inputs((), None)
    lines = quantities.lines(path)
    return Inputs(lines, hashlib.sha256(b"\n".join(lines)).hexdigest())


def is_address(target: str) -> bool:
    """Whether a target is asked over a network; else it is a function."""
    return urlsplit(target).scheme in endpoint.SCHEMES


def latency_objective(objectives: Sequence[acceptance.Objective]) -> dict[str, float] | None:
    """The first latency objective as keywords of `inferscope.SLO`, for the attribution of the tail."""
    return next(({f"{each.metric}_ms": each.limit} for each in objectives if each.metric in {"p95", "p99", "p999"}), None)


class Session:
    """One target, from the first question to the last load; use it in a with-block.

    Args:
        options: of `bench`.
        inputs: what is sent.
        objectives: what must hold.
        progress: where it is shown what goes on.
    """

    def __init__(self, options: argparse.Namespace, inputs: Inputs, objectives: Sequence[acceptance.Objective], progress: Progress) -> None:
        self._options, self._inputs, self._progress = options, inputs, progress
        self._objectives = objectives
        self._checked = bool(options.golden or options.save_golden)
        self._cards = Cards()
        self._pid: int | None = options.pid
        self._stack = contextlib.ExitStack()
        self.endpoint: endpoint.Endpoint | None = None
        self.baseline: dict[str, Any] | None = None

    def __enter__(self) -> Self:
        """Find the target."""
        options = self._options
        if is_address(options.target):
            batch, length = options.batch_size or 1, _lengths(options)
            self.endpoint = endpoint.resolve(options.target, self._inputs.lines, batch=batch, input_len=length, seed=options.seed)
            self.endpoint.check()
            self._pid = self._pid or _local_pid(options.target)
        self._stack.callback(self._cards.close)
        self._generators = self._stack.enter_context(Generators(options.generators))
        return self

    def __exit__(self, *_: object) -> None:
        """End the generators, let go of the driver."""
        self._stack.close()

    def outputs(self) -> list[Any]:
        """What an address answers to the golden inputs."""
        return self.endpoint.answers(GOLDEN) if self.endpoint is not None and self._checked else []

    def measure(self, plan: LoadPlan) -> tuple[LoadResult, dict[str, Any]]:
        """The load, and what is known beside it; both baselines come before the first load."""
        what = f"{plan.rate:g} requests/s" if plan.mode == "open" else f"{plan.connections} clients"
        label, seconds = f"{self._options.target}: {what}", None if plan.requests else plan.seconds
        if self.endpoint is None:
            with self._progress.part(label, seconds):
                result, found = self._function(plan)
            self.baseline = self.baseline or found.get("baseline")
            return result, found
        self.rest(plan)
        with self._progress.part(label, seconds):
            return self._address(self.endpoint, plan)

    def rest(self, plan: LoadPlan) -> None:
        """Both baselines of an address, once."""
        if self.endpoint is not None and self.baseline is None and self._options.baseline:
            with self._progress.part(f"{self._options.target}: idle, and one request at a time"):
                self.baseline = self._baselines(plan)

    def _function(self, plan: LoadPlan) -> tuple[LoadResult, dict[str, Any]]:
        options = self._options
        settings = {name: getattr(options, name) for name in ("batch_size", "precision", "model", "seed")}
        drawn = _lengths(options)
        settings |= {"input_len": drawn} if drawn is None or isinstance(drawn, int) else {"input_len": drawn[0], "input_lens": drawn}
        baseline = options.baseline if self.baseline is None else 0
        return child.measure(
            plan,
            options.target,
            settings,
            self._inputs.values(),
            golden=self._checked,
            limit_s=options.max_time,
            baseline=baseline,
            objective=latency_objective(self._objectives),
            until=_until(options),
            trace=bool(options.perfetto),
        )

    def _address(self, found: endpoint.Endpoint, plan: LoadPlan) -> tuple[LoadResult, dict[str, Any]]:
        options = self._options
        within = inside.Inside(Path(options.state_dir)) if options.state_dir else None
        before = found.totals()
        with Sampler(self._pid, self._cards) as sampler:
            result = self._rounds(replace(plan, url=found.url), found.bodies)
        outside: dict[str, Any] = {
            "resources": {**summary(sampler.samples), "began_ns": sampler.began_ns},
            "stages": _stages(before, found.totals()),
        }
        if within is not None and not result.stopped:
            once = replace(plan, url=found.url, mode="closed", connections=1, requests=inside.EXTRA, seconds=10.0)
            outside["inside"] = within.ask(lambda: self._generators.measure(once, found.bodies))
        return replace(result, plan=plan), outside

    def _rounds(self, plan: LoadPlan, bodies: Sequence[bytes]) -> LoadResult:
        """The load; with `--until`, as often as it takes."""
        options = self._options
        if options.until is None:
            return self._generators.measure(plan, bodies)
        precision: Precision = replace(options.until, level=options.ci)

        def enough(result: LoadResult) -> bool:
            return precision.reached(result, metrics.warm_up(result, options.warmup)[0], options.blocks)

        return rounds(lambda each: self._generators.measure(each, bodies), plan, enough, options.max_time)

    def _baselines(self, plan: LoadPlan) -> dict[str, Any]:
        assert self.endpoint is not None  # noqa: S101  (functions measure their own)
        with Sampler(self._pid, self._cards, 0.1) as idle:
            time.sleep(IDLE_S)
        single = replace(
            plan, url=self.endpoint.url, mode="closed", connections=1, requests=self._options.baseline, seconds=SINGLE_S, process="poisson"
        )
        result = self._generators.measure(single, self.endpoint.bodies)
        latency = ((result.done_ns - result.intended_ns)[result.fine] / 1e6).tolist()
        return baseline_of(summary(idle.samples), latency)


_DISTINCT: Final = 64
"""So many random inputs are made for an address whose lengths are drawn; a function gets a new one each time."""


def _lengths(options: argparse.Namespace) -> int | list[int] | None:
    """The length of inputs, or one for each request, over and over."""
    asked = options.input_len
    if asked is None or asked.fixed is not None:
        return None if asked is None else int(asked.fixed)
    return [int(each) for each in asked.draw(_DISTINCT if is_address(options.target) else _DRAWN, options.seed)]


def _until(options: argparse.Namespace) -> dict[str, Any] | None:
    """How closely a percentile is to be known, for the process that holds a function."""
    if options.until is None:
        return None
    return {"text": options.until.text, "level": options.ci, "blocks": options.blocks, "warmup": options.warmup}


def _local_pid(target: str) -> int | None:
    """The process that listens at an address of this machine."""
    parts = urlsplit(target)
    if parts.hostname not in _LOCAL:
        return None
    return listening(parts.port or (443 if parts.scheme == "https" else 80))


def _stages(before: endpoint.Totals, after: endpoint.Totals) -> list[dict[str, Any]]:
    """What a server counted inside during the load: how often and the mean; it keeps no percentiles."""
    rows: list[dict[str, Any]] = []
    for name, (count, total) in after.items():
        first = before.get(name, (0, 0.0))
        times = count - first[0]
        if times > 0:
            rows.append({"name": name, "count": times, "mean_ms": (total - first[1]) / times, "p50_ms": None, "p99_ms": None})
    return rows


def document(
    options: argparse.Namespace,
    plan: LoadPlan,
    inputs: Inputs,
    result: LoadResult,
    outside: dict[str, Any],
    baseline: dict[str, Any] | None,
) -> dict[str, Any]:
    """The run as data: settings, fingerprint, metrics, resources, and what is wrong with it."""
    events: list[tuple[int, str, int]] = [(int(at), str(kind), int(count)) for at, kind, count in outside.get("events", [])]
    cut, method = metrics.warm_up(result, options.warmup, events)
    found = metrics.describe(
        result, skip=cut, items=options.batch_size or 1, lag_limit_ms=options.max_lag * 1e3, level=options.ci, blocks=options.blocks
    )
    until = None if options.until is None else replace(options.until, level=options.ci).to_json(result, cut, options.blocks)
    resources: dict[str, Any] = outside.get("resources") or {}
    problems = [problem for problem in (result.stopped and f"partial: {result.stopped}", found["generator_bound"]) if problem]
    return {
        "written_unix_ns": time.time_ns(),
        "settings": _settings(options, plan, inputs),
        "source": source(Path.cwd()),
        "fingerprint": runs.machine(),
        "conditions": hardware.conditions(),
        "warmup": {"cut": cut, "method": method, "events": events},
        "metrics": found,
        "cost_per_million": metrics.cost_per_million(options.price, found["throughput"]["requests_per_s"]),
        "problems": problems,
        "valid": not problems,
        "partial": bool(result.stopped),
        "until": until,
        "process": {name: resources.get(name) for name in ("cpu_cores", "host_cpu_cores", "memory")},
        "device": _device(resources.get("device"), outside.get("device")),
        "curve": resources.get("curve", []),
        "curve_began_ns": resources.get("began_ns"),
        "baseline": baseline,
        "errors": outside.get("errors", {}),
        "stages": outside.get("stages", []),
        "inside": outside.get("inside"),
        "trace": outside.get("trace", []),
    }


def _device(driver: dict[str, Any] | None, own: dict[str, Any] | None) -> dict[str, Any] | None:
    """What the driver tells of the cards, beside what the process itself knows of the devices that it uses."""
    if driver is None and own is None:
        return None
    empty = {"utilization": None, "busy": None, "memory": None, "source": None}
    return {**(driver or empty), "devices": own["devices"] if own is not None else []}


def _settings(options: argparse.Namespace, plan: LoadPlan, inputs: Inputs) -> dict[str, Any]:
    return {
        "target": options.target,
        **{name: getattr(options, name) for name in ("model", "precision", "batch_size", "ci", "blocks")},
        "input_len": None if options.input_len is None else options.input_len.fixed or options.input_len.text,
        "input_len_sha256": None if options.input_len is None else options.input_len.sha256,
        **{name: value for name, value in asdict(plan).items() if name != "url"},
        "rate": plan.rate if plan.mode == "open" else None,
        "generators": options.generators,
        "price_per_hour": options.price,
        "inputs_sha256": inputs.sha256,
        "golden_sha256": file_sha256(options.golden) if options.golden else None,
        "model_sha256": file_sha256(Path(options.model)) if options.model and Path(options.model).is_file() else None,
    }
