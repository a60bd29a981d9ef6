"""A function under load in a process of its own, so that its crash, its memory and its imports stay there."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inferscope.bench.inprocess import recovered
from inferscope.bench.result import LoadPlan, LoadResult
from inferscope.bench.targets import ServiceError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["HANGS", "measure"]

_START_S = 120.0
HANGS = 70
"""The status of a child whose function does not return."""


def measure(
    plan: LoadPlan,
    target: str,
    settings: dict[str, Any],
    inputs: Sequence[Any],
    *,
    golden: bool,
    limit_s: float,
    baseline: int = 0,
    objective: dict[str, float] | None = None,
    until: dict[str, Any] | None = None,
    trace: bool = False,
) -> tuple[LoadResult, dict[str, Any]]:
    """Run the plan on `module:function` in a new interpreter, with inferscope configured in it.

    Args:
        plan: how to call; `connections` threads.
        target: `module:function`, importable from the working directory.
        settings: values for the names that the function may ask for.
        inputs: what it is given, JSON values.
        golden: whether to keep its outputs for the first inputs.
        limit_s: how long all of it may take, besides two minutes to import and load.
        baseline: requests one at a time before the load, 0 for none.
        objective: the latency objective for its attribution, as keywords of `inferscope.SLO`.
        until: how closely a percentile is to be known: `text`, `level`, `blocks` and `warmup` (requests, or None); None measures the plan once.
        trace: whether to hand back the slowest requests with what inferscope saw inside, as trace events.

    Returns:
        The load, and what else the child says: outputs, errors, resources, baseline, events, stages, device, inside, trace. Of a child that died or hung
        under load, what it had measured until then, with `LoadResult.stopped`, and nothing else.

    Raises:
        ServiceError: it could not be imported or called, died before the load or did not end in time; one line that says which.
    """
    with tempfile.TemporaryDirectory(prefix="inferscope-bench-") as folder:
        ask, answer, log, spool = (Path(folder, name) for name in ("ask.json", "answer.json", "log", "spool"))
        asked = {
            "plan": asdict(plan), "target": target, "settings": settings, "inputs": list(inputs), "golden": golden, "baseline": baseline,
            "objective": objective, "until": until, "max_s": limit_s, "trace": trace, "spool": str(spool),
        }  # fmt: skip
        ask.write_text(json.dumps(asked), "utf-8")
        command = [sys.executable, "-m", "inferscope.cli.target", str(ask), str(answer), str(Path(folder, "state"))]
        why = _run(command, log, limit_s + _START_S)
        if not answer.exists():
            why = f"{target}: {why}"
            partial = recovered(plan, spool, why)
            if partial is None:
                raise ServiceError(why)
            return partial, {}
        found: dict[str, Any] = json.loads(answer.read_text("utf-8"))
    if "error" in found:
        raise ServiceError(str(found["error"]))
    return LoadResult.from_json(found.pop("load")), found


def _run(command: Sequence[str], log: Path, limit_s: float) -> str:
    """Run the child; how it ended."""
    try:
        with log.open("wb") as output:
            done = subprocess.run(command, check=False, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return f"it did not finish within {limit_s:g} s; its process was ended"
    if done.returncode == HANGS:
        return f"it hangs: {_tail(log)}"
    return f"{_ended(done.returncode)}; the end of its output: {_tail(log)}"


def _ended(status: int) -> str:
    if status >= 0:
        return f"its process ended with status {status}"
    try:
        return f"its process was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"its process was ended by signal {-status}"


def _tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1][-300:] if lines else "empty"
