"""Profiles on disk: a pprof file each for people, and all of them folded for the exporter."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any, Final, cast

from inferscope.diagnose.evidence import read_json
from inferscope.diagnose.profiles.folded import fold
from inferscope.diagnose.profiles.pprof import encode

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["FOLDED", "read", "write"]

FOLDED: Final = "profiles/folded.json"
_SCHEMA: Final = 1


def write(directory: Path) -> tuple[Path, ...]:
    """Fold an incident and write what there is; nothing when there is nothing to fold.

    Args:
        directory: The incident.

    Raises:
        EvidenceError: Its evidence is damaged.
        OSError: It cannot be written.
    """
    profiles = fold(directory)
    if not profiles:
        return ()
    place = directory / "profiles"
    place.mkdir(mode=0o700, exist_ok=True)
    written: list[Path] = []
    for number, each in enumerate(profiles):
        name = f"{each.kind}-{each.capture or number}.pb.gz"
        written.append(_put(place / name, encode(each)))
    document = {"schema": _SCHEMA, "profiles": [each.to_json() for each in profiles]}
    written.append(_put(directory / FOLDED, json.dumps(document, separators=(",", ":")).encode()))
    return tuple(written)


def read(directory: Path) -> list[dict[str, Any]]:
    """What `write` folded; empty when there is nothing.

    Raises:
        EvidenceError: It is damaged.
    """
    path = directory / FOLDED
    if not path.is_file():
        return []
    document = read_json(path)
    return cast("list[dict[str, Any]]", document.get("profiles") or []) if document.get("schema") == _SCHEMA else []


def _put(path: Path, content: bytes) -> Path:
    """Whole or not at all, readable by the owner only."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    return path
