"""`inferscope bundle`: an incident as one file to attach, after its evidence was checked."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

from inferscope.bench import evidence
from inferscope.capture.bundle import verify, write_atomic
from inferscope.capture.chain import list_files, manifest_numbers
from inferscope.cli.output import emit, find_incident, state_argument
from inferscope.errors import EvidenceError, InferscopeError

if TYPE_CHECKING:
    import argparse

HELP = """Pack an incident, or a chain that 'ab' or 'compare' wrote with --evidence, (its id, the beginning of it, or a directory; default the newest) with its chain of manifests into one .tar.gz.
It is verified first and refused when anything differs. The same incident always gives the same bytes. Unpacked, 'inferscope verify DIR'
checks it again; --expect gives the root hash that the incident event carried."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this verb."""
    state_argument(parser)
    parser.add_argument("incident", nargs="?", metavar="ID|DIR", help="an incident")
    parser.add_argument("-o", "--output", metavar="FILE", help="where to (default INCIDENT.tar.gz)")
    parser.add_argument("--expect", metavar="SHA256", help="the root hash that the incident event carried")


def _names(path: Path) -> list[str]:
    """The files of an incident, or of a chain with the incident in it."""
    if (path / evidence.INDEX).is_file():
        return [each.relative_to(path).as_posix() for each in path.rglob("*") if each.is_file()]
    return [*list_files(path), *(f"manifest-{number}.json" for number in manifest_numbers(path))]


def _pack(path: Path) -> bytes:
    """The files in order of name, owner and time left out."""
    names = _names(path)
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in sorted(names):
            content = (path / name).read_bytes()
            entry = tarfile.TarInfo(f"{path.name}/{name}")
            entry.size, entry.mode = len(content), 0o600
            archive.addfile(entry, io.BytesIO(content))
    return _compressed(out.getvalue())


def _compressed(content: bytes) -> bytes:
    import gzip

    return gzip.compress(content, mtime=0)


def run(options: argparse.Namespace) -> int:
    """Verify and pack; 1 when the evidence does not verify."""
    path = find_incident(options).resolve()
    chained = (path / evidence.INDEX).is_file()
    problems = evidence.verify(path, options.expect) if chained else verify(path, options.expect)
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise EvidenceError(f"{path.name} does not verify, so it was not packed: {problems[0]}{more}")
    target = Path(options.output or f"{path.name}.tar.gz")
    if target.resolve().is_relative_to(path):
        raise InferscopeError(f"--output {target}: lies inside the incident, which would no longer verify")
    try:
        content = _pack(path)
    except OSError as error:
        raise EvidenceError(f"{path.name} cannot be read: {error.strerror}") from error
    if not target.parent.is_dir():
        raise InferscopeError(f"--output {target}: no such directory")
    write_atomic(target, content)
    last = path / (evidence.INDEX if chained else f"manifest-{manifest_numbers(path)[-1]}.json")
    root = hashlib.sha256(last.read_bytes()).hexdigest()
    value = {
        "incident": path.name,
        "file": str(target),
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
        "root_sha256": root,
    }
    emit(options, value, f"{target}: {len(content)} bytes, verified, root hash {root}")
    return 0
