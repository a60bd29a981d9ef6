"""From the objective to the proof: one directory whose links each hash what they rest on.

    objective → run → incident → finding → change → (candidate) → comparison

    DIR/objective.json  run.json  incident/…  finding.json  change.json  comparison.json  evidence.json

`evidence.json` lists every link with its SHA-256 and the hashes of the links that it rests on; its own SHA-256 is the root hash. `verify`
recomputes all of it, and what can be computed again: percentiles from the run's requests, the finding from the incident's diagnosis, the
verdicts from the comparison's blocks. Nothing here is ever deleted by inferscope.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeGuard

from inferscope.bench import compare, interleave, metrics, runs
from inferscope.bench.acceptance import parse_objective
from inferscope.capture import bundle, chain
from inferscope.diagnose.incident import load as load_incident
from inferscope.diagnose.incident import to_dict
from inferscope.errors import ConfigurationError, EvidenceError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["INDEX", "STEPS", "Evidence", "root_hash", "verify"]

INDEX: Final = "evidence.json"
KIND: Final = "inferscope.evidence"
SCHEMA: Final = 1
STEPS: Final = ("objective", "run", "incident", "finding", "change", "candidate", "comparison")
_RESTS_ON: Final = {
    "objective": (),
    "run": ("objective",),
    "incident": ("objective", "run"),
    "finding": ("incident",),
    "change": ("finding",),
    "candidate": ("objective", "change"),
    "comparison": ("objective", "run", "change", "candidate"),
}
_INCIDENT: Final = "incident"


def _is_dict(value: object) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)


def _encode(value: Any) -> bytes:
    return json.dumps(value, indent=1, sort_keys=True).encode() + b"\n"


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def root_hash(directory: Path) -> str:
    """SHA-256 of the index: whoever has it from elsewhere can tell that nothing was rewritten."""
    return _sha256((directory / INDEX).read_bytes())


@dataclass(slots=True)
class Evidence:
    """A chain that is being written.

    Args:
        directory: is made; it must not hold a chain yet.
    """

    directory: Path
    root: str = ""
    """The root hash, once it is sealed."""
    _links: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])

    def __post_init__(self) -> None:
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            taken = any(self.directory.iterdir())
        except OSError as error:
            raise EvidenceError(f"{self.directory}: cannot be used ({error.strerror})") from error
        if taken:
            raise EvidenceError(f"{self.directory}: is not empty; evidence is written once")

    def objective(self, texts: Sequence[str]) -> None:
        """What had to hold."""
        self._json("objective", {"kind": "inferscope.objective", "objectives": list(texts)})

    def run(self, path: Path, step: str = "run") -> None:
        """A run of `bench`, before (`run`) or after (`candidate`)."""
        found = runs.read(path)
        self._file(step, path.read_bytes())
        del found

    def incident(self, path: Path) -> None:
        """The incident, with its own chain of manifests."""
        problems = bundle.verify(path)
        if problems:
            raise EvidenceError(f"{path.name} does not verify, so it is no evidence: {problems[0]}")
        target = self.directory / _INCIDENT / path.name
        shutil.copytree(path, target)
        target.parent.chmod(0o700)
        self._add("incident", f"{_INCIDENT}/{path.name}", _incident_root(target))

    def finding(self, name: str | None = None) -> dict[str, Any] | None:
        """The finding that the change answers, from the incident's diagnosis.

        Args:
            name: its id; default the first.

        Raises:
            EvidenceError: the incident has no such finding.
        """
        link = self._links.get("incident")
        if link is None:
            raise EvidenceError("a finding needs the incident that it was found in")
        found = to_dict(load_incident(self.directory / link["path"]))["findings"]
        chosen = next((row for row in found if name in {None, row["id"]}), None)
        if chosen is None:
            if name is None:
                return None
            raise EvidenceError(f"the incident has no finding {name}; it has {', '.join(row['id'] for row in found) or 'none'}")
        self._json("finding", {"kind": "inferscope.finding", "finding": chosen})
        return dict(chosen)

    def change(self, what: str, rollback: str, **more: Any) -> None:
        """What was changed because of it, and how it is undone."""
        self._json("change", {"kind": "inferscope.change", "what": what, "rollback": rollback, **more})

    def comparison(self, value: dict[str, Any]) -> None:
        """The proof, as `ab` or `compare` made it."""
        self._json("comparison", value)

    def seal(self) -> str:
        """Write the index; returns the root hash."""
        index = {
            "schema": SCHEMA,
            "kind": KIND,
            "written_unix_ns": time.time_ns(),
            "links": [self._links[step] for step in STEPS if step in self._links],
            "missing": [step for step in STEPS if step not in self._links and step != "candidate"],
        }
        bundle.write_atomic(self.directory / INDEX, _encode(index))
        self.root = root_hash(self.directory)
        return self.root

    def _json(self, step: str, value: dict[str, Any]) -> None:
        rests = self._inputs(step)
        self._file(step, _encode({"schema": SCHEMA, **value, "rests_on": rests}))

    def _file(self, step: str, content: bytes) -> None:
        bundle.write_atomic(self.directory / f"{step}.json", content)
        self._add(step, f"{step}.json", _sha256(content))

    def _inputs(self, step: str) -> dict[str, str]:
        return {name: self._links[name]["sha256"] for name in _RESTS_ON[step] if name in self._links}

    def _add(self, step: str, path: str, sha256: str) -> None:
        self._links[step] = {"step": step, "path": path, "sha256": sha256, "inputs": self._inputs(step)}


def _incident_root(path: Path) -> str:
    return _sha256((path / f"manifest-{chain.manifest_numbers(path)[-1]}.json").read_bytes())


def _index(directory: Path) -> dict[str, Any]:
    try:
        found: Any = json.loads((directory / INDEX).read_bytes())
    except OSError as error:
        raise EvidenceError(f"{directory}: {INDEX} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise EvidenceError(f"{INDEX} is damaged: not JSON") from error
    if not _is_dict(found) or found.get("kind") != KIND:
        raise EvidenceError(f"{INDEX} is no index of evidence")
    if found.get("schema") != SCHEMA:
        raise EvidenceError(f"{INDEX} has schema {found.get('schema')!r}, this version reads {SCHEMA}")
    return found


def verify(directory: Path, expect: str | None = None) -> list[str]:
    """Recompute a chain; what is wrong with it, nothing when it is whole.

    Args:
        directory: where it lies.
        expect: the root hash, from elsewhere.
    """
    try:
        index = _index(directory)
        links: dict[str, dict[str, Any]] = {str(row["step"]): row for row in index["links"]}
        problems = [] if expect in {None, root_hash(directory)} else [f"the root hash is {root_hash(directory)}, not {expect}"]
        for step, row in links.items():
            problems += _check_link(directory, step, row, links)
        problems += _strangers(directory, links)
    except EvidenceError as error:
        return [str(error)]
    except (KeyError, TypeError, ValueError, OSError, IndexError) as error:
        return [f"{INDEX} is damaged: {type(error).__name__} at {error}"]
    return problems or _recomputed(directory, links)


def _check_link(directory: Path, step: str, row: dict[str, Any], links: dict[str, dict[str, Any]]) -> list[str]:
    path = directory / str(row["path"])
    if step not in STEPS or not path.resolve().is_relative_to(directory.resolve()):
        return [f"{step} is no link of a chain"]
    if step == "incident":
        problems = [f"incident: {problem}" for problem in bundle.verify(path, str(row["sha256"]))]
    else:
        try:
            content = path.read_bytes()
        except OSError as error:
            return [f"{row['path']} cannot be read ({error.strerror})"]
        problems = [] if _sha256(content) == row["sha256"] else [f"{row['path']} was changed"]
    expected = {name: links[name]["sha256"] for name in _RESTS_ON[step] if name in links}
    if row["inputs"] != expected:
        problems.append(f"{step} rests on other links than those that are here")
    return problems


def _strangers(directory: Path, links: dict[str, dict[str, Any]]) -> list[str]:
    known = {str(row["path"]).partition("/")[0] for row in links.values()} | {INDEX}
    return [f"{path.name} belongs to no link" for path in sorted(directory.iterdir()) if path.name not in known]


def _recomputed(directory: Path, links: dict[str, dict[str, Any]]) -> list[str]:
    """What does not come out again from what it was computed from."""
    problems: list[str] = []
    loaded: dict[str, runs.Run] = {}
    for step in ("run", "candidate"):
        if step in links:
            run = loaded[step] = runs.read(directory / links[step]["path"])
            items = int(run.document["settings"].get("batch_size") or 1)
            how: dict[str, Any] = {"level": run.document["settings"].get("ci") or 0.95, "blocks": run.document["settings"].get("blocks")}
            again = json.loads(json.dumps(metrics.describe(run.load, skip=run.skip, items=items, **how)["latency"]))
            if again != run.document["metrics"]["latency"]:
                problems.append(f"{step}: its percentiles are not those of its requests")
    if "objective" in links:
        for text in json.loads((directory / links["objective"]["path"]).read_bytes())["objectives"]:
            try:
                parse_objective(text)
            except ConfigurationError as error:
                problems.append(f"objective: {error}")
    if "finding" in links and "incident" in links:
        finding = json.loads((directory / links["finding"]["path"]).read_bytes())["finding"]
        diagnosed = json.loads(json.dumps(to_dict(load_incident(directory / links["incident"]["path"]))["findings"]))
        if finding not in diagnosed:
            problems.append("finding: it is not in the incident's diagnosis")
    if "comparison" in links:
        problems += _rejudged(json.loads((directory / links["comparison"]["path"]).read_bytes()), loaded)
    return problems


def _rejudged(value: dict[str, Any], loaded: dict[str, runs.Run]) -> list[str]:
    """Whether the verdicts come out again."""
    if value.get("gates") is None:
        return []
    gates = [compare.Gate(str(row["metric"]), float(row["tolerance"])) for row in value["gates"]]
    if value["method"] == "interleaved":
        if not value.get("samples"):
            return []
        blocks: dict[interleave.Arm, list[compare.Block]] = {
            "a": [interleave.restored(row) for row in value["samples"]["a"]],
            "b": [interleave.restored(row) for row in value["samples"]["b"]],
        }
        again = interleave.rejudged(blocks, value["looks"], gates, extend=bool(value["extend"]), seed=int(value["seed"]))
    elif "run" in loaded and "candidate" in loaded:
        base, candidate = loaded["run"], loaded["candidate"]
        again = compare.sequential(base.load, candidate.load, gates, skip=(base.skip, candidate.skip))
    else:
        return []
    said = {str(row["metric"]): row for row in value["verdicts"]}
    return [
        f"comparison: {each.metric} comes out as {each.word}, it says {said.get(each.metric, {}).get('word')}"
        for each in again
        if not _same(each, said.get(each.metric))
    ]


def _same(again: compare.Verdict, said: dict[str, Any] | None) -> bool:
    """Whether a verdict is the same, or was withheld for a reason that it names."""
    if said is None:
        return False
    if said["word"] == compare.INCONCLUSIVE and said["why"]:
        return True
    near = all(
        (ours is None and theirs is None) or (ours is not None and theirs is not None and abs(ours - theirs) <= 1e-9 * max(1.0, abs(ours)))
        for ours, theirs in ((again.change, said["change"]), (again.low, said["low"]), (again.high, said["high"]))
    )
    return again.word == said["word"] and near
