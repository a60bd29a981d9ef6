"""Late device data settle into a request that closed: time changes its owner, sums stand, and nothing waits for ever."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

SECOND = 1_000_000_000
MS = 1_000_000


@pytest.fixture
def columns(timed):
    return {name: timed.column("stage", name) for name in ("forward", "respond")} | {"queue": timed.column("gpu-queue", "sim:0")}


def serve(recorder, clock, *, forward=10 * MS, respond=5 * MS, pins=1, name="score"):
    """One request whose stage `forward` has device spans pending; gives their reference."""
    with recorder.request(name) as request:
        with recorder.stage("forward"):
            refs = [recorder.pin(request) for _ in range(pins)]
            clock.tick(forward)
        with recorder.stage("respond"):
            clock.tick(respond)
    assert len(set(refs)) == 1
    assert refs[0] == request.id
    return refs[0]


def test_time_moves_in_the_record_and_in_its_band(timed, clock, reader, columns):
    ref = serve(timed, clock)
    look = reader(timed)
    before = look.bands()
    assert timed.settle(ref, columns["forward"], columns["queue"], 4 * MS) == 4 * MS
    timed.unpin(ref)
    (record,) = look.drain()
    assert look.vector(record) == {"forward": 6 * MS, "respond": 5 * MS, "gpu-queue:sim:0": 4 * MS}
    assert sum(record.vector) == record.wall_ns == 15 * MS
    assert record.device_incomplete is False
    ((band, count, sums),) = look.bands()
    assert (band, count, sum(sums)) == (before[0][0], 1, 15 * MS)
    assert sums[columns["queue"]] == 4 * MS
    assert timed.counters()["device_incomplete"] == 0


def test_what_comes_before_the_end_moves_at_the_end(timed, clock, reader, columns):
    with timed.request("score") as request:
        ref = timed.pin(request)
        assert timed.settle(ref, columns["forward"], columns["queue"], 3 * MS) == 3 * MS
        assert timed.settle(ref, columns["forward"], columns["queue"], 90 * MS) == 90 * MS
        timed.unpin(ref)
        with timed.stage("forward"):
            clock.tick(10 * MS)
    look = reader(timed)
    (record,) = look.drain()
    assert look.vector(record) == {"gpu-queue:sim:0": 10 * MS}
    assert look.bands()[0][2][columns["queue"]] == 10 * MS


def test_it_also_moves_where_stages_overlapped(timed, clock, reader, columns):
    with timed.request("score") as request:
        ref = timed.pin(request)
        one, two = timed.stage("forward"), timed.stage("respond")
        one.__enter__()
        clock.tick(4 * MS)
        two.__enter__()
        clock.tick(4 * MS)
        one.__exit__(None, None, None)
        clock.tick(2 * MS)
        two.__exit__(None, None, None)
        timed.settle(ref, columns["respond"], columns["queue"], 1 * MS)
        timed.unpin(ref)
    look = reader(timed)
    (record,) = look.drain()
    assert look.vector(record)["gpu-queue:sim:0"] == 1 * MS
    assert sum(record.vector) == record.wall_ns


def test_a_column_gives_no_more_than_it_holds(timed, clock, reader, columns):
    ref = serve(timed, clock)
    assert timed.settle(ref, columns["respond"], columns["queue"], 99 * MS) == 5 * MS
    assert timed.settle(ref, columns["respond"], columns["queue"], 1) == 0
    timed.unpin(ref)
    (record,) = reader(timed).drain()
    assert min(record.vector) == 0
    assert sum(record.vector) == record.wall_ns


def test_other_requests_of_the_band_keep_their_time(timed, clock, reader, columns):
    serve(timed, clock, pins=0 + 1)
    ref = serve(timed, clock, forward=1, respond=15 * MS - 1)
    assert timed.settle(ref, columns["forward"], columns["queue"], 10 * MS) == 1, "the band holds more, this request does not"
    ((_, count, sums),) = reader(timed).bands()
    assert (count, sums[columns["queue"]], sum(sums)) == (2, 1, 30 * MS)


def test_a_record_waits_for_its_last_span(timed, clock, reader, columns):
    ref = serve(timed, clock, pins=2)
    serve(timed, clock, name="other", pins=1)
    look = reader(timed)
    assert look.drain() == []
    timed.unpin(ref)
    assert look.drain() == []
    timed.settle(ref, columns["forward"], columns["queue"], 1)
    timed.unpin(ref)
    (record,) = look.drain()
    assert record.vector[columns["queue"]] == 1
    timed.unpin(ref)
    assert look.drain() == []


def test_records_that_do_not_wait_pass_those_that_do(timed, clock, reader):
    ref = serve(timed, clock)
    with timed.request("plain"):
        clock.tick(MS)
    look = reader(timed)
    assert [record.wall_ns for record in look.drain()] == [MS]
    timed.unpin(ref)
    assert [record.wall_ns for record in look.drain()] == [15 * MS]


def test_after_two_seconds_it_leaves_incomplete_and_counted(timed, clock, reader, columns):
    ref = serve(timed, clock)
    look = reader(timed)
    clock.tick(2 * SECOND - 1)
    assert look.drain() == []
    clock.tick(1)
    (record,) = look.drain()
    assert record.device_incomplete is True
    assert sum(record.vector) == record.wall_ns
    assert timed.counters()["device_incomplete"] == 1
    assert timed.settle(ref, columns["forward"], columns["queue"], MS) == 0
    timed.unpin(ref)
    assert look.bands()[0][2][columns["queue"]] == 0
    assert look.drain() == []


def test_a_request_that_is_not_retained_settles_in_its_band(timed, clock, reader, columns):
    timed.begin_epoch(breaching=0, reservoir=0, slowest=0)
    ref = serve(timed, clock)
    assert timed.settle(ref, columns["forward"], columns["queue"], 4 * MS) == 4 * MS
    timed.unpin(ref)
    assert reader(timed).drain() == []
    assert reader(timed).bands()[0][2][columns["queue"]] == 4 * MS
    late = serve(timed, clock)
    clock.tick(2 * SECOND)
    assert reader(timed).drain() == []
    assert timed.counters()["device_incomplete"] == 1
    assert timed.settle(late, columns["forward"], columns["queue"], 1) == 0


def test_a_profiled_request_settles_in_its_record_only(timed, clock, reader, columns):
    with timed.request("score") as request:
        ref = timed.pin(request)
        request.profiled = True
        with timed.stage("forward"):
            clock.tick(MS)
    assert timed.settle(ref, columns["forward"], columns["queue"], MS) == MS
    timed.unpin(ref)
    (record,) = reader(timed).drain()
    assert record.vector[columns["queue"]] == MS
    assert reader(timed).bands() == []


def test_columns_made_after_the_end_have_room(timed, clock, reader, columns):
    ref = serve(timed, clock)
    fresh = timed.column("gpu-queue", "sim:1")
    assert fresh == len(timed.columns()) - 1
    assert timed.settle(ref, columns["forward"], fresh, MS) == MS
    timed.unpin(ref)
    (record,) = reader(timed).drain()
    assert len(record.vector) == fresh + 1
    assert record.vector[fresh] == MS
    assert record.spans[0][0] == record.start_ns, "the positions are still whole"


def test_edges_that_change_meanwhile_take_their_rows_along(timed, clock, reader, columns):
    timed.set_edges("score", [14_900_000])
    ref = serve(timed, clock)
    assert reader(timed).bands()[0][0] == 216
    timed.set_edges("score", [3 * MS])
    assert timed.settle(ref, columns["forward"], columns["queue"], MS) == MS
    ((band, count, sums),) = reader(timed).bands()
    assert band < 216
    assert (count, sum(sums), sums[columns["queue"]], min(sums)) == (1, 15 * MS, MS, 0)


def test_one_object_entered_again_is_another_request(timed, clock, reader, columns):
    request = timed.request("score")
    refs = []
    for _ in range(2):
        with request, timed.stage("forward"):
            refs.append(timed.pin(request))
            clock.tick(10 * MS)
    assert refs[0] != refs[1]
    timed.settle(refs[0], columns["forward"], columns["queue"], MS)
    for ref in refs:
        timed.unpin(ref)
    assert [record.vector[columns["queue"]] for record in reader(timed).drain()] == [MS, 0]


def test_nothing_to_pin(timed, clock, implementation):
    assert timed.pin(None) == 0
    other = implementation(clock=clock)
    with other.request("score") as foreign:
        assert timed.pin(foreign) == 0
    closed = timed.request("score")
    assert timed.pin(closed) == 0, "not entered"
    with closed:
        pass
    assert timed.pin(closed) == 0, "ended"
    timed.enabled = False
    assert timed.pin(timed.request("off")) == 0
    for ref in (0, -1, 10**6):
        assert timed.settle(ref, 0, 1, 1) == 0
        assert timed.unpin(ref) is None


def test_nonsense_moves_nothing(timed, clock, reader, columns):
    ref = serve(timed, clock)
    queue = columns["queue"]
    for source, target, ns in ((-1, queue, 1), (queue, 99, 1), (0, 0, 5), (2, queue, 0), (2, queue, -5)):
        assert timed.settle(ref, source, target, ns) == 0
    timed.unpin(ref)
    (record,) = reader(timed).drain()
    assert record.vector[queue] == 0


def test_discarded_and_dropped_requests_are_forgotten(timed, clock, reader, columns):
    with timed.request("score") as request:
        ref = timed.pin(request)
        request.discard()
    assert timed.settle(ref, columns["forward"], columns["queue"], 1) == 0
    dropped = timed.request("score")
    dropped.__enter__()
    ref = timed.pin(dropped)
    with timed.attach(None):
        del dropped, request
    clock.tick(3 * SECOND)
    assert reader(timed).drain() == []
    assert timed.counters()["device_incomplete"] == 0


def test_pins_are_bounded_and_refusals_counted(timed, clock):
    for _ in range(4100):
        with timed.request("score") as request:
            timed.pin(request)
            clock.tick(1)
    assert timed.counters()["pins_refused"] == 4
    clock.tick(2 * SECOND)
    timed.drain()
    assert timed.counters()["device_incomplete"] == 4096
    with timed.request("score") as request:
        assert timed.pin(request) == request.id


def test_pairs_of_columns_are_bounded_while_a_request_is_open(timed, clock):
    many = [timed.column("stage", f"s{number}") for number in range(20)]
    with timed.request("score") as request:
        ref = timed.pin(request)
        noted = [timed.settle(ref, column, 0, 5) for column in many]
        timed.unpin(ref)
    assert noted == [5] * 16 + [0] * 4
    assert timed.counters()["settles_refused"] == 4


def test_a_forked_child_has_none(timed, clock, reader, columns):
    ref = serve(timed, clock)
    with timed.request("score") as request:
        still = timed.pin(request)
        timed.after_fork()
        assert timed.settle(still, columns["forward"], columns["queue"], 1) == 0
    assert timed.settle(ref, columns["forward"], columns["queue"], 1) == 0
    clock.tick(3 * SECOND)
    assert reader(timed).drain() == []
    assert timed.counters()["device_incomplete"] == 0


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    moves=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(-5, 40), st.booleans()), max_size=12),
    parts=st.lists(st.integers(0, 30), min_size=3, max_size=3),
)
def test_every_sum_stands(implementation, reader, moves, parts):
    now = [1000]
    recorder = implementation(clock=lambda: now[0])
    look = reader(recorder)
    names = [recorder.column("stage", name) for name in ("a", "b", "c")]
    recorder.column("gpu-queue", "sim:0")
    with recorder.request("r") as request:
        ref = recorder.pin(request)
        for name, part in zip("abc", parts, strict=True):
            with recorder.stage(name):
                now[0] += part
        for source, target, ns, early in moves:
            if early:
                recorder.settle(ref, source, target, ns)
    for source, target, ns, early in moves:
        if not early:
            assert recorder.settle(ref, source, target, ns) <= max(ns, 0)
    recorder.unpin(ref)
    (record,) = look.drain()
    assert sum(record.vector) == record.wall_ns == sum(parts)
    assert min(record.vector) >= 0
    ((_, _, sums),) = look.bands()
    assert list(record.vector) == list(sums), "one request in the band: its sums are the record"
    assert names == [2, 3, 4]


def test_the_reader_gets_whole_vectors(timed, clock, columns):
    ref = serve(timed, clock)
    timed.unpin(ref)
    (row,) = timed.drain()
    assert len(row) == 18
    assert sum(array("q", row[14])) == row[3]


def batched(recorder, clock, requests, before=lambda ref: None):
    """One forward of 10 ms for several requests, on the device; gives the carrier's reference."""
    with recorder.attach(None), recorder.carrier("forward") as carrier, recorder.stage("forward"):
        ref = recorder.pin(carrier)
        clock.tick(10 * MS)
    before(ref)
    for request in requests:
        recorder.splice(carrier.packed, request)
    return ref


@pytest.mark.parametrize("when", ["before the splice", "before the end", "after the end"])
def test_device_time_of_a_batch_settles_in_each_of_its_requests(timed, clock, reader, columns, when):
    def settle(ref):
        assert timed.settle(ref, columns["forward"], columns["queue"], 4 * MS) == 4 * MS
        timed.unpin(ref)

    look = reader(timed)
    with timed.request("score") as one:
        with timed.attach(None), timed.request("score") as two:
            ref = batched(timed, clock, (one, two), settle if when == "before the splice" else lambda _: None)
            if when == "before the end":
                settle(ref)
            clock.tick(MS)
        if when == "after the end":
            assert look.drain() == []
    if when == "after the end":
        assert look.drain() == [], "both wait"
        settle(ref)
    records = look.drain()
    assert len(records) == 2
    for record in records:
        assert record.vector[columns["queue"]] == 4 * MS
        assert sum(record.vector) == record.wall_ns
        assert [span[2] for span in record.spans] == [0] * len(record.spans), "the carrier's id is nobody's business"
    assert sum(sums[columns["queue"]] for _, _, sums in look.bands()) == 8 * MS
    assert timed.counters()["device_incomplete"] == 0
    assert timed.settle(ref, columns["forward"], columns["queue"], MS) == 0, "forgotten with the drain"


def test_requests_of_a_batch_whose_device_data_never_come_are_incomplete(timed, clock, reader, columns):
    with timed.request("score") as request:
        ref = batched(timed, clock, (request,))
    clock.tick(2 * SECOND)
    (record,) = reader(timed).drain()
    assert record.device_incomplete is True
    assert timed.counters()["device_incomplete"] == 1
    assert timed.settle(ref, columns["forward"], columns["queue"], 1) == 0


def test_a_batch_without_device_spans_pins_nobody(timed, clock, reader, columns):
    with timed.request("score") as request:
        ref = batched(timed, clock, (), lambda ref: timed.unpin(ref))
        with timed.attach(None), timed.carrier("other") as carrier:
            clock.tick(1)
        timed.splice(carrier.packed, request)
    assert [one.device_incomplete for one in reader(timed).drain()] == [False]
    assert timed.settle(ref, 0, 2, 1) == 0
