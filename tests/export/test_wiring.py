"""A whole process: what it shows to a Prometheus registry, whose trace its spans join, and what its bands say."""

from __future__ import annotations

import hashlib
import time

import pytest

import inferscope
from inferscope import integration, semconv
from inferscope.capture.bundle import Bundle
from inferscope.export.otlp import bands
from inferscope.record import core, fallback
from inferscope.rooms.outlet import _hashes
from inferscope.testing.receiver import OtlpReceiver
from inferscope.types import Breach

MS = 1e-3


def busy(seconds):
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def serve(slow=0.0, name="wired"):
    with inferscope.request(name):
        with inferscope.stage("model"):
            busy(0.2 * MS)
        if slow:
            with inferscope.stage("rules"):
                busy(slow)


@pytest.fixture
def receiver(tmp_path):
    with OtlpReceiver() as found:
        inferscope.configure(
            service="wired",
            slo=[inferscope.SLO("wired", p99_ms=5), inferscope.SLO("banded", p99_ms=5)],
            endpoint=found.url,
            state_dir=tmp_path,
            export_interval_s=0.2,
            export_bands=True,
            capture=False,
            warmup_s=3600,
            warmup_requests=1_000_000,
        )
        yield found
        inferscope.shutdown()


def test_a_registry_reads_the_running_instance_and_nothing_afterwards(receiver):
    client = pytest.importorskip("prometheus_client")
    from inferscope.export import prometheus_collector

    registry = client.CollectorRegistry()
    registry.register(prometheus_collector())
    for _ in range(10):
        serve()
    assert inferscope.flush(2.0)
    counted = [s for family in registry.collect() for s in family.samples if s.labels.get("inferscope_request") == "wired"]
    assert {s.value for s in counted if s.name in {"inferscope_requests_total", "inferscope_request_duration_seconds_count"}} == {10}
    inferscope.shutdown()
    assert list(registry.collect()) == []


def test_spans_join_the_application_s_trace_when_it_is_sampled_and_link_to_it_when_not(receiver):
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

    before = trace._TRACER_PROVIDER
    ids = []
    for sampler in (None, ALWAYS_OFF):
        provider = TracerProvider(**({} if sampler is None else {"sampler": sampler}), shutdown_on_exit=False)
        with provider.get_tracer("app").start_as_current_span("handle") as span:
            serve(slow=6 * MS)
            ids.append(span.get_span_context())
    assert inferscope.flush(2.0)
    assert trace._TRACER_PROVIDER is before, "no global provider is set by us"
    roots = sorted(receiver.spans("wired"), key=lambda span: span.start_unix_ns)
    joined, own = roots[-2:]
    assert (joined.trace_id, joined.parent_id) == (format(ids[0].trace_id, "032x"), format(ids[0].span_id, "016x"))
    assert own.parent_id is None
    assert own.links == ((format(ids[1].trace_id, "032x"), format(ids[1].span_id, "016x")),)
    known = {span.span_id for span in receiver.spans()} | {joined.parent_id}
    assert all(span.parent_id in known for span in receiver.spans() if span.parent_id), "no orphan"


@pytest.fixture
def room_for_all(monkeypatch):
    """Classes that earlier tests of this process left in the recorder are in the first window and would take the bands' places."""
    monkeypatch.setattr(bands, "SERIES_LIMIT", 1_000_000)
    for number in range(5):
        serve(name=f"earlier {number}")


@pytest.mark.usefixtures("room_for_all")
def test_bands_add_up_to_all_requests_and_all_their_time(receiver):
    for i in range(30):
        serve(slow=6 * MS if i % 10 == 0 else 0.0, name="banded")
    assert inferscope.flush(2.0)
    newest = {}
    for point in receiver.metrics():
        newest[point.name, tuple(sorted(point.attributes.items()))] = point
    found = [point for point in newest.values() if point.attributes.get(semconv.ATTR_REQUEST) == "banded"]
    requests = [point for point in found if point.name == semconv.BAND_REQUESTS]
    times = [point for point in found if point.name == semconv.BAND_TIME]
    above = {point.attributes[semconv.ATTR_BAND] for point in requests if float(point.attributes[semconv.ATTR_BAND]) > 0.005}
    assert sum(point.value for point in requests) == 30
    slow = sum(point.value for point in requests if point.attributes[semconv.ATTR_BAND] in above)
    (violations,) = [point.value for point in found if point.name == semconv.SLO_VIOLATIONS]
    assert slow == violations >= 3
    assert {point.attributes[semconv.ATTR_BAND] for point in requests if point.attributes.get(semconv.ATTR_TAIL)} == above
    assert {point.attributes[semconv.ATTR_STAGE] for point in times} <= {
        "model",
        "rules",
        "unattributed",
        "gc:gen0",
        "gc:gen1",
        "gc:gen2",
        "other",
    }
    wall = sum(point.value for point in times)
    (duration,) = [point for point in found if point.name == semconv.REQUEST_DURATION]
    assert wall == pytest.approx(duration.buckets.total, rel=1e-6)
    rules = sum(p.value for p in times if p.attributes[semconv.ATTR_STAGE] == "rules" and p.attributes[semconv.ATTR_BAND] in above)
    assert rules >= 0.018


def test_explicit_buckets_stand_around_the_objective_when_the_standard_variable_asks(tmp_path, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION", "explicit_bucket_histogram")
    with OtlpReceiver() as found:
        inferscope.configure(
            service="wired", slo=inferscope.SLO("explicit", p99_ms=5), endpoint=found.url, state_dir=tmp_path, capture=False
        )
        serve(name="explicit")
        assert inferscope.flush(2.0)
        inferscope.shutdown()
        point = found.last(semconv.REQUEST_DURATION, inferscope__request="explicit")
    assert point.kind == "histogram"
    assert 0.005 in point.buckets.bounds


def test_bytes_copied_captures_and_what_was_dropped_are_metrics(receiver):
    integration.record_copy("h2d", 4096, 0, 1_000, sync=True, pageable=True, site="load (model.py:12)")
    for _ in range(3):
        serve()
    with inferscope.request("wired") as late:
        pass
    with inferscope.attach(late), inferscope.stage("too-late"):
        pass
    assert inferscope.flush(2.0)
    assert receiver.last(semconv.COPY_IO, direction="h2d").value >= 4096
    dropped = {point.attributes[semconv.ATTR_REASON] for point in receiver.metrics(semconv.SELF_DROPPED)}
    assert "late_spans" in dropped


def test_hashes_of_artefacts_are_those_of_the_newest_manifest(tmp_path):
    breach = Breach("20260501T120000Z-score-00ff", "score-p99", "score", 20.0, 0.99, 1, 2, 3, 100, 9, "e_detector", 12.0, 1.0)
    bundle = Bundle.create(tmp_path, breach, {}, {})
    bundle.publish("open")
    (bundle.path / "captures" / "c1.trace.json").write_text("{}")
    bundle.add_rest()
    bundle.publish("diagnosed")
    assert _hashes(bundle.path)["captures/c1.trace.json"] == hashlib.sha256(b"{}").hexdigest()


@pytest.mark.parametrize("implementation", [core.Recorder, fallback.Recorder])
def test_the_application_s_span_is_asked_for_once_a_kept_request_and_its_failure_is_contained(implementation):
    now = [10**9]
    recorder = implementation(clock=lambda: now[0])
    recorder.set_edges("score", [20_000_000])
    recorder.begin_epoch(breaching=100, reservoir=0, slowest=0)
    asked = []
    recorder.trace_context = lambda: asked.append(1) or ("ab" * 16, "cd" * 8)

    def serve(milliseconds):
        with recorder.request("score"):
            now[0] += milliseconds * 1_000_000

    for milliseconds in (5, 30, 6, 40):
        serve(milliseconds)
    kept = recorder.drain()
    assert len(asked) == len(kept) == 2, "ordinary requests cost no question"
    assert [record[16] for record in kept] == [("ab" * 16, "cd" * 8)] * 2

    def broken():
        raise KeyError

    recorder.trace_context = broken
    serve(30)
    assert [record[16] for record in recorder.drain()] == [None]
    assert recorder.counters()["hook_errors"] == 1
    recorder.trace_context = None
    serve(30)
    assert len(recorder.drain()) == 1
