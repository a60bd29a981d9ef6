"""`inferscope verify`: is the evidence what was published?"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from inferscope.capture.bundle import verify
from inferscope.cli.output import emit, find_incident, state_argument

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

HELP = "Recompute every hash of an incident's evidence chain (its id, the beginning of it, or a directory; default the newest)."


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this verb."""
    state_argument(parser)
    parser.add_argument("incident", nargs="?", metavar="ID|DIR", help="an incident")
    parser.add_argument("--expect", metavar="SHA256", help="the root hash that the OTLP incident event carried")


def _root(path: Path) -> str | None:
    manifests = sorted(path.glob("manifest-*.json"), key=lambda manifest: int(manifest.stem.partition("-")[2]))
    return hashlib.sha256(manifests[-1].read_bytes()).hexdigest() if manifests else None


def run(options: argparse.Namespace) -> int:
    """Verify it; 1 when anything differs."""
    path = find_incident(options)
    problems = verify(path, options.expect)
    root = _root(path)
    text = "\n".join([f"{path.name}: {line}" for line in problems] or [f"{path.name}: intact, root hash {root}"])
    emit(options, {"incident": path.name, "path": str(path), "intact": not problems, "problems": problems, "root_sha256": root}, text)
    return 1 if problems else 0
