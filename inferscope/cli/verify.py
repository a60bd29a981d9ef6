"""`inferscope verify`: is the evidence what was published?"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from inferscope.capture.bundle import verify
from inferscope.cli.output import emit, find_incident, state_argument

if TYPE_CHECKING:
    import argparse

HELP = """Recompute an evidence chain: every hash of an incident (its id, the beginning of it, or a directory; default the newest); of a chain
that 'ab' or 'compare' wrote with --evidence also percentiles, finding and verdicts; or an acceptance record of 'bench --accept' (a file)."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this verb."""
    state_argument(parser)
    parser.add_argument("incident", nargs="?", metavar="ID|DIR|FILE", help="an incident, a chain, or a record")
    parser.add_argument("--expect", metavar="SHA256", help="the root hash that the OTLP incident event carried")


def _root(path: Path) -> str | None:
    manifests = sorted(path.glob("manifest-*.json"), key=lambda manifest: int(manifest.stem.partition("-")[2]))
    return hashlib.sha256(manifests[-1].read_bytes()).hexdigest() if manifests else None


def run(options: argparse.Namespace) -> int:
    """Verify it; 1 when anything differs."""
    named = Path(options.incident) if options.incident else None
    if named is not None and named.is_file():
        from inferscope.cli import release

        return _say(options, named, release.verify(named), hashlib.sha256(named.read_bytes()).hexdigest())
    if named is not None and (named / "evidence.json").is_file():
        from inferscope.bench import evidence

        return _say(options, named, evidence.verify(named, options.expect), evidence.root_hash(named))
    path = find_incident(options)
    return _say(options, path, verify(path, options.expect), _root(path))


def _say(options: argparse.Namespace, path: Path, problems: list[str], root: str | None) -> int:
    text = "\n".join([f"{path.name}: {line}" for line in problems] or [f"{path.name}: intact, root hash {root}"])
    emit(options, {"incident": path.name, "path": str(path), "intact": not problems, "problems": problems, "root_sha256": root}, text)
    return 1 if problems else 0
