from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
from simulator.recorder import ArrayRecorder
from simulator.service import COLUMNS, simulate

from inferscope.aggregate import Aggregator
from inferscope.aggregate.window import decode
from inferscope.record import core, fallback
from inferscope.types import ClassKey, Column, Reason

S = 1_000_000_000


@pytest.fixture
def clock():
    class Clock:
        now = 10 * S

        def __call__(self):
            return self.now

    return Clock()


@pytest.fixture(params=sorted({core.Recorder, fallback.Recorder}, key=lambda kind: kind.__module__), ids=lambda kind: kind.__module__)
def recorder(request, clock):
    return request.param(clock=clock)


def run(recorder, clock, milliseconds, *, stage="forward", lock_ms=0):
    with recorder.request("score"):
        clock.now += 1_000_000
        with recorder.stage(stage):
            clock.now += int(milliseconds * 1e6)
        clock.now += lock_ms * 1_000_000


def test_a_window_is_the_difference_of_two_ticks(recorder, clock):
    recorder.set_edges("score", [20_000_000])
    aggregator = Aggregator(recorder, clock)
    for _ in range(5):
        run(recorder, clock, 4)
    run(recorder, clock, 30)
    first = aggregator.tick()
    for _ in range(3):
        run(recorder, clock, 4)
    second = aggregator.tick()
    third = aggregator.tick()

    assert (first.start_ns, first.end_ns) == (10 * S, second.start_ns)
    assert [w.classes[0].count for w in (first, second, third)] == [6, 3, 0]
    assert [w.classes[0].violations for w in (first, second, third)] == [(1,), (0,), (0,)]
    assert [w.classes[0].latency.count for w in (first, second, third)] == [6, 3, 0]
    assert second.classes[0].latency.counts.sum() == 3
    assert second.classes[0].bands.sums.sum() == 3 * 5_000_000
    assert third.classes[0].bands.counts.sum() == 0
    assert second.classes[0].key == ClassKey("score", None, None)
    forward = next(held for held in second.series if held.labels == ("forward",))
    assert (forward.kind, forward.count, forward.sum_ns, forward.counts.sum()) == ("stage", 3, 12_000_000, 3)
    assert Column("stage", "forward") in second.columns
    assert not any(held.kind == "request" for held in second.series)


def test_running_totals_are_copies_and_include_requests(recorder, clock):
    aggregator = Aggregator(recorder, clock)
    run(recorder, clock, 4)
    aggregator.tick()
    held = {(d.kind, d.labels): d for d in aggregator.cumulative()}
    request = held["request", ("score", "", "")]
    run(recorder, clock, 4)
    aggregator.tick()
    assert request.counts.sum() == request.count == 1
    assert [t.count for t in aggregator.totals()] == [2]
    assert aggregator.totals()[0].wall_ns == 10_000_000


def test_new_series_columns_and_edges_appear_while_running(recorder, clock):
    aggregator = Aggregator(recorder, clock)
    run(recorder, clock, 4)
    aggregator.tick()
    recorder.set_edges("late", [5_000_000])
    with recorder.request("late", model="m", cls="gold"), recorder.stage("new"):
        clock.now += 9_000_000
    window = aggregator.tick()
    late = next(held for held in window.classes if held.key.request == "late")
    assert late.key == ClassKey("late", "m", "gold")
    assert (late.count, late.violations, late.edges_ns) == (1, (1,), (5_000_000,))
    assert any(held.labels == ("new",) and held.count == 1 for held in window.series)
    assert late.bands.sums.shape[1] == len(window.columns)


def test_a_recorder_emptied_after_a_fork_starts_again_from_zero(recorder, clock):
    aggregator = Aggregator(recorder, clock)
    for _ in range(9):
        run(recorder, clock, 4)
    aggregator.tick()
    recorder.after_fork()
    for _ in range(2):
        run(recorder, clock, 4)
    window = aggregator.tick()
    assert window.classes[0].count == 2
    assert window.classes[0].latency.counts.sum() == 2
    assert window.classes[0].bands.counts.sum() == 2
    assert window.classes[0].bands.sums.sum() == 10_000_000
    assert aggregator.totals()[0].count == 2

    recorder.after_fork()
    aggregator.reset()
    run(recorder, clock, 4)
    assert aggregator.tick().classes[0].count == 1


def test_profiled_requests_are_counted_and_stay_out_of_latency_and_bands(recorder, clock):
    aggregator = Aggregator(recorder, clock)
    with recorder.request("score") as request:
        request.profiled = True
        clock.now += 5_000_000
    run(recorder, clock, 4)
    window = aggregator.tick()
    held = window.classes[0]
    assert (held.count, held.excluded, held.latency.count, int(held.bands.counts.sum())) == (2, 1, 1, 1)
    assert [record.profiled for record in window.records].count(True) == 1


def test_records_carry_vectors_that_sum_to_their_wall_time(recorder, clock):
    recorder.set_edges("score", [20_000_000])
    aggregator = Aggregator(recorder, clock)

    @recorder.request("score", size=7.0, items=3)
    def fail():
        with recorder.stage("forward"):
            clock.now += 30_000_000
        raise KeyError

    with pytest.raises(KeyError):
        fail()
    (record,) = aggregator.tick().records
    assert sum(record.vector) == record.wall_ns == 30_000_000
    assert (record.key.request, record.size, record.items, record.error) == ("score", 7.0, 3, "KeyError")
    assert record.reasons & Reason.BREACH
    (span,) = record.spans
    assert (span.end_ns - span.start_ns, span.parent) == (30_000_000, -1)


def test_spans_are_unpacked_only_where_somebody_looks_at_them():
    recorder = ArrayRecorder(COLUMNS)
    traffic = simulate(1, 4)
    recorder.feed(traffic.start_ns, traffic.wall_ns, traffic.vectors)
    found = recorder.drain()
    reservoir = next(one for one in found if one[5] == Reason.RESERVOIR)
    slowest = next(one for one in found if one[5] & Reason.SLOWEST)
    assert decode(reservoir, ClassKey("score", None, None)).spans == ()
    assert decode(slowest, ClassKey("score", None, None)).spans[0].thread_id == 7


def test_epochs_are_begun_every_ten_seconds(clock):
    recorder = ArrayRecorder(COLUMNS)
    aggregator = Aggregator(recorder, clock)
    for _ in range(31):
        clock.now += S
        aggregator.tick()
    assert recorder.epochs == 3


def test_windows_add_up_to_all_that_was_fed(clock):
    recorder = ArrayRecorder(COLUMNS)
    aggregator = Aggregator(recorder, clock)
    traffic = simulate(10, 2)
    counted, nanoseconds, breathed = 0, 0, []
    for part in np.array_split(np.arange(len(traffic.wall_ns)), 10):
        recorder.feed(traffic.start_ns[part], traffic.wall_ns[part], traffic.vectors[part])
        clock.now += S
        window = aggregator.tick(breathe=lambda: breathed.append(1))
        counted += int(window.classes[0].latency.counts.sum())
        nanoseconds += int(window.classes[0].bands.sums.sum())
    assert counted == len(traffic.wall_ns)
    assert nanoseconds == traffic.wall_ns.sum()
    assert breathed


def test_a_tick_at_rest_makes_few_tracked_objects(clock):
    recorder = ArrayRecorder([*COLUMNS, *[("stage", f"s{i}") for i in range(50)]])
    aggregator = Aggregator(recorder, clock)
    aggregator.tick()
    gc.collect()
    gc.disable()
    try:
        before = gc.get_count()[0]
        kept = aggregator.tick()
        made = gc.get_count()[0] - before
    finally:
        gc.enable()
    assert kept.classes[0].count == 0
    assert made < 40


def test_totals_may_be_read_by_another_thread_while_ticking(clock):
    recorder = ArrayRecorder(COLUMNS)
    aggregator = Aggregator(recorder, clock)
    traffic = simulate(3, 5)
    wrong, stop = [], threading.Event()

    def read():
        while not stop.is_set():
            wrong.extend(d for d in aggregator.cumulative() if d.counts.sum() != d.count)

    reader = threading.Thread(target=read)
    reader.start()
    for part in np.array_split(np.arange(len(traffic.wall_ns)), 20):
        recorder.feed(traffic.start_ns[part], traffic.wall_ns[part], traffic.vectors[part])
        aggregator.tick()
    stop.set()
    reader.join()
    assert not wrong
