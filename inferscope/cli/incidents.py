"""`inferscope incidents`: what broke, when, and why, newest first."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from inferscope.capture.bundle import list_incidents
from inferscope.cli.output import emit, state_argument, state_dir
from inferscope.diagnose.incident import load
from inferscope.errors import EvidenceError
from inferscope.report.words import milliseconds

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

HELP = "List the incidents of all services and workers, newest first."


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this verb."""
    state_argument(parser)
    parser.add_argument("--service", help="only this service's")
    parser.add_argument("--limit", type=int, default=20, metavar="N", help="how many to show (default 20)")


def _row(path: Path) -> dict[str, Any]:
    """One incident; one that is damaged or not diagnosed yet is listed with what is known."""
    row: dict[str, Any] = {"id": path.name, "service": path.parent.parent.parent.name, "slot": path.parent.parent.name, "path": str(path)}
    try:
        breach = json.loads((path / "breach.json").read_text(encoding="utf-8"))
        row |= {"request": breach["request"], "detected_unix_ns": breach["detected_unix_ns"], "threshold_ms": breach["threshold_ms"]}
        incident = load(path)
        row |= {"state": incident.state, "p99_ms": incident.latency_ms.p99, "verdict": incident.verdict}
    except EvidenceError as error:
        row |= {"state": "undiagnosed", "p99_ms": None, "verdict": str(error)}
    except (OSError, ValueError, KeyError) as error:
        row |= {"state": "damaged", "p99_ms": None, "verdict": f"{type(error).__name__} while reading breach.json"}
    return row


def run(options: argparse.Namespace) -> int:
    """List them."""
    paths = list_incidents(state_dir(options))
    rows = [row for row in map(_row, paths) if options.service in {None, row["service"]}][: options.limit]
    lines: list[str] = []
    for row in rows:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["detected_unix_ns"] / 1e9)) if "detected_unix_ns" in row else "n/a"
        lines.append(
            f"{row['id']}  {when}  {row['service']}/{row['slot']}  P99 {milliseconds(row['p99_ms'])}  {row['state']}\n  {row['verdict']}"
        )
    emit(options, {"incidents": rows}, "\n".join(lines) if lines else "no incidents")
    return 0
