"""A seeded service with two planted causes, and its evidence as a worker would write it; plain numpy, no recorder involved.

Stalls of the copy path and long holds of the lock `rules` come as episodes; everybody who arrives during one waits for its end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

COLUMNS = [
    ["unattributed", "unattributed"],
    ["other", "other"],
    ["stage", "preprocess"],
    ["copy", "h2d"],
    ["stage", "forward"],
    ["lock", "rules"],
    ["stage", "rules"],
]
LABELS = ["unattributed", "other", "preprocess", "copy:h2d", "forward", "lock:rules", "rules"]
MS = 1_000_000
OFFSET = 1_700_000_000 * 10**9


@dataclass
class Requests:
    """Arrivals and exclusive vectors, ns."""

    start: np.ndarray
    vectors: np.ndarray

    @property
    def wall(self) -> np.ndarray:
        return self.vectors.sum(axis=1)

    def select(self, mask: np.ndarray) -> Requests:
        return Requests(self.start[mask], self.vectors[mask])


def simulate(
    seconds: float, qps: float = 500.0, *, seed: int = 7, copy_rate: float = 0.7, lock_rate: float = 0.5, slow: float = 1.0
) -> Requests:
    """Serve Poisson arrivals; rates are episodes a second, `slow` stretches preprocessing."""
    rng = np.random.default_rng(seed)
    count = int(rng.poisson(seconds * qps))
    start = np.sort(rng.uniform(0, seconds, count))
    vectors = np.zeros((count, len(COLUMNS)))
    vectors[:, 0] = rng.gamma(2.0, 0.25, count)
    vectors[:, 2] = 1.8 * slow * rng.lognormal(0.0, 0.15, count)
    vectors[:, 3] = 0.4 + 0.05 * rng.gamma(2.0, 1.0, count) + _wait(rng, start, seconds, copy_rate, 30.0, 52.0)
    vectors[:, 4] = 5.3 * rng.lognormal(0.0, 0.10, count)
    vectors[:, 5] = _wait(rng, start, seconds, lock_rate, 28.0, 50.0)
    vectors[:, 6] = 0.6 * rng.lognormal(0.0, 0.2, count)
    return Requests((start * 1e9).astype(np.int64), np.rint(vectors * MS).astype(np.int64))


def _wait(rng: np.random.Generator, start: np.ndarray, seconds: float, rate: float, low: float, high: float) -> np.ndarray:
    """Milliseconds until the end of the episode that covers each arrival."""
    begins = np.sort(rng.uniform(0, seconds, int(rng.poisson(seconds * rate))))
    ends = begins + rng.uniform(low, high, len(begins)) / 1e3
    found = np.searchsorted(begins, start, side="right") - 1
    if not len(begins):
        return np.zeros(len(start))
    left = np.where(found >= 0, ends[np.maximum(found, 0)] - start, 0.0)
    return np.clip(left, 0.0, None) * 1e3


def truth(requests: Requests, edge: int) -> np.ndarray:
    """Shares of this very sample, by its raw vectors."""
    wall = requests.wall
    low, high = np.quantile(wall, (0.4, 0.6))
    body = requests.vectors[(wall >= low) & (wall <= high)].mean(axis=0)
    excess = requests.vectors[wall > edge].mean(axis=0) - body
    return np.asarray(excess / excess.sum())


def capped_p99(requests: Requests, columns: list[int], q: float = 0.99) -> float:
    """The quantile, ms, with columns capped at their median in every request."""
    vectors = requests.vectors.copy()
    for column in columns:
        vectors[:, column] = np.minimum(vectors[:, column], np.median(vectors[:, column]))
    return float(np.quantile(vectors.sum(axis=1), q)) / MS


def band_of(wall: np.ndarray, edges: list[int]) -> np.ndarray:
    """Band ids: 8 an octave from 1024 ns, edge rows from 216."""
    base = _base(wall)
    band = base.copy()
    for index, edge in enumerate(edges):
        band[(base == _base(np.array([edge]))[0]) & (wall > edge)] = 216 + index
    return band


def _base(wall: np.ndarray) -> np.ndarray:
    value = np.maximum(wall, 1024).astype(np.int64)
    bits = np.frexp(value.astype(np.float64))[1].astype(np.int64)
    return np.minimum((bits - 11) * 8 + ((value >> (bits - 4)) & 7), 215)


def hdr_index(value: np.ndarray, digits: int = 3, lowest: int = 1000) -> np.ndarray:
    """HdrHistogram's index."""
    half_bits = (2 * 10**digits - 1).bit_length() - 1
    unit = lowest.bit_length() - 1
    bits = np.frexp(np.maximum(value, 1).astype(np.float64))[1].astype(np.int64)
    bucket = np.maximum(bits - unit - half_bits - 1, 0)
    return ((bucket + 1) << half_bits) + (value >> (bucket + unit)) - (1 << half_bits)


def evidence(
    requests: Requests, edges: list[int], *, slot: int = 0, seed: int = 1, order: list[int] | None = None, keep: int = 64
) -> dict[str, Any]:
    """The evidence JSON of one slot; `order` permutes the columns, as another process would have met them."""
    order = order or list(range(len(COLUMNS)))
    vectors = requests.vectors[:, order]
    wall = requests.wall
    band = band_of(wall, edges)
    ids = sorted(set(band.tolist()), key=lambda b: (wall[band == b].min(), b))
    index, counts = np.unique(hdr_index(wall), return_counts=True)
    second = requests.start // 10**9
    places = np.unique(second, return_inverse=True)
    slow = wall > edges[0]
    tails = np.zeros((len(places[0]), vectors.shape[1]), np.int64)
    np.add.at(tails, places[1][slow], vectors[slow])
    counts_, tail_counts = np.bincount(places[1]), np.bincount(places[1][slow], minlength=len(places[0]))
    blocks = [
        {"t_ns": t * 10**9, "count": n, "tail_count": k, "tail_sums": sums}
        for t, n, k, sums in zip(places[0].tolist(), counts_.tolist(), tail_counts.tolist(), tails.tolist(), strict=True)
    ]
    return {
        "schema": 1,
        "slot": slot,
        "pid": 100 + slot,
        "instance_id": f"instance-{slot}",
        "from_ns": 0,
        "to_ns": int((second.max() + 1) * 10**9),
        "unix_offset_ns": OFFSET,
        "columns": [COLUMNS[i] for i in order],
        "classes": [
            {
                "request": "score",
                "model": None,
                "cls": None,
                "edges_ns": edges,
                "count": len(wall),
                "errors": 0,
                "excluded": 0,
                "items": len(wall),
                "violations": [int((wall > edge).sum()) for edge in edges],
                "latency": {"digits": 3, "lowest_ns": 1000, "index": index.tolist(), "count": counts.tolist()},
                "bands": {
                    "ids": ids,
                    "counts": [int((band == b).sum()) for b in ids],
                    "sums": [vectors[band == b].sum(axis=0).tolist() for b in ids],
                },
                "blocks": blocks,
                "reservoir": _reservoir(requests, vectors, band, ids, seed, keep),
                "slowest": [_record(requests, vectors, i) for i in np.argsort(-wall)[:32].tolist()],
            }
        ],
        "series": [
            {"kind": "gc", "labels": ["gen2"], "count": 3, "sum_ns": 6 * MS, "p50_ns": 2.0 * MS, "p99_ns": 3.0 * MS, "max_ns": 3 * MS}
        ],
        "locks": [
            {
                "lock": "rules",
                "site_id": 1,
                "site": "reload (rules.py:41)",
                "stage": "rules",
                "waits": 90,
                "wait_ns": 900 * MS,
                "longest_hold_ns": 49 * MS,
            },
            {
                "lock": "rules",
                "site_id": 2,
                "site": "apply (rules.py:88)",
                "stage": "rules",
                "waits": 30,
                "wait_ns": 100 * MS,
                "longest_hold_ns": 2 * MS,
            },
        ],
        "counters": {},
        "copies": [
            {
                "name": "h2d",
                "site": "score (serve.py:20)",
                "count": len(wall),
                "bytes": len(wall) * 262_144,
                "wall_ns": int(requests.vectors[:, 3].sum()),
                "sync": len(wall),
                "pageable": len(wall),
            }
        ],
        "gc": [{"generation": 2, "count": 90, "total_ns": 900 * MS, "max_ns": 300 * MS}],
        "device": {"busy": None, "source": None},
        "process": {"cpus": 2, "threads": 9, "torch_threads": None},
        "status": {},
    }


def _reservoir(requests: Requests, vectors: np.ndarray, band: np.ndarray, ids: list[int], seed: int, keep: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    rows = []
    for b in ids:
        members = np.flatnonzero(band == b)
        for i in rng.permutation(members)[:keep].tolist():
            weight = len(members) / min(keep, len(members))
            rows.append(
                {
                    "wall_ns": int(vectors[i].sum()),
                    "start_ns": int(requests.start[i]),
                    "band": int(b),
                    "weight": weight,
                    "vector": vectors[i].tolist(),
                }
            )
    return rows


def _record(requests: Requests, vectors: np.ndarray, i: int) -> dict[str, Any]:
    start = int(requests.start[i])
    spans, cursor = [], start
    for column in range(2, vectors.shape[1]):
        spans.append([column, cursor, cursor + int(vectors[i, column]), -1, 7, 3 if column == 3 else 0, 0])
        cursor += int(vectors[i, column])
    return {
        "id": i,
        "key": ["score", None, None],
        "start_ns": start,
        "wall_ns": int(vectors[i].sum()),
        "band": 0,
        "reasons": 3,
        "thread_id": 7,
        "size": None,
        "items": 1,
        "error": None,
        "cpu_ns": None,
        "voluntary_switches": None,
        "involuntary_switches": None,
        "truncated": False,
        "vector": vectors[i].tolist(),
        "spans": spans,
        "trace": None,
    }


def breach(threshold_ms: float = 20.0, **changes: Any) -> dict[str, Any]:
    """breach.json."""
    value = {
        "id": "20240101T000000Z-score-abcd",
        "slo": "score",
        "request": "score",
        "threshold_ms": threshold_ms,
        "quantile": 0.99,
        "onset_ns": 0,
        "detected_ns": 60 * 10**9,
        "detected_unix_ns": OFFSET,
        "requests": 1000,
        "exceeding": 60,
        "trigger": "e_detector",
        "statistic": 1e6,
        "design_effect": 4.0,
    }
    return {**value, **changes}
