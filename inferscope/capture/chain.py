"""Manifests and what they prove: digests, the chain, `verify`."""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from inferscope.errors import EvidenceError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "OLDEST_SCHEMA",
    "SAFE_NAME",
    "SCHEMA",
    "digest",
    "encode",
    "hash_file",
    "is_manifest",
    "list_files",
    "manifest_numbers",
    "parse",
    "verify",
]

SCHEMA: Final = 1
OLDEST_SCHEMA: Final = 1
SAFE_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,199}\Z")
"""What may name an incident or one part of an artefact's path."""

_MANIFEST: Final = re.compile(r"manifest-([1-9][0-9]*)\.json\Z")
_TEMPORARY: Final = re.compile(r"\..+\.tmp\Z")
_CHUNK: Final = 1 << 20


def is_manifest(name: str) -> bool:
    """Whether a relative path is a manifest's."""
    return _MANIFEST.match(name) is not None


def encode(value: Any) -> bytes:
    """The one spelling of a JSON value, so that a digest of the value is a digest of the bytes."""
    return (json.dumps(value, indent=1, sort_keys=True, ensure_ascii=True, allow_nan=False) + "\n").encode("ascii")


def digest(document: Mapping[str, Any]) -> str:
    """SHA-256 of a manifest without its own `digest`."""
    return hashlib.sha256(encode({key: value for key, value in document.items() if key != "digest"})).hexdigest()


def hash_file(path: Path) -> tuple[int, str]:
    """Bytes and SHA-256 of a regular file; a link is refused, because what it points to lies outside the chain."""
    total, size = hashlib.sha256(), 0
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0))
    with os.fdopen(descriptor, "rb") as file:
        while chunk := file.read(_CHUNK):
            total.update(chunk)
            size += len(chunk)
    return size, total.hexdigest()


def manifest_numbers(directory: Path) -> list[int]:
    """Numbers of the manifests in `directory`, ascending.

    Raises:
        EvidenceError: There is no such directory.
    """
    try:
        names = [path.name for path in directory.iterdir()]
    except OSError as error:
        raise EvidenceError(f"{directory.name}: no such incident") from error
    return sorted(int(match[1]) for name in names if (match := _MANIFEST.match(name)))


def parse(name: str, content: bytes) -> dict[str, Any]:
    """A manifest from its bytes.

    Raises:
        EvidenceError: Damaged, or of a schema that this version does not read.
    """
    try:
        document: Any = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise EvidenceError(f"{name} is damaged: not JSON") from error
    schema: Any = cast("dict[str, Any]", document).get("schema") if isinstance(document, dict) else None
    if not isinstance(schema, int):
        raise EvidenceError(f"{name} is damaged: not a manifest")
    if not OLDEST_SCHEMA <= schema <= SCHEMA:
        raise EvidenceError(f"{name} has schema {schema}, this version reads {OLDEST_SCHEMA} to {SCHEMA}")
    manifest = cast("dict[str, Any]", document)
    if encode(manifest) != content or manifest.get("digest") != digest(manifest):
        raise EvidenceError(f"{name} is damaged: its digest does not match")
    return manifest


def list_files(directory: Path) -> list[str]:
    """Everything below `directory` but manifests and unfinished writes, as relative names."""
    found: list[str] = []
    for base, folders, names in os.walk(directory):
        # A link to a directory is not followed; it is a file that does not belong here.
        links = [name for name in folders if Path(base, name).is_symlink()]
        for name in [*names, *links]:
            relative = Path(base, name).relative_to(directory).as_posix()
            if not _TEMPORARY.match(name) and not _MANIFEST.match(relative):
                found.append(relative)
    return sorted(found)


def verify(path: Path, expect: str | None = None) -> list[str]:
    """Check an incident against its manifests.

    Args:
        path: The incident's directory.
        expect: The root hash as somebody else recorded it; without it only damage is found, not a consistent forgery. Any manifest of the
            chain may have it: an incident that was extended since keeps all that was recorded then. Default None.

    Returns:
        One line for each problem, naming the file; empty when all holds.
    """
    problems: list[str] = []
    try:
        numbers = manifest_numbers(path)
    except EvidenceError as error:
        return [str(error)]
    if not numbers:
        return [f"{path.name}: no manifest"]
    problems += [f"manifest-{n}.json is missing" for n in range(1, numbers[-1]) if n not in numbers]
    chain = _Chain(path, problems)
    for n in numbers:
        chain.step(n)
    if chain.last is not None:
        problems += _check_artefacts(path, chain.last)
    if expect is not None and expect.strip().lower() not in chain.roots:
        problems.append(f"manifest-{numbers[-1]}.json: root hash is {chain.root}, and no earlier manifest has the expected {expect}")
    return problems


class _Chain:
    """Walks the manifests in order and notes where a link is broken."""

    def __init__(self, path: Path, problems: list[str]) -> None:
        self._path = path
        self._problems = problems
        self._known: dict[str, str] = {}
        self.root: str | None = None
        self.roots: set[str] = set()
        self.last: list[dict[str, Any]] | None = None

    def step(self, n: int) -> None:
        """Read one manifest and compare it with its predecessor."""
        name = f"manifest-{n}.json"
        before, self.root, self.last = self.root, None, None
        try:
            content = (self._path / name).read_bytes()
            self.root = hashlib.sha256(content).hexdigest()
            self.roots.add(self.root)
            manifest = parse(name, content)
            listed = {str(row["path"]): str(row["sha256"]) for row in manifest["artefacts"]}
            rows = [dict(row) for row in manifest["artefacts"]]
        except OSError as error:
            self._problems.append(f"{name} cannot be read: {error.strerror}")
            return
        except EvidenceError as error:
            self._problems.append(str(error))
            return
        except (KeyError, TypeError, ValueError):
            self._problems.append(f"{name} is damaged: its list of artefacts")
            return
        if manifest.get("n") != n or manifest.get("previous_sha256") != before:
            self._problems.append(f"{name} does not follow manifest-{n - 1}.json" if n > 1 else f"{name} is not a first manifest")
        for artefact, sha in self._known.items():
            if listed.get(artefact) != sha:
                self._problems.append(f"{artefact} {'changed' if artefact in listed else 'was dropped'} between manifests, in {name}")
        self._known = listed
        self.last = rows


def _check_artefacts(path: Path, rows: list[dict[str, Any]]) -> list[str]:
    problems: list[str] = []
    for row in rows:
        name = str(row["path"])
        try:
            size, sha = hash_file(path / name)
        except OSError as error:
            problems.append(f"{name} cannot be read: {error.strerror}")
            continue
        if size != row.get("bytes") or sha != row["sha256"]:
            problems.append(f"{name} was changed")
    listed = {str(row["path"]) for row in rows}
    problems += [f"{name} is in no manifest" for name in list_files(path) if name not in listed]
    return problems
