"""`inferscope bench --locust FILE`: the same arrivals as a Locust scenario, written, and run on as many machines as it takes."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from inferscope.bench import acceptance, endpoint, locust, runs, text
from inferscope.bench.targets import ServiceError, free_port
from inferscope.cli.climbing import accepted
from inferscope.cli.measuring import document
from inferscope.cli.output import emit
from inferscope.errors import InferscopeError

if TYPE_CHECKING:
    import argparse

    from inferscope.bench.result import LoadPlan, LoadResult
    from inferscope.cli.measuring import Inputs

__all__ = ["write"]

_START_S: Final = 300.0


def write(options: argparse.Namespace, plan: LoadPlan, inputs: Inputs) -> int:
    """Write the scenario; with `--workers`, run it and report as a run of our own generator."""
    try:
        target = endpoint.resolve(options.target, inputs.lines) if options.target.startswith("triton:") else None
        url, bodies = (options.target, inputs.lines) if target is None else (target.url, target.bodies)
        content = locust.scenario(_at(plan, url), bodies)
    except ValueError as error:
        raise InferscopeError(str(error)) from error
    text.put("--locust", str(options.locust), content)
    if options.workers is None:
        emit(options, {"scenario": str(options.locust)}, f"{options.locust}: run it with 'locust -f {options.locust} --headless'")
        return 0
    result = _run(options, plan)
    found = document(options, plan, inputs, result, {}, None)
    objectives: list[acceptance.Objective] = [*options.slo, *options.accept]
    verdicts = accepted(objectives, result, found)
    found["acceptance"] = [{**each.to_json(), "text": each.text()} for each in verdicts]
    found["generator"] = {"name": "locust", "workers": options.workers}
    if options.output:
        runs.save(options.output, found, result)
    emit(options, found, "\n".join(text.run_lines(found, options.report)))
    return 3 if found["problems"] else acceptance.exit_code(verdicts)


def _at(plan: LoadPlan, url: str) -> LoadPlan:
    from dataclasses import replace

    return replace(plan, url=url)


def _program() -> list[str]:
    words = os.environ.get("INFERSCOPE_LOCUST", "").split() or [shutil.which("locust") or ""]
    if not words[0]:
        raise InferscopeError("--workers needs Locust: 'pip install locust', or name the program in INFERSCOPE_LOCUST")
    return words


def _run(options: argparse.Namespace, plan: LoadPlan) -> LoadResult:
    program, port = _program(), free_port()
    with tempfile.TemporaryDirectory(prefix="inferscope-locust-") as folder:
        rows, log = Path(folder, "rows.json"), Path(folder, "log")
        environment: dict[str, str] = {**os.environ, "INFERSCOPE_ROWS": str(rows), "INFERSCOPE_WORKERS": str(max(options.workers, 1))}
        words = locust.command(program, str(options.locust), options.workers, port)
        here = f"locust -f {options.locust} --worker --master-host HOST --master-port {port}"
        if options.json != "-" and options.workers:
            emit(_silent(options), {}, f"waiting for {options.workers} workers: INFERSCOPE_WORKERS={options.workers} {here}")
        with log.open("wb") as output:
            try:
                done = subprocess.run(
                    words, env=environment, check=False, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                    timeout=_START_S + plan.seconds + plan.drain_s,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                raise ServiceError(f"Locust did not finish; did {options.workers} workers connect to port {port}?") from None
        if not rows.exists():
            said = log.read_text(errors="replace").strip().splitlines()
            raise ServiceError(
                f"Locust ended with status {done.returncode} and left no rows: {said[-1][-300:] if said else 'it said nothing'}"
            )
        return locust.read_rows(rows.read_bytes(), plan)


def _silent(options: argparse.Namespace) -> Any:
    from argparse import Namespace

    return Namespace(**{**vars(options), "json": None})
