"""What `inferscope doctor --endpoint` says of real receivers, well and badly configured."""

from __future__ import annotations

import pytest

from inferscope.export.probe import probe


def test_victoriametrics_as_it_should_be(victoria_metrics):
    answers = {answer.check: answer for answer in probe(victoria_metrics.otlp)}
    assert answers["OTLP metrics"].result == "ok"
    assert answers["VictoriaMetrics"].result == "ok"
    assert answers["OTLP traces"].result == "note", "it takes metrics alone"


def test_victoriametrics_without_prometheus_names(serve):
    with serve.victoria_metrics(naming=False) as backend:
        answers = {answer.check: answer for answer in probe(backend.otlp)}
    assert answers["VictoriaMetrics"].result == "problem"
    assert "-opentelemetry.usePrometheusNaming" in answers["VictoriaMetrics"].detail


def test_a_wrong_path_names_the_right_one(victoria_metrics, prometheus):
    for url in (victoria_metrics.url, prometheus.url):
        (metrics, *_) = probe(url)
        assert metrics.result == "problem"
        assert "/opentelemetry" in metrics.detail


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_a_collector_cannot_be_looked_behind(behind_rotel, protocol):
    grpc, http, _ = behind_rotel
    answers = {answer.check: answer for answer in probe(grpc if protocol == "grpc" else http, protocol=protocol)}
    assert {answers[f"OTLP {signal}"].result for signal in ("metrics", "logs", "traces")} == {"ok"}
    assert answers["store"].result == "note"
