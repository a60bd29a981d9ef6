"""What a run says of itself: validity, warm-up, Little's law, jitter, correction of a closed loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import numpy as np
import pytest

from inferscope.bench import load, metrics
from inferscope.bench.closed_loop import corrected
from inferscope.bench.load import LoadPlan, LoadResult


def run_of(latency_ms, *, rate=100.0, lag_ms=0.0, mode="open", connections=1, status=None):
    count = len(latency_ms)
    intended = (np.arange(count) * (1e9 / rate)).astype(np.int64) + 1
    launched = intended + int(lag_ms * 1e6)
    done = intended + (np.asarray(latency_ms) * 1e6).astype(np.int64)
    plan = LoadPlan("", rate, count / rate, connections=connections, mode=mode)
    return LoadResult(plan, intended, launched, launched, done, np.full(count, 200) if status is None else status)


@pytest.mark.parametrize(("lag", "latency", "bound"), [(0.2, 50.0, False), (1.5, 500.0, True), (0.5, 5.0, True), (0.2, 5.0, False)])
def test_a_late_generator_makes_the_run_invalid(lag, latency, bound):
    found = metrics.generator_bound(run_of(np.full(500, latency), lag_ms=lag))
    assert (found is not None) is bound
    assert metrics.generator_bound(run_of(np.full(500, latency), lag_ms=lag, mode="closed")) is None


def test_littles_law_holds_on_a_steady_run_and_fails_when_a_queue_grows():
    assert metrics.little(run_of(np.full(2000, 30.0)))["gap"] < 0.01
    assert metrics.little(run_of(np.full(2000, 30.0)))["in_system"] == pytest.approx(3.0, rel=0.02)
    growing = metrics.little(run_of(np.linspace(0, 8000, 2000)))
    assert not growing["holds"]
    clients = metrics.little(run_of(np.full(2000, 10.0), mode="closed", connections=1))
    assert clients["holds"]
    assert not metrics.little(run_of(np.full(2000, 10.0), mode="closed", connections=4))["holds"]
    assert metrics.little(run_of([1.0])) is None


def test_the_warm_up_is_cut_by_place_among_all_requests():
    latency = np.full(1000, 10.0) + np.random.default_rng(0).normal(0, 0.3, 1000)
    latency[:100] += 60.0
    status = np.full(1000, 200)
    status[:50] = 500
    cut, how = metrics.warm_up(run_of(latency, status=status), None)
    assert how == "MSER-5"
    assert 95 <= cut <= 110
    assert metrics.warm_up(run_of(latency), 30)[0] == 30
    assert metrics.warm_up(run_of(latency), 5000)[0] == 1000
    assert metrics.warm_up(run_of(np.linspace(50, 1, 1000)), None) == (0, "no steady state was found (MSER-5), nothing was cut")


def test_a_run_is_described_with_intervals_and_gaps_are_named():
    rng = np.random.default_rng(1)
    found = metrics.describe(run_of(rng.lognormal(2, 0.3, 3000)), items=8)
    p99 = found["latency"]["p99"]
    assert p99["low_ms"] < p99["ms"] < p99["high_ms"]
    assert p99["method"] == "30 blocks of 1 s"
    assert found["latency"]["p999"]["ms"] is None
    assert found["latency"]["p999"]["method"] == "n/a, needs ≥ 3688 requests"
    assert found["throughput"]["requests_per_s"] == pytest.approx(100, rel=0.01)
    assert found["throughput"]["items_per_s"] == pytest.approx(800, rel=0.01)
    assert found["jitter"]["iqr_ms"] == pytest.approx(np.exp(2) * (np.exp(0.2023) - np.exp(-0.2023)), rel=0.05)
    assert found["error_rate"]["low"] == 0
    assert 0 < found["error_rate"]["high"] < 0.002
    assert found["generator_bound"] is None


def test_a_run_without_a_good_answer_has_no_numbers():
    found = metrics.describe(run_of(np.full(50, 5.0), status=np.full(50, 500)))
    assert found["latency"]["p50"]["ms"] is None
    assert found["throughput"]["requests_per_s"] is None
    assert found["error_rate"]["share"] == 1
    empty = np.empty(0, dtype=np.int64)
    assert metrics.describe(LoadResult(LoadPlan("", 1, 1), empty, empty, empty, empty, empty))["requests"] == 0


def test_the_correction_adds_what_nobody_measured():
    assert sorted(corrected(np.array([10.0, 10.0, 40.0]), 10.0).tolist()) == [10.0, 10.0, 10.0, 20.0, 30.0, 40.0]
    assert corrected(np.array([5.0, 9.0]), 10.0).tolist() == [5.0, 9.0]
    assert corrected(np.empty(0), 10.0).size == 0


class Echo:
    """Answers at once on a thread of its own; dies after `limit` answers."""

    def __init__(self, limit=10**9):
        self.limit, self.answers, self.ready = limit, 0, threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self.serve()))

    def __enter__(self):
        self.thread.start()
        assert self.ready.wait(10)
        return f"http://127.0.0.1:{self.port}/"

    def __exit__(self, *_):
        with contextlib.suppress(RuntimeError):  # it ended by itself
            self.loop.call_soon_threadsafe(self.stop.set)
        self.thread.join(10)

    async def serve(self):
        self.loop, self.stop, self.writers = asyncio.get_running_loop(), asyncio.Event(), []
        server = await asyncio.start_server(self.talk, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self.ready.set()
        await self.stop.wait()
        server.close()
        for writer in self.writers:
            writer.transport.abort()
        await asyncio.sleep(0)

    async def talk(self, reader, writer):
        self.writers.append(writer)
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                self.answers += 1
                if self.answers > self.limit:
                    self.stop.set()
                    return
                await asyncio.sleep(0.002)
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            return


def test_a_closed_loop_keeps_so_many_under_way_and_stops_in_time():
    with Echo() as url:
        counted = load.generate(LoadPlan(url, 1.0, 20.0, connections=3, mode="closed", requests=100))
        timed = load.generate(LoadPlan(url, 1.0, 0.4, connections=2, mode="closed"))
    assert counted.summary()["ok"] == 100
    events = sorted([(at, 1) for at in counted.sent_ns.tolist()] + [(at, -1) for at in counted.done_ns.tolist()])
    assert np.cumsum([step for _, step in events]).max() == 3
    assert timed.fine.all()
    assert 20 <= timed.status.size <= 420
    assert (timed.intended_ns[-1] - timed.intended_ns[0]) / 1e9 < 0.45


def test_a_closed_loop_survives_its_server():
    with Echo(limit=20) as url:
        result = load.generate(LoadPlan(url, 1.0, 5.0, connections=2, mode="closed", drain_s=0.5))
    assert 15 <= np.count_nonzero(result.fine) <= 20
    assert 1 <= np.count_nonzero(~result.fine) <= 5
    refused = load.generate(LoadPlan("http://127.0.0.1:9/", 1.0, 5.0, connections=2, mode="closed"))
    assert 1 <= refused.status.size <= 2
    assert not refused.fine.any()


def test_recorded_arrivals_are_replayed(tmp_path):
    path = tmp_path / "trace"
    path.write_text("0.0\n0.25\n0.25\n1.5\n")
    assert load.arrivals(1, 1, 0, f"trace:{path}").tolist() == [0, 250_000_000, 250_000_000]
    for content, said in (("0.5\n0.1\n", "ascending"), ("x", "not one number"), ("", "ascending"), ("nan", "ascending")):
        path.write_text(content)
        with pytest.raises(ValueError, match=said):
            load.arrivals(1, 1, 0, f"trace:{path}")
    with pytest.raises(ValueError, match="No such file"):
        load.arrivals(1, 1, 0, f"trace:{tmp_path / 'none'}")
