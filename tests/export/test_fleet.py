"""Fleets without a backend: rings of several replicas, and what an attribution refuses to say."""

from __future__ import annotations

import json

import numpy as np
import pytest

from inferscope import cli, semconv
from inferscope.errors import InferscopeError
from inferscope.export import Bands, ExportBatch, Exporter, Total
from inferscope.export.fleet import Scope, connect, summarise
from inferscope.export.fleet.promql import _exponential
from inferscope.export.fleet.tail import attribute
from inferscope.types import BandSums, ClassKey, ClassWindow, Column, Distribution, Window

SECOND = 1_000_000_000
END = 1_700_000_000
WHO = ((semconv.ATTR_REQUEST, "score"),)
SLO = (semconv.ATTR_SLO, "score-p99")


@pytest.fixture
def replica(make):
    """Exports values, in ms, of one life of a replica: `[(seconds before the end, requests so far)]`."""

    def export(root, name, points, *, service="shop", life=0, scale=5, version="1", items=1):
        exporter = Exporter(root / name / "0", environ={}, scale=scale)
        resource = {"service.name": service, "service.instance.id": name, "service.version": version, "process.pid": 7}
        start = (END - 7200 + life) * SECOND
        for ago_s, values in points:
            seen = np.asarray(values) * 1_000_000
            totals = (
                Total(semconv.REQUESTS, len(seen), WHO),
                Total(semconv.ITEMS, items * len(seen), WHO),
                Total(semconv.SLO_VIOLATIONS, int((seen > 20_000_000).sum()), (*WHO, SLO)),
                Total(semconv.SLO_TARGET, 0.02, (*WHO, SLO, ("inferscope.slo.quantile", 0.99)), monotonic=False),
            )
            exporter.offer(ExportBatch((make.distribution(seen),), totals, start, (END - ago_s) * SECOND, resource))
            exporter.run_once()
        exporter.shutdown()

    return export


def rows(root, *, seconds=3600, **where):
    return summarise(connect(f"ring={root}"), Scope(END - seconds, END, where))


def test_replicas_add_and_what_was_before_the_interval_is_taken_away(replica, tmp_path):
    replica(tmp_path, "a", [(5000, [9.0] * 100), (10, [9.0] * 100 + [30.0] * 50)])
    replica(tmp_path, "b", [(20, [5.0] * 200)])
    (row,) = rows(tmp_path)
    assert (row.requests, row.replicas) == (250, 2), "the first 100 of replica a were before"
    assert row.objectives[0].violations == 50
    assert row.latency_ms[0.5] == pytest.approx(5.0, rel=0.012)
    assert row.latency_ms[0.999] is None, "250 requests have no P99.9"


def test_a_life_that_ended_in_the_interval_counts_and_scales_merge_at_the_coarser(replica, tmp_path):
    replica(tmp_path, "a", [(900, [9.0] * 40)], life=1)
    replica(tmp_path, "a", [(10, [9.0] * 60)], life=2, scale=3)
    (row,) = rows(tmp_path)
    assert row.requests == 100
    assert row.bucket_error == pytest.approx(0.0443, abs=1e-3)


def test_only_what_was_asked_for(replica, tmp_path):
    replica(tmp_path, "a", [(10, [9.0] * 40)], version="1")
    replica(tmp_path, "b", [(10, [9.0] * 60)], version="2")
    replica(tmp_path, "c", [(10, [9.0] * 10)], service="other")
    assert [row.requests for row in rows(tmp_path, **{"service.version": "2"})] == [60]
    assert [(row.service, row.requests) for row in rows(tmp_path)] == [("other", 10), ("shop", 100)]
    assert rows(tmp_path, **{"service.name": "nobody"}) == ()


def test_the_command_line(replica, tmp_path, capsys):
    replica(tmp_path / "x", "a", [(10, [9.0] * 900 + [30.0] * 100)], version="1")
    replica(tmp_path / "y", "b", [(10, [9.0] * 1000)], version="2", items=3)
    asked = ["report", "--from", f"ring={tmp_path / 'x'}", str(tmp_path / "y"), "--since", str(END - 3600), "--until", str(END)]
    assert cli.main([*asked, "--json"]) == 2
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["requests"], row["replicas"], row["objectives"][0]["violations"]) == (2000, 2, 100)
    assert "export_bands" in row["withheld"]
    assert cli.main([*asked, "--compare", "service.version=1,2"]) == 0
    said = capsys.readouterr().out
    assert "1 000 requests of 1" in said
    assert "items a request 1 -> 3: sizes differ" in said
    for wrong in (
        ["report", "--from", "graphite=x"],
        ["report", "--from", "prometheus=x"],
        ["report", "--since", "1h"],
        ["report", "a", "b"],
        [*asked, "--compare", "service.version=1"],
    ):
        assert cli.main(wrong) == 1
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_backend_that_does_not_answer_is_one_line_without_credentials():
    with pytest.raises(InferscopeError, match="does not answer") as raised:
        summarise(connect("prometheus=http://me:secret@127.0.0.1:9"), Scope(0, 1))
    assert "secret" not in str(raised.value)


COUNTS = {"0.01": 900.0, "0.02": 80.0, "0.03": 50.0, "+Inf": 150.0}
TIMES = {("0.01", "model"): 9.0, ("0.02", "model"): 1.2, ("0.03", "model"): 0.6, ("+Inf", "model"): 1.5, ("+Inf", "rules"): 6.0}


class TestTail:
    def test_shares_add_to_one_and_name_the_owner(self):
        found = attribute(COUNTS, TIMES, 0.02)
        assert found.withheld is None
        assert found.requests == 200
        assert sum(share.share for share in found.shares) == pytest.approx(1)
        assert found.shares[0].name == "rules"
        assert found.shares[0].tail_ms == pytest.approx(30)
        assert found.body_ms == pytest.approx(10)

    @pytest.mark.parametrize(
        ("counts", "threshold", "said"),
        [
            ({}, 0.02, "export_bands"),
            (COUNTS, 0.025, "disagree"),
            ({**COUNTS, "0.03": 3.0, "+Inf": 1.0}, 0.02, "4 requests above"),
            ({**COUNTS, "+Inf": 900.0}, 0.02, "an ordinary one is not known"),
        ],
    )
    def test_what_is_not_said(self, counts, threshold, said):
        found = attribute(counts, TIMES, threshold)
        assert found.shares == ()
        assert said in found.withheld


def test_what_is_no_exponential_bucket_is_refused():
    with pytest.raises(InferscopeError, match="no exponential histogram"):
        _exponential([(0.01, 0.017, 3.0)], 0.0)


def window(columns, counts, edges=(20_000_000,), request="score"):
    """One window of one class: requests and nanoseconds in the recorder's rows."""
    ids = np.array(list(counts), dtype=np.int64)
    requests = np.array([row[0] for row in counts.values()], dtype=np.int64)
    sums = np.array([row[1] for row in counts.values()], dtype=np.int64)
    nothing = Distribution("request", (request, "", ""), 3, 1000, np.zeros(0, np.int64), 0, 0, 0)
    held = ClassWindow(
        ClassKey(request, None, None), edges, int(requests.sum()), 0, 0, 0, (0,) * len(edges), nothing, BandSums(ids, requests, sums)
    )
    return Window(0, 1, columns, (held,), (), (), {})


class TestBands:
    COLUMNS = (Column("unattributed", "unattributed"), Column("other", "other"), *(Column("stage", f"s{i}") for i in range(12)))

    def totals(self, bands):
        return {(total.name, tuple(value for _, value in total.attributes[1:])): total.value for total in bands.totals()}

    def test_eight_owners_keep_their_names_and_nothing_is_lost(self):
        bands = Bands()
        spent = [5, 0, *range(1000, 2200, 100)]
        bands.add(window(self.COLUMNS, {100: (10, spent)}))
        found = self.totals(bands)
        times = {key[1][1]: value for key, value in found.items() if key[0] == semconv.BAND_TIME}
        assert len(times) == 9
        assert set(times) - {"other"} == {f"s{i}" for i in range(4, 12)}
        assert sum(times.values()) == pytest.approx(sum(spent) / 1e9)

    def test_a_column_that_came_first_keeps_its_name(self):
        bands = Bands()
        bands.add(window(self.COLUMNS, {100: (10, [0, 0, 7_000] + [0] * 11)}))
        bands.add(window(self.COLUMNS, {100: (10, [0, 0, 1_000, *range(5_000, 16_000, 1_000)])}))
        assert any(key[1][1] == "s0" for key in self.totals(bands) if key[0] == semconv.BAND_TIME)

    def test_time_that_settles_late_never_makes_a_counter_fall(self):
        bands = Bands()
        bands.add(window(self.COLUMNS, {100: (10, [0, 0, 9_000, 1_000] + [0] * 10)}))
        before = self.totals(bands)
        bands.add(window(self.COLUMNS, {100: (0, [0, 0, -500, 500] + [0] * 10)}))
        after = self.totals(bands)
        assert all(after[key] >= before[key] for key in before)

    def test_a_fourth_class_is_left_out_and_counted(self):
        bands = Bands()
        for name in "abcd":
            bands.add(window(self.COLUMNS, {100: (1, [1] + [0] * 13)}, request=name))
        found = bands.totals()
        assert {dict(t.attributes)[semconv.ATTR_REQUEST] for t in found if t.name == semconv.BAND_REQUESTS} == {"a", "b", "c"}
        assert [t.value for t in found if t.name == semconv.SELF_DROPPED] == [1]
        bands.clear()
        assert bands.totals() == ()
