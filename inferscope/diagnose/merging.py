"""The documents of several slots, added to one `Horizon`.

Everything that is merged is additive (histogram counts, band sums, 1-second blocks), so a pod of eight workers is judged as one service.
Columns are mapped by (kind, name), because each process numbers them in the order in which it met them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from inferscope.aggregate.bands import bounds_ns, order_keys
from inferscope.aggregate.histogram import Layout, value_at_index
from inferscope.diagnose.device import DeviceFacts, read_device
from inferscope.diagnose.evidence import Blocks, CopySite, Document, Horizon, Sampled, SlowRequest, Waited
from inferscope.diagnose.host import HostFacts, read_host
from inferscope.diagnose.remote import merge_calls, merge_servers
from inferscope.errors import EvidenceError
from inferscope.types import COLUMN_LIMIT, UNATTRIBUTED, Column, LockSite, SpanRecord

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from inferscope.types import FloatArray

__all__ = ["merge"]

SECOND_NS: Final = 1_000_000_000


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
        self.sampled: dict[int, float] = {}
        self.slowest: list[SlowRequest] = []
        self.locks: list[LockSite] = []
        self.copies: dict[tuple[str, str], list[int]] = {}
        self.copied: dict[str, int] = {}
        self.gc: dict[int, list[int]] = {}
        self.classes = 0
        self.seconds: list[float] = []
        self.queues: dict[str, Waited] = {}
        self.batches: dict[str, Waited] = {}
        self.stages: dict[str, int] = {}
        self.host = HostFacts()
        self.device = DeviceFacts()

    def add_all(self, documents: Sequence[Document]) -> Horizon:
        """Add every document and freeze the result."""
        mappings: list[list[int]] = []
        for document in documents:
            mapping = [self._column(Column(str(kind), str(name))) for kind, name in document["columns"]]
            mappings.append(mapping)
            offset = int(document.get("unix_offset_ns") or 0)
            found = [entry for entry in document["classes"] if entry["request"] == self.request]
            for entry in found:
                self._add_class(entry, mapping, offset, int(document.get("slot") or 0))
            self.seconds.append((int(document["to_ns"]) - int(document["from_ns"])) / SECOND_NS)
            self._add_tables(document)
        if not self.classes or self.edges is None:
            msg = f"no evidence about the request {self.request!r}"
            raise EvidenceError(msg)
        self.host = read_host(list(zip(documents, mappings, strict=True)))
        self.device = read_device(documents)
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
            row = [0.0] * (3 + COLUMN_LIMIT)
            row[:3] = float(kept["wall_ns"]), float(kept["weight"]), (int(kept["start_ns"]) + offset) // SECOND_NS
            _spread(row, 3, kept["vector"], mapping)
            self.reservoir.append(row)
            self.sampled[int(kept["band"])] = self.sampled.get(int(kept["band"]), 0.0) + row[1]
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
                    site.get("request"),
                )
            )
        for copy in document.get("copies") or ():
            held = self.copies.setdefault((str(copy["name"]), str(copy["site"] or "unknown")), [0] * 6)
            for position, name in enumerate(("count", "bytes", "wall_ns", "sync", "pageable", "implicit")):
                held[position] += int(copy.get(name, 0) if name == "implicit" else copy[name])  # earlier evidence does not tell
        for series in document.get("series") or ():  # the tables above hold running totals, the series what the horizon saw
            name = str(series["labels"][0]) if series["labels"] else ""
            if series["kind"] in {"queue", "batch"}:
                held_ = self.queues if series["kind"] == "queue" else self.batches
                held_[name] = held_.get(name, Waited(name, 0, 0, 0.0, 0.0, 0.0)).add(series)
            elif series["kind"] == "stage":
                self.stages[name] = self.stages.get(name, 0) + int(series["count"])
            if series["kind"] == "copy":
                self.copied[name] = self.copied.get(name, 0) + int(series["count"])
            elif series["kind"] == "gc" and name.startswith("gen"):
                row = self.gc.setdefault(int(name[3:]), [0, 0, 0])
                row[0] += int(series["count"])
                row[1] += int(series["sum_ns"])
                row[2] = max(row[2], int(series["max_ns"]))

    def _unsampled(self) -> Iterable[list[float]]:
        """Requests that no kept vector stands for: their band's mean stands in."""
        for band, (count, *sums) in self.bands.items():
            missing = count - self.sampled.get(band, 0.0)
            if count and missing > 0.5:
                yield [sum(sums) / count, missing, -1.0, *(value / count for value in sums)]

    def _freeze(self, documents: Sequence[Document]) -> Horizon:
        edges = self.edges or ()
        width = len(self.columns)
        keys = order_keys(edges)
        order = sorted(self.bands, key=lambda band: int(keys[band]))
        bands = _matrix((self.bands[band] for band in order), 1 + COLUMN_LIMIT)
        blocks = _matrix((self.blocks[second] for second in sorted(self.blocks)), 2 + COLUMN_LIMIT)
        kept = _matrix([*self.reservoir, *self._unsampled()], 3 + COLUMN_LIMIT)
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
            band_lower=np.array([bounds_ns(band, edges)[0] for band in order], dtype=np.float64),
            band_counts=bands[:, 0].astype(np.int64),
            band_sums=bands[:, 1 : 1 + width],
            blocks=Blocks(blocks[:, 0].astype(np.int64), blocks[:, 1].astype(np.int64), blocks[:, 2 : 2 + width]),
            reservoir=Sampled(kept[:, 0], kept[:, 1], kept[:, 3 : 3 + width], kept[:, 2].astype(np.int64)),
            slowest=tuple(sorted(self.slowest, key=lambda record: -record.wall_ns)),
            locks=tuple(self.locks),
            copies=tuple(CopySite(name, site, *numbers) for (name, site), numbers in self.copies.items()),
            copied=self.copied,
            gc=tuple((generation, row[0], row[1], row[2]) for generation, row in sorted(self.gc.items())),
            device_busy=_busy(documents),
            status=documents[0].get("status") or {},
            process=documents[0].get("process") or {},
            slots=len(documents),
            classes=self.classes,
            host=self.host,
            queues=tuple(self.queues.values()),
            stages=self.stages,
            device=self.device,
            batches=tuple(self.batches.values()),
            calls=merge_calls(documents),
            servers=merge_servers(documents),
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
            low, _, high = value_at_index(index, Layout(digits, lowest))
            if counts[index]:
                rows.append((float(low), float(high), counts[index]))
    return tuple(rows)


def _busy(documents: Sequence[Document]) -> float | None:
    """The device-wide busy fraction; slots of a pod see the same card, so the highest reading stands."""
    readings = [device["busy"] for document in documents if (device := document.get("device")) and device.get("busy") is not None]
    return float(max(readings)) if readings else None
