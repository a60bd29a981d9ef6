"""One piece of work for several requests, in this thread, another one, or another process."""

from __future__ import annotations

import asyncio
import multiprocessing
import pickle
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from inferscope.record import core, fallback
from inferscope.record.batch import Batch
from inferscope.types import SpanFlag

THREAD = SpanFlag.OTHER_THREAD


def batch(recorder: Any, requests: Any, name: str = "batch", **keywords: Any) -> Batch:
    return Batch(requests, name, keywords.pop("queued_ns", None), recorder)


def names(recorder: Any, record: Any) -> list[tuple[str, int, int, int]]:
    """Column, start, end, parent of each span."""
    columns = recorder.columns()
    return [(":".join(columns[s[4]]), s[0], s[1], s[5]) for s in record.spans]


def test_a_carrier_packs_what_it_saw_and_counts_the_work_once(timed, clock, reader):
    with timed.carrier("work") as carrier:
        assert carrier.packed is None
        assert timed.current() is carrier
        clock.tick(10)
        with timed.stage("forward"):
            clock.tick(30)
            timed.interval("copy", "h2d", clock.now - 5, clock.now)
        clock.tick(2)
    _, columns, spans, truncated = carrier.packed
    rows = [(columns[s[4]], s[0] - 1_000_000, s[1] - 1_000_000, s[5]) for s in struct.iter_unpack("<qqqIHBB", spans)]
    assert rows == [(("batch", "work"), 0, 42, 255), (("stage", "forward"), 10, 40, 0), (("copy", "h2d"), 35, 40, 1)]
    assert truncated is False
    assert (carrier.name, carrier.open, timed.current()) == ("work", False, None)
    assert timed.classes() == []
    assert timed.drain() == []
    assert reader(timed).counts("batch", "work")[1:3] == (1, 42)
    assert reader(timed).count("stage", "forward") == 1


def test_spliced_spans_take_their_time_from_the_span_that_waited(timed, clock, reader):
    one, two = timed.request("score"), timed.request("score")
    one.__enter__()
    clock.tick(5)
    with timed.attach(None):
        two.__enter__()
        wait = timed.stage("wait")
        wait.__enter__()
        clock.tick(5)
        with timed.attach(None), timed.carrier("work") as carrier:
            clock.tick(10)
            with timed.stage("forward"):
                clock.tick(30)
        for request in (one, two):
            timed.splice(carrier.packed, request)
        clock.tick(1)
        wait.__exit__(None, None, None)
        two.__exit__(None, None, None)
    one.__exit__(None, None, None)
    first, second = sorted(reader(timed).drain(), key=lambda record: record.id)
    assert reader(timed).vector(first) == {"unattributed:unattributed": 11, "batch:work": 10, "forward": 30}
    assert reader(timed).vector(second) == {"wait": 6, "batch:work": 10, "forward": 30}
    assert [row[0::3] for row in names(timed, second)] == [("stage:wait", 255), ("batch:work", 0), ("stage:forward", 1)]
    assert reader(timed).count("stage", "forward") == 1
    assert timed.counters()["late_spans"] == 0


def test_work_that_began_before_the_wait_is_cut_there(timed, clock, reader):
    """A batch may start between the hand-over and the stage in which the request waits."""
    with timed.request("score") as request:
        clock.tick(4)
        begin = clock.now
        with timed.stage("wait"):
            packed = record(timed, clock, begin - 2, begin + 10)
            clock.tick(12)
            timed.splice(packed, request)
    (one,) = reader(timed).drain()
    assert reader(timed).vector(one) == {"unattributed:unattributed": 2, "batch:work": 12, "wait": 2}
    assert [row[0::3] for row in names(timed, one)] == [("stage:wait", 255), ("batch:work", 255), ("batch:work", 0)]


def record(recorder: Any, clock: Any, start: int, end: int, *, name: str = "work", pid: int | None = None, **columns: Any) -> Any:
    """A packed record of one span, made by hand."""
    import os

    extra = list(columns.items())
    spans = struct.pack("<qqqIHBB", start, end, 0, threading.get_native_id(), 0, 255, 0)
    for index, (_, (its_start, its_end, aux)) in enumerate(extra):
        spans += struct.pack("<qqqIHBB", its_start, its_end, aux, threading.get_native_id(), index + 1, 0, 0)
    return (pid or os.getpid(), (("batch", name), *((key, key) for key, _ in extra)), spans, False)


def test_a_wait_that_is_over_by_now_is_still_the_parent(timed, clock, reader):
    """Results are often handed over inside the block: the request went on before it heard what the work was."""
    with timed.request("score") as request:
        start = clock.now
        with timed.stage("wait"):
            clock.tick(20)
        clock.tick(7)
        timed.splice(record(timed, clock, start + 5, start + 19), request)
    (one,) = reader(timed).drain()
    assert reader(timed).vector(one) == {"unattributed:unattributed": 7, "batch:work": 14, "wait": 6}
    assert names(timed, one)[1][3] == 0


def test_what_ran_beside_the_work_shares_by_the_critical_path(timed, clock, reader):
    with timed.request("score") as request:
        start = clock.now
        clock.tick(5)
        with timed.stage("log"):
            clock.tick(5)
        clock.tick(20)
        timed.splice(record(timed, clock, start + 2, start + 25), request)
        clock.tick(3)
    (one,) = reader(timed).drain()
    assert reader(timed).vector(one) == {"unattributed:unattributed": 10, "batch:work": 23}
    assert sum(one.vector) == one.wall_ns == 33


def test_work_outside_the_request_is_clipped_or_left_out(timed, clock, reader):
    before = clock.now
    clock.tick(100)
    with timed.request("score") as request:
        clock.tick(10)
        timed.splice(record(timed, clock, before, before + 50), request)
        timed.splice(record(timed, clock, before + 90, before + 500, stage=(before + 95, before + 400, 0)), request)
    (one,) = reader(timed).drain()
    assert sum(one.vector) == one.wall_ns == 10
    assert [row[1:3] for row in names(timed, one)] == [(before + 100, before + 110)] * 2


def test_a_request_that_ended_counts_a_late_span(timed, clock, reader):
    with timed.request("score") as request:
        clock.tick(10)
    timed.splice(record(timed, clock, clock.now - 5, clock.now), request)
    assert timed.counters()["late_spans"] == 1
    assert reader(timed).classed()["late_spans"] == 1
    assert sum(reader(timed).drain()[0].vector) == 10


def test_positions_run_out_and_the_sum_stays(timed, clock, reader):
    with timed.request("score") as request:
        for _ in range(60):
            with timed.stage("step"):
                clock.tick(1)
        with timed.attach(None), timed.carrier("work") as carrier:
            for _ in range(80):
                with timed.stage("part"):
                    clock.tick(1)
        assert len(carrier.packed[2]) == 65 * 32
        assert carrier.packed[3] is True
        timed.splice(carrier.packed, request)
    (one,) = reader(timed).drain()
    assert one.truncated
    assert sum(one.vector) == one.wall_ns == 140
    assert all(ns >= 0 for ns in one.vector)


def test_a_lock_site_of_another_process_means_nothing_here(timed, clock, reader):
    with timed.request("score") as request:
        clock.tick(10)
        start = clock.now - 8
        packed = record(timed, clock, start, start + 8, pid=1, lock=(start + 1, start + 4, 7))
        timed.splice(packed, request)
        clock.tick(10)
        timed.splice(record(timed, clock, start + 9, start + 18, lock=(start + 10, start + 12, 7)), request)
    (one,) = reader(timed).drain()
    assert [span[2] for span in one.spans] == [0, 0, 0, 7]


@pytest.mark.parametrize(
    "packed",
    [
        (),
        "text",
        (1, (), b"", False),
        (1, (("batch", "x"),), b"12345", False),
        (1, (("batch", "x"),), struct.pack("<qqqIHBB", 0, 9, 0, 1, 7, 255, 0), False),
        (1, (("batch", "x"),), struct.pack("<qqqIHBB", 9, 0, 0, 1, 0, 255, 0), False),
        (1, (("batch", "x"),), struct.pack("<qqqIHBB", 0, 9, 0, 1, 0, 255, 0) + struct.pack("<qqqIHBB", 0, 9, 0, 1, 0, 40, 0), False),
        (1, (("batch", "x"),), struct.pack("<qqqIHBB", 0, 9, 0, 1, 0, 255, 0) * 66, False),
        (1, ("batch",), struct.pack("<qqqIHBB", 0, 9, 0, 1, 0, 255, 0), False),
    ],
)
def test_what_no_carrier_packed_is_refused_and_counted(implementation, monkeypatch, packed):
    monkeypatch.delenv("INFERSCOPE_STRICT", raising=False)
    recorder = implementation()
    with recorder.request("score") as request:
        recorder.splice(packed, request)
        recorder.splice(None, request)
        recorder.splice(packed, None)
    assert recorder.counters()["internal_errors"] == 1
    (row,) = recorder.drain()
    assert row[15] == b""


def test_an_error_inside_marks_the_work_and_passes(timed):
    with pytest.raises(KeyError), timed.carrier("work") as carrier:
        raise KeyError("x")
    (span,) = struct.iter_unpack("<qqqIHBB", carrier.packed[2])
    assert span[6] & SpanFlag.ERROR
    assert carrier.error == "KeyError"


def test_hooks_and_cpu_time_do_not_see_a_carrier(implementation):
    recorder = implementation()
    seen: list[str] = []
    recorder.armed = True
    recorder.cpu_mode = "on"
    recorder.set_hooks(on_start=lambda request: seen.append(request.name) or True)

    def serve() -> None:
        with recorder.request("score"), recorder.carrier("work"), recorder.stage("forward"):
            sum(range(10_000))

    serve()
    assert seen == ["score"]
    (row,) = recorder.drain()
    assert row[10] is not None, "the work ran on the request's own thread: its CPU time is the request's"


@pytest.mark.parametrize("wanted", [True, False])
def test_hooks_hear_of_a_batch_when_one_of_its_requests_is_wanted(timed, wanted):
    heard: list[tuple[str, str, str, bool]] = []
    timed.set_hooks(
        on_enter=lambda request, name, kind: heard.append(("enter", name, kind, request.wanted)),
        on_exit=lambda request, name, kind: heard.append(("exit", name, kind, request.wanted)),
        on_finish=lambda request, _wall: heard.append(("finish", request.name, "", request.wanted)),
    )
    with timed.request("score") as first:
        pass
    with timed.request("score") as second, timed.attach(None):
        second.wanted = wanted
        with Batch([first, second, None], "forward", None, timed), timed.stage("layers"):
            pass
        second.wanted = False
    assert heard == [("enter", "layers", "with", True), ("exit", "layers", "with", True)] * wanted
    assert timed.counters()["hook_errors"] == 0


def test_a_carrier_may_serve_again(timed, clock):
    carrier = timed.carrier("work")
    with carrier:
        clock.tick(3)
    first = carrier.packed
    with carrier:
        assert carrier.packed is None
        clock.tick(4)
    assert first is not None
    assert carrier.packed != first
    carrier.discard()
    assert timed.carrier("work")(len) is len


def test_a_batch_serves_every_request_and_says_how_long_each_waited(timed, clock, reader):
    requests = [timed.request("score", items=n) for n in (1, 2, 3)]
    for request in requests:
        with timed.attach(None):
            request.__enter__()
        clock.tick(10)
    with timed.attach(None), batch(timed, [*requests, None, requests[0]], "forward") as work:
        clock.tick(100)
    assert work.packed is not None
    for request in requests:
        request.finish()
    records = sorted(reader(timed).drain(), key=lambda one: one.items)
    assert [reader(timed).vector(one) for one in records] == [{"queue:forward": 30 - 10 * n, "batch:forward": 100} for n in range(3)]
    assert reader(timed).counts("batch", "forward")[1:3] == (1, 100)
    assert reader(timed).counts("queue", "forward")[1:3] == (3, 60)
    assert timed.counters()["late_spans"] == 0


def test_queueing_may_be_told(timed, clock, reader):
    with timed.request("score") as one, timed.attach(None), timed.request("score") as two, timed.attach(None):
        clock.tick(50)
        with batch(timed, [one, two], queued_ns=[clock.now - 20, None]):
            clock.tick(10)
        with batch(timed, [one], queued_ns=clock.now + 5):
            clock.tick(10)
    assert reader(timed).counts("queue", "batch")[1:3] == (2, 70)


def test_the_request_around_the_block_is_linked_once(timed, clock, reader):
    with timed.request("score") as request:
        clock.tick(3)
        with batch(timed, [request]), timed.stage("forward"):
            clock.tick(7)
        with batch(timed, []):
            clock.tick(5)
    (one,) = reader(timed).drain()
    assert reader(timed).vector(one) == {"queue:batch": 3, "forward": 7, "batch:batch": 5}
    assert one.spans[1][6] & THREAD == 0


def test_batches_of_batches(timed, clock, reader):
    with timed.request("score") as request, timed.attach(None):
        with batch(timed, [request], "outer"):
            clock.tick(1)
            with batch(timed, [], "inner"):
                clock.tick(5)
    (one,) = reader(timed).drain()
    assert reader(timed).vector(one) == {"batch:outer": 1, "batch:inner": 5}


def test_parallel_batches_share_by_the_critical_path(timed, clock, reader):
    with timed.request("score") as request, timed.stage("wait"):
        start = clock.now
        clock.tick(30)
        timed.splice(foreign(start + 5, start + 25, "long"), request)
        timed.splice(foreign(start + 10, start + 20, "short"), request)
    (one,) = reader(timed).drain()
    assert reader(timed).vector(one) == {"wait": 10, "batch:long": 20}


def foreign(start: int, end: int, name: str) -> Any:
    return (1, (("batch", name),), struct.pack("<qqqIHBB", start, end, 0, 1, 0, 255, 0), False)


def test_threads_hand_requests_to_a_batcher(recorder, reader):
    """Twenty clients, one batcher: nothing mixes, nothing is lost, every vector sums to its wall time."""
    inbox: list[tuple[Any, Future[int], int]] = []
    ready = threading.Condition()
    clients, rounds = 10, 8

    def serve(number: int) -> int:
        with recorder.request("score", items=number) as request:
            answer: Future[int] = Future()
            with ready:
                inbox.append((request, answer, number))
                ready.notify()
            with recorder.stage("wait"):
                return answer.result(10)

    def work() -> None:
        served = 0
        while served < clients * rounds:
            with ready:
                ready.wait_for(lambda: inbox, 10)
                taken = inbox[:]
                inbox.clear()
            with batch(recorder, [item[0] for item in taken], "forward"), recorder.stage("model"):
                time.sleep(0.002)
            for _, answer, number in taken:
                answer.set_result(number)
            served += len(taken)

    worker = threading.Thread(target=work)
    worker.start()
    with ThreadPoolExecutor(clients) as pool:
        assert list(pool.map(serve, range(clients * rounds))) == list(range(clients * rounds))
    worker.join()
    records = reader(recorder).drain()
    assert len(records) >= 64
    model = recorder.columns().index(("stage", "model"))
    for one in records:
        assert sum(one.vector) == one.wall_ns
        assert one.vector[model] >= 1_500_000
        assert one.cpu_ns is None
    assert recorder.counters()["late_spans"] == 0
    batches = reader(recorder).count("batch", "forward")
    assert reader(recorder).count("stage", "model") == batches <= clients * rounds


async def test_tasks_hand_requests_to_a_batcher(recorder, reader):
    inbox: asyncio.Queue[tuple[Any, asyncio.Future[None]]] = asyncio.Queue()

    async def serve() -> None:
        with recorder.request("score") as request:
            answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            inbox.put_nowait((request, answer))
            await answer

    async def work() -> None:
        for _ in range(5):
            taken = [await inbox.get() for _ in range(4)]
            with batch(recorder, [request for request, _ in taken], "forward"), recorder.stage("model"):
                await asyncio.sleep(0.002)
            for _, answer in taken:
                answer.set_result(None)

    worker = asyncio.create_task(work())
    await asyncio.gather(*(serve() for _ in range(20)))
    await worker
    records = reader(recorder).drain()
    assert len(records) == 20
    model = recorder.columns().index(("stage", "model"))
    for one in records:
        assert sum(one.vector) == one.wall_ns
        assert one.vector[model] >= 1_500_000
    assert reader(recorder).count("queue", "forward") == 20


WORKER = """
import time
from inferscope.record import fallback
if not pure:
    from inferscope.record import _native
recorder = (fallback if pure else _native).Recorder()
with recorder.carrier("worker") as carrier, recorder.stage("forward"):
    time.sleep(0.02)
pipe.send(carrier.packed)
"""


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_work_in_another_process(recorder, reader, method):
    context = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    with recorder.request("score") as request, recorder.stage("wait"):
        worker = context.Process(target=exec, args=(WORKER, {"pure": isinstance(recorder, fallback.Recorder), "pipe": theirs}))
        worker.start()
        assert ours.poll(30)
        packed = ours.recv()
        recorder.splice(packed, request)
        worker.join(30)
    assert pickle.loads(pickle.dumps(packed)) == packed
    (one,) = reader(recorder).drain()
    columns = recorder.columns()
    told = {columns[i]: ns for i, ns in enumerate(one.vector) if ns}
    assert told["stage", "forward"] >= 19_000_000
    assert sum(one.vector) == one.wall_ns
    assert [row[3] for row in names(recorder, one)] == [255, 0, 1]
    assert reader(recorder).count("stage", "forward") == 0, "counted over there"


def test_both_cores_agree_on_many_shapes():
    """The same random requests and works on one clock: the same records."""
    _native = pytest.importorskip("inferscope.record._native", reason="the C core was not built")
    import random

    for seed in range(60):
        rows = [play(core_class, random.Random(seed)) for core_class in (fallback.Recorder, _native.Recorder)]
        assert rows[0] == rows[1], seed


def play(core_class: Any, dice: Any) -> Any:
    now = [1_000_000]
    recorder = core_class(clock=lambda: now[0])
    works: list[Any] = []

    def step() -> None:
        now[0] += dice.randrange(1, 9)

    def span(depth: int) -> None:
        with recorder.stage(f"s{dice.randrange(4)}"):
            step()
            for _ in range(dice.randrange(3) if depth < 3 else 0):
                span(depth + 1)
            maybe_work()
            step()

    def maybe_work() -> None:
        if dice.random() < 0.4:
            start = now[0] - dice.randrange(0, 60)
            works.append((start, start + dice.randrange(1, 50)))
        if works and dice.random() < 0.5:
            start, end = works.pop()
            middle = (start + end) // 2
            spans = struct.pack("<qqqIHBB", start, end, 0, 1, 0, 255, 0) + struct.pack("<qqqIHBB", start, middle, 0, 1, 1, 0, 0)
            recorder.splice((1, (("batch", "b"), ("stage", "s1")), spans, False), recorder.current())

    with recorder.request("r"):
        for _ in range(dice.randrange(1, 12)):
            span(0)
            maybe_work()
            step()
    (row,) = recorder.drain()
    import array

    vector = array.array("q", row[14])
    assert sum(vector) == row[3]
    assert min(vector) >= 0
    columns = recorder.columns()
    spans = [(columns[s[4]], s[0], s[1], s[5], s[6]) for s in struct.iter_unpack("<qqqIHBB", row[15])]
    return {columns[i]: ns for i, ns in enumerate(vector) if ns}, spans, recorder.counters()


def test_the_public_name_and_its_disabled_form():
    import inferscope

    assert inferscope.batch([]).__class__ is Batch
    code = (
        "import inferscope\n"
        "with inferscope.request('r') as r, inferscope.batch([r, None], 'b', queued_ns=1) as work: pass\n"
        "assert work.packed is None and inferscope.status()['failures'] == {}\n"
    )
    import os

    for extra in ({"INFERSCOPE_DISABLED": "1"}, {}):
        environment = {**os.environ, "INFERSCOPE_STRICT": "1", **extra}
        code = code if extra else code.replace("work.packed is None", "work.packed[1] == (('batch', 'b'),)")
        subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    assert core.IMPLEMENTATION in {"native", "pure"}
