"""Each nanosecond of a request has one owner."""

from __future__ import annotations

import asyncio

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


def test_nested_stages_own_what_their_children_do_not(timed, clock, reader):
    with timed.request("r"):
        clock.tick(5)
        with timed.stage("a"):
            clock.tick(10)
            with timed.stage("b"):
                clock.tick(100)
            clock.tick(10)
        clock.tick(7)
    (record,) = reader(timed).drain()
    assert reader(timed).vector(record) == {"unattributed:unattributed": 12, "a": 20, "b": 100}
    assert record.wall_ns == 132
    assert [(s[0] - record.start_ns, s[1] - record.start_ns, s[5]) for s in record.spans] == [(5, 125, 255), (15, 115, 0)]
    assert reader(timed).sum("stage", "a") == 120


def test_recursion_charges_every_level_once(timed, clock, reader):
    def recurse(depth):
        with timed.stage("f"):
            clock.tick(3)
            if depth:
                recurse(depth - 1)

    with timed.request("r"):
        recurse(9)
    (record,) = reader(timed).drain()
    assert reader(timed).vector(record) == {"f": 30}
    assert reader(timed).count("stage", "f") == 10


def test_a_span_object_may_be_entered_again(timed, clock, reader):
    span = timed.stage("s")
    with timed.request("r"):
        with span:
            clock.tick(1)
            with timed.stage("t"), span:
                clock.tick(2)
            clock.tick(4)
        with span:
            clock.tick(8)
    (record,) = reader(timed).drain()
    assert reader(timed).vector(record) == {"s": 15}
    assert reader(timed).count("stage", "s") == 3


def test_overlapping_stages_follow_the_critical_path(timed, clock, reader):
    a, b = timed.stage("a"), timed.stage("b")
    with timed.request("r"):
        clock.tick(1)
        a.__enter__()
        clock.tick(10)
        b.__enter__()
        clock.tick(10)
        a.__exit__(None, None, None)
        clock.tick(10)
        b.__exit__(None, None, None)
        clock.tick(1)
    (record,) = reader(timed).drain()
    assert reader(timed).vector(record) == {"unattributed:unattributed": 2, "a": 10, "b": 20}
    assert [span[5] for span in record.spans] == [255, 255], "b outlives a, so it is no part of it"


def test_gather_charges_the_task_that_finished_last(implementation, clock, reader):
    recorder = implementation(clock=clock)

    async def work(name, steps, each):
        with recorder.stage(name):
            for _ in range(steps):
                clock.tick(each)
                await asyncio.sleep(0)

    async def main():
        with recorder.request("r"), recorder.stage("join"):
            await asyncio.gather(work("short", 2, 10), work("long", 5, 10))

    asyncio.run(main())
    (record,) = reader(recorder).drain()
    vector = reader(recorder).vector(record)
    assert sum(record.vector) == record.wall_ns == 70
    assert vector["long"] >= 50


def test_an_interval_goes_under_the_span_that_covers_its_start(timed, clock, reader):
    with timed.request("r"):
        start = clock.now
        clock.tick(10)
        with timed.stage("a"):
            clock.tick(10)
            timed.interval("copy", "h2d", clock.now - 4, clock.now, flags=3, aux=4096)
            with timed.stage("b"):
                clock.tick(5)
                timed.interval("queue", "q", start + 2, start + 6)
    (record,) = reader(timed).drain()
    assert reader(timed).vector(record) == {"unattributed:unattributed": 6, "a": 6, "b": 5, "copy:h2d": 4, "queue:q": 4}
    by_column = {timed.columns()[span[4]]: span for span in record.spans}
    assert by_column["copy", "h2d"][2] == 4096
    assert by_column["copy", "h2d"][6] & 3 == 3
    assert by_column["copy", "h2d"][5] == 0
    assert by_column["queue", "q"][5] == 255


def test_an_interval_over_a_closed_stage_takes_only_what_is_left(timed, clock, reader):
    with timed.request("r"):
        start = clock.now
        with timed.stage("a"):
            clock.tick(10)
        clock.tick(5)
        timed.interval("io", "disk", start + 6, start + 12)
    (record,) = reader(timed).drain()
    assert reader(timed).vector(record) == {"a": 6, "io:disk": 6, "unattributed:unattributed": 3}


def test_what_a_device_did_is_counted_and_owns_no_time(timed, clock, reader):
    with timed.request("r") as request:
        clock.tick(10)
        timed.interval("device", "forward", clock.now - 9, clock.now, request=request)
        timed.interval("device.queue", "forward", clock.now - 9, clock.now, request=request)
    (record,) = reader(timed).drain()
    assert reader(timed).vector(record) == {"unattributed:unattributed": 10}
    assert timed.columns() == [("unattributed", "unattributed"), ("other", "other")]
    assert (reader(timed).count("device", "forward"), reader(timed).count("device.queue", "forward")) == (1, 1)


def test_an_interval_is_clipped_to_its_request_but_counts_in_full(timed, clock, reader):
    clock.tick(100)
    with timed.request("r"):
        clock.tick(10)
        timed.interval("queue", "q", clock.now - 60, clock.now)
        timed.interval("queue", "q", clock.now - 500, clock.now - 400)
    (record,) = reader(timed).drain()
    assert reader(timed).vector(record) == {"queue:q": 10}
    assert reader(timed).sum("queue", "q") == 160


def test_positions_run_out_and_sums_do_not(timed, clock, reader):
    with timed.request("r"):
        for _ in range(100):
            with timed.stage("a"):
                clock.tick(2)
                with timed.stage("b"):
                    clock.tick(3)
    (record,) = reader(timed).drain()
    assert record.truncated
    assert len(record.spans) == 64
    assert reader(timed).vector(record) == {"a": 200, "b": 300}
    assert timed.counters()["truncated"] == reader(timed).classed()["truncated"] == 1


def test_a_stage_left_open_owns_its_time_and_is_late(timed, clock, reader):
    span = timed.stage("a")
    with timed.request("r"):
        clock.tick(1)
        span.__enter__()
        clock.tick(5)
    clock.tick(4)
    span.__exit__(None, None, None)
    (record,) = reader(timed).drain()
    assert reader(timed).vector(record) == {"unattributed:unattributed": 1, "a": 5}
    assert reader(timed).sum("stage", "a") == 9
    assert timed.counters()["late_spans"] == reader(timed).classed()["late_spans"] == 1


actions = st.lists(
    st.one_of(
        st.tuples(st.just("tick"), st.integers(0, 1000)),
        st.tuples(st.just("enter"), st.integers(0, 4)),
        st.tuples(st.just("exit"), st.integers(0, 5)),
        st.tuples(st.just("leave"), st.just(0)),
        st.tuples(st.just("interval"), st.tuples(st.integers(-2000, 2000), st.integers(0, 2000))),
    ),
    max_size=150,
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=actions)
def test_any_interleaving_sums_to_the_wall_time(implementation, reader, steps):
    now = [10_000]
    recorder = implementation(clock=lambda: now[0])
    entered = []
    crossed = False
    with recorder.request("r"):
        for action, value in steps:
            if action == "tick":
                now[0] += value
            elif action == "enter":
                span = recorder.stage(f"s{value}")
                span.__enter__()
                entered.append(span)
            elif action == "exit" and entered:
                crossed |= value % len(entered) != len(entered) - 1
                entered.pop(value % len(entered)).__exit__(None, None, None)
            elif action == "leave" and entered:
                entered.pop().__exit__(None, None, None)
            elif action == "interval":
                offset, length = value
                recorder.interval("copy", "x", now[0] + offset, now[0] + offset + length)
    (record,) = reader(recorder).drain()
    assert sum(record.vector) == record.wall_ns
    if not record.truncated or not crossed:
        assert sum(recorder_row[2][0] for recorder_row in reader(recorder).bands()) == record.vector[0]
    if not record.truncated:
        assert min(record.vector) >= 0
    for start, end, _aux, _thread, _column, parent, _flags in record.spans:
        low, high = (record.start_ns, record.start_ns + record.wall_ns) if parent == 255 else record.spans[parent][:2]
        assert low <= start <= end <= high, "a span lies inside its parent"
