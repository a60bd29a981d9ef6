"""How long incidents stay: caps that drop the oldest, pins that keep one, and tombstones for what was dropped.

    incidents/.pins/<id>.json          who keeps it, and why
    incidents/.tombstones.jsonl        one line for each incident that was dropped: what it was, its root hash, when it went and why

A tombstone holds the root hash, so that an auditor who has the incident from elsewhere can still tell that it is the one.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from inferscope.capture.bundle import write_atomic
from inferscope.capture.chain import SAFE_NAME, hash_file, manifest_numbers
from inferscope.errors import EvidenceError

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["TOMBSTONES", "find_tombstone", "pin", "pinned", "prune", "tombstones", "unpin"]

SCHEMA: Final = 1
TOMBSTONES: Final = 2000
"""Of one worker; the oldest go when there are a tenth more."""
_VERDICT: Final = 400
_LINE: Final = 4096


def _pins(incident: Path) -> Path:
    return incident.parent / ".pins" / f"{incident.name}.json"


def pin(incident: Path, reason: str) -> None:
    """Keep an incident whatever the caps say.

    Args:
        incident: Its directory.
        reason: Why, for whoever finds it later; at most 200 characters are kept.

    Raises:
        EvidenceError: It cannot be written.
    """
    place = _pins(incident)
    document = {"schema": SCHEMA, "incident": incident.name, "reason": reason[:200], "uid": os.getuid(), "pinned_unix_ns": time.time_ns()}
    try:
        place.parent.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise EvidenceError(f"{incident.name} cannot be pinned: {error.strerror}") from error
    write_atomic(place, (json.dumps(document, sort_keys=True) + "\n").encode())


def unpin(incident: Path) -> bool:
    """Let the caps decide again; False when it was not pinned.

    Raises:
        EvidenceError: The pin cannot be taken out.
    """
    try:
        _pins(incident).unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise EvidenceError(f"{incident.name} cannot be unpinned: {error.strerror}") from error
    return True


def pinned(incident: Path) -> dict[str, Any] | None:
    """Who pinned it, when and why; None when nobody did. A damaged pin still pins."""
    place = _pins(incident)
    if not place.exists():
        return None
    try:
        found: Any = json.loads(place.read_bytes()[:_LINE])
    except (OSError, ValueError, RecursionError):
        found = None
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


def _size(directory: Path) -> int:
    total = 0
    for base, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                total += Path(base, name).lstat().st_blocks * 512
    return total


def prune(root: Path, *, max_bytes: int, max_count: int, keep: Collection[Path] = ()) -> list[Path]:
    """Drop the oldest incidents of one worker until both caps hold; returns what was dropped.

    Args:
        root: The worker's directory, `STATE_DIR/<service>/<slot>`.
        max_bytes: What incidents may occupy on disk.
        max_count: How many may stay.
        keep: Incidents that stay whatever the caps say, beside pinned ones: the open one.
    """
    base = root / "incidents"
    incidents = sorted((path for path in base.glob("*") if path.is_dir() and SAFE_NAME.match(path.name)), key=lambda path: path.name)
    sizes = {path: _size(path) for path in incidents}
    total, count, dropped = sum(sizes.values()), len(incidents), list[Path]()
    for path in incidents:
        if total <= max_bytes and count <= max_count:
            break
        if path in keep or pinned(path) is not None:
            continue
        stone = _stone(path, sizes[path], "size" if total > max_bytes else "count")
        # Renamed first: a reader sees an incident whole or not at all.
        doomed = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            path.rename(doomed)
        except OSError:
            continue
        shutil.rmtree(doomed, ignore_errors=True)
        total, count = total - sizes[path], count - 1
        _bury(base, stone)  # after it: on a full disk there is room now
        dropped.append(path)
    return dropped


def _stone(path: Path, size: int, why: str) -> dict[str, Any]:
    stone: dict[str, Any] = {"schema": SCHEMA, "incident": path.name, "bytes": size, "why": why, "dropped_unix_ns": time.time_ns()}
    with contextlib.suppress(OSError, EvidenceError, IndexError):
        numbers = manifest_numbers(path)
        stone |= {"manifests": len(numbers), "root_sha256": hash_file(path / f"manifest-{numbers[-1]}.json")[1]}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        breach: dict[str, Any] = json.loads((path / "breach.json").read_bytes())
        stone |= {key: breach[key] for key in ("request", "slo", "trigger", "detected_unix_ns")}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, IndexError, RecursionError):
        newest = max(path.glob("diagnosis-*.json"), key=lambda each: int(each.stem.partition("-")[2]))
        stone["verdict"] = str(json.loads(newest.read_bytes())["verdict"])[:_VERDICT]
    return stone


def _bury(base: Path, stone: dict[str, Any]) -> None:
    """Append one line; what cannot be written is lost, as the incident would be without a tombstone."""
    place = base / ".tombstones.jsonl"
    with contextlib.suppress(OSError, EvidenceError):
        descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0), 0o600)
        with os.fdopen(descriptor, "ab") as file:
            file.write((json.dumps(stone, sort_keys=True) + "\n").encode())
            file.flush()
            os.fsync(file.fileno())
        lines = place.read_bytes().splitlines(keepends=True)
        if len(lines) > TOMBSTONES * 11 // 10:
            write_atomic(place, b"".join(lines[-TOMBSTONES:]))


def tombstones(root: Path) -> list[dict[str, Any]]:
    """What one worker dropped, newest first; lines that cannot be read are left out."""
    found: list[dict[str, Any]] = []
    try:
        lines = (root / "incidents" / ".tombstones.jsonl").read_bytes().splitlines()
    except OSError:
        return []
    for line in reversed(lines):
        with contextlib.suppress(ValueError, RecursionError):
            stone: Any = json.loads(line[:_LINE])
            if isinstance(stone, dict) and isinstance(cast("dict[str, Any]", stone).get("incident"), str):
                found.append(cast("dict[str, Any]", stone))
    return found


def find_tombstone(state_dir: Path, asked: str) -> dict[str, Any] | None:
    """The newest tombstone of an incident with that id, or the beginning of it, under a state directory."""
    for place in sorted(state_dir.glob("*/*/incidents/.tombstones.jsonl")):
        for stone in tombstones(place.parent.parent):
            if stone["incident"].startswith(asked):
                return stone
    return None
