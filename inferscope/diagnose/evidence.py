"""Evidence as values: what `merging` makes of the documents on disk, and how those are read."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, cast

from inferscope.diagnose.device import DeviceFacts
from inferscope.diagnose.host import HostFacts
from inferscope.errors import EvidenceError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from inferscope.remote import Calls, ServerTotals
    from inferscope.types import Column, FloatArray, IntArray, LockSite, SpanRecord

__all__ = [
    "Blocks",
    "CopySite",
    "Document",
    "Horizon",
    "Sampled",
    "SlowRequest",
    "Waited",
    "quantile_ns",
    "read_documents",
    "read_json",
]

Document = dict[str, Any]
"""One evidence file as parsed JSON."""

_SCHEMAS: Final = range(1, 2)


@dataclass(frozen=True, slots=True)
class Blocks:
    """One-second blocks of the horizon, ascending; every second with requests has one."""

    counts: IntArray
    """Requests, shape (n,)."""
    tail_counts: IntArray
    """Requests above the first edge, shape (n,)."""
    tail_sums: FloatArray
    """Nanoseconds of those, shape (n, columns)."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """Whole exclusive vectors, each standing for `weights[i]` requests of the horizon."""

    wall_ns: FloatArray
    weights: FloatArray
    vectors: FloatArray
    """Nanoseconds, shape (n, columns); each row sums to its wall time."""
    seconds: IntArray
    """Unix second in which each request began; -1 where a band's mean stands in."""


@dataclass(frozen=True, slots=True)
class SlowRequest:
    """One of the slowest requests, with positions in wall-clock nanoseconds (comparable between slots of one machine)."""

    id: int
    slot: int
    start_unix_ns: int
    wall_ns: int
    thread_id: int
    spans: tuple[SpanRecord, ...]
    """Instants are unix nanoseconds; columns are the horizon's."""


@dataclass(frozen=True, slots=True)
class CopySite:
    """Host-to-device or device-to-host copies from one line of code; running totals of the process."""

    name: str
    site: str
    count: int
    bytes: int
    wall_ns: int
    sync: int
    """Copies during which the host was blocked."""
    pageable: int
    implicit: int = 0
    """Copies that came of reading a value (`item`, `if tensor:`)."""


@dataclass(frozen=True, slots=True)
class Waited:
    """All waits in one queue within the horizon, of slow and ordinary requests; ns. Percentiles are the largest of the slots'."""

    name: str
    count: int
    sum_ns: int
    p50_ns: float
    p99_ns: float
    max_ns: float

    def add(self, series: Mapping[str, Any]) -> Waited:
        """With another slot's series."""
        return Waited(
            self.name,
            self.count + int(series["count"]),
            self.sum_ns + int(series["sum_ns"]),
            max(self.p50_ns, float(series["p50_ns"] or 0.0)),
            max(self.p99_ns, float(series["p99_ns"] or 0.0)),
            max(self.max_ns, float(series["max_ns"] or 0.0)),
        )


@dataclass(frozen=True, slots=True)
class Horizon:
    """All that is known of one request name over the horizon, merged over slots and classes."""

    columns: tuple[Column, ...]
    from_unix_ns: int
    to_unix_ns: int
    seconds: float
    edges_ns: tuple[int, ...]
    count: int
    errors: int
    excluded: int
    """Profiled requests: counted, but in neither percentiles nor bands."""
    violations: tuple[int, ...]
    latency: tuple[tuple[float, float, int], ...]
    """(lowest, highest, count) of each occupied histogram bucket, ascending, ns."""
    band_ids: IntArray
    band_lower: FloatArray
    """Lowest latency of each row, ns, ascending."""
    band_counts: IntArray
    band_sums: FloatArray
    blocks: Blocks
    reservoir: Sampled
    slowest: tuple[SlowRequest, ...]
    locks: tuple[LockSite, ...]
    copies: tuple[CopySite, ...]
    copied: Mapping[str, int]
    """Copies within the horizon by name."""
    gc: tuple[tuple[int, int, int, int], ...]
    """Collections within the horizon: (generation, count, total_ns, longest_ns)."""
    device_busy: float | None
    status: Mapping[str, Any]
    process: Mapping[str, Any]
    slots: int
    classes: int
    """Request classes (model, class) that were merged."""
    host: HostFacts = field(default_factory=HostFacts)
    queues: tuple[Waited, ...] = ()
    stages: Mapping[str, int] = field(default_factory=dict[str, int])
    """How often each stage ran within the horizon, by name."""
    device: DeviceFacts = field(default_factory=DeviceFacts)
    batches: tuple[Waited, ...] = ()
    """Work that was done for several requests at once, by name; times are the work's, not waits."""
    calls: tuple[Calls, ...] = ()
    """Calls to inference servers; running totals of the processes."""
    servers: tuple[ServerTotals, ...] = ()
    """What those servers counted since they were first asked."""

    @property
    def labels(self) -> tuple[str, ...]:
        """The columns' names as people see them."""
        return tuple(column.label for column in self.columns)

    @property
    def timed(self) -> int:
        """Requests that are in percentiles and bands."""
        return int(self.band_counts.sum())


def read_json(path: Path) -> Document:
    """Read one JSON object.

    Raises:
        EvidenceError: The file is missing, damaged or not an object.
    """
    try:
        value: object = json.loads(path.read_bytes())
    except OSError as error:
        msg = f"{path.name}: cannot be read ({error.strerror or error})"
        raise EvidenceError(msg) from error
    except ValueError as error:
        msg = f"{path.name}: damaged JSON ({error})"
        raise EvidenceError(msg) from error
    if not isinstance(value, dict):
        msg = f"{path.name}: expected a JSON object, found {type(value).__name__}"
        raise EvidenceError(msg)
    return cast("Document", value)


def read_documents(directory: Path, stem: str = "evidence") -> list[Document]:
    """The newest `<stem>-<slot>-<n>.json` of every slot, by ascending slot.

    Args:
        directory: The incident.
        stem: `evidence`, or `healthy` for the last healthy horizon.

    Raises:
        EvidenceError: A file is damaged or from a newer version.
    """
    newest: dict[str, tuple[int, Path]] = {}
    for path in directory.glob(f"{stem}-*.json"):
        match = re.fullmatch(rf"{stem}-(.+)-(\d+)\.json", path.name)
        if match and (n := int(match[2])) >= newest.get(match[1], (-1, path))[0]:
            newest[match[1]] = (n, path)
    documents = [read_json(path) for _, (_, path) in sorted(newest.items())]
    for document, (_, (_, path)) in zip(documents, sorted(newest.items()), strict=True):
        if document.get("schema") not in _SCHEMAS:
            msg = f"{path.name}: schema {document.get('schema')!r} is not known here; this version reads 1"
            raise EvidenceError(msg)
    return documents


def quantile_ns(latency: Sequence[tuple[float, float, int]], q: float) -> float | None:
    """The highest value of the bucket that holds the quantile, as HdrHistogram answers; None when fewer than 1/(1-q) requests.

    Args:
        latency: Occupied buckets as in `Horizon.latency`.
        q: 0 < q < 1.
    """
    total = sum(bucket[2] for bucket in latency)
    if total * (1.0 - q) < 1.0 - 1e-9:
        return None
    wanted = max(1, int(q * total + 0.5))
    seen = 0
    for _, highest, count in latency:
        seen += count
        if seen >= wanted:
            return highest
    return None
