"""A fleet in every backend: merged percentiles, exact shares, attribution, versions, and mixed scales."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import numpy as np
import pytest

from inferscope import cli
from inferscope.export.fleet import Scope, compare, connect, summarise

KINDS = ("prometheus", "victoriametrics", "clickhouse", "ring")
REQUESTS = 30_000


@pytest.fixture(scope="module")
def fleet(shapes):
    found = shapes.shapes(REQUESTS)
    return found, shapes.truth(found)


def asked(origin, service, *, seconds=3600, until=None):
    end = time.time() + 1 if until is None else until
    source = connect(origin)
    (row,) = summarise(source, Scope(end - seconds, end, {"service.name": service}))
    return row


@pytest.mark.parametrize("kind", KINDS)
def test_three_replicas_of_different_shape_are_one_fleet(kind, fleet, deliver):
    replicas, truth = fleet
    row = asked(deliver(kind, replicas, f"fleet-{kind}"), f"fleet-{kind}")
    assert (row.requests, row.replicas, row.errors) == (truth["requests"], 3, 0)
    for quantile, exact in truth["quantiles"].items():
        assert row.latency_ms[quantile] == pytest.approx(exact * 1e3, rel=0.005 if quantile == 0.99 else 0.012), quantile
    (objective,) = row.objectives
    assert objective.violations == truth["violations"]
    assert objective.share == truth["violations"] / truth["requests"]
    assert objective.broken
    assert row.tail.withheld is None
    shares = {share.name: share.share for share in row.tail.shares}
    for name, exact in truth["shares"].items():
        assert shares[name] == pytest.approx(exact, abs=0.01), name


@pytest.mark.parametrize("kind", KINDS)
def test_an_interval_counts_what_was_gained_in_it(kind, fleet, deliver, shapes):
    replicas, _ = fleet
    service, now = f"interval-{kind}", time.time()
    origin = deliver(kind, replicas, service, points=3, apart_s=120, end_s=now)
    later = [replace(each, columns=np.concatenate(np.array_split(each.columns, 3)[1:])) for each in replicas]
    truth = shapes.truth(later)
    row = asked(origin, service, seconds=200, until=now + 1)
    assert row.requests == truth["requests"]
    assert row.objectives[0].violations == truth["violations"]
    assert row.latency_ms[0.99] == pytest.approx(truth["quantiles"][0.99] * 1e3, rel=0.012)


@pytest.mark.parametrize("kind", KINDS)
def test_a_fleet_with_two_scales_is_merged_at_the_coarser_one(kind, fleet, deliver):
    replicas, truth = fleet
    mixed = [replace(each, scale=scale) for each, scale in zip(replicas, (5, 5, 3), strict=True)]
    row = asked(deliver(kind, mixed, f"scales-{kind}"), f"scales-{kind}")
    assert row.bucket_error == pytest.approx(0.0443, abs=0.001)
    assert row.requests == truth["requests"]
    for quantile, exact in truth["quantiles"].items():
        assert row.latency_ms[quantile] == pytest.approx(exact * 1e3, rel=0.0443), quantile


@pytest.mark.parametrize("kind", KINDS)
def test_versions_are_compared_with_the_same_mix(kind, deliver, shapes):
    """1.4.2 serves more of the large class and is no slower; only the raw numbers say that it is."""
    rng = np.random.default_rng(8)

    def replica(name, version, cls, n, milliseconds):
        columns = np.zeros((n, 4), dtype=np.int64)
        columns[:, 1] = rng.lognormal(np.log(milliseconds), 0.2, n) * 1e6
        return shapes.Replica(name, version, columns, cls=cls)

    found = [
        replica("a-small", "1.4.1", "small", 18_000, 4),
        replica("a-large", "1.4.1", "large", 2_000, 12),
        replica("b-small", "1.4.2", "small", 2_000, 4),
        replica("b-large", "1.4.2", "large", 18_000, 12),
    ]
    service = f"versions-{kind}"
    source = connect(deliver(kind, found, service))
    end = time.time() + 1
    (row,) = compare(source, Scope(end - 3600, end, {"service.name": service}), "service.version", ("1.4.1", "1.4.2"))
    assert row.requests == (20_000, 20_000)
    assert row.classes == 2
    raw, fair = row.raw_ms[0.5], row.adjusted_ms[0.5]
    assert raw[1] > 2 * raw[0]
    assert fair[1] == pytest.approx(fair[0], rel=0.05)
    assert row.adjusted_ms[0.99][1] == pytest.approx(row.adjusted_ms[0.99][0], rel=0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_versions_are_compared_with_the_same_sizes(kind, deliver, shapes):
    """1.4.2 gets more of the large requests and is no slower; nobody told the sizes apart by a class."""
    rng = np.random.default_rng(9)

    def replica(name, version, n, mix):
        sizes, columns = rng.choice([1.0, 4.0, 16.0], n, p=mix), np.zeros((n, 4), dtype=np.int64)
        columns[:, 1] = (2 + 1.5 * sizes) * rng.lognormal(0, 0.2, n) * 1e6
        return shapes.Replica(name, version, columns, sizes=sizes)

    small, large = [0.7, 0.25, 0.05], [0.2, 0.3, 0.5]
    found = [replica(f"a{i}", "1.4.1", 3_000, small) for i in range(2)] + [replica(f"b{i}", "1.4.2", 3_000, large) for i in range(2)]
    service = f"sizes-{kind}"
    source = connect(deliver(kind, found, service))
    end = time.time() + 1
    (row,) = compare(source, Scope(end - 3600, end, {"service.name": service}), "service.version", ("1.4.1", "1.4.2"))
    assert (row.requests, row.classes, row.sizes, row.size_left_out) == ((6_000, 6_000), 1, 3, (0, 0))
    for q in (0.5, 0.95):
        raw, fair = row.raw_ms[q], row.adjusted_ms[q]
        assert raw[1] > 1.3 * raw[0], q
        assert fair[1] == pytest.approx(fair[0], rel=0.08), q
    assert row.raw_ms[0.5][1] / row.raw_ms[0.5][0] > 2
    assert row.shares["score-p99"][1] == pytest.approx(row.shares["score-p99"][0], rel=0.2)


def test_clickhouse_adds_differences_as_they_are(fleet, deliver):
    replicas, truth = fleet
    row = asked(deliver("clickhouse", replicas, "delta", points=3, delta=True), "delta")
    assert row.requests == truth["requests"]
    assert row.objectives[0].violations == truth["violations"]
    assert row.latency_ms[0.99] == pytest.approx(truth["quantiles"][0.99] * 1e3, rel=0.005)


def test_explicit_buckets_are_read_too_and_no_error_is_claimed_for_them(fleet, deliver):
    replicas, truth = fleet
    row = asked(deliver("victoriametrics", replicas, "explicit", explicit=True), "explicit")
    assert row.requests == truth["requests"]
    assert row.bucket_error is None
    assert row.latency_ms[0.5] == pytest.approx(truth["quantiles"][0.5] * 1e3, rel=0.25)
    assert row.objectives[0].violations == truth["violations"]


@pytest.mark.parametrize("kind", KINDS[:3])
def test_a_replica_that_was_restarted_is_counted_through_both_lives(kind, fleet, deliver, shapes):
    replicas, _ = fleet
    service, now = f"restarted-{kind}", time.time()
    first, second = (replace(replicas[1], columns=part) for part in np.array_split(replicas[1].columns, 2))
    truth = shapes.truth([first, second])
    deliver(kind, [first], service, points=8, apart_s=30, end_s=now - 300)
    origin = deliver(kind, [second], service, points=8, apart_s=30, end_s=now)
    row = asked(origin, service, until=now + 1)
    exact = kind == "clickhouse"
    assert row.requests == truth["requests"] if exact else row.requests == pytest.approx(truth["requests"], rel=0.15)
    assert row.objectives[0].share == pytest.approx(truth["violations"] / truth["requests"], rel=1e-9 if exact else 0.1)
    assert row.latency_ms[0.99] == pytest.approx(truth["quantiles"][0.99] * 1e3, rel=0.02)


def test_the_command_line_says_what_the_fleet_does(fleet, deliver, capsys):
    replicas, truth = fleet
    origin = deliver("ring", replicas, "said")
    assert cli.main(["report", "--from", origin, "--json"]) == 2
    value = json.loads(capsys.readouterr().out)
    assert value["rows"][0]["objectives"][0]["violations"] == truth["violations"]
    assert cli.main(["report", "--from", origin, "--service", "said"]) == 2
    text = capsys.readouterr().out
    assert "BROKEN" in text
    assert "rules" in text
    assert cli.main(["report", "--from", origin, "--service", "nobody"]) == 1
    assert cli.main(["report", "--from", origin, "--compare", "service.version=1.4.1,1.4.2"]) == 0
