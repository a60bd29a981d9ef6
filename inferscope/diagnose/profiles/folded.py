"""Stacks with a value each: the one form between traces, samples and waits on one side and pprof and OTLP on the other."""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from inferscope.diagnose.evidence import read_documents, read_json
from inferscope.diagnose.stream import open_trace, stream
from inferscope.errors import EvidenceError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from inferscope.diagnose.evidence import Document

__all__ = ["Folded", "Frame", "fold"]

Frame = tuple[str, str, int]
"""Name, file (empty for what has none) and line (0 for none)."""
Stack = tuple[Frame, ...]
"""The innermost frame first."""

_HOST: Final = frozenset(
    {"cpu_op", "operator", "user_annotation", "cuda_runtime", "cuda_driver", "hip_runtime", "runtime", "xpu_runtime", "python_function"}
)
_DEVICE: Final = frozenset({"kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset"})
_EVENTS: Final = 200_000
"""Events of one trace that are folded; what comes later is left out and said."""
_CAPTURES: Final = 4
_TRACE_BYTES: Final = 8 << 20
_DEPTH: Final = 64
_NS_PER_US: Final = 1000.0


@dataclass(slots=True)
class Folded:
    """One profile."""

    kind: str
    """`torch_self_cpu`, `torch_self_device`, `wall` or `lock_wait`."""
    unit: str
    time_unix_ns: int
    duration_ns: int
    values: dict[Stack, int] = field(default_factory=dict[Stack, int])
    period_ns: int = 0
    """Between two samples; 0 where everything was measured."""
    capture: str | None = None
    """Id of the capture it comes from."""
    trace: tuple[str, str] | None = None
    """The application's trace and span that the profile belongs to."""
    truncated: bool = False

    def add(self, stack: Stack, value: int) -> None:
        """Add to a stack."""
        if value > 0 and stack:
            self.values[stack] = self.values.get(stack, 0) + value

    def to_json(self) -> dict[str, Any]:
        """As JSON types, frames in a table of their own."""
        frames: dict[Frame, int] = {}
        rows = [[[frames.setdefault(frame, len(frames)) for frame in stack], value] for stack, value in self.values.items()]
        return {
            "kind": self.kind,
            "unit": self.unit,
            "time_unix_ns": self.time_unix_ns,
            "duration_ns": self.duration_ns,
            "period_ns": self.period_ns,
            "capture": self.capture,
            "trace": list(self.trace) if self.trace else None,
            "truncated": self.truncated,
            "frames": [list(frame) for frame in frames],
            "stacks": rows,
        }


def fold(directory: Path) -> tuple[Folded, ...]:
    """Every profile of an incident that has a value.

    Args:
        directory: The incident.

    Raises:
        EvidenceError: Its evidence is damaged; a damaged trace only costs its own profile.
    """
    documents = read_documents(directory)
    traces = _traces(documents)
    offset = int(documents[0].get("unix_offset_ns") or 0) if documents else 0
    found = [_locks(document) for document in documents]
    found += [_samples(read_json(path), offset) for path in sorted(directory.glob("stacks-*.json"))]
    for side, trace in _captures(directory):
        with suppress(EvidenceError):
            found += _operators(trace, side, traces.get(int(side.get("request_id") or -1)))
    return tuple(each for each in found if each.values)


def _captures(directory: Path) -> list[tuple[Document, Path]]:
    """Side file and trace of the captures that are folded: slow ones first, not many and none that is huge.

    An incident's diagnosis waits for this, and runs while the machine has nothing else to do.
    """
    sides = [read_json(path) for path in sorted((directory / "captures").glob("*.json")) if not path.name.endswith(".trace.json")]
    held = [(side, directory / str(side["trace"])) for side in sorted(sides, key=lambda side: not side.get("slow")) if side.get("trace")]
    return [(side, trace) for side, trace in held if trace.is_file() and trace.stat().st_size <= _TRACE_BYTES][:_CAPTURES]


def _traces(documents: Iterable[Mapping[str, Any]]) -> dict[int, tuple[str, str]]:
    """The application's sampled span of each kept request."""
    found: dict[int, tuple[str, str]] = {}
    for document in documents:
        for record in (record for entry in document["classes"] for record in entry["slowest"]):
            held: list[Any] = record.get("trace") or []
            if len(held) == 2:
                found[int(record["id"])] = (str(held[0]), str(held[1]))
    return found


def _locks(document: Mapping[str, Any]) -> Folded:
    """Waits for locks by the code that held them: running totals of the process, as blame counts them."""
    offset = int(document.get("unix_offset_ns") or 0)
    begin, end = int(document["from_ns"]), int(document["to_ns"])
    found = Folded("lock_wait", "nanoseconds", begin + offset, end - begin)
    for site in document.get("locks") or ():
        name, _, place = str(site["site"]).partition(" (")
        file, _, line = place.rstrip(")").rpartition(":")
        holder: Frame = (name, file, int(line) if line.isdecimal() else 0)
        stage: Stack = ((str(site["stage"]), "", 0),) if site.get("stage") else ()
        found.add(((f"lock:{site['lock']}", "", 0), holder, *stage), int(site["wait_ns"]))
    return found


def _samples(document: Mapping[str, Any], offset: int) -> Folded:
    """Stacks of late requests' threads; each sample stands for its period."""
    period = round(float(document.get("period_s") or 0) * 1e9)
    begin, end = int(document.get("from_ns") or 0), int(document.get("to_ns") or 0)
    found = Folded("wall", "nanoseconds", begin + offset, max(end - begin, 0), period_ns=period)
    found.truncated = bool(document.get("dropped"))
    for row in document.get("stacks") or ():
        stack = tuple((str(name), str(file), int(line)) for name, file, line in row["frames"])
        stage: Stack = ((f"stage {row['stage']}", "", 0),) if row.get("stage") else ()
        found.add((*stack, *stage), int(row["samples"]) * period)
    return found


def _operators(path: Path, side: Mapping[str, Any], trace: tuple[str, str] | None) -> list[Folded]:
    """Self time of operators on the host and of kernels below the operators that launched them."""
    header: dict[str, object] = {}
    host: dict[Any, list[tuple[float, float, str, Any]]] = defaultdict(list)
    device: list[tuple[float, str, Any]] = []
    truncated = False
    with open_trace(path) as text:
        for number, event in enumerate(stream(text, header)):
            if number >= _EVENTS:
                truncated = True
                break
            if event.get("ph") != "X":
                continue
            category = str(event.get("cat", "")).lower()
            about: dict[str, Any] = event["args"] if isinstance(event.get("args"), dict) else {}
            begin, lasted = float(event.get("ts", 0.0)), float(event.get("dur", 0.0))
            if category in _HOST:
                host[event.get("tid")].append((begin, lasted, str(event.get("name", "")), about.get("correlation")))
            elif category in _DEVICE:
                device.append((lasted, str(event.get("name", "")), about.get("correlation")))
    region: dict[str, Any] = side.get("region") or {}
    begin_ns = int(region.get("start_ns") or side.get("start_ns") or 0) + int(side.get("unix_offset_ns") or 0)
    lasted_ns = int(region.get("end_ns") or 0) - int(region.get("start_ns") or 0)
    cpu, gpu = (
        Folded(kind, "nanoseconds", begin_ns, max(lasted_ns, 0), capture=str(side.get("id")), trace=trace, truncated=truncated)
        for kind in ("torch_self_cpu", "torch_self_device")
    )
    launched: dict[Any, Stack] = {}
    for events in host.values():
        _sweep(sorted(events, key=lambda each: (each[0], -each[1])), cpu, launched)
    for lasted, name, correlation in device:
        gpu.add(((name, "", 0), *launched.get(correlation, ())), round(lasted * _NS_PER_US))
    return [cpu, gpu]


def _sweep(events: Sequence[tuple[float, float, str, Any]], cpu: Folded, launched: dict[Any, Stack]) -> None:
    """One thread's nested events: a parent loses what its children take."""
    open_: list[tuple[float, Stack]] = []
    for begin, lasted, name, correlation in events:
        while open_ and open_[-1][0] <= begin:
            open_.pop()
        stack = ((name, "", 0), *(open_[-1][1] if open_ else ()))[:_DEPTH]
        spent = round(lasted * _NS_PER_US)
        cpu.values[stack] = cpu.values.get(stack, 0) + spent
        if open_:
            cpu.values[open_[-1][1]] -= spent
        if correlation is not None:
            launched[correlation] = stack
        open_.append((begin + lasted, stack))
    for stack in [stack for stack, value in cpu.values.items() if value <= 0]:
        del cpu.values[stack]
