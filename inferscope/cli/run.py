"""`inferscope run -- COMMAND`: measure a Python service without changing its code."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Final

from inferscope import forms
from inferscope.errors import InferscopeError
from inferscope.integration import Registry

HELP: Final = (
    "Run a Python service with inferscope in it, workers included: inferscope run --slo 'score:p99_ms=20' -- python serve.py. "
    "Options become INFERSCOPE_* variables of the command, which replaces this process."
)
BOOTSTRAP: Final = Path(__file__).resolve().parent / "bootstrap"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this verb."""
    parser.add_argument("--service", help="service.name (default OTEL_SERVICE_NAME)")
    parser.add_argument("--slo", metavar="TEXT", help="objectives, such as 'score:p99_ms=20,min_requests=50; rank:p95_ms=5'")
    parser.add_argument("--integrations", metavar="NAMES", help="comma-separated (default all that are installed)")
    parser.add_argument("--state-dir", metavar="DIR", help="where evidence lies")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND ...", help="what to run")


def environment(options: argparse.Namespace) -> dict[str, str]:
    """What the command's environment gains.

    Raises:
        ConfigurationError: An option has a value that cannot be used.
    """
    given = {name: getattr(options, name) for name in ("service", "slo", "integrations", "state_dir")}
    for name, value in given.items():
        if value is not None:
            forms.read(name, value, f"--{name.replace('_', '-')}")
    added = {f"INFERSCOPE_{name.upper()}": value for name, value in given.items() if value is not None}
    paths = [str(BOOTSTRAP), *(path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path)]
    names = [name.strip() for name in (options.integrations or os.environ.get("INFERSCOPE_INTEGRATIONS", "")).split(",") if name.strip()]
    watched = sorted({target for state, target in Registry().preview(names).values() if target and state.startswith("waiting")})
    return {**added, "INFERSCOPE_WATCHED": ",".join(watched), "PYTHONPATH": os.pathsep.join(paths)}


def run(options: argparse.Namespace) -> int:  # noqa: RET503  (os.execve does not return)
    """Become the command; with --json, only say what would be run."""
    words: list[str] = options.command
    command = words[1:] if words[:1] == ["--"] else words
    if not command:
        sys.stderr.write("inferscope run: nothing to run; the form is: inferscope run [options] -- python serve.py\n")
        return 64
    added = environment(options)
    program = shutil.which(command[0])
    if program is None:
        raise InferscopeError(f"{command[0]}: no such program")
    if options.json:
        text = json.dumps({"command": command, "environment": added}, indent=1)
        if options.json == "-":
            sys.stdout.write(text + "\n")
        else:
            Path(options.json).write_text(text + "\n", encoding="utf-8")
        return 0
    sys.stdout.flush()
    os.execve(program, command, {**os.environ, **added})  # noqa: S606  (running the user's own command is this verb's purpose)
