from __future__ import annotations

import json

import numpy as np
import pytest
from simulator.recorder import ArrayRecorder
from simulator.service import COLUMNS, simulate

from inferscope.aggregate import Aggregator, Horizon
from inferscope.aggregate.blocks import ClassBlock, Sparse, add_sparse, coarsen
from inferscope.aggregate.reservoir import Reservoir
from inferscope.types import BandSums, ClassKey, LockSite, Reason, RequestRecord

S = 1_000_000_000
EDGE = 20_000_000


def drive(traffic, seconds, *, edges=(EDGE,), horizon=None, origin=0, profiled=0):
    """Feeds a run second by second; returns the horizon and the recorder."""
    clock = [origin]
    recorder = ArrayRecorder(COLUMNS, edges)
    aggregator = Aggregator(recorder, lambda: clock[0])
    horizon = horizon or Horizon()
    bounds = np.searchsorted(traffic.end_ns, np.arange(seconds + 1) * S)
    for second in range(seconds):
        part = slice(bounds[second], bounds[second + 1])
        recorder.feed(origin + traffic.start_ns[part], traffic.wall_ns[part], traffic.vectors[part], profiled=profiled)
        clock[0] = origin + (second + 1) * S
        horizon.add(aggregator.tick(clock[0]), aggregator.lock_sites())
    return horizon, recorder, int(bounds[seconds])


@pytest.fixture(scope="module")
def minute():
    traffic = simulate(61, 11)
    horizon, _, fed = drive(traffic, 60)
    return traffic, horizon, fed


def test_evidence_is_exact_where_it_counts(minute):
    traffic, horizon, fed = minute
    document = json.loads(json.dumps(horizon.evidence("score", 0, 60 * S)))
    (held,) = document["classes"]
    wall, vectors = traffic.wall_ns[:fed], traffic.vectors[:fed]
    assert (document["schema"], document["from_ns"], document["to_ns"]) == (1, 0, 60 * S)
    assert document["columns"] == [list(column) for column in COLUMNS]
    assert (held["request"], held["model"], held["cls"], held["edges_ns"]) == ("score", None, None, [EDGE])
    assert held["count"] == sum(held["latency"]["count"]) == sum(held["bands"]["counts"]) == fed
    assert held["violations"] == [(wall > EDGE).sum()]
    tail = [sum(column) for column in zip(*(block["tail_sums"] for block in held["blocks"]), strict=True)]
    assert tail == vectors[wall > EDGE].sum(axis=0).tolist()
    assert sum(block["tail_count"] for block in held["blocks"]) == (wall > EDGE).sum()
    assert sum(map(sum, held["bands"]["sums"])) == wall.sum()
    assert len(held["blocks"]) == 60


def test_tail_minus_body_gives_the_planted_shares(minute):
    traffic, horizon, _ = minute
    (held,) = horizon.evidence(ClassKey("score", None, None), 0, 60 * S)["classes"]
    from inferscope.aggregate.bands import body, tail

    sums = BandSums(np.array(held["bands"]["ids"]), np.array(held["bands"]["counts"]), np.array(held["bands"]["sums"]))
    n, slow = tail(sums, [EDGE])
    m, ordinary = body(sums)
    excess = slow / n - ordinary / m
    truth = traffic.excess(EDGE)
    assert np.abs(excess / excess.sum() - truth / truth.sum()).max() < 0.01


def test_reservoir_weights_stand_for_every_request(minute):
    _, horizon, fed = minute
    (held,) = horizon.evidence("score", 0, 60 * S)["classes"]
    counts = dict(zip(held["bands"]["ids"], held["bands"]["counts"], strict=True))
    by_band: dict[int, float] = {}
    for kept in held["reservoir"]:
        assert sum(kept["vector"]) == kept["wall_ns"]
        by_band[kept["band"]] = by_band.get(kept["band"], 0.0) + kept["weight"]
    for band, weight in by_band.items():
        assert weight == pytest.approx(counts[band])
    assert sum(by_band.values()) == pytest.approx(fed, rel=0.01)
    sizes = np.bincount([kept["band"] for kept in held["reservoir"]])
    assert sizes.max() <= 64


def test_slowest_requests_come_with_spans(minute):
    traffic, horizon, fed = minute
    (held,) = horizon.evidence("score", 0, 60 * S)["classes"]
    slowest = [record["wall_ns"] for record in held["slowest"]]
    assert slowest == sorted(traffic.wall_ns[:fed].tolist(), reverse=True)[:32]
    assert held["slowest"][0]["spans"][0]["thread_id"] == 7
    assert held["slowest"][0]["key"] == ["score", None, None]
    assert len(horizon.breaching(ClassKey("score", None, None))) == 128


def test_a_part_of_the_time_is_widened_to_blocks_that_agree(minute):
    traffic, horizon, fed = minute
    document = horizon.evidence("score", 25 * S, 31 * S)
    (held,) = document["classes"]
    assert (document["from_ns"], document["to_ns"]) == (20 * S, 40 * S)
    inside = (traffic.end_ns[:fed] > 20 * S) & (traffic.end_ns[:fed] <= 40 * S)
    assert held["count"] == inside.sum()
    assert sum(block["count"] for block in held["blocks"]) == inside.sum()
    assert sum(block["tail_count"] for block in held["blocks"]) == held["violations"][0]
    for record in [*held["slowest"], *held["reservoir"]]:
        assert 20 * S < record["start_ns"] + record["wall_ns"] <= 40 * S


def test_what_is_not_known_is_left_out(minute):
    _, horizon, _ = minute
    assert horizon.evidence("other", 0, 60 * S)["classes"] == []
    assert horizon.evidence(ClassKey("score", "m", None), 0, 60 * S)["classes"] == []
    assert horizon.evidence(None, 100 * S, 200 * S)["classes"] == []
    assert len(horizon.evidence(None, 0, 1 << 62)["classes"]) == 1
    assert horizon.evidence(None, 0, 1 << 62)["to_ns"] == 60 * S


def test_series_of_the_horizon(minute):
    traffic, horizon, fed = minute
    series = {tuple(row["labels"]): row for row in horizon.evidence("score", 0, 60 * S)["series"]}
    spent = traffic.vectors[:fed, 4]
    forward = series["forward",]
    assert (forward["kind"], forward["count"], forward["sum_ns"]) == ("stage", (spent > 0).sum(), spent.sum())
    assert forward["p50_ns"] == pytest.approx(np.median(spent), rel=0.01)
    assert forward["p99_ns"] == pytest.approx(np.quantile(spent, 0.99), rel=0.01)
    assert spent.max() <= forward["max_ns"] <= spent.max() * 1.01


def test_profiled_requests_are_in_the_counts_only():
    traffic = simulate(12, 3)
    horizon, _, fed = drive(traffic, 11, profiled=5)
    (held,) = horizon.evidence("score", 0, 11 * S)["classes"]
    assert (held["count"], held["excluded"]) == (fed, 55)
    assert sum(held["latency"]["count"]) == sum(held["bands"]["counts"]) == fed - 55
    assert not any(record["reasons"] & Reason.PROFILED for record in held["slowest"])


def test_memory_of_a_class_stays_below_400_kilobytes_and_old_time_is_dropped():
    horizon = Horizon(200)  # shorter than the default: the arrays are as full
    traffic = simulate(20, 8, rate=1000)
    clock = [0]
    recorder = ArrayRecorder(COLUMNS, (EDGE,))
    aggregator = Aggregator(recorder, lambda: clock[0])
    bounds = np.searchsorted(traffic.end_ns, np.arange(20) * S)
    key = ClassKey("score", None, None)
    largest = 0
    for second in range(300):
        at = second % 19
        part = slice(bounds[at], bounds[at + 1])
        recorder.feed(traffic.start_ns[part] + (second - at) * S, traffic.wall_ns[part], traffic.vectors[part])
        clock[0] = (second + 1) * S
        horizon.add(aggregator.tick(clock[0]))
        largest = max(largest, horizon.nbytes(key))
    assert 50_000 < largest <= 400 * 1024
    document = horizon.evidence(key, 0, 300 * S)
    assert document["from_ns"] >= 100 * S
    (held,) = document["classes"]
    assert sum(held["bands"]["counts"]) == held["count"]
    assert min(one["start_ns"] + one["wall_ns"] for one in held["slowest"]) >= 100 * S


def test_other_edges_start_the_class_over():
    traffic = simulate(4, 1)
    horizon, _, _ = drive(traffic, 2)
    horizon, _, _ = drive(traffic, 2, edges=(10_000_000, EDGE), horizon=horizon, origin=2 * S)
    (held,) = horizon.evidence("score", 0, 4 * S)["classes"]
    assert held["edges_ns"] == [10_000_000, EDGE]
    assert len(held["violations"]) == 2
    assert held["violations"][0] == sum(block["tail_count"] for block in held["blocks"])


def test_lock_sites_are_those_of_the_horizon():
    clock = [0]
    recorder = ArrayRecorder(COLUMNS)
    aggregator, horizon = Aggregator(recorder, lambda: clock[0]), Horizon()
    for second in range(1, 41):
        recorder.sites = [
            ("rules", 1, "reload (rules.py:7)", "rules", second, 1000 * second, 5),
            ("rules", 2, "quiet (a.py:1)", None, 3, 30, 1),
        ]
        clock[0] = second * S
        horizon.add(aggregator.tick(), aggregator.lock_sites())
    (row,) = horizon.evidence(None, 20 * S, 40 * S)["locks"]
    assert (row["site"], row["waits"], row["wait_ns"], row["longest_hold_ns"]) == ("reload (rules.py:7)", 20, 20_000, 5)
    assert isinstance(aggregator.lock_sites()[0], LockSite)


def record(band, wall, start, reasons=Reason.RESERVOIR, id_=0):
    return RequestRecord(
        id_, ClassKey("r", None, None), start, wall, band, reasons, 1, None, 1, None, None, None, None, False, (wall - 1, 0, 1), ()
    )


def test_a_reservoir_is_unbiased_when_sampling_rates_change():
    """First a tenth is retained, then all: early requests must count ten times as much."""
    estimates = []
    for seed in range(60):
        reservoir = Reservoir(seed=seed, per_band=16)
        for tick in range(10):
            kept = [record(50, 1000 + tick, tick * S) for _ in range(10 if tick < 5 else 100)]
            reservoir.add(kept, BandSums(np.array([50]), np.array([100]), np.array([[0]])), (tick + 1) * S)
        rows = list(reservoir.entries(-1, 100 * S, {50: 1000}, 3))
        assert sum(row["weight"] for row in rows) == pytest.approx(1000)
        estimates.append(sum(row["weight"] for row in rows if row["start_ns"] < 5 * S))
    assert np.mean(estimates) == pytest.approx(500, rel=0.1)


def test_a_reservoir_skips_profiled_and_merely_slowest_requests():
    reservoir = Reservoir()
    sums = BandSums(np.array([50]), np.array([3]), np.array([[0]]))
    reservoir.add([record(50, 9, 0, Reason.SLOWEST), record(50, 9, 0, Reason.PROFILED | Reason.RESERVOIR), record(50, 9, 0)], sums, S)
    assert len(reservoir) == 1
    (row,) = reservoir.entries(-1, S, {50: 3}, 3)
    assert row["weight"] == pytest.approx(3)


def test_a_reservoir_gets_coarser_instead_of_larger():
    reservoir = Reservoir(limit_bytes=20_000, seed=1)
    for tick in range(30):
        kept = [record(band, 5_000_000_000 if band > 176 else 5000, tick * S) for band in range(160, 200) for _ in range(10)]
        bands = np.arange(160, 200)
        reservoir.add(kept, BandSums(bands, np.full(40, 10), np.zeros((40, 1), np.int64)), (tick + 1) * S)
    assert reservoir.nbytes <= 20_000
    assert 1 <= reservoir.per_band < 64
    rows = list(reservoir.entries(-1, 100 * S, dict.fromkeys(range(160, 200), 300), 3))
    assert {row["band"] for row in rows} == set(range(160, 200))
    assert all(sum(row["vector"]) == row["wall_ns"] for row in rows)
    assert sum(row["weight"] for row in rows) == pytest.approx(40 * 300)


def test_blocks_are_joined_oldest_first_and_lose_nothing():
    def block(i):
        return ClassBlock(
            i * 10 * S,
            (i + 1) * 10 * S,
            5,
            1,
            5,
            0,
            (2,),
            Sparse(np.array([i, 900], np.uint32), np.array([2, 3], np.uint32)),
            np.array([10, 50 + i % 3], np.uint8),
            np.array([2, 3]),
            np.array([0, 3], np.uint8),
            np.array([[1, 2], [3, 4]]),
        )

    blocks = [block(i) for i in range(40)]
    size = sum(one.nbytes for one in blocks)
    coarsen(blocks, size // 2, 400 * S)
    assert sum(one.nbytes for one in blocks) <= size // 2
    assert sum(one.count for one in blocks) == 200
    assert sum(int(one.sums.sum()) for one in blocks) == 400
    assert sum(one.violations[0] for one in blocks) == 80
    assert sum(int(one.latency.counts.sum()) for one in blocks) == 200
    lengths = [one.end_ns - one.start_ns for one in blocks]
    assert lengths[0] > lengths[-1] == 10 * S
    assert [one.start_ns for one in blocks[1:]] == [one.end_ns for one in blocks[:-1]]
    assert len(add_sparse([]).keys) == 0


def test_work_is_done_in_slices():
    traffic = simulate(3, 6)
    recorder = ArrayRecorder(COLUMNS)
    aggregator, horizon, rests = Aggregator(recorder), Horizon(), []
    recorder.feed(traffic.start_ns, traffic.wall_ns, traffic.vectors)
    window = aggregator.tick()
    horizon.add(window, breathe=lambda: rests.append(1))
    assert len(rests) >= len(window.records) // 200
