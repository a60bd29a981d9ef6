"""What a request counts, keeps and tells."""

from __future__ import annotations

import contextvars
import gc
import threading
from array import array

import pytest

from inferscope.types import Reason, SpanFlag


def test_totals_of_a_class(timed, clock, reader):
    timed.set_edges("r", [100, 50])
    for wall, items in ((40, 1), (60, 2), (200, 3)):
        with timed.request("r", items=items, model="m", cls="gold"):
            clock.tick(wall)
    with pytest.raises(KeyError), timed.request("r", model="m", cls="gold") as request:  # noqa: PT012 - the block is the request
        clock.tick(10)
        request.items = 4
        raise KeyError
    assert timed.classes() == [(0, "r", "m", "gold", 0, (50, 100))]
    assert timed.series()[0][:3] == (0, "request", ("r", "m", "gold"))
    got = reader(timed).classed()
    assert {k: got[k] for k in ("count", "errors", "items", "excluded", "violations", "wall_ns")} == {
        "count": 4, "errors": 1, "items": 10, "excluded": 0, "violations": (2, 1), "wall_ns": 310,
    }  # fmt: skip


def test_an_exception_passes_unchanged_and_marks_its_spans(timed, reader):
    class Odd(BaseException):
        pass

    error = Odd("x")
    with pytest.raises(Odd) as caught, timed.request("r"), timed.stage("a"):
        raise error
    assert caught.value is error
    (record,) = reader(timed).drain()
    assert record.error == Odd.__qualname__
    assert record.spans[0][6] & SpanFlag.ERROR


def test_attributes(timed):
    request = timed.request("r", size=3.5, items=2, model="m", cls="c")
    assert (request.name, request.size, request.items, request.model, request.cls) == ("r", 3.5, 2, "m", "c")
    assert (request.open, request.wanted, request.profiled, request.trace, request.error) == (False, False, False, None, None)
    with request as entered:
        assert entered is request
        assert request.open
        assert timed.current() is request
        request.trace = ("ab", "cd")
    assert not request.open
    assert timed.current() is None
    assert timed.drain()[0][16] == ("ab", "cd")


def test_requests_leave_no_work_for_the_garbage_collector(recorder):
    def work():
        with recorder.request("r"), recorder.stage("a"), recorder.stage("b"):
            recorder.interval("copy", "h2d", 0, 1)

    work()
    for _ in range(5):  # finalizers of other tests' garbage leave garbage themselves
        if not gc.collect():
            break
    gc.disable()
    try:
        for _ in range(50):
            work()
        recorder.drain()
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_ids_increase(timed):
    ids = []
    for _ in range(3):
        with timed.request("r") as request:
            ids.append(request.id)
    assert ids == sorted(set(ids))
    assert ids[0] > 0


def test_the_time_before_entry_is_backlog(timed, clock, reader):
    arrived = clock.now
    clock.tick(30)
    with timed.request("r", started_ns=arrived) as request:
        clock.tick(12)
    (record,) = reader(timed).drain()
    assert request.start_ns == arrived == record.start_ns
    assert record.wall_ns == 42
    assert reader(timed).vector(record) == {"queue:backlog": 30, "unattributed:unattributed": 12}
    assert reader(timed).sum("queue", "backlog") == 30


def test_an_arrival_in_the_future_is_ignored(timed, clock, reader):
    with timed.request("r", started_ns=clock.now + 1000):
        clock.tick(5)
    assert reader(timed).drain()[0].wall_ns == 5


def test_a_request_inside_a_request(timed, clock, reader):
    with timed.request("outer"):
        clock.tick(1)
        with timed.request("inner"):
            clock.tick(10)
            with timed.stage("s"):
                clock.tick(100)
        clock.tick(2)
    inner, outer = reader(timed).drain()
    assert reader(timed).vector(inner) == {"unattributed:unattributed": 10, "s": 100}
    assert reader(timed).vector(outer) == {"unattributed:unattributed": 3, "inner": 110}
    assert reader(timed).count("stage", "inner") == 0


def test_discard_counts_nothing(timed, clock, reader):
    with timed.request("r") as request:
        clock.tick(5)
        request.discard()
        assert not request.open
        with timed.stage("s"):
            pass
    assert reader(timed).classed()["count"] == 0
    assert reader(timed).count("stage", "s") == 1
    assert timed.counters()["late_spans"] == 1
    assert timed.drain() == []


def test_finish_counts_now_and_once(timed, clock, reader):
    with timed.request("r") as request:
        clock.tick(5)
        request.finish("TimeoutError")
        clock.tick(500)
        request.finish()
        with timed.stage("s"):
            pass
    (record,) = reader(timed).drain()
    assert (record.wall_ns, record.error) == (5, "TimeoutError")
    assert timed.counters()["late_spans"] == 1
    assert timed.current() is None


def test_enter_and_exit_in_different_contexts(timed, clock, reader):
    request = timed.request("r")
    contextvars.copy_context().run(request.__enter__)
    clock.tick(7)
    request.__exit__(None, None, None)
    assert reader(timed).drain()[0].wall_ns == 7
    assert timed.current() is None


def test_a_request_object_serves_again(timed, clock, reader):
    request = timed.request("r")
    for wall in (3, 4):
        with request:
            clock.tick(wall)
    first, second = reader(timed).drain()
    assert (first.wall_ns, second.wall_ns) == (3, 4)
    assert first.id < second.id


def test_attach_carries_a_request_to_a_thread(timed, clock, reader):
    def work(request):
        assert timed.current() is None
        with timed.attach(request):
            assert timed.current() is request
            with timed.stage("w"):
                clock.tick(10)
        assert timed.current() is None

    with timed.request("r") as request:
        thread = threading.Thread(target=work, args=(request,))
        thread.start()
        thread.join()
    (record,) = reader(timed).drain()
    assert reader(timed).vector(record) == {"w": 10}
    (span,) = record.spans
    assert span[6] & SpanFlag.OTHER_THREAD
    assert span[3] == thread.native_id
    assert record.thread_id == threading.get_native_id()
    assert record.cpu_ns is None


def test_attaching_a_closed_request_makes_late_spans(timed, reader):
    with timed.request("r") as request:
        pass
    with timed.attach(request), timed.stage("s"):
        pass
    with timed.attach(None), timed.stage("s"):
        pass
    assert timed.counters()["late_spans"] == 1
    assert reader(timed).count("stage", "s") == 2


def test_an_interval_for_a_named_request(timed, clock, reader):
    with timed.request("r") as request:
        clock.tick(10)
        with timed.attach(None):
            timed.interval("io", "k", clock.now - 4, clock.now, request=request)
    timed.interval("io", "k", clock.now - 4, clock.now, request=request)
    (record,) = reader(timed).drain()
    assert reader(timed).vector(record)["io:k"] == 4
    assert timed.counters()["late_spans"] == 1
    assert reader(timed).count("io", "k") == 2


def test_cpu_time_of_a_plain_request(recorder):
    recorder.cpu_mode = "on"
    with recorder.request("r"):
        sum(range(20000))
    record = recorder.drain()[0]
    cpu, voluntary, involuntary = record[10:13]
    assert 0 < cpu <= record[3] + 1_000_000
    assert voluntary >= 0
    assert involuntary >= 0
    totals = recorder.read_class(0)
    assert (totals["cpu_ns"], totals["cpu_wall_ns"], totals["cpu_requests"]) == (cpu, record[3], 1)


def test_cpu_time_is_unknown_where_it_could_be_another_ones(recorder):
    recorder.cpu_mode = "on"

    def generator():
        with recorder.request("generator"):
            yield

    list(generator())
    with recorder.request("r"), recorder.attach(None), recorder.request("r"):
        pass
    request = recorder.request("handed over")
    request.__enter__()
    thread = threading.Thread(target=request.finish)
    thread.start()
    thread.join()
    assert [row[10] for row in recorder.drain()] == [None] * 4


def test_cpu_time_of_a_nested_request_is_known(recorder):
    recorder.cpu_mode = "on"
    with recorder.request("outer"), recorder.request("inner"):
        pass
    assert all(row[10] is not None for row in recorder.drain())


def test_cpu_mode_off_and_auto(recorder, implementation):
    recorder.cpu_mode = "off"
    with recorder.request("r"):
        pass
    assert recorder.drain()[0][10] is None
    auto = implementation()
    for _ in range(128):
        with auto.request("r"):
            pass
    assert auto.read_class(0)["cpu_requests"] == 2, "1 of 64 below a millisecond"


def test_cpu_mode_auto_measures_every_long_request(timed, clock):
    for _ in range(20):
        with timed.request("r"):
            clock.tick(2_000_000)
    assert timed.read_class(0)["cpu_requests"] == 20


class Hooks:
    def __init__(self, recorder, want=True):
        self.calls = []
        self.want = want
        recorder.set_hooks(on_start=self.start, on_enter=self.enter, on_exit=self.exit, on_finish=self.finish)

    def start(self, request):
        self.calls.append("start")
        return self.want

    def enter(self, request, name, kind):
        self.calls.append(f"+{name}:{kind}")

    def exit(self, request, name, kind):
        self.calls.append(f"-{name}:{kind}")

    def finish(self, request, wall_ns):
        self.calls.append(wall_ns)


def test_hooks_hear_of_wanted_requests(timed, clock):
    hooks = Hooks(timed)
    timed.armed = True

    @timed.stage("f")
    def function():
        clock.tick(5)

    with timed.request("r") as request:
        assert request.wanted
        with timed.stage("s"):
            function()
    assert hooks.calls == ["start", "+r:with", "+s:with", "+f:call", "-f:call", "-s:with", "-r:with", 5]


def test_hooks_are_silent_unarmed_or_unwanted(timed):
    hooks = Hooks(timed, want=None)
    with timed.request("r"), timed.stage("s"):
        pass
    assert hooks.calls == []
    timed.armed = True
    with timed.request("r"), timed.stage("s"):
        pass
    assert hooks.calls == ["start"]


def test_a_hook_that_raises_is_counted_and_swallowed(timed, clock, reader):
    def boom(*_):
        raise ZeroDivisionError

    timed.set_hooks(on_start=boom, on_enter=boom, on_exit=boom, on_finish=boom)
    timed.armed = True
    with timed.request("r") as request:
        request.wanted = True
        with timed.stage("s"):
            clock.tick(3)
    assert timed.counters()["hook_errors"] == 5, "start, the stage's two, exit and finish of the request"
    assert reader(timed).classed()["count"] == 1


def test_a_profiled_request_stays_in_the_exact_counters_only(timed, clock, reader):
    timed.set_edges("r", [10])

    def finish(request, wall_ns):
        request.profiled = True

    timed.set_hooks(on_start=lambda request: True, on_finish=finish)
    timed.armed = True
    with pytest.raises(ValueError, match="x"), timed.request("r", items=3):  # noqa: PT012 - the block is the request
        clock.tick(50)
        raise ValueError("x")
    got = reader(timed).classed()
    assert (got["count"], got["excluded"], got["items"], got["errors"], got["violations"]) == (1, 1, 3, 1, (1,))
    assert reader(timed).count("request", "r", "", "") == 0
    assert reader(timed).bands() == []
    (record,) = reader(timed).drain()
    assert record.reasons & Reason.PROFILED
    assert not record.reasons & (Reason.RESERVOIR | Reason.SLOWEST)


def test_disabled_gives_a_shared_no_op(timed, clock):
    timed.enabled = False
    assert timed.stage("a") is timed.stage("b")

    def function():
        return 5

    assert timed.stage("a")(function) is function
    with timed.request("r", items=3) as request, timed.stage("s"):
        request.items = 7
        request.trace = ("a", "b")
        request.discard()
    timed.interval("copy", "h2d", 0, 5)
    assert timed.series() == []
    timed.enabled = True
    with timed.request("r"), timed.stage("s"):
        pass
    assert len(timed.series()) == 2


def test_after_fork_forgets_counts_and_open_requests(timed, clock, reader):
    timed.set_edges("r", [1])
    lock = timed.lock("l", threading.Lock())
    with lock, timed.request("r"), timed.stage("s"):
        clock.tick(5)
    with timed.request("r"):
        with timed.stage("s"):
            clock.tick(5)
        columns = timed.columns()
        timed.after_fork()
        assert timed.current() is None
    for index, kind, labels, _digits, _lowest, length in timed.series():
        buffer = array("q", bytes(8 * length))
        assert timed.read_counts(index, buffer) == (0, 0, 0), (kind, labels)
        assert not any(buffer)
    assert reader(timed).classed()["count"] == 0
    assert timed.drain() == []
    assert timed.columns() == columns
    assert not any(timed.counters().values())
