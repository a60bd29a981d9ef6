"""Evidence on disk, read and merged: the sums of several slots become one `Horizon`.

Everything that is merged is additive (histogram counts, band sums, 1-second blocks), so a pod of eight workers is judged as one service.
Columns are mapped by (kind, name), because each process numbers them in the order in which it met them.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np

from inferscope.errors import EvidenceError
from inferscope.types import BAND_COUNT, COLUMN_LIMIT, UNATTRIBUTED, Column, LockSite, SpanRecord

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from inferscope.types import FloatArray, IntArray

__all__ = [
    "Blocks",
    "CopySite",
    "Document",
    "Horizon",
    "Sampled",
    "SlowRequest",
    "band_lower_ns",
    "merge",
    "quantile_ns",
    "read_documents",
    "read_json",
]

Document = dict[str, Any]
"""One evidence file as parsed JSON."""

SECOND_NS: Final = 1_000_000_000
_SCHEMAS: Final = range(1, 2)
_BASE_BANDS: Final = 216


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
    """Host-to-device or device-to-host copies from one line of code; totals of the horizon."""

    name: str
    site: str
    count: int
    bytes: int
    wall_ns: int
    sync: int
    """Copies during which the host was blocked."""
    pageable: int


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
    gc: tuple[tuple[int, int, int, int], ...]
    """(generation, count, total_ns, longest_ns)."""
    device_busy: float | None
    status: Mapping[str, Any]
    process: Mapping[str, Any]
    slots: int
    classes: int
    """Request classes (model, class) that were merged."""

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


def band_lower_ns(band: int, edges_ns: Sequence[int]) -> float:
    """The lowest latency of a band row: 8 bands an octave from 1024 ns, or the edge itself for an edge row.

    Raises:
        EvidenceError: The band does not exist, or names an edge that the class does not have.
    """
    if band >= _BASE_BANDS:
        if band - _BASE_BANDS >= len(edges_ns):
            msg = f"band {band} names an objective edge that is missing"
            raise EvidenceError(msg)
        return float(edges_ns[band - _BASE_BANDS] + 1)
    if not 0 <= band < BAND_COUNT:
        msg = f"band {band} does not exist"
        raise EvidenceError(msg)
    octave, eighth = divmod(band, 8)
    return float((8 + eighth) << (octave + 7)) if band else 0.0


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


def merge(documents: Sequence[Document], request: str) -> Horizon:
    """Add the documents of all slots for one request name.

    Args:
        documents: Evidence of one or more slots.
        request: The request's name; all its models and classes are added.

    Raises:
        EvidenceError: No document has the request, or one is damaged or laid out differently.
    """
    try:
        return _Merge(request).add_all(documents)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        msg = f"evidence is damaged: {type(error).__name__}: {error}"
        raise EvidenceError(msg) from error


class _Merge:
    """The running sums while documents are added."""

    def __init__(self, request: str) -> None:
        self.request = request
        self.columns: dict[Column, int] = {UNATTRIBUTED: 0, Column("other", "other"): 1}
        self.totals: dict[str, int] = {"count": 0, "errors": 0, "excluded": 0}
        self.edges: tuple[int, ...] | None = None
        self.violations: list[int] = []
        self.latency: dict[tuple[int, int], dict[int, int]] = {}
        self.bands: dict[int, list[float]] = {}
        self.blocks: dict[int, list[float]] = {}
        self.reservoir: list[list[float]] = []
        self.slowest: list[SlowRequest] = []
        self.locks: list[LockSite] = []
        self.copies: dict[tuple[str, str], list[int]] = {}
        self.gc: dict[int, list[int]] = {}
        self.classes = 0
        self.seconds: list[float] = []

    def add_all(self, documents: Sequence[Document]) -> Horizon:
        """Add every document and freeze the result."""
        for document in documents:
            mapping = [self._column(Column(str(kind), str(name))) for kind, name in document["columns"]]
            offset = int(document.get("unix_offset_ns") or 0)
            found = [entry for entry in document["classes"] if entry["request"] == self.request]
            for entry in found:
                self._add_class(entry, mapping, offset, int(document.get("slot") or 0))
            self.seconds.append((int(document["to_ns"]) - int(document["from_ns"])) / SECOND_NS)
            self._add_tables(document)
        if not self.classes or self.edges is None:
            msg = f"no evidence about the request {self.request!r}"
            raise EvidenceError(msg)
        return self._freeze(documents)

    def _column(self, column: Column) -> int:
        """The merged index of a column; what does not fit any more is `other`, as in the recorder."""
        if column not in self.columns and len(self.columns) >= COLUMN_LIMIT:
            return 1
        return self.columns.setdefault(column, len(self.columns))

    def _add_class(self, entry: Mapping[str, Any], mapping: Sequence[int], offset: int, slot: int) -> None:
        edges = tuple(int(edge) for edge in entry["edges_ns"])
        if self.edges is not None and edges != self.edges:
            msg = f"slots disagree about the objective's edges: {list(self.edges)} and {list(edges)} ns"
            raise EvidenceError(msg)
        self.edges = edges
        self.classes += 1
        for name in self.totals:
            self.totals[name] += int(entry[name])
        counts = [int(value) for value in entry["violations"]]
        self.violations = counts if not self.violations else [a + b for a, b in zip(self.violations, counts, strict=True)]
        latency = entry["latency"]
        held = self.latency.setdefault((int(latency["digits"]), int(latency["lowest_ns"])), {})
        for index, count in zip(latency["index"], latency["count"], strict=True):
            held[int(index)] = held.get(int(index), 0) + int(count)
        bands = entry["bands"]
        for band, count, sums in zip(bands["ids"], bands["counts"], bands["sums"], strict=True):
            _add_row(self.bands, int(band), (count,), sums, mapping)
        for block in entry["blocks"]:
            second = (int(block["t_ns"]) + offset) // SECOND_NS
            _add_row(self.blocks, second, (block["count"], block["tail_count"]), block["tail_sums"], mapping)
        for kept in entry["reservoir"]:
            row = [0.0] * (2 + COLUMN_LIMIT)
            row[0], row[1] = float(kept["wall_ns"]), float(kept["weight"])
            _spread(row, 2, kept["vector"], mapping)
            self.reservoir.append(row)
        self.slowest.extend(_slow(record, mapping, offset, slot) for record in entry["slowest"])

    def _add_tables(self, document: Document) -> None:
        for site in document.get("locks") or ():
            self.locks.append(
                LockSite(
                    str(site["lock"]),
                    int(site["site_id"]),
                    str(site["site"]),
                    site.get("stage"),
                    int(site["waits"]),
                    int(site["wait_ns"]),
                    int(site["longest_hold_ns"]),
                )
            )
        for copy in document.get("copies") or ():
            held = self.copies.setdefault((str(copy["name"]), str(copy["site"])), [0] * 5)
            for position, name in enumerate(("count", "bytes", "wall_ns", "sync", "pageable")):
                held[position] += int(copy[name])
        for pause in document.get("gc") or ():
            row = self.gc.setdefault(int(pause["generation"]), [0, 0, 0])
            row[0] += int(pause["count"])
            row[1] += int(pause["total_ns"])
            row[2] = max(row[2], int(pause["max_ns"]))

    def _freeze(self, documents: Sequence[Document]) -> Horizon:
        edges = self.edges or ()
        width = len(self.columns)
        order = sorted(self.bands, key=lambda band: (band_lower_ns(band, edges), band))
        bands = _matrix((self.bands[band] for band in order), 1 + COLUMN_LIMIT)
        blocks = _matrix((self.blocks[second] for second in sorted(self.blocks)), 2 + COLUMN_LIMIT)
        kept = _matrix(self.reservoir, 2 + COLUMN_LIMIT)
        offsets = [int(document.get("unix_offset_ns") or 0) for document in documents]
        return Horizon(
            columns=tuple(self.columns),
            from_unix_ns=min(int(document["from_ns"]) + offset for document, offset in zip(documents, offsets, strict=True)),
            to_unix_ns=max(int(document["to_ns"]) + offset for document, offset in zip(documents, offsets, strict=True)),
            seconds=max(self.seconds),
            edges_ns=edges,
            count=self.totals["count"],
            errors=self.totals["errors"],
            excluded=self.totals["excluded"],
            violations=tuple(self.violations),
            latency=_buckets(self.latency),
            band_ids=np.array(order, dtype=np.int64),
            band_lower=np.array([band_lower_ns(band, edges) for band in order], dtype=np.float64),
            band_counts=bands[:, 0].astype(np.int64),
            band_sums=bands[:, 1 : 1 + width],
            blocks=Blocks(blocks[:, 0].astype(np.int64), blocks[:, 1].astype(np.int64), blocks[:, 2 : 2 + width]),
            reservoir=Sampled(kept[:, 0], kept[:, 1], kept[:, 2 : 2 + width]),
            slowest=tuple(sorted(self.slowest, key=lambda record: -record.wall_ns)),
            locks=tuple(self.locks),
            copies=tuple(CopySite(name, site, *numbers) for (name, site), numbers in self.copies.items()),
            gc=tuple((generation, row[0], row[1], row[2]) for generation, row in sorted(self.gc.items())),
            device_busy=_busy(documents),
            status=documents[0].get("status") or {},
            process=documents[0].get("process") or {},
            slots=len(documents),
            classes=self.classes,
        )


def _spread(row: list[float], start: int, values: Sequence[float], mapping: Sequence[int]) -> None:
    for position, value in enumerate(values):
        row[start + mapping[position]] += value


def _add_row(rows: dict[int, list[float]], key: int, heads: Sequence[float], sums: Sequence[float], mapping: Sequence[int]) -> None:
    row = rows.setdefault(key, [0.0] * (len(heads) + COLUMN_LIMIT))
    for position, head in enumerate(heads):
        row[position] += head
    _spread(row, len(heads), sums, mapping)


def _matrix(rows: Iterable[list[float]], width: int) -> FloatArray:
    held = list(rows)
    matrix = np.zeros((len(held), width), dtype=np.float64)
    for position, row in enumerate(held):
        matrix[position] = row
    return matrix


def _slow(record: Mapping[str, Any], mapping: Sequence[int], offset: int, slot: int) -> SlowRequest:
    spans: list[SpanRecord] = []
    for span in record.get("spans") or ():
        span_ = SpanRecord(**span) if isinstance(span, dict) else SpanRecord(*span)
        spans.append(span_._replace(column=mapping[span_.column], start_ns=span_.start_ns + offset, end_ns=span_.end_ns + offset))
    return SlowRequest(
        int(record["id"]), slot, int(record["start_ns"]) + offset, int(record["wall_ns"]), int(record.get("thread_id") or 0), tuple(spans)
    )


def _buckets(latency: Mapping[tuple[int, int], Mapping[int, int]]) -> tuple[tuple[float, float, int], ...]:
    if len(latency) > 1:
        msg = "slots disagree about the histogram's layout"
        raise EvidenceError(msg)
    rows: list[tuple[float, float, int]] = []
    for (digits, lowest), counts in latency.items():
        for index in sorted(counts):
            low, high = _bucket(index, digits, lowest)
            if counts[index]:
                rows.append((low, high, counts[index]))
    return tuple(rows)


def _bucket(index: int, digits: int, lowest_ns: int) -> tuple[float, float]:
    """Lowest and highest value of an HdrHistogram index (its published layout: 2^ceil(log2(2*10^digits)) sub-buckets, halved after the first)."""
    half_bits = (2 * 10**digits - 1).bit_length() - 1
    unit = lowest_ns.bit_length() - 1
    bucket = (index >> half_bits) - 1
    sub = (index & ((1 << half_bits) - 1)) + (1 << half_bits)
    if bucket < 0:
        bucket, sub = 0, sub - (1 << half_bits)
    low = sub << (bucket + unit)
    return float(low), float(low + (1 << (bucket + unit)) - 1)


def _busy(documents: Sequence[Document]) -> float | None:
    """The device-wide busy fraction; slots of a pod see the same card, so the highest reading stands."""
    readings = [device["busy"] for document in documents if (device := document.get("device")) and device.get("busy") is not None]
    return float(max(readings)) if readings else None
