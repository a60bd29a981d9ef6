"""Batches end to end: a real batcher, the records it leaves, the spans that are sent, and what a diagnosis says of how batches form."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from inferscope.aggregate.window import Aggregator
from inferscope.clock import now_ns
from inferscope.diagnose.host import read_host
from inferscope.diagnose.rules.load import _batches
from inferscope.export.otlp.traces import Identity, request_spans, shared_work
from inferscope.host.gc import GcPauses
from inferscope.host.watch import HostWatch
from inferscope.record import core
from inferscope.record.batch import Batch

MS = 1_000_000
SIZE, ROUNDS = 4, 6
SERVICE_S = 0.004


@pytest.fixture(scope="module")
def served():
    """Four clients at a time, each a little later than the one before it; the batcher waits for all four."""
    recorder = core.Recorder()
    recorder.set_edges("score", (1,))  # every request is kept as a slow one
    aggregator, watch = Aggregator(recorder), HostWatch(GcPauses(recorder))
    aggregator.tick(now_ns())
    inbox: list = []
    ready = threading.Condition()

    def client(number):
        time.sleep(0.002 * (number % SIZE))
        with recorder.request("score") as request:
            answer: Future = Future()
            with ready:
                inbox.append((request, answer, recorder.clock() if hasattr(recorder, "clock") else now_ns()))
                ready.notify()
            answer.result(10)

    def batcher():
        for _ in range(ROUNDS):
            with ready:
                ready.wait_for(lambda: len(inbox) >= SIZE, 10)
                taken = [inbox.pop(0) for _ in range(SIZE)]
            with Batch([item[0] for item in taken], "forward", [item[2] for item in taken], recorder), recorder.stage("model"):
                time.sleep(SERVICE_S)
            for _, answer, _ in taken:
                answer.set_result(None)

    worker = threading.Thread(target=batcher, name="batcher")
    worker.start()
    for _ in range(ROUNDS):
        with ThreadPoolExecutor(SIZE) as pool:
            list(pool.map(client, range(SIZE)))
    worker.join()
    moment = now_ns()
    window = aggregator.tick(moment)
    watch.tick(moment, window.records)
    host = json.loads(json.dumps(watch.evidence("score", 0, moment)))
    watch.stop()
    return window, host


def spans_of(record, columns, kind):
    return [span for span in record.spans if columns[span.column].kind == kind]


def groups(window):
    found: dict = {}
    for record in window.records:
        (work,) = spans_of(record, window.columns, "batch")
        found.setdefault((work.thread_id, work.start_ns, work.end_ns), []).append(record)
    return found


def test_retained_requests_of_a_batch_hold_the_same_work_and_each_its_own_wait(served):
    window, _ = served
    assert len(window.records) == SIZE * ROUNDS
    held = groups(window)
    assert len(held) == ROUNDS
    assert all(len(members) == SIZE for members in held.values())
    queue = next(index for index, column in enumerate(window.columns) if column == ("queue", "forward"))
    for (thread, begin, end), members in held.items():
        assert end - begin >= SERVICE_S * 0.9e9
        assert thread not in {record.thread_id for record in members}
        waits = []
        for record in members:
            assert sum(record.vector) == record.wall_ns
            (wait,) = spans_of(record, window.columns, "queue")
            assert wait.end_ns == begin, "a request waits until its batch begins"
            assert wait.start_ns >= record.start_ns
            assert record.vector[queue] == wait.end_ns - wait.start_ns
            waits.append(wait.end_ns - wait.start_ns)
        assert max(waits) > min(waits), "who came first waited longest: the batch formed meanwhile"
    series = {(row.kind, row.labels): row for row in window.series}
    assert series["batch", ("forward",)].count == ROUNDS, "the work is counted once, however many requests it served"
    assert series["queue", ("forward",)].count == SIZE * ROUNDS


def test_spans_of_a_batch_link_the_requests_that_it_served(served):
    window, _ = served
    identity = Identity()
    shared = shared_work(window.records, window.columns, identity)
    made = {record.id: request_spans(record, window.columns, identity, 0, shared=shared) for record in window.records}
    for members in groups(window).values():
        work = {r.id: next(span for span in made[r.id] if span.links) for r in members}
        for record in members:
            others = {(work[r.id].trace_id, work[r.id].span_id) for r in members if r is not record}
            assert set(work[record.id].links) == others
            assert {span.name for span in made[record.id]} >= {"forward", "model"} or len(made[record.id]) >= 4


def test_a_diagnosis_says_how_batches_formed_and_how_long_they_took(served):
    window, host = served
    facts = read_host([({"host": host}, list(range(len(window.columns))))])
    assert len(facts.requests) == SIZE * ROUNDS
    batches = [SimpleNamespace(name="forward", count=ROUNDS, sum_ns=ROUNDS * 4 * MS)]
    context = SimpleNamespace(horizon=SimpleNamespace(columns=window.columns, host=facts, batches=batches))
    found = {entry.metric: entry.value for entry in _batches(context)}
    assert found["service time of a batch (forward), mean"] == 4.0
    assert found["retained requests linked to one batch, most"] == SIZE
    waits = [
        [span.end_ns - span.start_ns for r in members for span in spans_of(r, window.columns, "queue")]
        for members in groups(window).values()
    ]
    formed = sorted(max(each) - min(each) for each in waits)
    assert found["from a batch's first request to its last, median"] == pytest.approx(sum(formed[2:4]) / 2e6, abs=0.01)
    assert found["from its last request to its begin, median"] >= 0.0
