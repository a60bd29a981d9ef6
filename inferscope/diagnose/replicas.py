"""The incidents of many replicas as one: their evidence added, intervals over replicas and not over requests.

What one replica saw says little about the next: seconds of one process share its neighbours, its data and its luck. So intervals come from a
bootstrap that draws whole replicas, and within each of them its 1-second blocks; what-ifs are drawn the same way over the merged reservoirs.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from inferscope.diagnose.evidence import read_documents, read_json
from inferscope.diagnose.incident import breach_of, diagnose
from inferscope.diagnose.merging import merge
from inferscope.diagnose.waits import divide
from inferscope.diagnose.whatif import weighted_quantile
from inferscope.errors import EvidenceError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from inferscope.diagnose.evidence import Document, Horizon
    from inferscope.types import Breach, FloatArray, Incident, Share, WhatIf

__all__ = ["LEAST_REPLICAS", "explain_replicas"]

LEAST_REPLICAS: Final = 3
"""Fewer replicas than this give no interval: two say nothing of how replicas differ."""
_REPLICATES: Final = 400
_SEED: Final = 20_240_613
_MS: Final = 1e6


@dataclass(frozen=True, slots=True)
class _Replica:
    """One replica's part, in the merged columns' order."""

    slow: FloatArray
    """Slow requests by second, shape (n,)."""
    sums: FloatArray
    """Their nanoseconds, shape (n, columns)."""
    seconds: int
    wall: FloatArray
    weights: FloatArray
    vectors: FloatArray


def explain_replicas(directories: Sequence[Path]) -> Incident:
    """Diagnose the incidents of several replicas together.

    Args:
        directories: Incidents of one request and one objective.

    Raises:
        EvidenceError: One has no evidence, or they are about different requests or objectives.
    """
    breaches = [breach_of(read_json(directory / "breach.json")) for directory in directories]
    first = min(breaches, key=lambda each: each.detected_unix_ns)
    for breach, directory in zip(breaches, directories, strict=True):
        if (breach.request, breach.threshold_ms, breach.quantile) != (first.request, first.threshold_ms, first.quantile):
            asked = f"P{100 * breach.quantile:g} of {breach.request} at most {breach.threshold_ms:g} ms"
            raise EvidenceError(f"{directory.name} is about {asked}, the others are not: incidents of different objectives do not add")
    documents, notes = _documents(directories)
    breach = replace(
        first,
        id=f"{len(directories)} incidents",
        requests=sum(each.requests for each in breaches),
        exceeding=sum(each.exceeding for each in breaches),
    )
    incident = diagnose(
        breach,
        [document for held in documents.values() for document in held],
        service=", ".join(sorted({directory.resolve().parent.parent.parent.name for directory in directories})),
        path=", ".join(map(str, directories)),
        notes=[f"{len(documents)} replicas, {len(directories)} incidents, added.", *notes],
    )
    # Every replica has a card of its own: one busy fraction for all of them would be none.
    return _with_intervals(replace(incident, device_busy=None), breach, documents)


def _documents(directories: Iterable[Path]) -> tuple[dict[str, list[Document]], list[str]]:
    """Evidence by replica; of two that cover the same time of one replica the longer one counts, else it would count twice."""
    found: dict[str, list[Document]] = defaultdict(list)
    notes: list[str] = []
    for directory in directories:
        read = read_documents(directory)
        if not read:
            raise EvidenceError(f"{directory.name}: no evidence-*.json")
        for document in read:
            name = str(document.get("instance_id") or f"{directory.resolve()}/{document.get('slot')}")
            found[name].append(document)
    slot = 0
    for name, held in found.items():
        kept: list[Document] = []
        for document in sorted(held, key=lambda each: int(each["from_ns"]) - int(each["to_ns"])):
            if any(int(document["from_ns"]) < int(other["to_ns"]) and int(other["from_ns"]) < int(document["to_ns"]) for other in kept):
                notes.append(f"Two incidents of {name} cover the same time: the longer one counts.")
                continue
            # Every document is a worker of its own here, whatever slot it had in its pod.
            kept.append({**document, "slot": slot})
            slot += 1
        found[name] = kept
    return dict(found), notes


def _with_intervals(incident: Incident, breach: Breach, documents: Mapping[str, Sequence[Document]]) -> Incident:
    if len(documents) < LEAST_REPLICAS:
        note = f"{len(documents)} replicas: {LEAST_REPLICAS} are needed for intervals over replicas."
        shares = tuple(replace(share, ci=None) for share in incident.attribution)
        return replace(incident, attribution=shares, notes=(*incident.notes, note))
    threshold = round(breach.threshold_ms * _MS)
    horizons: list[Horizon] = []
    for held in documents.values():
        horizon = merge(held, breach.request)
        edge = threshold if threshold > 0 else (horizon.edges_ns[0] if horizon.edges_ns else None)
        horizons.append(divide(horizon, edge)[0])
    labels = [share.name for share in incident.attribution]
    rate = sum(horizon.count / horizon.seconds for horizon in horizons if horizon.seconds > 0)
    replicas = [_replica(horizon, labels) for horizon in horizons]
    generator = np.random.default_rng(_SEED)
    # How often each replica is drawn, in each replicate.
    drawn = generator.multinomial(len(replicas), np.full(len(replicas), 1 / len(replicas)), size=_REPLICATES).astype(np.float64)
    shares = _shares(incident.attribution, replicas, drawn, generator)
    what_if = tuple(_what_if(entry, labels, replicas, drawn) for entry in incident.what_if)
    note = f"Intervals are over {len(replicas)} replicas, drawn as a whole, and the seconds of each."
    return replace(incident, throughput_rps=rate, attribution=shares, what_if=what_if, notes=(*incident.notes, note))


def _replica(horizon: Horizon, labels: Sequence[str]) -> _Replica:
    places = [horizon.labels.index(label) if label in horizon.labels else -1 for label in labels]

    def columns(matrix: FloatArray) -> FloatArray:
        return np.stack([matrix[:, place] if place >= 0 else np.zeros(len(matrix)) for place in places], axis=1)

    slow = np.flatnonzero(horizon.blocks.tail_counts)
    sample = horizon.reservoir
    return _Replica(
        horizon.blocks.tail_counts[slow].astype(np.float64),
        columns(horizon.blocks.tail_sums)[slow],
        max(len(horizon.blocks.counts), len(slow), 1),
        sample.wall_ns,
        sample.weights,
        columns(sample.vectors),
    )


def _shares(shares: Sequence[Share], replicas: Sequence[_Replica], drawn: FloatArray, generator: np.random.Generator) -> tuple[Share, ...]:
    if not shares:
        return ()
    counts, sums = np.zeros(len(drawn)), np.zeros((len(drawn), len(shares)))
    for place, each in enumerate(replicas):
        if not len(each.slow):
            continue
        # As for one incident: only seconds with slow requests matter, but how many of them a resample holds is random.
        cells = np.append(np.full(len(each.slow), 1.0 / each.seconds), 1.0 - len(each.slow) / each.seconds).clip(0.0)
        blocks = generator.multinomial(each.seconds, cells / cells.sum(), size=len(drawn))[:, :-1].astype(np.float64)
        counts += drawn[:, place] * (blocks @ each.slow)
        sums += drawn[:, place, None] * (blocks @ each.sums)
    usable = counts > 0
    if usable.sum() < _REPLICATES // 2:
        return tuple(replace(share, ci=None) for share in shares)
    body = np.array([share.body_ms for share in shares]) * _MS
    excess = sums[usable] / counts[usable, None] - body
    totals = excess.sum(axis=1, keepdims=True)
    low, high = np.quantile(excess / np.where(np.abs(totals) < 1.0, 1.0, totals), (0.025, 0.975), axis=0)
    return tuple(replace(share, ci=(float(low[place]), float(high[place]))) for place, share in enumerate(shares))


def _what_if(entry: WhatIf, labels: Sequence[str], replicas: Sequence[_Replica], drawn: FloatArray) -> WhatIf:
    chosen = [labels.index(label) for label in entry.fix if label in labels]
    if len(chosen) != len(entry.fix) or not any(len(each.wall) for each in replicas):
        return entry
    weights = np.concatenate([each.weights for each in replicas])
    vectors = np.concatenate([each.vectors for each in replicas])[:, chosen]
    medians = np.array([weighted_quantile(vectors[:, place], weights, 0.5) for place in range(len(chosen))])
    wall = np.concatenate([each.wall for each in replicas]) - np.maximum(vectors - medians, 0.0).sum(axis=1)
    owner = np.repeat(np.arange(len(replicas)), [len(each.wall) for each in replicas])
    found = [weighted_quantile(wall, held, 0.99) for held in (weights * row[owner] for row in drawn) if held.sum() > 0]
    low, high = np.quantile(found, (0.025, 0.975)) / _MS
    return replace(entry, ci=(float(low), float(high)))
