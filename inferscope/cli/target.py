"""The process that holds a function under load: `python -m inferscope.cli.target ASK ANSWER STATE_DIR` (started by `bench`, no verb)."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from inferscope import api
from inferscope.bench import inprocess
from inferscope.bench.load import LoadPlan
from inferscope.errors import InferscopeError

__all__ = ["main"]


def _stages() -> list[dict[str, Any]]:
    """What inferscope measured inside: stages, locks, copies, queues, collections."""
    series = [each for each in api.snapshot().series if each.kind != "request" and each.count]
    return [
        {
            "name": " ".join([*([] if each.kind == "stage" else [each.kind]), *filter(None, each.labels)]),
            "count": each.count,
            "p50_ms": None if each.p50_s is None else each.p50_s * 1e3,
            "p99_ms": None if each.p99_s is None else each.p99_s * 1e3,
        }
        for each in series
    ]


def _measure(asked: dict[str, Any]) -> dict[str, Any]:
    plan = LoadPlan(**asked["plan"])
    found = inprocess.measure(plan, asked["target"], asked["settings"], asked["inputs"], golden=asked["golden"])
    api.flush(2.0)
    return {
        "load": found.load.to_json(),
        "outputs": found.outputs,
        "errors": found.errors,
        "cpu_cores": found.cpu_cores,
        "memory": found.memory,
        "stages": _stages(),
    }


def main(arguments: list[str]) -> int:
    """Measure what ASK says and write ANSWER; an error of the target's is an answer too."""
    ask, answer, state = (Path(each) for each in arguments)
    asked = json.loads(ask.read_text("utf-8"))
    sys.path.insert(0, os.getcwd())  # noqa: PTH109  (what `python -m` puts there is lost when PYTHONSAFEPATH is set)
    api.configure(service="inferscope-bench", state_dir=state, capture=False, export=False)
    try:
        found = _measure(asked)
    except (InferscopeError, ValueError) as error:
        found = {"error": f"{asked['target']}: {error}" if asked["target"] not in str(error) else str(error)}
    finally:
        api.shutdown(1.0)
    temporary = answer.with_suffix(".tmp")
    temporary.write_text(json.dumps(found), "utf-8")
    temporary.rename(answer)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
