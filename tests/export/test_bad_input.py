"""What a fleet does to an exporter: the service runs on, one line says what and what to do, counters tell what was lost."""

from __future__ import annotations

import errno
import os
from dataclasses import replace

import pytest

from inferscope import semconv
from inferscope.export import Exporter, Total, read_ring
from inferscope.testing.receiver import OtlpReceiver, merge

MS = 1_000_000


@pytest.fixture
def exporter():
    made = []

    def make(**keywords):
        made.append(Exporter(**{"environ": {}, **keywords}))
        return made[-1]

    yield make
    for each in made:
        each.shutdown(0.2)


@pytest.mark.parametrize("temporality", ["cumulative", "delta"])
def test_a_clock_that_jumps_back_and_forth_loses_nothing(make, exporter, temporality):
    environ = {"OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE": temporality}
    with OtlpReceiver() as receiver:
        sender = exporter(endpoint=receiver.url, environ=environ)
        for tick, count in enumerate((10, 20, 35, 50), 1):
            batch = make.batch(make.distribution([9 * MS] * count), totals=[Total(semconv.REQUESTS, count)])
            jumped = batch.now_unix_ns + (-3600 if tick % 2 else 86_400) * 10**9
            sender.offer(replace(batch, now_unix_ns=jumped))
            assert sender.run_once()
        points = receiver.metrics(semconv.REQUESTS)
        histograms = [point.buckets for point in receiver.metrics(semconv.REQUEST_DURATION)]
    if temporality == "delta":
        assert sum(point.value for point in points) == 50
        assert merge(histograms).count == 50
    else:
        assert points[-1].value == histograms[-1].count == 50


def test_a_label_with_twenty_thousand_values_stays_a_hundred_series(make, exporter):
    with OtlpReceiver() as receiver:
        sender = exporter(endpoint=receiver.url)
        totals = [Total(semconv.REQUESTS, 1, ((semconv.ATTR_REQUEST, f"user-{i}"),)) for i in range(20_000)]
        sender.offer(make.batch(totals=totals))
        assert sender.run_once(10.0)
        points = receiver.metrics(semconv.REQUESTS)
        dropped = receiver.metrics(semconv.SELF_DROPPED)
    assert len(points) == 101
    assert sum(point.value for point in points) == 20_000, "the overflow series has the rest"
    assert [(point.attributes["reason"], point.value) for point in dropped] == [("series_overflow", 19_900)]


def test_a_full_disk_costs_the_ring_and_one_line(make, exporter, tmp_path, monkeypatch, lines):
    with OtlpReceiver() as receiver:
        sender = exporter(endpoint=receiver.url, directory=tmp_path)
        sender.offer(make.batch(make.distribution([MS]), tick=1))
        assert sender.run_once()

        def full(*_):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr("os.writev", full)
        for tick in (2, 3):
            sender.offer(make.batch(make.distribution([MS] * tick), tick=tick))
            assert sender.run_once(), "what is sent does not wait for a disk"
        assert receiver.last(semconv.REQUEST_DURATION).buckets.count == 3
        lost = {point.attributes["reason"]: point.value for point in receiver.metrics(semconv.SELF_DROPPED)}
    assert lost["ring_line"] == 1
    assert len([line for line in lines() if "No space left" in line]) == 1
    assert len(list(read_ring(tmp_path, "metrics"))) == 1


@pytest.mark.parametrize("status", [401, 413])
def test_a_refusal_is_one_line_with_its_status(make, exporter, lines, status, monkeypatch):
    from inferscope.testing import receiver as module

    monkeypatch.setattr(
        module._Handler, "do_POST", lambda self: (self.rfile.read(int(self.headers["content-length"])), self._answer(status, b""))
    )
    with OtlpReceiver() as receiver:
        sender = exporter(endpoint=receiver.url)
        for tick in (1, 2):
            sender.offer(make.batch(make.distribution([MS] * tick), tick=tick))
            assert not sender.run_once()
    assert [line for line in lines() if f"HTTP {status}" in line] == lines()[:1]
    assert sender.status()["dropped"]["metrics_rejected"] >= 1


@pytest.mark.parametrize("scheme", ["https", "ftp", "grpc"])
def test_a_wrong_scheme_is_one_line_and_no_exception(make, exporter, lines, scheme):
    with OtlpReceiver() as receiver:
        sender = exporter(endpoint=receiver.url.replace("http", scheme))
        for tick in (1, 2):
            sender.offer(make.batch(make.distribution([MS] * tick), tick=tick))
            assert not sender.run_once(0.5)
    assert len([line for line in lines() if "do not reach" in line]) <= 1
    assert sender.status()["targets"]["metrics"]["failed"] >= 1
