"""What we cost and what failed of ours leaves with the other metrics; a tick leaves the interpreter to requests."""

from __future__ import annotations

import json
import threading
import time

from inferscope.pace import PAUSE_S, SLICE_NS, Pace, paced
from inferscope.testing.receiver import OtlpReceiver


def test_overhead_and_errors_are_metrics(script):
    source = """
import json, time
import inferscope as scope
from inferscope.detect.trigger import Trigger
def broken(*_): raise ZeroDivisionError
Trigger.update = broken
scope.configure(service="cost", slo=scope.SLO("score", p99_ms=50), tick_s=0.05, export_interval_s=0.1)
for _ in range(40):
    with scope.request("score"):
        time.sleep(0.005)
time.sleep(0.3)
scope.flush()
print(json.dumps(scope.status()["overhead"]))
scope.shutdown()
"""
    with OtlpReceiver() as receiver:
        done = script(source, OTEL_EXPORTER_OTLP_ENDPOINT=receiver.url)
        assert done.returncode == 0, done.stderr
        spent = json.loads(done.stdout)
        for name in ("worker", "export", "capture"):
            point = receiver.last("inferscope.self.overhead", thread__name=f"inferscope-{name}")
            assert 0 < float(point.value) < 2
            assert 0 < spent[name]["share"] < 0.5
        assert receiver.last("inferscope.self.errors", reason="detect").value == 3


def test_a_pace_pauses_when_its_slice_is_over_and_not_before(monkeypatch):
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    pace = Pace()
    end = time.perf_counter_ns() + SLICE_NS // 8
    while time.perf_counter_ns() < end:
        pass
    pace()
    early = len(slept)
    end = time.perf_counter_ns() + SLICE_NS
    while time.perf_counter_ns() < end:
        pass
    pace()
    assert slept[early:] == [PAUSE_S]
    assert list(paced([1, 2], lambda: slept.append(0))) == [1, 2]
    assert slept[-2:] == [0, 0]


def test_a_tick_pauses_for_waiting_threads(state_dir):
    """White-box: a window with many retained requests is taken in many slices."""
    from inferscope.aggregate.horizon import Horizon
    from inferscope.aggregate.window import Aggregator
    from inferscope.record.core import Recorder

    recorder = Recorder()
    recorder.set_edges("score", (1000,))
    aggregator, horizon = Aggregator(recorder), Horizon()

    def serve() -> None:
        for _ in range(300):
            with recorder.request("score"), recorder.stage("work"):
                time.sleep(0)

    workers = [threading.Thread(target=serve) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    rests = []
    window = aggregator.tick(None, lambda: rests.append(1))
    assert len(window.records) >= 300
    assert len(rests) > len(window.records)
    taken = len(rests)
    horizon.add(window, (), lambda: rests.append(1))
    assert len(rests) - taken > 100
    taken = len(rests)
    horizon.evidence("score", 0, window.end_ns, breathe=lambda: rests.append(1))
    assert len(rests) - taken > 30
