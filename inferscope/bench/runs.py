"""A run on disk: settings, fingerprint, metrics, and every request, so that two runs can be compared later."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeGuard

from inferscope.bench.fingerprint import digest, fingerprint, settings_hashes
from inferscope.bench.hardware import machine_parts
from inferscope.bench.result import LoadResult
from inferscope.errors import EvidenceError, InferscopeError

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

__all__ = ["KIND", "SCHEMA", "Run", "changed", "differences", "machine", "read", "save"]

SCHEMA: Final = 1
KIND: Final = "inferscope.run"
WORKLOAD: Final = (
    "mode",
    "rate",
    "process",
    "connections",
    "seed",
    "batch_size",
    "input_len",
    "input_len_sha256",
    "precision",
    "inputs_sha256",
    "golden_sha256",
)
"""What two runs must have in common; target, model and commit are what is compared."""
MACHINE: Final = (
    "python", "implementation", "free_threaded", "machine", "kernel", "cpu", "cpus", "affinity", "cpu_quota", "governor", "libraries", "settings",
    "gpu", "transparent_hugepages", "numa_nodes", "threads",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Run:
    """A run that was read."""

    path: str
    sha256: str
    """Of the file."""
    document: dict[str, Any]
    load: LoadResult

    @property
    def skip(self) -> int:
        """Requests of the warm-up."""
        return int(self.document["warmup"]["cut"])

    @property
    def name(self) -> str:
        """What was measured."""
        return str(self.document["settings"].get("model") or self.document["settings"]["target"])


def machine() -> dict[str, Any]:
    """The fingerprint of this process and machine with hashes of its settings, hashed as a whole."""
    found = {**fingerprint(), **machine_parts(), "settings": settings_hashes()}
    found["sha256"] = digest(found)
    return found


def save(path: Path, document: dict[str, Any], load: LoadResult) -> None:
    """Write a run.

    Raises:
        InferscopeError: it cannot be written.
    """
    try:
        path.write_text(json.dumps({"schema": SCHEMA, "kind": KIND, **document, "load": load.to_json()}) + "\n", encoding="utf-8")
    except OSError as error:
        raise InferscopeError(f"{path}: cannot be written ({error.strerror})") from error


def _is_dict(value: object) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)


def read(path: Path) -> Run:
    """Read a run.

    Raises:
        EvidenceError: it is missing, damaged, something else, or from a newer version.
    """
    try:
        content = path.read_bytes()
        found: Any = json.loads(content)
    except OSError as error:
        raise EvidenceError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise EvidenceError(f"{path} is damaged: not JSON") from error
    if not _is_dict(found) or found.get("kind") != KIND:
        raise EvidenceError(f"{path} is no run; 'inferscope bench TARGET -o FILE' makes one")
    if found.get("schema") != SCHEMA:
        raise EvidenceError(f"{path} has schema {found.get('schema')!r}, this version reads {SCHEMA}")
    try:
        load = LoadResult.from_json(found["load"])
        run = Run(str(path), hashlib.sha256(content).hexdigest(), found, load)
        complete = all(_is_dict(found[key]) for key in ("settings", "fingerprint", "metrics", "warmup"))
        sizes = {load.intended_ns.size, load.launched_ns.size, load.sent_ns.size, load.done_ns.size, load.status.size}
        if not complete or len(sizes) != 1 or not 0 <= run.skip <= load.status.size or not run.name:
            raise EvidenceError(f"{path} is damaged: its parts do not fit together")
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise EvidenceError(f"{path} is damaged: {type(error).__name__} at {error}") from error
    return run


def _flat(value: Any, name: str) -> dict[str, Any]:
    if not _is_dict(value):
        return {name: value}
    return {key: each for part, inner in value.items() for key, each in _flat(inner, f"{name}.{part}").items()}


def differences(base: Run, candidate: Run, *, vary: Collection[str] = ()) -> list[str]:
    """Variables in which two runs differ and which must be equal for a comparison, one line each.

    Args:
        base: the run before.
        candidate: the run after.
        vary: names that are meant to differ: they are what is compared.
    """
    found: list[str] = []
    for part, names in (("settings", WORKLOAD), ("fingerprint", MACHINE)):
        ours = {key: each for name in names for key, each in _flat(base.document[part].get(name), name).items()}
        theirs = {key: each for name in names for key, each in _flat(candidate.document[part].get(name), name).items()}
        for key in sorted(ours.keys() | theirs.keys()):
            if ours.get(key) != theirs.get(key) and key not in vary and key.replace("settings.", "environment variable ") not in vary:
                shown = "" if key.startswith("settings.") else f": {ours.get(key)} → {theirs.get(key)}"
                found.append(f"{key.replace('settings.', 'environment variable ')}{shown}")
    return found


def changed(base: Run, candidate: Run, *, vary: Collection[str] = ()) -> list[str]:
    """What was changed on purpose between two runs: what is measured, its code, and what `vary` names. More than one says not which did it.

    Args:
        base: the run before.
        candidate: the run after.
        vary: names of further variables that are meant to differ.
    """
    ours, theirs = base.document, candidate.document
    found: list[str] = []
    if ours["settings"].get("target") != theirs["settings"].get("target"):
        found.append("target")
    if any(ours["settings"].get(name) != theirs["settings"].get(name) for name in ("model", "model_sha256")):
        found.append("model")
    sources: list[dict[str, Any]] = [each.get("source") or {} for each in (ours, theirs)]
    if sources[0].get("commit") != sources[1].get("commit"):
        found.append("code (commit)")
    elif any(each.get("dirty") for each in sources):
        found.append("code (uncommitted)")
    named = {line.partition(":")[0] for line in differences(base, candidate)}
    return found + sorted(named & set(vary))
