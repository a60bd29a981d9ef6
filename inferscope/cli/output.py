"""Where a verb's result goes: text for people, JSON where it was asked for."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inferscope import settings
from inferscope.capture.bundle import list_incidents
from inferscope.capture.retention import find_tombstone
from inferscope.errors import EvidenceError, InferscopeError

if TYPE_CHECKING:
    import argparse

    from inferscope.types import Incident

__all__ = ["emit", "find_incident", "present", "state_argument", "state_dir", "terminal"]


def emit(options: argparse.Namespace, value: Any, text: str) -> None:
    """Print `text`, or the JSON of `value` to stdout, or both with a file."""
    if options.json == "-":
        json.dump(value, sys.stdout, indent=1)
        sys.stdout.write("\n")
        return
    sys.stdout.write(text if text.endswith("\n") or not text else text + "\n")
    if options.json:
        try:
            Path(options.json).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise InferscopeError(f"--json {options.json}: cannot be written ({error.strerror})") from error


def terminal() -> tuple[int, bool]:
    """Columns and whether colours are wanted: a terminal, and NO_COLOR is not set."""
    tty = sys.stdout.isatty()
    return (shutil.get_terminal_size().columns if tty else 100), tty and not os.environ.get("NO_COLOR")


def state_argument(parser: argparse.ArgumentParser) -> None:
    """`--state-dir`, for verbs that read what services wrote."""
    parser.add_argument(
        "--state-dir", metavar="DIR", help="where evidence lies (default: INFERSCOPE_STATE_DIR, else the user's state directory)"
    )


def state_dir(options: argparse.Namespace) -> Path:
    """The state directory that was asked for, or the default one.

    Raises:
        InferscopeError: There is none.
    """
    if options.state_dir:
        directory = Path(options.state_dir)
        if not directory.is_dir():
            raise InferscopeError(f"--state-dir {options.state_dir}: no such directory")
        return directory
    found = settings.load({}).state_dir
    if found is None:
        raise InferscopeError("no state directory can be used here; name one with --state-dir")
    return found


def find_incident(options: argparse.Namespace) -> Path:
    """The directory of `options.incident`: a path, an id, the unique beginning of one, or the newest when it is None.

    Raises:
        InferscopeError: No such incident, or the name is ambiguous.
    """
    asked = options.incident
    if asked is not None and (os.sep in asked or Path(asked).is_dir()):
        if not Path(asked).is_dir():
            raise EvidenceError(f"{asked}: no such directory")
        return Path(asked)
    incidents = list_incidents(state_dir(options))
    matching = [path for path in incidents if asked is None or path.name.startswith(asked)]
    stone = find_tombstone(state_dir(options), asked) if asked and not matching else None
    if stone is not None:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(stone.get("dropped_unix_ns", 0) / 1e9))
        hashed = stone.get("root_sha256", "unknown")
        raise EvidenceError(f"incident {stone['incident']} was dropped on {when} to keep to the caps; its root hash was {hashed}")
    if not matching:
        known = f"; newest is {incidents[0].name}" if incidents else "; there are none yet"
        raise EvidenceError(f"no incident {asked!r}{known}" if asked else "there are no incidents")
    exact = [path for path in matching if path.name == asked]
    if asked is not None and not exact and len(matching) > 1:
        raise EvidenceError(f"{asked!r} is ambiguous: {', '.join(path.name for path in matching[:4])}")
    return exact[0] if exact else matching[0]


def present(incident: Incident) -> str:
    """The incident as text for this terminal."""
    from inferscope.report import text

    width, color = terminal()
    return text.render(incident, width=width, color=color)
