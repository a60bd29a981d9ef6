"""What requests did inside their stages: computed, waited for a CPU, for the interpreter, a lock nobody named, a collection, or I/O.

The recorder owns named waits exactly. What it calls a stage or unattributed is divided here, for slow and for ordinary requests apart, by
laying thread samples and collections over retained requests by thread and time; sums are preserved, a wait only moves to a column of its
own. Named waits (locks, copies) are never divided again. A collection is charged as min(overlap, off-CPU remainder).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np

from inferscope.diagnose.evidence import Blocks, Sampled
from inferscope.diagnose.host import STATES
from inferscope.types import Column

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from inferscope.diagnose.evidence import Horizon
    from inferscope.diagnose.host import HostFacts, HostRequest, ThreadRows
    from inferscope.types import FloatArray

__all__ = ["GIL", "RUN_QUEUE", "UNNAMED_LOCK", "Waits", "divide", "is_model", "segments", "weights"]

GIL: Final = Column("cpu", "gil")
RUN_QUEUE: Final = Column("cpu", "run-queue")
UNNAMED_LOCK: Final = Column("lock", "unnamed")
_DIVISIBLE: Final = frozenset({"stage", "unattributed", "queue"})
"""Of a queue only what kept its worker from the interpreter or a CPU: the worker may serve others meanwhile."""
_ROWS: Final = 12
"""Sampled intervals inside a column, of at least `_REQUESTS` requests, that are needed to divide it by its own fractions."""
_REQUESTS: Final = 5
_LEAST: Final = 0.02
"""Fractions below this stay where they were."""
_INSIDE: Final = 0.5
"""An interval counts for a part of a request that holds at least this much of it."""
_MODEL_NAMES: Final = ("forward", "model", "inference", "infer", "predict", "generate", "decode")
_ASKING: Final = 0.10
_PARTS: Final = ("cpu", "run-queue", "gil", "lock", "io")


@dataclass(frozen=True, slots=True)
class Waits:
    """How the division was made; numbers of requests, and fractions of the divisible time by part."""

    slow: int = 0
    """Slow requests that samples were laid over."""
    ordinary: int = 0
    slow_parts: Mapping[str, float] = field(default_factory=dict[str, float])
    """Fractions of sampled time in slow requests' stages: cpu, run-queue, gil, lock, io."""
    ordinary_parts: Mapping[str, float] = field(default_factory=dict[str, float])
    paused: int = 0
    """Slow requests that a collection of another thread stopped."""
    slow_cpu: Mapping[str, float] = field(default_factory=dict[str, float])
    """Fraction of each stage's time in which its thread was on a CPU, by label, where enough was sampled."""
    ordinary_cpu: Mapping[str, float] = field(default_factory=dict[str, float])


def is_model(label: str) -> bool:
    """Whether a stage's name says that it is the model's own."""
    return any(part in _MODEL_NAMES for part in label.lower().replace(":", ".").replace("_", ".").split("."))


class _Pool:
    """Weighted sums over one kind of requests."""

    def __init__(self, width: int) -> None:
        self.known = np.zeros((width, len(_PARTS)))
        """Sampled time by column and part."""
        self.cpu = np.zeros(width)
        """Sampled CPU time by column, and what it is a part of."""
        self.rows = np.zeros(width)
        self.requests = np.zeros(width)
        self.total = np.zeros(width)
        self.gc: dict[int, FloatArray] = {}
        """Time in others' collections by generation."""
        self.count = self.sampled = self.paused = 0

    def fractions(self, column: int) -> FloatArray | None:
        """Parts of a column's time, when enough of it was sampled."""
        if self.rows[column] >= _ROWS and self.requests[column] >= _REQUESTS:
            fractions: FloatArray = self.known[column] / self.known[column].sum()
            return fractions
        return None

    def on_cpu(self, labels: Sequence[str]) -> dict[str, float]:
        """Fraction of the columns' time on a CPU, when enough of it was sampled."""
        return {label: float(self.cpu[at] / self.known[at].sum()) for at, label in enumerate(labels) if self.fractions(at) is not None}

    def parts(self) -> dict[str, float]:
        """All columns together."""
        total = self.known.sum()
        return dict(zip(_PARTS, (self.known.sum(axis=0) / total).tolist(), strict=True)) if total else {}


def weights(horizon: Horizon) -> FloatArray:
    """Requests of the horizon that each of `horizon.host.requests` stands for, by its band, shape (n,)."""
    counts = dict(zip(horizon.band_ids.tolist(), horizon.band_counts.tolist(), strict=True))
    kept: dict[int, int] = {}
    for request in horizon.host.requests:
        kept[request.band] = kept.get(request.band, 0) + 1
    return np.array([max(counts.get(request.band, 0), 1) / kept[request.band] for request in horizon.host.requests])


def divide(horizon: Horizon, threshold_ns: int | None) -> tuple[Horizon, Waits]:
    """The horizon with waits in columns of their own, and how that was done.

    Args:
        horizon: Merged evidence.
        threshold_ns: Requests above it are slow; None divides nothing.
    """
    facts = horizon.host
    if threshold_ns is None or not facts.requests:
        return horizon, Waits()
    pools = (_Pool(len(horizon.columns)), _Pool(len(horizon.columns)))
    join = _Join(horizon, facts)
    for request, weight in zip(facts.requests, weights(horizon).tolist(), strict=True):
        join.add(pools[request.wall_ns > threshold_ns], request, weight)
    ordinary, slow = (_moves(horizon, pool) for pool in pools)
    labels = horizon.labels
    told = Waits(
        pools[1].sampled, pools[0].sampled, pools[1].parts(), pools[0].parts(), pools[1].paused, pools[1].on_cpu(labels), pools[0].on_cpu(labels)
    )  # fmt: skip
    return _moved(horizon, ordinary, slow, float(threshold_ns)), told


class _Join:
    """Samples and pauses by thread and time."""

    def __init__(self, horizon: Horizon, facts: HostFacts) -> None:
        self.kinds = [column.kind for column in horizon.columns]
        self.facts = facts
        self.threads = {(rows.slot, rows.thread): rows for rows in facts.threads}
        self.pause_ends = np.array([pause.end_ns for pause in facts.pauses], dtype=np.float64)

    def add(self, pool: _Pool, request: HostRequest, weight: float) -> None:
        divisible = np.array([kind in _DIVISIBLE for kind in self.kinds[: len(request.vector)]])
        own = np.where(divisible, request.vector, 0.0)
        if own.sum() <= 0:
            return
        pool.count += 1
        pool.total[: len(own)] += weight * own
        segments_ = segments(request, self.kinds, own)
        stopped = self._pauses(pool, request, segments_, own, weight)
        seen = False
        for column, thread, start, end, scale in segments_:
            found = self._sampled(request, column, thread, start, end)
            if found is None:
                continue
            parts, rows, on_cpu = found
            left = stopped.get(column, 0.0)
            for part in (2, 1):  # a stopped thread waits for the interpreter, and for a CPU each time it wakes to ask for it
                taken = min(left, float(parts[part]))
                parts[part] -= taken
                left -= taken
            spread = own / own.sum() if column < 0 else None
            if spread is not None:
                pool.known[: len(own)] += weight * scale * np.outer(spread, parts)
                pool.rows[: len(own)] += rows * spread
                pool.requests[: len(own)] += own > 0
            else:
                pool.known[column] += weight * parts
                pool.cpu[column] += weight * on_cpu
                pool.rows[column] += rows
                pool.requests[column] += 1
            seen = True
        pool.sampled += seen

    def _sampled(self, request: HostRequest, column: int, thread: int, start: int, end: int) -> tuple[FloatArray, int, float] | None:
        rows = self.threads.get((request.slot, thread))
        if rows is None:
            return None
        low, high = np.searchsorted(rows.ends, start, "right"), np.searchsorted(rows.starts, end, "left")
        part = slice(int(low), int(high))
        length = rows.ends[part] - rows.starts[part]
        overlap = np.minimum(rows.ends[part], end) - np.maximum(rows.starts[part], start)
        usable = (length > 0) & ((overlap >= _INSIDE * length) | (overlap >= 0.9 * (end - start)))
        if not usable.any():
            return None
        scale = np.where(usable, overlap / np.maximum(length, 1.0), 0.0)
        # Who awaits leaves its thread to others: what that thread waits for is not what the request waits for.
        awaits = (request.cpu_ns is None and column <= 0) or (column >= 0 and self.kinds[column] == "queue")
        return _parts(rows, part, length, scale, awaits=awaits), int(usable.sum()), float((rows.cpu[part] * scale).sum())

    def _pauses(
        self, pool: _Pool, request: HostRequest, segments: Sequence[tuple[int, int, int, int, float]], own: FloatArray, weight: float
    ) -> dict[int, float]:
        """Charge others' collections; returns what each column lost to them."""
        first = int(np.searchsorted(self.pause_ends, request.start_ns, "right"))
        found: dict[tuple[int, int], float] = {}
        for pause in self.facts.pauses[first:]:
            if pause.start_ns >= request.start_ns + request.wall_ns:
                break
            for column, thread, start, end, part in segments:
                both = min(end, pause.end_ns) - max(start, pause.start_ns)
                if both > 0 and pause.slot == request.slot and thread != pause.thread:
                    key = (pause.generation, column)
                    found[key] = found.get(key, 0.0) + both * part
        if not found:
            return {}
        pool.paused += 1
        limit = own.sum() if request.cpu_ns is None else max(0.0, own.sum() - request.cpu_ns)
        scale = min(1.0, limit / sum(found.values()))
        lost: dict[int, float] = {}
        for (generation, column), overlap in found.items():
            row = pool.gc.setdefault(generation, np.zeros_like(pool.total))
            if column < 0:
                row[: len(own)] += weight * overlap * scale * own / own.sum()
            else:
                row[column] += weight * overlap * scale
            lost[column] = lost.get(column, 0.0) + overlap * scale
        return lost


def segments(request: HostRequest, kinds: Sequence[str], own: FloatArray) -> list[tuple[int, int, int, int, float]]:
    """(column, thread, start, end, scale) of divisible time; column -1 is a request whose positions are unknown."""
    start, end = request.start_ns, request.start_ns + request.wall_ns  # whole numbers: a float has 256 ns at this distance
    share = float(own.sum()) / request.wall_ns
    if not request.spans:
        return [(-1, request.thread, start, end, share)] if share >= _INSIDE else []
    edges = sorted({start, end, *(t for span in request.spans for t in (span.start_ns, span.end_ns) if start < t < end)})
    found: list[tuple[int, int, int, int, float]] = []
    for low, high in pairwise(edges):
        over = [span for span in request.spans if span.start_ns <= low and span.end_ns >= high]
        inner = max(over, key=lambda span: (span.start_ns, -span.end_ns), default=None)
        column, thread = (0, request.thread) if inner is None else (inner.column, inner.thread)
        if kinds[column] in _DIVISIBLE:
            found.append((column, thread, low, high, 1.0))
    return found


def _parts(rows: ThreadRows, part: slice, length: FloatArray, scale: FloatArray, *, awaits: bool) -> FloatArray:
    """Time by `_PARTS`; what has no name counts as the column's own."""
    cpu, delay, state = rows.cpu[part], rows.delay[part], rows.state[part]
    # Who waits for the interpreter wakes every 5 ms only to ask again: the delay of that is part of the same wait.
    delay = np.where((state == STATES.index("gil")) & (cpu < _ASKING * length), 0.0, delay)
    blocked = np.maximum(length - cpu - delay, 0.0) * scale
    by_state = np.array([blocked[state == number].sum() for number in range(len(STATES))])
    parts = np.array([(cpu * scale).sum() + by_state[0], (delay * scale).sum(), by_state[1], by_state[2], by_state[3:].sum()])
    if awaits:
        parts[0] += parts[3] + parts[4]
        parts[3:] = 0.0
    return parts


def _moves(horizon: Horizon, pool: _Pool) -> list[tuple[int, Column, float]]:
    """(from, to, fraction of it) for one kind of requests."""
    found: list[tuple[int, Column, float]] = []
    for index, column in enumerate(horizon.columns):
        if column.kind not in _DIVISIBLE or not pool.total[index]:
            continue
        left = 1.0
        for generation, lost in sorted(pool.gc.items()):
            fraction = min(float(lost[index] / pool.total[index]), left)
            left -= fraction
            found.append((index, Column("gc", f"gen{generation}"), fraction))
        parts = pool.fractions(index)
        if parts is None:
            continue
        if column.kind == "queue" or is_model(column.name):
            parts[3:] = 0.0  # a model's stage blocks on its device or its own pool: that is its work
        scale = min(1.0, left / parts[1:].sum()) if parts[1:].sum() > 0 else 0.0
        io = Column("io", "between stages" if column.kind == "unattributed" else column.name)
        for target, fraction in zip((RUN_QUEUE, GIL, UNNAMED_LOCK, io), parts[1:].tolist(), strict=True):
            found.append((index, target, fraction * scale))
    return [(index, target, fraction) for index, target, fraction in found if fraction >= _LEAST]


def _moved(
    horizon: Horizon, ordinary: Iterable[tuple[int, Column, float]], slow: Iterable[tuple[int, Column, float]], threshold: float
) -> Horizon:
    ordinary, slow = list(ordinary), list(slow)
    columns = dict.fromkeys([*horizon.columns, *(target for _, target, _ in (*slow, *ordinary))])
    places = {column: position for position, column in enumerate(columns)}

    def shift(rows: FloatArray, above: NDArray[np.bool_]) -> FloatArray:
        wide = np.zeros((rows.shape[0], len(places)))
        wide[:, : rows.shape[1]] = rows
        for moves, chosen in ((slow, above), (ordinary, ~above)):
            for index, target, fraction in moves:
                amount = rows[:, index] * fraction * chosen
                wide[:, index] -= amount
                wide[:, places[target]] += amount
        return wide

    held = horizon.reservoir
    return replace(
        horizon,
        columns=tuple(columns),
        band_sums=shift(horizon.band_sums, horizon.band_lower > threshold),
        blocks=Blocks(
            horizon.blocks.counts,
            horizon.blocks.tail_counts,
            shift(horizon.blocks.tail_sums, np.ones(len(horizon.blocks.tail_counts), bool)),
        ),
        reservoir=Sampled(held.wall_ns, held.weights, shift(held.vectors, held.wall_ns > threshold), held.seconds),
    )
