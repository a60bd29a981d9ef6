"""What lies in an incident, field by field, with the class of data that each holds: for whoever decides where incidents may go.

Every string that is written has its line here; numbers need none, they are instants, durations, counts and sizes. A string in a field that
is not listed is reported by `inferscope inspect` and fails our tests. No field holds a value of the application's: no tensor, no payload,
no message of an exception, no environment variable's value.
"""

from __future__ import annotations

import fnmatch
import json
import re
from functools import cache
from typing import TYPE_CHECKING, Any, Final, cast

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["CLASSES", "FIELDS", "SCHEMA", "Field", "document", "find", "unlisted"]

SCHEMA: Final = 1
CLASSES: Final[dict[str, str]] = {
    "id": "identifiers that inferscope made: incident, process, hashes, request numbers, trace ids",
    "name": "names that developers gave in code: service, request, stage, lock, queue, model, class, objective, thread",
    "code": "functions, files (last two parts of the path) and lines, operators, kernels, types of exceptions",
    "measure": "instants, durations, counts, sizes and shares; packed ones too",
    "shape": "dimensions and types of operators' inputs",
    "machine": "hardware, kernel, library versions, limits, names of settings that are set (never their values)",
    "text": "sentences that inferscope wrote from the above",
    "audit": "what a person typed to say why, who it was, and where the evidence lay",
}
Field = tuple[str, str, str]
_E: Final = "evidence-*.json"
_C: Final = "captures/*.json"
_T: Final = "captures/*.trace.json"
_D: Final = "diagnosis-*.json"
_M: Final = "manifest-*.json"
_S: Final = "stacks-*.json"
FIELDS: Final[tuple[Field, ...]] = (
    ("breach.json", "id", "id"),
    ("breach.json", "slo", "name"),
    ("breach.json", "request", "name"),
    ("breach.json", "trigger", "text"),
    ("breach.json", "*", "text"),
    (_M, "artefacts[].path", "id"),
    (_M, "artefacts[].sha256", "id"),
    (_M, "digest", "id"),
    (_M, "previous_sha256", "id"),
    (_M, "incident", "id"),
    (_M, "state", "text"),
    (_M, "objective.asked_by.*", "audit"),
    (_M, "objective.*", "name"),
    (_M, "fingerprint.*", "machine"),
    (_M, "versions.*", "machine"),
    (_T, "traceEvents[].name", "code"),
    (_T, "traceEvents[].args.Input *", "shape"),
    (_T, "traceEvents[].args.name", "name"),
    (_T, "traceEvents[].*", "code"),
    (_T, "deviceProperties[].*", "machine"),
    (_T, "*", "machine"),
    (_C, "id", "id"),
    (_C, "trace", "id"),
    (_C, "request", "name"),
    (_C, "region.name", "name"),
    (_C, "spans[].column", "name"),
    (_C, "device", "machine"),
    (_C, "device_reason", "text"),
    (_C, "torch", "machine"),
    (_S, "request", "name"),
    (_S, "reason", "text"),
    (_S, "stacks[].stage", "name"),
    (_S, "stacks[].frames[][]", "code"),
    (_D, "id", "id"),
    (_D, "breach.id", "id"),
    (_D, "service", "name"),
    (_D, "path", "audit"),
    (_D, "breach.*", "name"),
    (_D, "attribution[].*", "name"),
    (_D, "what_if[].fix[]", "name"),
    (_D, "captures[].*", "id"),
    (_D, "findings[].*", "text"),
    (_D, "*", "text"),
    (_E, "instance_id", "id"),
    (_E, "columns[][]", "name"),
    (_E, "classes[].request", "name"),
    (_E, "classes[].model", "name"),
    (_E, "classes[].cls", "name"),
    (_E, "classes[].slowest[].key[]", "name"),
    (_E, "classes[].slowest[].error", "code"),
    (_E, "classes[].slowest[].trace[]", "id"),
    (_E, "classes[].slowest[].*", "name"),
    (_E, "series[].*", "name"),
    (_E, "locks[].lock", "name"),
    (_E, "locks[].stage", "name"),
    (_E, "locks[].request", "name"),
    (_E, "locks[].site", "code"),
    (_E, "copies[].*", "code"),
    (_E, "gc[].*", "code"),
    (_E, "device.spans[][]", "name"),
    (_E, "device.memory_by_stage[].*", "name"),
    (_E, "device.*", "machine"),
    (_E, "remote.*", "name"),
    (_E, "process.*", "machine"),
    (_E, "status.*", "text"),
    (_E, "host.requests[].error", "code"),
    (_E, "host.requests[].shape*", "shape"),
    (_E, "host.scheduling.reason", "text"),
    *(
        (_E, f"host.{part}.{field}", kind)
        for part in ("samples", "earlier_samples[]")
        for field, kind in (
            ("reason", "text"),
            ("threads[].name", "name"),
            ("threads[].*", "measure"),
            ("places[]", "code"),
            ("sites[].site", "code"),
        )
    ),
    (_E, "host.children[].*", "name"),
    (_E, "host.cgroup.*", "machine"),
    ("healthy-*.json", "*", "name"),
    ("gpu-*.json", "source", "text"),
    ("gpu-*.json", "rows[].*", "code"),
)
"""Artefact, field and class of every string; the first line that fits holds. `[]` is any element of a list, `*` at the end anything below."""
_LONGEST: Final = 200
"""Of what is reported; a field that is not listed may be anything."""


@cache
def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(re.escape(text).replace(r"\*", ".*") + r"\Z", re.DOTALL)


def find(artefact: str, path: str) -> str | None:
    """The class of a string at `path` in an artefact; None when it is not listed."""
    for name, field, kind in FIELDS:
        if fnmatch.fnmatchcase(artefact, name) and not (name == _C and fnmatch.fnmatchcase(artefact, _T)) and _pattern(field).match(path):
            return kind
    return None


def _strings(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for key, item in cast("dict[str, Any]", value).items():
            yield from _strings(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for item in value:  # pyright: ignore[reportUnknownVariableType]  (of JSON)
            yield from _strings(item, f"{path}[]")


def unlisted(directory: Path) -> list[str]:
    """Fields of an incident that hold a string and are not in `FIELDS`, as `artefact: field`; artefacts that cannot be read are left out."""
    found: dict[str, None] = {}
    for path in sorted(directory.rglob("*.json")):
        artefact = path.relative_to(directory).as_posix()
        if not path.is_file() or path.is_symlink() or any(part.startswith(".") for part in path.relative_to(directory).parts):
            continue
        try:
            document = json.loads(path.read_bytes())
            for field, _ in _strings(document, ""):
                if find(artefact, field) is None:
                    found[f"{artefact}: {field}"[:_LONGEST]] = None
        except (OSError, ValueError, RecursionError):
            continue
    return list(found)


def document() -> dict[str, Any]:
    """The schema as JSON types."""
    rows = [{"artefact": artefact, "field": field, "class": kind} for artefact, field, kind in FIELDS]
    return {"schema": SCHEMA, "classes": CLASSES, "strings": rows, "numbers": "measure", "profiles/*.pb.gz": "code"}
