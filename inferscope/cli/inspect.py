"""`inferscope inspect`: what lies in an incident, file by file and hash by hash, before anybody interprets it."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any, cast

from inferscope.capture.bundle import verify
from inferscope.capture.chain import hash_file, manifest_numbers
from inferscope.capture.retention import pinned
from inferscope.capture.schema import document, unlisted
from inferscope.cli.asking import whole
from inferscope.cli.output import emit, find_incident, state_argument
from inferscope.diagnose.evidence import read_documents, read_json
from inferscope.diagnose.merging import merge
from inferscope.errors import EvidenceError
from inferscope.report.words import milliseconds, number
from inferscope.triggers import told
from inferscope.types import Breach

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

    from inferscope.diagnose.evidence import Horizon, SlowRequest

HELP = (
    "Show what lies in an incident (its id, the beginning of it, or a directory; default the newest). Exit status 1 when it is not intact."
)

_STACKS = 5
_FRAMES = 6


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this verb."""
    state_argument(parser)
    parser.add_argument("incident", nargs="?", metavar="ID|DIR", help="an incident")
    parser.add_argument("--schema", action="store_true", help="say instead what an incident may hold, field by field, with classes of data")
    parser.add_argument(
        "--slowest", type=whole(0, 32), default=3, metavar="N", help="of how many slow requests to show the spans (default 3)"
    )


def _table(value: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _rows(value: Any) -> list[dict[str, Any]]:
    return [_table(item) for item in cast("list[object]", value)] if isinstance(value, list) else []


def _manifests(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for n in manifest_numbers(path):
        manifest = path / f"manifest-{n}.json"
        row: dict[str, Any] = {"n": n, "state": None, "written_unix_ns": None, "previous_sha256": None, "sha256": None, "artefacts": []}
        try:
            row["sha256"] = hash_file(manifest)[1]
            held = read_json(manifest)
        except (OSError, EvidenceError):
            found.append({**row, "state": "damaged"})
            continue
        found.append(
            {**row, **{key: held.get(key) for key in row if key in held and key not in {"n", "sha256"}}, "objective": held.get("objective")}
        )
    return found


def _artefacts(path: Path, manifests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last manifest's list, each with the manifest that first had it."""
    first: dict[str, int] = {}
    for manifest in manifests:
        for row in _rows(manifest["artefacts"]):
            first.setdefault(str(row.get("path")), manifest["n"])
    found: list[dict[str, Any]] = []
    for row in _rows(manifests[-1]["artefacts"]) if manifests else []:
        name = str(row.get("path"))
        try:
            intact = hash_file(path / name)[1] == row.get("sha256")
        except (OSError, ValueError):
            intact = False
        found.append(
            {"path": name, "bytes": row.get("bytes"), "sha256": row.get("sha256"), "since_manifest": first[name], "intact": intact}
        )
    return found


def _captures(path: Path) -> list[dict[str, Any]]:
    keys = (
        "id",
        "tier",
        "slow",
        "request",
        "request_id",
        "wall_ns",
        "events",
        "stall_ms",
        "threads",
        "region",
        "trace",
        "torch",
        "truncated",
        "shapes",
        "stacks",
        "scrubbed",
        "gil_gap_ms",
        "device",
        "device_reason",
        "kernels",
        "lost",
        "window",
        "requests",
    )
    found: list[dict[str, Any]] = []
    for side in sorted((path / "captures").glob("*.json")):
        if side.name.endswith(".trace.json"):
            continue
        try:
            held = read_json(side)
        except EvidenceError as error:
            found.append({"id": side.stem, "problem": str(error)})
            continue
        found.append({key: held.get(key) for key in keys})
    return found


def _slow(horizon: Horizon, slow: SlowRequest) -> dict[str, Any]:
    labels = horizon.labels
    spans = [
        {
            "column": labels[span.column] if span.column < len(labels) else "other",
            "parent": span.parent,
            "start_ms": (span.start_ns - slow.start_unix_ns) / 1e6,
            "duration_ms": (span.end_ns - span.start_ns) / 1e6,
            "thread": span.thread_id,
        }
        for span in slow.spans
    ]
    return {"id": slow.id, "slot": slow.slot, "start_unix_ns": slow.start_unix_ns, "wall_ms": slow.wall_ns / 1e6, "spans": spans}


def _slowest(path: Path, request: str, wanted: int) -> tuple[list[dict[str, Any]], str | None]:
    try:
        documents = read_documents(path)
        if not documents:
            return [], "no evidence was written yet"
        horizon = merge(documents, request)
        return [_slow(horizon, slow) for slow in horizon.slowest[:wanted]], None
    except EvidenceError as error:
        return [], str(error)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        return [], f"the evidence is damaged ({type(error).__name__})"


def _stacks(path: Path) -> list[dict[str, Any]]:
    """The most frequent stacks of late requests, those of all workers."""
    found: list[dict[str, Any]] = []
    for place in sorted(path.glob("stacks-*.json")):
        try:
            held = read_json(place)
        except EvidenceError as error:
            found.append({"problem": str(error)})
            continue
        if held.get("reason"):
            found.append({"problem": str(held["reason"])})
        found += _rows(held.get("stacks"))[:_STACKS]
    return found


def inspect(path: Path, slowest: int) -> dict[str, Any]:
    """Everything that lies in an incident, as JSON types.

    Args:
        path: The incident.
        slowest: Of how many slow requests to give the spans.
    """
    manifests = _manifests(path)
    try:
        breach: dict[str, Any] | None = read_json(path / "breach.json")
    except EvidenceError:
        breach = None
    slow, missing = _slowest(path, str((breach or {}).get("request")), slowest)
    return {
        "incident": path.name,
        "path": str(path),
        "state": manifests[-1]["state"] if manifests else None,
        "root_sha256": manifests[-1]["sha256"] if manifests else None,
        "problems": verify(path),
        "breach": breach,
        "manifests": [{key: value for key, value in row.items() if key != "artefacts"} for row in manifests],
        "artefacts": _artefacts(path, manifests),
        "captures": _captures(path),
        "slowest": slow,
        "slowest_missing": missing,
        "stacks": _stacks(path),
        "pinned": pinned(path),
        "unlisted_fields": unlisted(path),
    }


def _when(unix_ns: Any) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_ns / 1e9)) if isinstance(unix_ns, int) else "n/a"
    except (OverflowError, OSError, ValueError):
        return "n/a"  # no instant that a calendar has


def _ms(value: Any, per: float = 1e6) -> str:
    return milliseconds(value / per) if isinstance(value, (int, float)) else "n/a"


def _capture_text(row: dict[str, Any]) -> str:
    if "problem" in row:
        return f"  {row['id']}: {row['problem']}"
    stall = sum(value for value in _table(row["stall_ms"]).values() if isinstance(value, (int, float)))
    kind = "slow" if row["slow"] else "healthy"
    region = _table(row["region"]).get("name", "n/a")
    what = f"{kind} request {row['request_id']}" if row["window"] is None else f"window of {len(row['threads'] or ())} threads, {kind}"
    of = f" of {region}" if row["window"] is None else ""
    without = f", GPU left out: {row['device_reason']}" if row["device_reason"] else ""
    return f"  {row['id']}: {what}, {_ms(row['wall_ns'])}, {row['events']} events{of}, stall {number(stall)} ms{without}"


def _spans_text(slow: dict[str, Any]) -> list[str]:
    lines = [f"  request {slow['id']} of slot {slow['slot']}, {_when(slow['start_unix_ns'])}, {milliseconds(slow['wall_ms'])}"]
    depth: list[int] = []  # spans come in the order in which they began: a parent before its children
    for span in slow["spans"]:
        parent = int(span["parent"])
        depth.append(depth[parent] + 1 if 0 <= parent < len(depth) else 0)
        start, duration = f"{span['start_ms']:10.3f}", f"{span['duration_ms']:9.3f}"
        lines.append(f"    {start} ms +{duration} ms  {'  ' * depth[-1]}{span['column']}  (thread {span['thread']})")
    return lines


def _frame_text(frame: Any) -> str:
    row: list[Any] = frame if isinstance(frame, list) else []  # pyright: ignore[reportUnknownVariableType]  (of JSON)
    return f"{row[0]} ({row[1]}:{row[2]})" if len(row) == len(("function", "file", "line")) else "n/a"


def _stack_text(row: dict[str, Any]) -> str:
    if "problem" in row:
        return f"  {row['problem']}"
    frames = [_frame_text(frame) for frame in cast("list[Any]", row.get("frames") if isinstance(row.get("frames"), list) else [])]
    return f"  {row.get('samples')} samples in {row.get('stage') or 'no stage'}: {' < '.join(frames[:_FRAMES])}"


def _breach_text(breach: dict[str, Any] | None) -> str:
    if breach is None:
        return "breach: breach.json cannot be read"
    when = _when(breach.get("detected_unix_ns"))
    if breach.get("trigger") == "manual":
        return f"opened by hand, {when}"
    try:
        share = told(Breach(**{name: breach[name] for name in Breach.__dataclass_fields__}))
    except (KeyError, TypeError, ValueError):
        share = f"{breach.get('exceeding')} of {breach.get('requests')} requests above {breach.get('threshold_ms')} ms"
    return f"breach of {breach.get('slo')} on {breach.get('request')}: {share}, by {breach.get('trigger')}, {when}"


def _text(value: dict[str, Any]) -> str:
    lines = [f"{value['incident']}: {value['state'] or 'no manifest'}, {'intact' if not value['problems'] else 'NOT INTACT'}"]
    lines += [f"  {problem}" for problem in value["problems"]]
    lines += [f"root hash {value['root_sha256'] or 'n/a'}"]
    lines.append(_breach_text(value["breach"]))
    asked = _table(_table(value["manifests"][-1].get("objective")).get("asked_by")) if value["manifests"] else {}
    lines += [f"asked for: {', '.join(f'{key} {item}' for key, item in sorted(asked.items()))}"] if asked else []
    lines += ["manifests"]
    lines += [
        f"  {row['n']}  {_when(row['written_unix_ns'])}  {row['state']}  {row['sha256'] or 'unreadable'}" for row in value["manifests"]
    ]
    lines += ["artefacts"]
    for row in value["artefacts"]:
        lines.append(f"  {row['bytes']!s:>10}  {row['sha256']}  {row['path']}{'' if row['intact'] else '  CHANGED'}")
    lines += ["captures", *map(_capture_text, value["captures"])] if value["captures"] else ["captures: none"]
    lines += [f"slowest requests: {value['slowest_missing']}"] if value["slowest_missing"] else ["slowest requests"]
    lines += [line for slow in value["slowest"] for line in _spans_text(slow)]
    lines += ["stacks of late requests, innermost first", *map(_stack_text, value["stacks"])] if value["stacks"] else []
    lines += [f"pinned: {value['pinned'].get('reason', 'no reason')}"] if value["pinned"] is not None else []
    lines += (
        ["fields that the schema does not know", *(f"  {field}" for field in value["unlisted_fields"])] if value["unlisted_fields"] else []
    )
    return "\n".join(lines)


def _schema_text(known: dict[str, Any]) -> str:
    lines = ["classes of data", *(f"  {name:<8} {meaning}" for name, meaning in known["classes"].items()), "strings (numbers are measures)"]
    return "\n".join(lines + [f"  {row['class']:<8} {row['artefact']:<24} {row['field']}" for row in known["strings"]])


def run(options: argparse.Namespace) -> int:
    """Show it; 1 when it is not intact."""
    if options.schema:
        emit(options, document(), _schema_text(document()))
        return 0
    value = inspect(find_incident(options), options.slowest)
    emit(options, json.loads(json.dumps(value)), _text(value))
    return 1 if value["problems"] else 0
