from __future__ import annotations

import time

from inferscope.aggregate import Aggregator
from inferscope.detect.counting import flow
from inferscope.record import core


def test_what_a_request_waited_before_it_came_to_us_is_backlog():
    """`started_ns` tells of a queue that nobody instrumented: an idle device beside it, or too few requests a second, is then judged."""
    recorder = core.Recorder()
    aggregator = Aggregator(recorder)
    aggregator.tick()
    with recorder.request("score", started_ns=time.perf_counter_ns() - 50_000_000):
        pass
    items, waited_us = flow(None, aggregator.tick())[:2]
    assert items == 1
    assert 50_000 <= waited_us < 5_000_000
