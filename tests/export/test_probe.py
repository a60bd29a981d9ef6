"""`inferscope doctor --endpoint` and `--cost`."""

from __future__ import annotations

import json

import pytest

from inferscope import cli, semconv
from inferscope.export import Exporter, Total, announce, regression_event
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


def test_a_regression_is_an_event_for_the_receiver_that_the_environment_names():
    verdicts = [
        {"metric": "p99", "word": "REGRESSED", "base": 20.0, "candidate": 31.0, "change": 0.55, "low": 0.4, "high": 0.7, "why": ""},
        {"metric": "p50", "word": "NO CHANGE", "base": 9.0, "candidate": 9.0, "change": 0.0, "low": -0.01, "high": 0.01, "why": ""},
    ]
    event = regression_event("a against b", verdicts, 7, {"evidence/1": "ab" * 32})
    assert announce(event, "shop", environ={}) is None, "no endpoint, no attempt"
    with OtlpReceiver() as receiver:
        assert announce(event, "shop", environ={"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url}) is True
        (record,) = receiver.logs(semconv.EVENT_REGRESSION)
    assert record.attributes["inferscope.regression.metrics"] == ["p99"]
    assert record.attributes["inferscope.regression.verdicts"][0]["low"] == 0.4
    assert record.attributes["inferscope.artefact.sha256"] == "ab" * 32
    assert record.resource == {"service.name": "shop"}


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
