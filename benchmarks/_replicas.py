"""Three replicas of different shape, recorded by real recorders on clocks of their own, with the truth beside what they export."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from inferscope import semconv
from inferscope.aggregate.window import Aggregator
from inferscope.export import Bands, ExportBatch, Exporter, Objective, request_totals
from inferscope.record.core import Recorder

OBJECTIVE_NS = 20_000_000
STAGES = ("parse", "model", "rules", "copy")
QUANTILES = (0.5, 0.95, 0.99, 0.999)
TICK = 200
"""Requests between two ticks where sizes are sampled: a second of 200 a second."""


@dataclass
class Replica:
    name: str
    version: str
    columns: np.ndarray
    """Nanoseconds by request and stage."""
    scale: int = 5
    cls: str | None = None
    sizes: np.ndarray | None = None
    """Of each request."""

    @property
    def wall(self):
        return self.columns.sum(axis=1)


def shapes(n, *, seed=31):
    """A fast one, one that waits for a lock at times, and a slow wide one with expensive copies."""
    rng = np.random.default_rng(seed)
    found = []
    for name, model_ms, spread, slow, extra_ms in (("a", 8, 0.2, 0.01, 24), ("b", 9, 0.15, 0.03, 36), ("c", 11, 0.3, 0.02, 18)):
        columns = np.zeros((n, len(STAGES)))
        columns[:, 0] = rng.lognormal(np.log(0.4), 0.3, n)
        columns[:, 1] = rng.lognormal(np.log(model_ms), spread, n)
        columns[:, 3] = rng.lognormal(np.log(0.6), 0.4, n)
        hit = rng.random(n) < slow
        columns[hit, 2 if name != "c" else 3] += rng.normal(extra_ms, 2, int(hit.sum())).clip(1)
        found.append(Replica(f"replica-{name}", "1.4.1" if name != "c" else "1.4.2", (columns * 1e6).astype(np.int64)))
    return found


_recorded = {}


def record(replica, points):
    """Batches of running totals, as `points` exports of the replica would have them; the same requests are recorded once."""
    key = id(replica.columns), points, replica.cls, id(replica.sizes)
    if key not in _recorded:
        _recorded[key] = replica, list(_record(replica, points))  # the replica too: what is gone might share its id with another
    return _recorded[key][1]


def _record(replica, points):
    now = [10**9]
    recorder = Recorder(clock=lambda: now[0])
    recorder.set_edges("score", [OBJECTIVE_NS])
    aggregator, bands = Aggregator(recorder, clock=lambda: now[0]), Bands()
    request, stages = recorder.request, [recorder.stage(name) for name in STAGES]
    sizes = np.full(len(replica.columns), np.nan) if replica.sizes is None else replica.sizes
    apart = len(replica.columns) if replica.sizes is None else TICK
    for part, large in zip(np.array_split(replica.columns, points), np.array_split(sizes, points), strict=True):
        for start in range(0, len(part), apart):
            rows, tokens = part[start : start + apart].tolist(), large[start : start + apart].tolist()
            for row, size in zip(rows, tokens, strict=True):
                with request("score", cls=replica.cls, size=None if size != size else size):
                    for stage, spent in zip(stages, row, strict=True):
                        with stage:
                            now[0] += spent
            bands.add(aggregator.tick(now[0]))
        totals = request_totals(aggregator.totals(), [Objective("score-p99", "score", OBJECTIVE_NS, 0.99)])
        yield aggregator.cumulative(), totals + bands.totals()


def export(replicas, endpoint, *, service, points=2, apart_s=60, end_s=None, directory=None, delta=False, explicit=False):
    """Each replica through an exporter of its own, `points` exports `apart_s` seconds apart, the last one now."""
    end = round((time.time() if end_s is None else end_s) * 1e9)
    for replica in replicas:
        place = None if directory is None else directory / replica.name / "0"
        environ = {"OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE": "delta"} if delta else {}
        exporter = Exporter(
            place, endpoint=endpoint, scale=replica.scale, objectives={"score": OBJECTIVE_NS} if explicit else None, environ=environ
        )
        resource = {semconv.SERVICE_NAME: service, semconv.SERVICE_INSTANCE_ID: replica.name, semconv.SERVICE_VERSION: replica.version}
        start = end - (points * apart_s + 60) * 10**9
        for number, (distributions, totals) in enumerate(record(replica, points), 1):
            exporter.offer(ExportBatch(distributions, totals, start, end - (points - number) * apart_s * 10**9, resource))
            assert exporter.run_once(2.0), exporter.status()["targets"]
        exporter.shutdown()


def truth(replicas):
    """Percentiles in seconds, requests above the objective, and the tail's shares, from the requests themselves."""
    columns = np.concatenate([each.columns for each in replicas])
    wall = columns.sum(axis=1)
    low, high = np.quantile(wall, (0.4, 0.6))
    excess = columns[wall > OBJECTIVE_NS].mean(axis=0) - columns[(wall >= low) & (wall <= high)].mean(axis=0)
    return {
        "requests": len(wall),
        "quantiles": {q: float(np.quantile(wall, q)) / 1e9 for q in QUANTILES},
        "violations": int((wall > OBJECTIVE_NS).sum()),
        "shares": dict(zip(STAGES, (excess / excess.sum()).tolist(), strict=True)),
    }
