"""The exporter against a receiver in every mood."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from inferscope import semconv
from inferscope.export import Event, Exporter, Total, breach_event, capture_event, incident_event, read_ring, read_store
from inferscope.testing.receiver import OtlpReceiver, merge, percentile
from inferscope.types import Breach, CaptureSummary, Evidence, Finding, Incident, Latency, Share

MOODS = ["refuse", "unavailable", "black_hole", "drip"]
DELTA = {"OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE": "delta"}


@pytest.fixture
def exporter():
    made = []

    def make(directory=None, **keywords):
        keywords.setdefault("environ", {})
        made.append(Exporter(directory, **keywords))
        return made[-1]

    yield make
    for each in made:
        each.shutdown(0.2)


def requests(make, count, tick=1, **keywords):
    return make.batch(make.distribution([9_000_000] * count), totals=[Total(semconv.REQUESTS, count)], tick=tick, **keywords)


@pytest.mark.parametrize("scale", [4, 5])
def test_percentiles_read_back_are_close_to_the_exact_ones(make, exporter, scale):
    values = np.random.default_rng(11).lognormal(16, 0.5, 100_000).astype(np.int64)
    with OtlpReceiver() as receiver:
        mine = exporter(endpoint=receiver.url, scale=scale)
        mine.offer(make.batch(make.distribution(values)))
        assert mine.run_once()
        point = receiver.last(semconv.REQUEST_DURATION, inferscope__request="score")
    assert point.buckets.scale == scale
    for quantile in (0.5, 0.95, 0.99, 0.999):
        assert percentile(point.buckets, quantile) == pytest.approx(np.quantile(values, quantile) / 1e9, rel=0.012)


def test_three_replicas_merge_in_the_receiver(make, exporter):
    rng = np.random.default_rng(12)
    parts = [rng.lognormal(mu, sigma, 30_000).astype(np.int64) for mu, sigma in ((16, 0.2), (16.5, 0.6), (15, 1.0))]
    with OtlpReceiver() as receiver:
        for part in parts:
            mine = exporter(endpoint=receiver.url)
            mine.offer(make.batch(make.distribution(part)))
            assert mine.run_once()
        merged = merge(point.buckets for point in receiver.metrics(semconv.REQUEST_DURATION))
    whole = np.concatenate(parts)
    assert merged.count == 90_000
    for quantile in (0.5, 0.95, 0.99, 0.999):
        assert percentile(merged, quantile) == pytest.approx(np.quantile(whole, quantile) / 1e9, rel=0.012)


@pytest.mark.parametrize("mood", MOODS)
def test_no_mood_holds_the_thread_or_the_exit(make, exporter, mood, lines):
    with OtlpReceiver(mood, delay_s=0.05) as receiver:
        mine = exporter(endpoint=receiver.url)
        mine.offer(requests(make, 10))
        mine.event(Event("inferscope.slo.breach", 1, "broken"))
        begun = time.monotonic()
        assert not mine.run_once(0.4)
        assert time.monotonic() - begun < 0.7
        mine.offer(requests(make, 11))
        begun = time.monotonic()
        assert not mine.shutdown()
        assert time.monotonic() - begun <= 1.0
        assert mine.shutdown(), "a second call does nothing"
    assert 1 <= len(lines()) <= 2


def slow_to_build(monkeypatch, exporter, seconds):
    """As beside threads that compute: the building rests and gets the interpreter back late."""
    build = exporter._builder.build

    def late(*args, **keywords):
        time.sleep(seconds / 2)  # it is called twice a run
        return build(*args, **keywords)

    monkeypatch.setattr(exporter._builder, "build", late)


def test_the_time_to_deliver_begins_when_the_request_is_built(make, exporter, monkeypatch, lines):
    with OtlpReceiver("slow", delay_s=0.3) as receiver:
        mine = exporter(endpoint=receiver.url)
        slow_to_build(monkeypatch, mine, 0.5)
        mine.offer(requests(make, 10))
        assert mine.run_once(0.6), "0.5 s of building left too little of 0.6 s"
    assert not lines()


def test_a_caller_who_waits_is_not_kept_longer_by_the_building(make, exporter, monkeypatch):
    with OtlpReceiver("black_hole") as receiver:
        mine = exporter(endpoint=receiver.url)
        slow_to_build(monkeypatch, mine, 0.3)
        mine.offer(requests(make, 10))
        begun = time.monotonic()
        assert not mine.flush(0.6)
        assert time.monotonic() - begun < 0.8


def test_a_caller_who_waits_for_a_run_has_that_time_less(make, exporter):
    with OtlpReceiver("black_hole") as receiver:
        mine = exporter(endpoint=receiver.url)
        mine.offer(requests(make, 10))
        worker = threading.Thread(target=mine.run_once, args=(0.5,))
        worker.start()
        time.sleep(0.1)
        mine.offer(requests(make, 11))
        begun = time.monotonic()
        assert not mine.flush(0.7)
        assert time.monotonic() - begun < 0.95
    worker.join()


def test_shutdown_does_not_wait_for_a_run_that_hangs(make, exporter):
    with OtlpReceiver("black_hole") as receiver:
        mine = exporter(endpoint=receiver.url)
        mine.offer(requests(make, 10))
        worker = threading.Thread(target=mine.run_once)
        worker.start()
        time.sleep(0.1)
        begun = time.monotonic()
        assert not mine.shutdown()
        assert time.monotonic() - begun <= 1.0
    worker.join()


def test_shutdown_delivers_what_is_left(make, exporter):
    with OtlpReceiver() as receiver:
        mine = exporter(endpoint=receiver.url)
        mine.offer(requests(make, 10))
        assert mine.shutdown()
        assert receiver.last(semconv.REQUESTS).value == 10
        mine.offer(requests(make, 11))
        assert not mine.run_once()
        assert receiver.last(semconv.REQUESTS).value == 10


@pytest.mark.parametrize("mood", ["refuse", "unavailable", "reject"])
def test_cumulative_totals_are_exact_after_an_outage(make, exporter, mood):
    with OtlpReceiver() as receiver:
        mine = exporter(endpoint=receiver.url)
        mine.offer(requests(make, 10))
        assert mine.run_once()
        receiver.mode = mood
        mine.offer(requests(make, 25, 2))
        assert not mine.run_once(1.0 if mood == "reject" else 0.15)
        receiver.mode = "ok"
        mine.offer(requests(make, 40, 3))
        assert mine.run_once()
        points = receiver.metrics(semconv.REQUEST_DURATION)
        assert [point.buckets.count for point in points] == [10, 40]
        assert {point.start_unix_ns for point in points} == {make.START}
        assert receiver.last(semconv.REQUESTS).value == 40
        assert receiver.last(semconv.SELF_ERRORS, reason="export").value == 1


def test_delta_windows_fold_over_an_outage(make, exporter):
    with OtlpReceiver() as receiver:
        mine = exporter(endpoint=receiver.url, environ=DELTA)
        for tick, (count, mood) in enumerate([(10, "ok"), (25, "unavailable"), (40, "ok"), (40, "ok"), (41, "ok")], 1):
            receiver.mode = mood
            mine.offer(requests(make, count, tick))
            mine.run_once(0.15 if mood != "ok" else 2)
        points = receiver.metrics(semconv.REQUEST_DURATION)
        assert [point.buckets.count for point in points] == [10, 30, 1]
        assert {point.temporality for point in points} == {1}
        assert points[1].start_unix_ns == points[0].unix_ns
        assert sum(point.value for point in receiver.metrics(semconv.REQUESTS)) == 41


def test_events_wait_for_the_receiver_and_arrive_once(make, exporter):
    with OtlpReceiver("unavailable") as receiver:
        mine = exporter(endpoint=receiver.url, resource={"service.name": "scoring"})
        mine.event(Event("inferscope.slo.breach", 1, "first"))
        assert not mine.run_once(0.15)
        mine.event(Event("inferscope.slo.breach", 2, "second"))
        receiver.mode = "ok"
        assert mine.run_once()
        assert mine.run_once()
        assert [(log.body, log.resource) for log in receiver.logs()] == [
            ("first", {"service.name": "scoring"}),
            ("second", {"service.name": "scoring"}),
        ]


def test_waiting_events_are_bounded_and_counted(make, exporter):
    with OtlpReceiver("refuse") as receiver:
        mine = exporter(endpoint=receiver.url)
        for i in range(600):
            mine.event(Event("inferscope.slo.breach", i, str(i)))
        assert mine.status()["events_waiting"] == 512
        receiver.mode = "ok"
        mine.offer(requests(make, 1))
        assert mine.run_once()
        assert receiver.logs()[0].body == "88"
        assert receiver.last(semconv.SELF_DROPPED, reason="event_sent").value == 88


def test_rejected_events_are_not_sent_for_ever(exporter):
    with OtlpReceiver("reject") as receiver:
        mine = exporter(endpoint=receiver.url)
        mine.event(Event("inferscope.slo.breach", 1, "b"))
        assert not mine.run_once()
        assert mine.run_once()
        assert mine.status()["dropped"] == {"event_rejected": 1}
        assert receiver.attempts == 1


def test_without_an_endpoint_nothing_is_connected(make, exporter, tmp_path, monkeypatch):
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("a connection was opened"))
    for environ in ({}, {"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}):
        mine = exporter(tmp_path, environ=environ)
        assert not mine.sends
        mine.offer(requests(make, 10))
        mine.event(Event("inferscope.slo.breach", 1, "b"))
        assert mine.run_once()
        assert mine.flush()
        assert mine.shutdown()
    assert len(list(read_ring(tmp_path, "metrics"))) == 2
    assert len(list(read_ring(tmp_path, "logs"))) == 2
    windows, events = read_store(tmp_path / "index.sqlite", name=semconv.REQUEST_DURATION)
    assert [window.count for window in windows] == [10, 10]
    assert events == []


def test_evidence_is_kept_once_while_the_receiver_is_away(make, exporter, tmp_path):
    with OtlpReceiver("unavailable") as receiver:
        mine = exporter(tmp_path, endpoint=receiver.url)
        mine.event(Event("inferscope.slo.breach", 1, "b"))
        for tick in range(1, 4):
            mine.offer(requests(make, 10 * tick, tick))
            mine.run_once(0.1)
    assert len(list(read_ring(tmp_path, "logs"))) == 1
    ring = list(read_ring(tmp_path, "metrics"))
    assert len(ring) == 3
    (metric,) = [item for item in ring[2]["resourceMetrics"][0]["scopeMetrics"][0]["metrics"] if item["name"] == semconv.REQUESTS]
    assert metric["sum"]["dataPoints"][0]["asInt"] == "30"


def test_a_directory_that_comes_later_gets_what_waits(make, exporter, tmp_path):
    mine = exporter()
    mine.event(Event("inferscope.slo.breach", 1, "early"))
    mine.offer(requests(make, 3))
    mine.open(tmp_path)
    assert mine.run_once()
    assert len(list(read_ring(tmp_path, "metrics"))) == 1
    assert [event.body for event in read_store(tmp_path / "index.sqlite")[1]] == ["early"]


def test_flush_tries_although_the_breaker_is_open(make, exporter):
    with OtlpReceiver("reject") as receiver:
        mine = exporter(endpoint=receiver.url)
        for tick in range(1, 6):
            mine.offer(requests(make, tick, tick))
            mine.run_once()
        assert receiver.attempts == 3
        assert mine.status()["targets"]["metrics"]["breaker_open"]
        receiver.mode = "ok"
        mine.offer(requests(make, 9, 9))
        assert mine.flush()
        assert receiver.last(semconv.REQUESTS).value == 9


def test_batches_that_pile_up_are_superseded(make, exporter):
    with OtlpReceiver() as receiver:
        mine = exporter(endpoint=receiver.url)
        for count in (1, 2, 3):
            mine.offer(requests(make, count))
        assert mine.run_once()
        assert mine.run_once()
        assert [point.value for point in receiver.metrics(semconv.REQUESTS)] == [3]


def test_overflow_is_counted(make, exporter):
    with OtlpReceiver() as receiver:
        mine = exporter(endpoint=receiver.url, series_limit=5)
        mine.offer(make.batch(*[make.distribution([1_000], "stage", (f"s{i}",)) for i in range(9)]))
        assert mine.run_once()
        assert receiver.last(semconv.SELF_DROPPED, reason="series_overflow").value == 5
        assert receiver.last(semconv.STAGE_DURATION, otel__metric__overflow=True).buckets.count == 5


def test_a_bad_certificate_path_is_not_the_services_problem(make, exporter, lines):
    mine = exporter(endpoint="https://127.0.0.1:1", environ={"OTEL_EXPORTER_OTLP_CERTIFICATE": "missing.pem"})
    mine.offer(requests(make, 1))
    assert not mine.run_once(0.2)
    assert len(lines()) == 1


def test_grpc_without_grpc_is_one_line(exporter, lines, monkeypatch):
    monkeypatch.setitem(sys.modules, "grpc", None)
    monkeypatch.delitem(sys.modules, "inferscope.export.otlp.grpc_wire", raising=False)
    assert not exporter(endpoint="http://127.0.0.1:4317").sends
    assert len(lines()) == 1
    assert "grpc" in lines()[0]


def test_no_global_provider_is_set(make, exporter):
    from opentelemetry import metrics, trace

    with OtlpReceiver() as receiver:
        mine = exporter(endpoint=receiver.url)
        mine.offer(requests(make, 1))
        assert mine.run_once()
    assert type(metrics.get_meter_provider()).__name__ == "_ProxyMeterProvider"
    assert type(trace.get_tracer_provider()).__name__ == "ProxyTracerProvider"


def test_the_applications_random_numbers_stay_the_same(make, exporter):
    import random

    random.seed(1)
    expected = random.random()
    random.seed(1)
    with OtlpReceiver("unavailable") as receiver:
        mine = exporter(endpoint=receiver.url)
        mine.offer(requests(make, 1))
        mine.run_once(0.25)
    assert random.random() == expected


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_fork_in_the_middle_of_an_export_leaves_both_sides_working(make, exporter, tmp_path):
    with OtlpReceiver("slow", delay_s=0.3) as receiver:
        mine = exporter(tmp_path / "0", endpoint=receiver.url)
        mine.offer(requests(make, 1000))
        worker = threading.Thread(target=mine.run_once)
        worker.start()
        time.sleep(0.1)  # the lock is held and the connection is in use
        child = os.fork()
        if child == 0:
            code = 1
            try:
                mine.after_fork(tmp_path / "1")
                mine.offer(requests(make, 1, start=make.START + 5))
                code = 0 if mine.run_once() and mine.shutdown() else 2
            finally:
                os._exit(code)
        worker.join()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        mine.offer(requests(make, 1001, 2))
        assert mine.run_once()
        points = receiver.metrics(semconv.REQUESTS)
    assert sorted(point.value for point in points) == [1, 1000, 1001]
    assert {point.start_unix_ns for point in points if point.value == 1} == {make.START + 5}
    assert len(list(read_ring(tmp_path / "0", "metrics"))) == 2
    assert len(list(read_ring(tmp_path / "1", "metrics"))) == 1


EXIT = """
import sys, time
sys.path[:0] = {path!r}
from inferscope.export import Exporter, ExportBatch, Total
mine = Exporter(endpoint={url!r}, environ={{}})
mine.offer(ExportBatch((), (Total("inferscope.requests", 1),), 1, 2, {{}}))
import threading
threading.Thread(target=mine.run_once, daemon=True).start()
time.sleep(0.1)
begun = time.monotonic()
mine.shutdown()
import atexit
atexit.register(lambda: print(time.monotonic() - begun))
"""


def test_a_process_ends_within_a_second_of_shutdown():
    with OtlpReceiver("black_hole") as receiver:
        code = EXIT.format(path=sys.path, url=receiver.url)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20, check=True)
    assert float(done.stdout) <= 1.0


class TestEvents:
    breach = Breach(
        "20260101T000000Z-score-ab12", "score-p99", "score", 20.0, 0.99, 0, 4_000_000_000, 77, 500, 30, "e_detector", 120.5, 1.4
    )

    def test_breach(self):
        event = breach_event(self.breach)
        assert (event.name, event.time_unix_ns, event.severity) == ("inferscope.slo.breach", 77, 13)
        assert event.attributes["inferscope.slo.threshold"] == 0.02
        assert event.attributes["inferscope.breach.detection_delay"] == 4.0
        assert event.body == "score: 30 of 500 requests above 20 ms (e_detector)"
        assert "inferscope.artefact.path" not in event.attributes
        assert breach_event(self.breach, "state/x", "ab").attributes["inferscope.artefact.sha256"] == "ab"

    def test_capture(self):
        capture = CaptureSummary("c1", 1, (5,), True, None, 1.5, (9,), "captures/c1.trace.json")
        event = capture_event(capture, "i-1", 5, "breach", sha256="ff")
        assert event.attributes["inferscope.artefact.sha256"] == "ff"
        assert event.attributes["inferscope.capture.stall"] == 0.0015
        assert "inferscope.capture.events" not in event.attributes, "unknown is absent, not zero"

    def test_incident_travels_with_verdict_shares_and_hash(self, exporter):
        finding = Finding(
            "gpu-queue",
            "scheduling",
            "high",
            "high",
            "forward",
            "others share the card",
            (Evidence("x", 1.0, "s"),),
            0.6,
            18.0,
            "r",
            "f",
            "b",
        )
        incident = Incident(
            self.breach.id,
            "scoring",
            "incidents/x",
            1,
            None,
            "diagnosed",
            self.breach,
            0,
            60_000_000_000,
            Latency(9, 12, 30, None),
            5000,
            1,
            30,
            2,
            83.3,
            21.0,
            None,
            "61 % of the excess is gpu-queue",
            (Share("gpu-queue", "device", 0.61, (0.5, 0.7), 12, 1, 0.1), Share("rest", "unattributed", 0.39, None, 3, 2, 0.9)),
            None,
            (),
            (finding,),
            (),
        )
        with OtlpReceiver() as receiver:
            mine = exporter(endpoint=receiver.url)
            mine.event(incident_event(incident, "ab" * 32))
            assert mine.run_once()
            (log,) = receiver.logs("inferscope.incident")
        assert log.body == "61 % of the excess is gpu-queue"
        assert log.attributes["inferscope.artefact.sha256"] == "ab" * 32
        assert log.attributes["inferscope.incident.shares"] == [
            {"name": "gpu-queue", "kind": "device", "share": 0.61, "ci_low": 0.5, "ci_high": 0.7},
            {"name": "rest", "kind": "unattributed", "share": 0.39},
        ]
        assert log.attributes["inferscope.latency.p99"] == pytest.approx(0.03)
        assert "inferscope.latency.p999" not in log.attributes
        assert log.attributes["inferscope.incident.findings"] == ["gpu-queue (high): others share the card"]
