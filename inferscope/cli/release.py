"""`inferscope bench --accept`: a record that a release met its objectives, which `inferscope verify` recomputes from the run."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeGuard

from inferscope.bench import acceptance, runs
from inferscope.capture.bundle import write_atomic
from inferscope.errors import EvidenceError, InferscopeError

if TYPE_CHECKING:
    import argparse

    from inferscope.bench.result import LoadResult

__all__ = ["KIND", "verify", "write"]

KIND: Final = "inferscope.acceptance"
SCHEMA: Final = 1


def _is_dict(value: object) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)


def write(options: argparse.Namespace, found: dict[str, Any], result: LoadResult) -> Path:
    """Write the record, and the run beside it when it was not asked for by name.

    Args:
        options: of `bench`.
        found: the run as data.
        result: its requests.
    """
    target: Path = options.acceptance or Path("acceptance.json")
    run: Path = options.output or target.with_suffix(".run.json")
    if options.output is None:
        runs.save(run, found, result)
    judged = [row for row in found["acceptance"] if row["objective"] in {each.text for each in options.accept}]
    golden: dict[str, Any] | None = found.get("golden")
    correct = golden is None or bool(golden["correct"])
    words = {row["word"] for row in judged}
    good = words == {"HOLDS"} and correct and found["valid"]
    record = {
        "schema": SCHEMA,
        "kind": KIND,
        "written_unix_ns": time.time_ns(),
        "release": options.release or found["source"]["commit"],
        "dirty": found["source"]["dirty"],
        "accepted": good,
        "objectives": judged,
        "outputs": "not checked" if golden is None else golden["text"],
        "problems": found["problems"],
        "rollback": "keep or reinstall the release before this one",
        "fingerprint_sha256": found["fingerprint"]["sha256"],
        "run": {"path": _beside(run, target), "sha256": hashlib.sha256(run.read_bytes()).hexdigest()},
    }
    if not target.parent.is_dir():
        raise InferscopeError(f"--acceptance {target}: no such directory")
    write_atomic(target, json.dumps(record, indent=1).encode() + b"\n")
    found["record"] = {"path": str(target), "accepted": good}
    return target


def _beside(run: Path, target: Path) -> str:
    """The run's path as seen from the record, so that both may move together."""
    try:
        return str(run.resolve().relative_to(target.resolve().parent))
    except ValueError:
        return str(run.resolve())


def verify(path: Path) -> list[str]:
    """Recompute a record from its run; what is wrong, nothing when it is whole."""
    try:
        record: Any = json.loads(path.read_bytes())
        if not _is_dict(record) or record.get("kind") != KIND:
            return [f"{path.name} is no acceptance record"]
        if record.get("schema") != SCHEMA:
            return [f"{path.name} has schema {record.get('schema')!r}, this version reads {SCHEMA}"]
        run = runs.read(path.parent / record["run"]["path"])
        if run.sha256 != record["run"]["sha256"]:
            return [f"{run.path} was changed"]
        level = float(run.document["settings"].get("ci") or 0.95)
        again = [
            acceptance.accept(acceptance.parse_objective(row["objective"]), run.load, skip=run.skip, level=level)
            for row in record["objectives"]
        ]
        problems = [
            f"{each.objective} comes out as {each.word}, the record says {row['word']}"
            for each, row in zip(again, record["objectives"], strict=True)
            if each.word != row["word"]
        ]
        golden: dict[str, Any] | None = run.document.get("golden")
        correct = golden is None or bool(golden["correct"])
        good = {each.word for each in again} == {"HOLDS"} and correct and not run.document["problems"]
    except OSError as error:
        return [f"{path.name} cannot be read ({error.strerror})"]
    except EvidenceError as error:
        return [str(error)]
    except (KeyError, TypeError, ValueError) as error:
        return [f"{path.name} is damaged: {type(error).__name__} at {error}"]
    if good is not record["accepted"]:
        problems.append(f"it says accepted: {record['accepted']}, and it comes out as {good}")
    return problems
