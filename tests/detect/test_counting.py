"""Windows counted against objectives: which requests, by what, and what is left out; from real recorders."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from inferscope.aggregate import Aggregator
from inferscope.detect import SLO, Counts, count
from inferscope.detect.counting import Jitter, SizeFilter, flow
from inferscope.errors import ConfigurationError
from inferscope.record.core import Recorder
from inferscope.record.fallback import Recorder as Pure

MS = 1_000_000
S = 1_000_000_000


@pytest.fixture(params=[Recorder, Pure], ids=["chosen", "pure"])
def served(request):
    """A recorder with a clock that a test sets, and its aggregator."""
    moment = [S]
    recorder = request.param(clock=lambda: moment[0])
    recorder.set_edges("score", [20 * MS])
    return Served(recorder, moment)


class Served:
    def __init__(self, recorder, moment):
        self.recorder, self.moment = recorder, moment
        self.aggregator = Aggregator(recorder, lambda: moment[0])

    def request(self, ms=1.0, error=None, name="score", **more):
        with self.recorder.request(name, **more) as request:
            self.moment[0] += int(ms * MS)
            request.error = error
            request.size = more.get("size")

    def window(self):
        return self.aggregator.tick(self.moment[0])


def test_each_outcome_is_judged_as_it_is_documented(served):
    for error, ms in [(None, 1), (None, 30), ("ValueError", 1), ("ValueError", 30), ("deadline", 1), ("deadline", 30), ("cancelled", 1),
                      ("cancelled", 30), ("shed", 1), ("shed", 30)]:  # fmt: skip
        served.request(ms, error)
    # judged: all but the early cancelled one and the two shed ones; above: four slow ones, and the quick one past its deadline
    assert count(SLO("score", p99_ms=20), served.window()) == Counts(7, 5, 4, 0, 3)


def test_classes_and_models_are_told_apart(served):
    served.request(30, model="a")
    served.request(1, model="b", cls="gold")
    window = served.window()
    assert count(SLO("score", p99_ms=20, model="a"), window)[:2] == (1, 1)
    assert count(SLO("score", p99_ms=20, cls="gold"), window)[:2] == (1, 0)
    assert count(SLO("score", p99_ms=20), window)[:2] == (2, 1)


def test_sizes_are_told_apart(served):
    rng = np.random.default_rng(3)
    slo = SLO("score", p99_ms=20, size=(512, None))
    judge = SizeFilter(slo)
    found, truth = np.zeros(2), np.zeros(2)
    for _ in range(60):
        for size in rng.choice([10, 700, None], 100, p=[0.6, 0.3, 0.1]):
            slow = rng.random() < (0.2 if size == 700 else 0.02)
            served.request(30 if slow else 2 + 6 * rng.random(), size=size)
            truth += (size == 700, slow and size == 700)
        found += judge.count(served.window())[:2]
    assert found[1] == pytest.approx(truth[1], abs=2)  # above the objective everything is retained
    assert found[0] == pytest.approx(truth[0], rel=0.05)


def test_sizes_of_few_requests_are_exact_in_sum(served):
    judge = SizeFilter(SLO("score", p99_ms=20, size=(None, 100)))
    totals = np.zeros(4)
    for number in range(40):
        served.request(25 if number % 4 == 0 else 3, size=number % 2 * 200, error="ValueError" if number % 8 == 0 else None)
        totals += judge.count(served.window())[:4]
    assert totals[:2].tolist() == [20, 10]
    assert judge.count(served.window()) == Counts(0, 0)


@pytest.mark.parametrize(
    ("size", "kept"),
    [((0, 512), (0.0, 512.0)), ([None, 5], (None, 5.0)), ("0-512", (0.0, 512.0)), ("512-", (512.0, None)), ("-512", (None, 512.0))],
)
def test_a_range_of_sizes_is_read(size, kept):
    assert SLO("score", p99_ms=20, size=size).size == kept


@pytest.mark.parametrize("size", [(5, 5), (9, 3), (None, None), "-", "x-9", "512", 512, (1,), (1, 2, 3), (True, 2), (float("nan"), 3)])
def test_a_range_of_sizes_that_is_none(size):
    with pytest.raises(ConfigurationError, match="size"):
        SLO("score", p99_ms=20, size=size)


def test_jitter_counts_what_is_far_above_the_current_middle(served):
    slo = SLO("score", p99_ms=500, jitter_ms=5, window_s=10)
    judge = Jitter(slo)
    for _ in range(50):
        served.request(10)
    assert judge.count(served.window()) == Counts(0, 0)  # too few to know a middle
    for number in range(100):
        served.request(10 if number % 10 else 18)
    assert judge.count(served.window())[:2] == (100, 10)
    # everything becomes slow: the middle follows, and nothing is far above it any more
    for _ in range(20):
        for _ in range(50):
            served.request(40)
        latest = judge.count(served.window())
    assert latest[:2] == (50, 0)


def test_flow_is_items_and_waits(served):
    served.request(1, items=8)
    served.request(1, items=2, name="other")
    served.recorder.interval("queue", "threadpool", S, S + 1500 * MS)
    window = served.window()
    assert flow(SLO("score", p99_ms=20), window) == Counts(8, 1_500_000)
    assert flow(None, window) == Counts(10, 1_500_000)


def test_the_first_byte_is_judged_where_the_objective_says_so(served):
    slo = SLO("score", p99_ms=20, until="first_byte")
    for ms in (5, 15, 150):
        with served.recorder.request("score") as request:
            served.moment[0] += ms * MS
            served.recorder.interval("first_byte", "score", request.start_ns, served.moment[0])
            served.moment[0] += 500 * MS  # the rest of the stream
    window = served.window()
    assert count(slo, window) == Counts(3, 1, 0, 1, 0)
    assert count(SLO("score", p99_ms=20), window)[:2] == (3, 3)
    (record, *_) = window.records
    assert sum(record.vector) == record.wall_ns, "the time to the first byte overlaps with the rest and owns nothing"


@pytest.mark.parametrize("more", [{"model": "m"}, {"cls": "c"}, {"size": (0, 1)}, {"jitter_ms": 3}])
def test_the_first_byte_is_measured_by_name_only(more):
    with pytest.raises(ConfigurationError, match="first_byte"):
        SLO("score", p99_ms=20, until="first_byte", **more)


def test_a_stream_tells_its_first_byte(monkeypatch):
    pytest.importorskip("starlette")
    from starlette.applications import Starlette
    from starlette.responses import StreamingResponse
    from starlette.routing import Route

    import inferscope
    from inferscope.record import core

    async def body():
        yield b""  # no byte so far
        await asyncio.sleep(0.03)
        yield b"a"
        await asyncio.sleep(0.05)
        yield b"b"

    async def ask():
        async def receive():
            await asyncio.sleep(60)

        async def send(message):
            pass

        scope = {
            "type": "http",
            "method": "GET",
            "path": "/stream",
            "headers": [],
            "query_string": b"",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
        }
        await app(scope, receive, send)

    app = Starlette(routes=[Route("/stream", lambda request: StreamingResponse(body()))])
    inferscope.instrument("asgi")
    aggregator = Aggregator(core.default)
    try:
        aggregator.tick()
        begun = time.perf_counter_ns()
        asyncio.run(ask())
        lasted = time.perf_counter_ns() - begun
        window = aggregator.tick()
    finally:
        inferscope.uninstrument("asgi")
    (series,) = [series for series in window.series if series.kind == "first_byte"]
    assert (series.labels, series.count) == (("stream",), 1)
    assert 29 * MS < series.sum_ns < lasted - 45 * MS
