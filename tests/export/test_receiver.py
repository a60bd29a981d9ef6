"""The receiver that users test with."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from inferscope.export import Event, Exporter
from inferscope.export.otlp.buckets import Buckets
from inferscope.testing.receiver import OtlpReceiver, merge, percentile


def test_waiting_for_what_comes(make):
    with OtlpReceiver() as receiver:
        mine = Exporter(endpoint=receiver.url, environ={})
        mine.event(Event("inferscope.slo.breach", 1, "b"))
        timer = threading.Timer(0.1, mine.run_once)
        timer.start()
        assert receiver.wait(lambda r: r.logs("inferscope.slo.breach"))
        assert not receiver.wait(lambda r: r.metrics(), 0.05)
        timer.join()
        mine.shutdown()


def test_last_says_what_there_is_instead(make):
    with OtlpReceiver() as receiver:
        mine = Exporter(endpoint=receiver.url, environ={})
        mine.offer(make.batch(make.distribution([9_000_000])))
        assert mine.shutdown()
        assert receiver.last("inferscope.request.duration", inferscope__request="score").buckets.count == 1
        with pytest.raises(LookupError, match=r"inferscope\.request\.duration"):
            receiver.last("inferscope.stage.duration")


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="black_hole"):
        OtlpReceiver().mode = "angry"


def test_leaving_lets_go_of_held_requests(make):
    with OtlpReceiver("black_hole") as receiver:
        mine = Exporter(endpoint=receiver.url, environ={})
        mine.offer(make.batch(make.distribution([9_000_000])))
        worker = threading.Thread(target=mine.run_once)
        worker.start()
        while not receiver.attempts:
            time.sleep(0.01)
        begun = time.monotonic()
    assert time.monotonic() - begun < 1
    worker.join()
    mine.shutdown(0.1)


@pytest.mark.parametrize(
    ("buckets", "quantile", "value"),
    [
        (Buckets(4, 0, 0, np.array([4]), scale=0), 0.5, 2**0.5),
        (Buckets(4, 0, 0, np.array([4]), scale=0, low=1.9, high=1.95), 0.5, 1.9),
        (Buckets(4, 0, 0, np.array([1, 0, 1]), zero_count=2, scale=0), 0.5, 0.0),
        (Buckets(4, 0, 0, np.array([1, 0, 1]), zero_count=2, scale=0), 0.75, 2.0),
        (Buckets(4, 0, 0, np.array([1, 0, 1]), zero_count=2, scale=0), 1.0, 8.0),
        (Buckets(2, 0, -1, np.array([1, 1]), scale=1), 0.5, 1.0),
    ],
)
def test_percentile_interpolates_exponentially(buckets, quantile, value):
    assert percentile(buckets, quantile) == pytest.approx(value)


def test_percentile_and_merge_refuse_nothing():
    with pytest.raises(ValueError, match="needed"):
        percentile(None, 0.5)
    with pytest.raises(ValueError, match="no points"):
        merge([])
