"""From a recorder to the receiver: nothing is lost on the way."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from inferscope.aggregate.window import Aggregator
from inferscope.export import ExportBatch, Exporter, Objective, request_totals
from inferscope.record.core import Recorder
from inferscope.testing.receiver import OtlpReceiver, percentile


@pytest.fixture
def recorder():
    now = [1_000_000_000]
    made = Recorder(clock=lambda: now[0])
    made.set_edges("score", [20_000_000])

    def serve(milliseconds, *, fail=False):
        try:
            with made.request("score", model="v2", items=4):
                with made.stage("forward"):
                    now[0] += int(milliseconds * 1e6)
                if fail:
                    raise KeyError
        except KeyError:
            pass

    made_serve = serve
    return made, made_serve


def test_requests_arrive_with_their_percentiles_and_exact_counters(recorder, make):
    made, serve = recorder
    rng = np.random.default_rng(2)
    times = np.concatenate([rng.normal(9, 0.5, 1950), rng.normal(46, 2, 50)])
    for i, milliseconds in enumerate(times):
        serve(float(milliseconds), fail=i % 100 == 0)
    made.interval("gc", "gen2", 0, 5_000_000)
    made.interval("copy", "h2d", 0, 70_000)
    lock = made.lock("rules", threading.Lock())
    with lock:
        pass
    aggregator = Aggregator(made, clock=lambda: 0)
    aggregator.tick(10)
    objectives = [Objective("score-p99", "score", 20_000_000, 0.99)]
    with OtlpReceiver() as receiver:
        exporter = Exporter(endpoint=receiver.url, environ={})
        totals = request_totals(aggregator.totals(), objectives)
        exporter.offer(ExportBatch(aggregator.cumulative(), totals, make.START, make.START + 1, {"service.name": "scoring"}))
        assert exporter.shutdown()
        request = receiver.last("inferscope.request.duration", inferscope__request="score", inferscope__model="v2")
        assert request.buckets.count == 2000
        for quantile in (0.5, 0.95, 0.99):
            assert percentile(request.buckets, quantile) == pytest.approx(np.quantile(times, quantile) / 1e3, rel=0.012)
        assert request.buckets.total == pytest.approx(times.sum() / 1e3, rel=1e-6)
        assert receiver.last("inferscope.stage.duration", inferscope__stage="forward").buckets.count == 2000
        assert sum(point.value for point in receiver.metrics("inferscope.requests")) == 2000
        assert receiver.last("inferscope.requests", error__type="_OTHER").value == 20
        assert receiver.last("inferscope.items").value == 8000
        assert receiver.last("inferscope.slo.violations", inferscope__slo="score-p99").value == 50
        assert receiver.last("inferscope.slo.target").value == 0.02
        assert receiver.last("inferscope.gc.pause").attributes == {"cpython.gc.generation": 2}
        assert receiver.last("inferscope.copy.duration").attributes == {"direction": "h2d"}
        assert receiver.last("inferscope.lock.hold.duration").attributes == {"inferscope.lock": "rules"}
