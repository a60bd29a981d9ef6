"""`inferscope top`: all services on this machine at a glance, from what they keep on disk."""

from __future__ import annotations

import contextlib
import io
import shutil
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from inferscope.capture.bundle import Bundle, list_incidents
from inferscope.cli.output import emit, state_argument, state_dir, terminal
from inferscope.cli.quantities import seconds
from inferscope.errors import EvidenceError
from inferscope.pod import safe_name

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

    from rich.console import RenderableType

    from inferscope.export.overview import Overview, Row

HELP = """Show requests a second, percentiles, objectives and open incidents of all services that keep their state here; live on a terminal.
Reads their indexes and asks no process anything, so it also shows what the last minute of a service that died looked like.
Exit status 2 when an incident is open or an objective is broken in the time shown, 1 when no service keeps anything here."""

_LISTED = 5


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this verb."""
    state_argument(parser)
    parser.add_argument("--service", help="only this service's")
    parser.add_argument("--window", type=seconds, default=60.0, metavar="TIME", help="how far back, as in 60s or 15m (default 60s)")
    parser.add_argument("--every", type=seconds, default=2.0, metavar="TIME", help="how often to look (default 2s)")
    parser.add_argument("--once", action="store_true", help="look once and leave; the default where there is no terminal")


def _open_incidents(root: Path, service: str | None) -> list[dict[str, str]]:
    found: list[dict[str, str]] = []
    for path in list_incidents(root)[:100]:
        name = path.parent.parent.parent.name
        if service in {None, name}:
            with contextlib.suppress(EvidenceError, OSError):
                state = Bundle.open(path).state
                if state != "closed":
                    found.append({"id": path.name, "service": name, "slot": path.parent.parent.name, "state": state})
    return found


def _look(options: argparse.Namespace, root: Path) -> tuple[Overview, list[dict[str, str]]]:
    from inferscope.export.overview import overview

    service = None if options.service is None else safe_name(options.service)
    return overview(root, time.time_ns(), window_s=options.window, service=service), _open_incidents(root, service)


def _milliseconds(value: float | None) -> str:
    return "n/a" if value is None else f"{value * 1e3:.3g} ms" if value < 0.1 else f"{value * 1e3:,.0f} ms"


def _cells(row: Row, now_unix_ns: int) -> list[str]:
    name = "".join(f" {part}" for part in (row.model, row.cls) if part)
    objective = violations = ""
    if row.threshold_s is not None and row.quantile is not None and row.violations is not None:
        objective = f"P{100 * row.quantile:g} {_milliseconds(row.threshold_s)}"
        violations = f"{row.violations} ({100 * row.violations / max(row.requests, 1):.2f} %)"
    return [
        row.service if row.slot is None else f"  slot {row.slot}",
        f"{row.request}{name}",
        f"{row.rate:,.1f}",
        str(row.errors),
        _milliseconds(row.p50_s),
        _milliseconds(row.p99_s),
        objective,
        violations,
        f"{max(now_unix_ns - row.seen_unix_ns, 0) / 1e9:.0f} s",
    ]


def _draw(found: Overview, incidents: list[dict[str, str]], options: argparse.Namespace) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    now = time.time_ns()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("service", "request", "/s", "errors", "P50", "P99", "objective", "above it", "age"):
        table.add_column(heading, justify="left" if heading in {"service", "request", "objective"} else "right", no_wrap=True)
    for row in found.rows:
        table.add_row(*map(Text, _cells(row, now)), style="red" if row.broken else "dim" if row.slot is not None else "")
    lines = [Text(f"last {options.window:g} s, {time.strftime('%H:%M:%S')}", style="dim")]
    lines += [
        Text(f"incident {each['id']}  {each['service']}/{each['slot']}  {each['state']}", style="bold red") for each in incidents[:_LISTED]
    ]
    if len(incidents) > _LISTED:
        lines.append(Text(f"and {len(incidents) - _LISTED} more open incidents; see 'inferscope incidents'"))
    if found.quiet:
        names = ", ".join(f"{name}/{slot}" for name, slot in found.quiet)
        lines.append(Text(f"nothing in this time from {names}", style="dim"))
    return Group(table, *lines) if found.rows else Group(*lines)


def _text(shown: RenderableType, columns: int) -> str:
    from rich.console import Console

    out = io.StringIO()
    Console(file=out, width=max(columns, 120), color_system=None).print(shown)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def _data(found: Overview, incidents: list[dict[str, str]], options: argparse.Namespace) -> dict[str, Any]:
    return {
        "taken_unix_ns": time.time_ns(),
        "window_s": options.window,
        "rows": [{**asdict(row), "broken": row.broken} for row in found.rows],
        "quiet": [{"service": name, "slot": slot} for name, slot in found.quiet],
        "incidents": incidents,
    }


def _status(found: Overview, incidents: list[dict[str, str]]) -> int:
    if not (found.rows or found.quiet):
        return 1
    return 2 if incidents or any(row.broken for row in found.rows) else 0


def run(options: argparse.Namespace) -> int:
    """Look once, or until interrupted."""
    root = state_dir(options)
    if not options.once and options.json is None and sys.stdout.isatty():
        return _live(options, root)
    found, incidents = _look(options, root)
    nothing = not (found.rows or found.quiet)
    text = f"no service keeps anything under {root}" if nothing else _text(_draw(found, incidents, options), terminal()[0])
    emit(options, _data(found, incidents, options), text)
    return _status(found, incidents)


def _live(options: argparse.Namespace, root: Path) -> int:
    from rich.console import Console
    from rich.live import Live

    found, incidents = _look(options, root)
    console = Console(width=shutil.get_terminal_size().columns)
    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(_draw(found, incidents, options), console=console, auto_refresh=False, screen=True) as live,
    ):
        while True:
            time.sleep(options.every)
            found, incidents = _look(options, root)
            live.update(_draw(found, incidents, options), refresh=True)
    console.print(_draw(found, incidents, options))
    return _status(found, incidents)
