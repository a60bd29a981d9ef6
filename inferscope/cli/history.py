"""`inferscope history`: the runs of a directory, oldest first."""

from __future__ import annotations

import csv
import io
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from inferscope.bench import runs, text
from inferscope.cli.output import emit
from inferscope.errors import EvidenceError, InferscopeError

if TYPE_CHECKING:
    import argparse

HELP = """List the runs that 'inferscope bench -o' left in a directory, oldest first.
--csv writes them in the form that Apache Otava reads (a time column, attributes, one column for each metric that every run has a number for)
for change points over many runs."""

_METRICS: Final = ("p50_ms", "p95_ms", "p99_ms", "p999_ms", "throughput", "error_rate")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this verb."""
    parser.add_argument("directory", type=Path, metavar="DIR", help="searched with its subdirectories")
    parser.add_argument("--target", metavar="TEXT", help="only runs whose target or model contains this")
    parser.add_argument("--csv", metavar="FILE", help="write them as CSV: to stdout with -, else to FILE")


def _row(path: Path) -> dict[str, Any] | None:
    """One run; None for a JSON file that is none, `problem` for one that cannot be read."""
    try:
        run = runs.read(path)
    except EvidenceError as error:
        return None if "is no run" in str(error) else {"file": str(path), "problem": str(error)}
    document, metrics = run.document, run.document["metrics"]
    try:
        latency = {f"{name}_ms": metrics["latency"][name]["ms"] for name in ("p50", "p95", "p99", "p999")}
        return {
            "file": str(path),
            "time_unix_ns": int(document["written_unix_ns"]),
            "target": document["settings"]["target"],
            "model": document["settings"].get("model"),
            "commit": document["source"]["commit"],
            "dirty": document["source"]["dirty"],
            "valid": document["valid"],
            "fingerprint": document["fingerprint"]["sha256"][:12],
            **latency,
            "throughput": metrics["throughput"]["requests_per_s"],
            "error_rate": metrics["error_rate"]["share"],
        }
    except (KeyError, TypeError, ValueError) as error:
        return {"file": str(path), "problem": f"{path} is damaged: {type(error).__name__} at {error}"}


def run(options: argparse.Namespace) -> int:
    """List them; 1 when a run cannot be read."""
    if not options.directory.is_dir():
        raise InferscopeError(f"{options.directory}: no such directory")
    rows = [row for path in sorted(options.directory.rglob("*.json")) if (row := _row(path)) is not None]
    problems = [row["problem"] for row in rows if "problem" in row]
    good = sorted((row for row in rows if "problem" not in row), key=lambda row: row["time_unix_ns"])
    if options.target:
        good = [row for row in good if options.target in row["target"] or options.target in (row["model"] or "")]
    if options.csv:
        content, left_out = _csv(good)
        text.put("--csv", options.csv, content)
        if left_out:
            sys.stderr.write(f"inferscope history: left out of the CSV, because not every run has a number: {', '.join(left_out)}\n")
    shown = "" if options.csv == "-" else "\n".join([*_table(good), *problems])
    emit(options, {"runs": good, "problems": problems}, shown)
    return 1 if problems else 0


def _csv(rows: list[dict[str, Any]]) -> tuple[str, list[str]]:
    """Otava's CSV importer: ISO time, attributes, metrics; and which metrics were left out.

    Invalid runs are left out, and so is a metric that not every run has a number for: Otava takes no empty cell, and 0 would be a lie.
    """
    valid = [row for row in rows if row["valid"]]
    names = [name for name in _METRICS if all(row[name] is not None for row in valid)]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(("time", "commit", "target", "model", "fingerprint", *names))
    for row in valid:
        when = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(row["time_unix_ns"] / 1e9))
        values = (f"{row[name]:.6g}" for name in names)
        writer.writerow((when, row["commit"] or "", row["target"], row["model"] or "", row["fingerprint"], *values))
    return out.getvalue(), [name for name in _METRICS if name not in names]


def _table(rows: list[dict[str, Any]]) -> list[str]:
    if not rows:
        return ["no runs"]
    lines = [f"{'time (UTC)':<20}{'P50':>12}{'P95':>12}{'P99':>12}{'/s':>10}{'errors':>9}  commit        machine       target"]
    for row in rows:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(row["time_unix_ns"] / 1e9))
        cells = "".join(f"{text.milliseconds(row[name]):>12}" for name in ("p50_ms", "p95_ms", "p99_ms"))
        rate = "n/a" if row["throughput"] is None else f"{row['throughput']:.1f}"
        share = "n/a" if row["error_rate"] is None else f"{100 * row['error_rate']:.2f} %"
        commit = f"{(row['commit'] or 'n/a')[:10]}{'+' if row['dirty'] else ''}"
        marked = "" if row["valid"] else "  INVALID"
        lines.append(f"{when:<20}{cells}{rate:>10}{share:>9}  {commit:<12}  {row['fingerprint']}  {row['target']}{marked}")
    return lines
