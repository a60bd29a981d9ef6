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

from inferscope.bench.load import LoadPlan, LoadResult
from inferscope.bench.targets import ServiceError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["measure"]

_START_S = 120.0


def measure(
    plan: LoadPlan, target: str, settings: dict[str, Any], inputs: Sequence[Any], *, golden: bool, limit_s: float
) -> tuple[LoadResult, dict[str, Any]]:
    """Run the plan on `module:function` in a new interpreter, with inferscope configured in it.

    Args:
        plan: how to call; `connections` threads.
        target: `module:function`, importable from the working directory.
        settings: values for the names that the function may ask for.
        inputs: what it is given, JSON values.
        golden: whether to keep its outputs for the first inputs.
        limit_s: how long all of it may take, besides two minutes to import and load.

    Returns:
        The load, and what else the child says: outputs, errors, cpu_cores, memory, stages.

    Raises:
        ServiceError: it could not be imported or called, died, or did not end in time; one line that says which.
    """
    with tempfile.TemporaryDirectory(prefix="inferscope-bench-") as folder:
        ask, answer, log = (Path(folder, name) for name in ("ask.json", "answer.json", "log"))
        ask.write_text(
            json.dumps({"plan": asdict(plan), "target": target, "settings": settings, "inputs": list(inputs), "golden": golden}), "utf-8"
        )
        command = [sys.executable, "-m", "inferscope.cli.target", str(ask), str(answer), str(Path(folder, "state"))]
        try:
            with log.open("wb") as output:
                done = subprocess.run(
                    command, check=False, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, timeout=limit_s + _START_S
                )
        except subprocess.TimeoutExpired:
            raise ServiceError(f"{target} did not finish within {limit_s + _START_S:g} s; its process was ended") from None
        if not answer.exists():
            raise ServiceError(f"{target}: {_ended(done.returncode)}; the end of its output: {_tail(log)}")
        found: dict[str, Any] = json.loads(answer.read_text("utf-8"))
    if "error" in found:
        raise ServiceError(str(found["error"]))
    return LoadResult.from_json(found.pop("load")), found


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
