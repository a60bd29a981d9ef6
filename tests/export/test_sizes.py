"""Two versions with different mixes of sizes: what is exported of sizes, and that equal code compares as equal."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from inferscope import semconv
from inferscope.aggregate.bands import band_of
from inferscope.export.fleet.mix import compare
from inferscope.export.fleet.sizes import Weights, balance, banded
from inferscope.export.fleet.source import Scope
from inferscope.export.otlp.bands import BANDS, SERIES_LIMIT, Bands
from inferscope.export.otlp.buckets import exponential, merge
from inferscope.export.otlp.sizes import CELLS, size_label
from inferscope.report import fleet
from inferscope.types import BandSums, ClassKey, ClassWindow, Column, Distribution, Reason, RequestRecord, Window

MS = 1_000_000
OBJECTIVE = 20 * MS
NAMES = (semconv.SERVICE_NAME, semconv.ATTR_REQUEST, semconv.ATTR_MODEL, semconv.ATTR_CLASS)
VERSIONS = ("1", "2")
COLUMNS = (Column("unattributed", "unattributed"), Column("other", "other"), *(Column("stage", f"s{i}") for i in range(12)))


def window(walls, sizes, rng, *, kept=64, request="score", profiled=()):
    """One tick of one class as the recorder gives it: band sums of all requests, records of a uniform sample of each band."""
    rows = np.array([band_of(int(wall)) for wall in walls])
    key, records = ClassKey(request, None, None), []
    for row in np.unique(rows):
        inside = np.flatnonzero(rows == row)
        for place in rng.permutation(inside)[:kept]:
            reasons = Reason.RESERVOIR | (Reason.PROFILED if place in profiled else 0)
            size = None if np.isnan(sizes[place]) else float(sizes[place])
            records.append(
                RequestRecord(
                    int(place), key, 0, int(walls[place]), int(row), reasons, 1, size, 1, None, None, None, None, truncated=False,
                    vector=(int(walls[place]), *([0] * 13)), spans=(),
                )
            )  # fmt: skip
    ids, counts = np.unique(rows, return_counts=True)
    spent = np.zeros((len(ids), len(COLUMNS)), np.int64)
    nothing = Distribution("request", (request, "", ""), 3, 1000, np.zeros(0, np.int64), 0, 0, 0)
    held = ClassWindow(key, (OBJECTIVE,), len(walls), 0, 0, 0, (int((walls > OBJECTIVE).sum()),), nothing, BandSums(ids, counts, spent))
    return Window(0, 1, COLUMNS, (held,), (), tuple(records), {})


def of(totals, name):
    """Values by band and size."""
    found = {}
    for total in totals:
        if total.name == name:
            about = dict(total.attributes)
            found[about[semconv.ATTR_BAND], about.get(semconv.ATTR_SIZE, "")] = total.value
    return found


class Versions:
    """A source that knows what the exporters of two versions said, each in one process."""

    name, notes = "test", ()

    def __init__(self, make, *sides, kept=64, tick=400, seed=5):
        self._sides, rng = {}, np.random.default_rng(seed)
        for version, (walls, sizes) in zip(VERSIONS, sides, strict=True):
            bands = Bands()
            for start in range(0, len(walls), tick):
                bands.add(window(walls[start : start + tick], sizes[start : start + tick], rng, kept=kept))
            self._sides[version] = bands.totals(), exponential(make.distribution(walls), 5), walls

    def _chosen(self, scope):
        wanted = scope.where.get(semconv.SERVICE_VERSION)
        return [side for version, side in self._sides.items() if wanted in {None, version}]

    def counters(self, metric, by, scope):
        found = {}
        for totals, _, walls in self._chosen(scope):
            if metric == semconv.REQUESTS:
                found["shop", "score", "", ""] = len(walls)
            if metric == semconv.SLO_VIOLATIONS:
                found["shop", "score", "", "", "score-p99"] = int((walls > OBJECTIVE).sum())
            for total in totals:
                if total.name == metric:
                    about = {semconv.SERVICE_NAME: "shop", **dict(total.attributes)}
                    key = tuple(str(about.get(each, "")) for each in by)
                    found[key] = found.get(key, 0.0) + total.value
        return found

    def gauges(self, metric, by, scope):
        return {("shop", "score-p99"): OBJECTIVE / 1e9}

    def distributions(self, metric, by, scope):
        return {("shop", "score", "", ""): merge([points for _, points, _ in self._chosen(scope)])}


def served(n, mix, rng, *, slower=1.0):
    """Requests of sizes 1 to 16 that take 2 ms + 1.5 ms a unit, give or take a quarter."""
    sizes = rng.choice([1.0, 2.0, 4.0, 8.0, 16.0], n, p=mix)
    return ((2 + 1.5 * sizes) * rng.lognormal(0, 0.25, n) * slower * MS).astype(np.int64), sizes


SMALL, LARGE = [0.4, 0.3, 0.2, 0.08, 0.02], [0.1, 0.15, 0.25, 0.3, 0.2]


def compared(make, *sides, **more):
    (row,) = compare(Versions(make, *sides, **more), Scope(0, 1), semconv.SERVICE_VERSION, VERSIONS)
    return row


@pytest.mark.parametrize("kept", [64, 6])
def test_equal_latency_by_size_is_equal_whatever_the_mix(make, kept):
    rng = np.random.default_rng(11)
    row = compared(make, served(10_000, SMALL, rng), served(10_000, LARGE, rng), kept=kept)
    assert row.sizes == 5
    for q in (0.5, 0.95, 0.99):
        raw, (a, b), (low, high) = row.raw_ms[q], row.adjusted_ms[q], row.change[q]
        assert raw[1] / raw[0] - 1 > 0.3, "as served it looks like a regression"
        assert b == pytest.approx(a, rel=0.06), q
        assert low - 0.01 <= 0 <= high + 0.01, (q, low, high)
    first, second = row.shares["score-p99"]
    assert second == pytest.approx(first, rel=0.15)
    said = fleet.comparison_text([row], VERSIONS, [], "test")
    assert "5 sizes in both" in said
    assert f"as served: {row.raw_ms[0.5][0]:.3g}" in said
    assert fleet.comparison_json([row])[0]["change"]["P50"] == list(row.change[0.5])


def test_the_adjusted_figure_is_that_of_the_requests_reweighted(make):
    rng = np.random.default_rng(12)
    sides = served(10_000, SMALL, rng), served(10_000, LARGE, rng, slower=1.2)
    row = compared(make, *sides)
    everything = np.concatenate([sizes for _, sizes in sides])
    for n, (walls, sizes) in enumerate(sides):
        weights = np.array([(everything == size).mean() / (sizes == size).mean() for size in (1.0, 2.0, 4.0, 8.0, 16.0)])
        weight = weights[np.log2(sizes).astype(int)]
        order = np.argsort(walls)
        reached = np.cumsum(weight[order]) / weight.sum()
        for q in (0.5, 0.95, 0.99):
            assert row.adjusted_ms[q][n] == pytest.approx(walls[order][np.searchsorted(reached, q)] / MS, rel=0.025), (q, n)
        assert row.shares["score-p99"][n] == pytest.approx(weight[walls > OBJECTIVE].sum() / weight.sum(), rel=0.05)
    assert row.change[0.5][0] > 0.1, "a fifth slower is told from chance"


def test_a_size_of_one_version_only_is_left_out_and_counted(make):
    rng = np.random.default_rng(13)
    row = compared(make, served(8_000, [0.5, 0.5, 0, 0, 0], rng), served(8_000, [0.25, 0.25, 0, 0, 0.5], rng))
    assert row.sizes == 2
    assert row.size_left_out[0] == 0
    assert row.size_left_out[1] == pytest.approx(4_000, rel=0.05)
    assert row.adjusted_ms[0.95][1] == pytest.approx(row.adjusted_ms[0.95][0], rel=0.05)


def test_without_sizes_nothing_is_claimed(make):
    rng = np.random.default_rng(14)
    (walls, sizes), (others, _) = served(4_000, SMALL, rng), served(4_000, LARGE, rng)
    row = compared(make, (walls, sizes), (others, np.full(4_000, np.nan)))
    assert row.sizes is None
    assert row.adjusted_ms[0.5] == pytest.approx(row.raw_ms[0.5], rel=1e-6)
    assert "request(size=" in fleet.comparison_text([row], VERSIONS, [], "test")


def test_a_sample_says_how_many_it_stands_for(make):
    rng, bands = np.random.default_rng(15), Bands()
    walls, sizes = served(30_000, SMALL, rng)
    for start in range(0, len(walls), 2_000):
        bands.add(window(walls[start : start + 2_000], sizes[start : start + 2_000], rng, kept=8))
    totals = bands.totals()
    cells, requests = of(totals, semconv.BAND_SIZES), of(totals, semconv.BAND_REQUESTS)
    assert sum(cells.values()) == pytest.approx(sum(requests.values()), rel=0.02)
    for label, size in (("1", 1.0), ("4", 4.0), ("16", 16.0)):
        assert sum(value for (_, each), value in cells.items() if each == label) == pytest.approx((sizes == size).sum(), rel=0.12)
    squares = of(totals, semconv.BAND_SIZES_SQUARED)
    busiest = max(requests, key=requests.get)[0]
    effective = sum(value for (band, _), value in cells.items() if band == busiest) ** 2 / squares[busiest, ""]
    assert 15 * 8 * 0.5 < effective <= 15 * 8 * 4, "eight of each of the recorder's bands and ticks, four of which make one"


def test_profiled_requests_and_those_that_are_only_slowest_are_not_in_the_sample():
    rng, bands = np.random.default_rng(16), Bands()
    bands.add(window(np.full(10, 5 * MS), np.full(10, 3.0), rng, profiled={1, 2, 3}))
    assert of(bands.totals(), semconv.BAND_SIZES) == {(of(bands.totals(), semconv.BAND_REQUESTS).popitem()[0][0], "4"): pytest.approx(10)}


def test_counters_never_fall_and_begin_again_in_a_child():
    rng, bands = np.random.default_rng(17), Bands()
    before = {}
    for _ in range(20):
        walls, sizes = served(300, LARGE, rng)
        bands.add(window(walls, sizes, rng, kept=5))
        now = of(bands.totals(), semconv.BAND_SIZES)
        assert all(now[key] >= value for key, value in before.items())
        before = now
    bands.clear()
    assert bands.totals() == ()


@pytest.mark.parametrize("classes", [1, 2, 4])
def test_series_stay_within_the_cap_whatever_the_sizes(classes):
    rng, bands = np.random.default_rng(18), Bands()
    for _ in range(3):
        for number in range(classes):
            walls = rng.lognormal(np.log(8 * MS), 2.5, 400).astype(np.int64)
            made = window(walls, np.exp2(rng.integers(-20, 50, 400)), rng, request=f"class{number}")
            rows = made.classes[0].bands
            rows.sums[:] = rng.integers(1, 1_000_000, rows.sums.shape)
            bands.add(made)
    totals = bands.totals()
    assert sum(total.name.startswith("inferscope.band.") for total in totals) <= SERIES_LIMIT
    sized = [dict(total.attributes) for total in totals if total.name == semconv.BAND_SIZES]
    for name in {each[semconv.ATTR_REQUEST] for each in sized}:
        mine = [each[semconv.ATTR_SIZE] for each in sized if each[semconv.ATTR_REQUEST] == name]
        assert sum(size != "other" for size in mine) <= CELLS
        assert "other" in mine, "what found no place is not lost"
    assert len(sized) > CELLS
    refused = {dict(total.attributes)[semconv.ATTR_REASON] for total in totals if total.name == semconv.SELF_DROPPED}
    assert bool(refused) == (classes > 2)


@pytest.mark.parametrize(
    ("size", "label"),
    [(1, "1"), (1.01, "2"), (2, "2"), (700, "1024"), (0.3, "0.5"), (0, "0"), (-3, "0"), (None, "none"), (float("nan"), "none"),
     (float("inf"), str(2**50)), (1e300, str(2**50)), (1e-300, "9.53674316e-07")],
)  # fmt: skip
def test_a_size_s_octave(size, label):
    assert size_label(size) == label


def test_weights_keep_each_band_s_sum_and_follow_the_line_inside():
    weights = Weights(np.array([0.01, 0.02, 0.04]), np.array([1.0, 2.0, 0.0]))
    middles = np.array([0.004, 0.008, 0.012, 0.018, 0.03])
    counts = np.array([10.0, 30.0, 20.0, 20.0, 5.0])
    found = weights.along(middles, counts)
    assert counts[:2] @ found[:2] == pytest.approx(40)
    assert counts[2:4] @ found[2:4] == pytest.approx(80)
    assert found[4] == 0
    assert found[0] < found[1]
    assert BANDS == 24


def test_versions_whose_sizes_do_not_meet_have_nothing_in_common():
    a = banded({"0.01": 5.0}, {("0.01", "2"): 5.0}, {"0.01": 5.0})
    b = banded({"0.01": 7.0}, {("0.01", "8"): 7.0}, {"0.01": 7.0})
    (first, second), common = balance((a, b))
    assert common == ()
    assert list(itertools.chain(first.bands, second.bands)) == [0, 0]
    assert banded({"0.01": 5.0}, {("0.01", "none"): 5.0}, {}) is None
