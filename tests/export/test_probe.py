"""`inferscope doctor --endpoint` and `--cost`."""

from __future__ import annotations

import json

import pytest

from inferscope import cli, semconv
from inferscope.export import Exporter, Total
from inferscope.export.cost import costs
from inferscope.export.probe import PROBE, probe
from inferscope.testing.receiver import OtlpReceiver

MS = 1_000_000


def test_a_receiver_takes_everything_and_the_answer_does_not_claim_more():
    with OtlpReceiver() as receiver:
        answers = {answer.check: answer for answer in probe(receiver.url)}
        assert [answers[f"OTLP {signal}"].result for signal in ("metrics", "logs", "traces")] == ["ok"] * 3
        assert answers["store"].result == "note"
        assert receiver.last(PROBE).buckets.count == 100
        assert receiver.logs(PROBE)
        assert receiver.spans(PROBE)


@pytest.mark.parametrize(("mode", "said"), [("reject", "HTTP 400"), ("refuse", "is it running"), ("partial", "refused 1")])
def test_a_receiver_that_does_not_take_it_is_a_problem(mode, said, capsys):
    with OtlpReceiver(mode) as receiver:
        assert cli.main(["doctor", "--endpoint", receiver.url, "--json"]) == 1
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert checks[0]["result"] == "problem"
    assert said in checks[0]["detail"]


def test_a_port_of_another_protocol_is_named(capsys):
    with OtlpReceiver() as receiver:
        assert cli.main(["doctor", "--endpoint", receiver.url.replace("http", "https"), "--json"]) == 1
    assert "TLS" in json.loads(capsys.readouterr().out)["checks"][0]["detail"]


def test_cost_is_counted_from_what_was_exported(make, tmp_path, capsys):
    for slot in ("0", "1"):
        exporter = Exporter(tmp_path / "shop" / slot, environ={})
        for tick in (1, 2):
            totals = [Total(semconv.REQUESTS, 10 * tick), Total(semconv.SLO_TARGET, 0.02, monotonic=False)]
            exporter.offer(make.batch(make.distribution([MS, 2 * MS, 2 * MS]), totals=totals, tick=tick))
            exporter.run_once()
        exporter.shutdown()
    (found,) = costs(tmp_path)
    assert (found.service, found.workers, found.histograms, found.buckets) == ("shop", 2, 2, 4)
    assert (found.counters, found.gauges, found.points) == (2, 2, 6)
    assert found.series == 8, "with one target_info each"
    assert found.victoriametrics_series == 4 + 4 + 2 + 2
    assert found.interval_s == 10
    assert cli.main(["doctor", "--cost", "--replicas", "200", "--state-dir", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "1,600 series" in said
    assert "2,400 series" in said
    assert "10,368,000 rows/day" in said
    empty = tmp_path / "empty"
    empty.mkdir()
    assert cli.main(["doctor", "--cost", "--state-dir", str(empty)]) == 1
