"""Threads, forks and the choice of the implementation."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest


@pytest.fixture
def hasty():
    """Threads switch every microsecond."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def run_threads(count, work):
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def hammer(recorder, reader, each):
    def work(number):
        stage = recorder.stage
        for _ in range(each // 10):
            with recorder.request("r"):
                for _ in range(10):
                    with stage("s"):
                        pass

    run_threads(4, work)
    counts, count, total, _ = reader(recorder).counts("stage", "s")
    assert sum(counts) == count == 4 * each
    assert total > 0
    assert reader(recorder).classed()["count"] == reader(recorder).count("request", "r", "", "") == 4 * each // 10
    assert sum(row[1] for row in reader(recorder).bands()) == 4 * each // 10


def test_threads_lose_no_record(recorder, reader, hasty):
    hammer(recorder, reader, 10_000)


@pytest.mark.slow
def test_threads_lose_none_of_a_million_records(recorder, reader, hasty):
    hammer(recorder, reader, 250_000)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_four_threads_lose_none_of_a_million_records_each(recorder, reader, hasty):
    hammer(recorder, reader, 1_000_000)


def test_readers_do_not_disturb_writers(recorder, reader, hasty):
    done = threading.Event()
    seen = []

    def read():
        while not done.is_set():
            counts, count, _, _ = reader(recorder).counts("stage", "s")
            seen.append(count)
            recorder.drain()
            if counts:
                assert sum(counts) == count
            if recorder.classes():
                recorder.read_bands(0)

    thread = threading.Thread(target=read)
    thread.start()
    hammer(recorder, reader, 2_000)
    done.set()
    thread.join()
    assert seen == sorted(seen)


def test_many_threads_in_one_request_sum_to_its_wall_time(recorder, reader, hasty):
    def work(request):
        with recorder.attach(request):
            for _ in range(5):
                with recorder.stage("w"):
                    sum(range(50))

    for _ in range(20):
        with recorder.request("r") as request, recorder.stage("join"):
            threads = [threading.Thread(target=work, args=(request,)) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    for record in reader(recorder).drain():
        assert sum(record.vector) == record.wall_ns
        assert min(record.vector) >= 0
        assert record.cpu_ns is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_starts_from_nothing(recorder, reader):
    with recorder.request("r"), recorder.stage("s"):
        pass
    open_request = recorder.request("r")
    open_request.__enter__()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            recorder.after_fork()
            open_request.__exit__(None, None, None)
            ok = reader(recorder).count("stage", "s") == 0 and reader(recorder).classed()["count"] == 0
            ok = ok and recorder.drain() == [] and recorder.current() is None
            recorder.cpu_mode = "on"
            with recorder.request("r"), recorder.stage("s"):
                pass
            (record,) = reader(recorder).drain()
            ok = ok and record.thread_id == os.getpid() and record.cpu_ns is not None
            ok = ok and reader(recorder).count("stage", "s") == 1 and reader(recorder).classed()["count"] == 1
            code = 0 if ok else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    open_request.__exit__(None, None, None)
    assert reader(recorder).classed()["count"] == 2


def choose(**environment):
    program = (
        "import sys; from inferscope.record import core\n"
        "r = core.default\n"
        "with r.request('r') as q, r.stage('s'):\n    q.items = 2\n"
        "import threading; lock = threading.Lock(); same = r.lock('l', lock) is lock\n"
        "@r.stage('f')\ndef f(): return 7\n"
        "with r.attach(None): assert f() == 7\n"
        "r.interval('copy', 'x', 0, 1); r.set_edges('r', [1]); r.begin_epoch(); r.after_fork()\n"
        "print(core.IMPLEMENTATION, len(r.series()), same, 'inferscope.record._native' in sys.modules, sorted(r.counters().values())[-1])\n"
        "assert not {'torch', 'numpy', 'opentelemetry', 'asyncio'} & set(sys.modules)\n"
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith("INFERSCOPE_")}
    done = subprocess.run([sys.executable, "-c", program], env={**kept, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_the_disabled_recorder_keeps_nothing():
    assert choose(INFERSCOPE_DISABLED="1") == ["disabled", "0", "True", "False", "0"]


def test_pure_on_request():
    assert choose(INFERSCOPE_PURE="1") == ["pure", "6", "False", "False", "0"]


def test_the_core_is_taken_when_it_is_there():
    implementation, series, same, _, errors = choose()
    assert implementation in {"native", "pure"}
    assert (series, same, errors) == ("6", "False", "0")
