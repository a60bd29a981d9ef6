"""`inferscope incidents`: what broke, when, and why, newest first; which are kept whatever the caps say, and which were dropped."""

from __future__ import annotations

import argparse
import json
import time
from typing import TYPE_CHECKING, Any

from inferscope.capture.bundle import list_incidents
from inferscope.capture.retention import pin, pinned, tombstones, unpin
from inferscope.cli.output import emit, find_incident, state_argument, state_dir
from inferscope.diagnose.incident import load
from inferscope.errors import EvidenceError, InferscopeError
from inferscope.report.words import milliseconds

if TYPE_CHECKING:
    from pathlib import Path

HELP = """List the incidents of all services and workers, newest first.

  inferscope incidents                              those that are kept
  inferscope incidents pin ID --reason 'ticket 4'   keep one, whatever the caps on size and count say
  inferscope incidents unpin ID                     let the caps decide again
  inferscope incidents dropped                      those that the caps took, with their root hashes"""


def _reason(text: str) -> str:
    if not 1 <= len(text.strip()) <= 200 or not text.strip().isprintable():
        raise argparse.ArgumentTypeError("a reason has 1 to 200 printable characters")
    return text.strip()


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this verb."""
    state_argument(parser)
    parser.add_argument("action", nargs="?", choices=("list", "pin", "unpin", "dropped"), default="list", help="default: list")
    parser.add_argument("incident", nargs="?", metavar="ID|DIR", help="which one to pin or unpin: its id or the beginning of it")
    parser.add_argument("--reason", type=_reason, default="pinned on the command line", help="why it is pinned")
    parser.add_argument("--service", help="only this service's")
    parser.add_argument("--limit", type=int, default=20, metavar="N", help="how many to show (default 20)")


def _row(path: Path) -> dict[str, Any]:
    """One incident; one that is damaged or not diagnosed yet is listed with what is known."""
    row: dict[str, Any] = {"id": path.name, "service": path.parent.parent.parent.name, "slot": path.parent.parent.name, "path": str(path)}
    row["pinned"] = pinned(path)
    try:
        breach = json.loads((path / "breach.json").read_text(encoding="utf-8"))
        row |= {"request": breach["request"], "detected_unix_ns": breach["detected_unix_ns"], "threshold_ms": breach["threshold_ms"]}
        incident = load(path)
        row |= {"state": incident.state, "p99_ms": incident.latency_ms.p99, "verdict": incident.verdict}
    except EvidenceError as error:
        row |= {"state": "undiagnosed", "p99_ms": None, "verdict": str(error)}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        row |= {"state": "damaged", "p99_ms": None, "verdict": f"{type(error).__name__} while reading breach.json"}
    return row


def _when(unix_ns: Any) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_ns / 1e9)) if isinstance(unix_ns, int) else "n/a"
    except (OverflowError, OSError, ValueError):
        return "n/a"  # no instant that a calendar has


def _list(options: argparse.Namespace) -> int:
    paths = list_incidents(state_dir(options))
    rows = [row for row in map(_row, paths) if options.service in {None, row["service"]}][: options.limit]
    lines: list[str] = []
    for row in rows:
        kept = f"  pinned: {row['pinned'].get('reason', 'no reason')}" if row["pinned"] is not None else ""
        p99 = milliseconds(row["p99_ms"])
        where = f"{row['service']}/{row['slot']}"
        lines.append(f"{row['id']}  {_when(row.get('detected_unix_ns'))}  {where}  P99 {p99}  {row['state']}{kept}\n  {row['verdict']}")
    emit(options, {"incidents": rows}, "\n".join(lines) if lines else "no incidents")
    return 0


def _dropped(options: argparse.Namespace) -> int:
    rows: list[dict[str, Any]] = []
    for place in state_dir(options).glob("*/*/incidents/.tombstones.jsonl"):
        slot = place.parent.parent
        if options.service in {None, slot.parent.name}:
            rows += [{**stone, "service": slot.parent.name, "slot": slot.name} for stone in tombstones(slot)]
    rows = sorted(rows, key=lambda row: str(row["incident"]), reverse=True)[: options.limit]
    lines = [
        f"{row['incident']}  {row['service']}/{row['slot']}  dropped {_when(row.get('dropped_unix_ns'))} by {row.get('why', 'n/a')}"
        f"  {row.get('root_sha256', 'no root hash')}\n  {row.get('verdict', 'undiagnosed')}"
        for row in rows
    ]
    emit(options, {"dropped": rows}, "\n".join(lines) if lines else "nothing was dropped")
    return 0


def run(options: argparse.Namespace) -> int:
    """List, pin or unpin."""
    if options.action in {"list", "dropped"}:
        if options.incident is not None:
            raise InferscopeError(f"incidents {options.action} takes no incident; inferscope inspect {options.incident} shows one")
        return _list(options) if options.action == "list" else _dropped(options)
    if options.incident is None:
        raise InferscopeError(f"incidents {options.action} needs an incident's id")
    path = find_incident(options)
    if options.action == "pin":
        pin(path, options.reason)
        text = f"{path.name}: pinned; it stays until it is unpinned"
    else:
        text = f"{path.name}: {'unpinned' if unpin(path) else 'was not pinned'}"
    emit(options, {"incident": path.name, "path": str(path), "pinned": pinned(path)}, text)
    return 0
