"""`inferscope report`: the stored diagnosis of an incident, or the numbers of a whole fleet from where it exports to."""

from __future__ import annotations

import importlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inferscope import semconv
from inferscope.cli.output import emit, find_incident, present, state_argument
from inferscope.cli.replay import moment
from inferscope.diagnose.incident import load
from inferscope.errors import InferscopeError
from inferscope.report import document

if TYPE_CHECKING:
    import argparse

    from inferscope.export.fleet import Scope, Source

HELP = """Render the stored diagnosis of an incident (its id, the beginning of it, or a directory; default the newest).
With --from, ask a backend for all replicas: percentiles, exact shares above the objectives and, where replicas export band sums
(configure(export_bands=True)), whose time the tail is. Exit status 2 when an objective is broken, 1 when nothing is found."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this verb."""
    state_argument(parser)
    parser.add_argument("incident", nargs="*", metavar="ID|DIR", help="an incident; with --from ring=DIR, further directories")
    parser.add_argument("--format", choices=["text", "markdown"], default="text", help="form of the report (default text)")
    parser.add_argument("-o", "--output", metavar="FILE", help="write it there instead of to the terminal")
    parser.add_argument(
        "--from", dest="origin", metavar="KIND=URL",
        help="prometheus=URL, victoriametrics=URL, clickhouse=URL/DATABASE or ring=DIR; INFERSCOPE_FROM_HEADERS adds headers",
    )  # fmt: skip
    parser.add_argument(
        "--since", type=moment, metavar="TIME", help="begin of the interval with --from, as in 90m or 2026-05-01T12:00 (default 1h)"
    )
    parser.add_argument("--until", type=moment, metavar="TIME", help="its end (default now)")
    parser.add_argument("--service", help="only this service's, with --from")
    parser.add_argument("--request", help="only this request, with --from")
    parser.add_argument(
        "--compare",
        metavar="ATTRIBUTE=A,B",
        help="two values, such as service.version=1.4.1,1.4.2, adjusted for the mix of classes; with --from",
    )


def run(options: argparse.Namespace) -> int:
    """Render it; 2 when the objective is broken."""
    if options.origin:
        return _fleet(options)
    if options.compare or options.since or options.until or options.service or options.request:
        raise InferscopeError("--compare, --since, --until, --service and --request belong to --from KIND=URL")
    if len(options.incident) > 1:
        raise InferscopeError("one incident at a time; 'inferscope explain DIR…' merges several")
    options.incident = options.incident[0] if options.incident else None
    incident = load(find_incident(options))
    value = document.to_json(incident)
    rendered = (
        present(incident) if options.format == "text" else importlib.import_module(f"inferscope.report.{options.format}").render(incident)
    )
    _show(options, value, rendered)
    return 2 if value["slo"]["broken"] else 0


def _show(options: argparse.Namespace, value: Any, rendered: str) -> None:
    if options.output:
        try:
            Path(options.output).write_text(rendered, encoding="utf-8")
        except OSError as error:
            raise InferscopeError(f"--output {options.output}: cannot be written ({error.strerror})") from error
        rendered = f"written to {options.output}"
    emit(options, value, rendered)


def _fleet(options: argparse.Namespace) -> int:
    from inferscope.export.fleet import Scope, connect, summarise
    from inferscope.report import fleet

    if options.incident and not options.origin.startswith("ring="):
        raise InferscopeError("further directories belong to --from ring=DIR")
    if options.format != "text":
        raise InferscopeError("--from renders text, or data with --json")
    source = connect(":".join([options.origin, *options.incident]))
    until = time.time() if options.until is None else options.until / 1e9
    since = until - 3600 if options.since is None else options.since / 1e9
    if since >= until:
        raise InferscopeError("--since lies after --until")
    asked = ((semconv.SERVICE_NAME, options.service), (semconv.ATTR_REQUEST, options.request))
    scope = Scope(since, until, {name: value for name, value in asked if value})
    if options.compare:
        return _compare(options, source, scope)
    rows = summarise(source, scope)
    value = {
        "schema": 1,
        "from": source.name,
        "since_unix_s": since,
        "until_unix_s": until,
        "rows": fleet.rows_json(rows),
        "notes": source.notes,
    }
    nothing = f"{source.name} has no inferscope metrics of this time; 'inferscope doctor --endpoint URL' says what a backend takes"
    _show(options, value, fleet.rows_text(rows, source.notes, source.name) if rows else nothing)
    return 1 if not rows else 2 if any(row.broken for row in rows) else 0


def _compare(options: argparse.Namespace, source: Source, scope: Scope) -> int:
    from inferscope.export.fleet import compare
    from inferscope.report import fleet

    attribute, _, text = options.compare.partition("=")
    values = tuple(part.strip() for part in text.split(","))
    if attribute != semconv.SERVICE_VERSION or len(values) != 2 or not all(values) or values[0] == values[1]:
        raise InferscopeError(f"--compare {options.compare}: expected two versions, as in service.version=1.4.1,1.4.2")
    pair = values[0], values[1]
    found = compare(source, scope, attribute, pair)
    value = {"schema": 1, "from": source.name, "compare": list(pair), "rows": fleet.comparison_json(found), "notes": source.notes}
    nothing = f"{source.name} has no request class that both {pair[0]} and {pair[1]} served in this time"
    _show(options, value, fleet.comparison_text(found, pair, source.notes, source.name) if found else nothing)
    return 0 if found else 1
