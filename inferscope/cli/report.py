"""`inferscope report`: the stored diagnosis of an incident, in the form asked for."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from inferscope.cli.output import emit, find_incident, present, state_argument
from inferscope.diagnose.incident import load
from inferscope.errors import InferscopeError
from inferscope.report import document

if TYPE_CHECKING:
    import argparse

HELP = "Render the stored diagnosis of an incident (its id, the beginning of it, or a directory; default the newest)."


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this verb."""
    state_argument(parser)
    parser.add_argument("incident", nargs="?", metavar="ID|DIR", help="an incident")
    parser.add_argument("--format", choices=["text", "markdown"], default="text", help="form of the report (default text)")
    parser.add_argument("-o", "--output", metavar="FILE", help="write it there instead of to the terminal")


def run(options: argparse.Namespace) -> int:
    """Render it; 2 when the objective is broken."""
    incident = load(find_incident(options))
    value = document.to_json(incident)
    rendered = (
        present(incident) if options.format == "text" else importlib.import_module(f"inferscope.report.{options.format}").render(incident)
    )
    if options.output:
        try:
            Path(options.output).write_text(rendered, encoding="utf-8")
        except OSError as error:
            raise InferscopeError(f"--output {options.output}: cannot be written ({error.strerror})") from error
        rendered = f"written to {options.output}"
    emit(options, value, rendered)
    return 2 if value["slo"]["broken"] else 0
