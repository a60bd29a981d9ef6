"""Numbers for an application's own Prometheus registry."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from inferscope import guard, semconv
from inferscope.errors import InferscopeError
from inferscope.export import Total, prometheus_collector, publish
from inferscope.export.prometheus import metric_name


def target(request, seconds, quantile=0.99):
    attributes = ((semconv.ATTR_SLO, f"{request}-slo"), (semconv.ATTR_REQUEST, request), ("inferscope.slo.quantile", quantile))
    return Total(semconv.SLO_TARGET, seconds, attributes, monotonic=False)


@pytest.fixture
def registry():
    return pytest.importorskip("prometheus_client").CollectorRegistry()


@pytest.fixture
def published():
    yield publish
    publish(None)


def test_counters_are_exact_and_the_objective_is_a_bound(make, registry):
    values = np.random.default_rng(5).lognormal(16.5, 0.5, 20_000).astype(np.int64)
    who = ((semconv.ATTR_REQUEST, "score"),)
    totals = [
        Total(semconv.REQUESTS, 19_990, who),
        Total(semconv.REQUESTS, 10, (*who, (semconv.ERROR_TYPE, "_OTHER"))),
        Total(semconv.SELF_OVERHEAD, 1.5),
        target("score", 0.02),
    ]
    source = make.batch(make.distribution(values), make.distribution([500], "stage", ("tiny",)), totals=totals)
    registry.register(prometheus_collector(lambda: source))
    read = registry.get_sample_value
    labels = {"inferscope_request": "score"}
    assert read("inferscope_requests_total", {**labels, "error_type": ""}) == 19_990
    assert read("inferscope_requests_total", {**labels, "error_type": "_OTHER"}) == 10
    assert read("inferscope_self_overhead_seconds_total") == 1.5
    slo = {**labels, "inferscope_slo": "score-slo", "inferscope_slo_quantile": "0.99"}
    assert read("inferscope_slo_target_seconds", slo) == 0.02
    assert read("inferscope_request_duration_seconds_count", labels) == 20_000
    assert read("inferscope_request_duration_seconds_sum", labels) == pytest.approx(values.sum() / 1e9)
    at_objective = read("inferscope_request_duration_seconds_bucket", {**labels, "le": "0.02"})
    assert at_objective == pytest.approx((values <= 20_000_000).sum(), rel=0.002)
    assert read("inferscope_request_duration_seconds_bucket", {**labels, "le": "+Inf"}) == 20_000
    assert read("inferscope_stage_duration_seconds_count", {"inferscope_stage": "tiny", "inferscope_clock": "host"}) == 1


def test_the_text_form_is_valid_and_monotone(make, registry):
    from prometheus_client import generate_latest
    from prometheus_client.parser import text_string_to_metric_families

    values = np.random.default_rng(6).lognormal(16, 1, 500).astype(np.int64)
    copies = make.distribution([70_000], "copy", ("h2d", "sync", "pageable"))
    source = make.batch(make.distribution(values), copies, totals=[target("score", 0.02)])
    registry.register(prometheus_collector(lambda: source))
    families = {family.name: family for family in text_string_to_metric_families(generate_latest(registry).decode())}
    buckets = [s.value for s in families["inferscope_request_duration_seconds"].samples if s.name.endswith("_bucket")]
    assert buckets == sorted(buckets)
    assert buckets[-1] == 500
    (count,) = [s for s in families["inferscope_copy_duration_seconds"].samples if s.name.endswith("_count")]
    assert count.labels == {"direction": "h2d", "inferscope_copy_sync": "true", "inferscope_copy_pinned": "false"}


def test_it_may_be_registered_first_and_shows_the_running_instance(make, registry, published):
    registry.register(prometheus_collector())
    assert list(registry.collect()) == []
    published(lambda: make.batch(totals=[Total(semconv.REQUESTS, 3)]))
    assert registry.get_sample_value("inferscope_requests_total") == 3
    published(None)
    assert list(registry.collect()) == []


def test_a_failure_of_ours_is_an_empty_scrape(registry, monkeypatch):
    monkeypatch.setenv("INFERSCOPE_STRICT", "0")

    def broken():
        raise RuntimeError("no")

    registry.register(prometheus_collector(broken))
    assert list(registry.collect()) == []
    assert guard.counts()["export.prometheus"] == 1


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.setitem(sys.modules, "prometheus_client.core", None)
    with pytest.raises(InferscopeError, match="pip install prometheus-client"):
        prometheus_collector()


@pytest.mark.parametrize(
    ("name", "counter", "expected"),
    [
        (semconv.REQUEST_DURATION, False, "inferscope_request_duration_seconds"),
        (semconv.REQUESTS, True, "inferscope_requests_total"),
        (semconv.COPY_IO, True, "inferscope_copy_io_bytes_total"),
        (semconv.SLO_TARGET, False, "inferscope_slo_target_seconds"),
        (semconv.GC_PAUSE, False, "inferscope_gc_pause_seconds"),
    ],
)
def test_names_follow_opentelemetry_s_rules(name, counter, expected):
    assert metric_name(name, counter=counter) == expected
