"""An instrumented lock is the lock, and says what it cost."""

from __future__ import annotations

import copy
import os
import pickle
import queue
import subprocess
import sys
import threading
import time
import weakref

import pytest

from inferscope.types import SpanFlag

KINDS = {
    "Lock": threading.Lock,
    "RLock": threading.RLock,
    "Semaphore": threading.Semaphore,
    "BoundedSemaphore": threading.BoundedSemaphore,
    "Condition": threading.Condition,
}


@pytest.fixture(params=KINDS)
def raw(request):
    return KINDS[request.param]()


@pytest.fixture
def lock(recorder, raw):
    return recorder.lock("l", raw)


def in_thread(function, *args):
    """The result of a function run to its end in another thread."""
    box = []
    thread = threading.Thread(target=lambda: box.append(function(*args)))
    thread.start()
    thread.join()
    return box[0]


def outcome(function, *args, **kwargs):
    """What a call does: its result, or its exception's type and message."""
    try:
        return function(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - it is the outcome
        return type(error), str(error)


def test_is_what_it_wraps(lock, raw):
    assert isinstance(lock, type(raw))
    assert lock.wrapped is raw
    assert lock.name == "l"
    assert weakref.ref(lock)() is lock


def test_with_and_holds(lock, recorder, reader):
    for _ in range(3):
        with lock as entered:
            assert entered is True
    assert lock.acquire() is True
    lock.release()
    assert reader(recorder).count("lock.hold", "l") == 4
    counts, count, total, _ = reader(recorder).counts("lock.wait", "l")
    assert (count, counts[0], total) == (4, 4, 0)
    assert reader(recorder).sum("lock.hold", "l") > 0


def test_holds_are_measured_on_the_clock(timed, clock, reader, raw):
    lock = timed.lock("l", raw)
    with timed.request("r"), lock:
        clock.tick(50)
    assert reader(timed).sum("lock.hold", "l") == 50
    (record,) = reader(timed).drain()
    assert reader(timed).vector(record) == {"unattributed:unattributed": 50}, "holding is not waiting"
    assert record.spans == []


def test_the_body_raises_unchanged_and_the_lock_is_free(lock):
    error = ZeroDivisionError("x")
    with pytest.raises(ZeroDivisionError) as caught, lock:
        raise error
    assert caught.value is error
    assert in_thread(lock.acquire, False) is True


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((), {}), ((True,), {}), ((False,), {}), ((), {"blocking": False}), ((True, 0.01), {}), ((), {"timeout": 0.01}), ((), {"timeout": 0}),
     ((False, 1), {}), ((True, -5), {}), ((), {"timeout": 1e99}), ((), {"timeout": "x"}), ((), {"wrong": 1})],
)  # fmt: skip
def test_acquire_answers_as_the_lock_itself(recorder, raw, args, kwargs):
    lock = recorder.lock("l", raw)
    fresh = type(raw)() if not isinstance(raw, type(threading.Lock())) else threading.Lock()
    expected, got = outcome(fresh.acquire, *args, **kwargs), outcome(lock.acquire, *args, **kwargs)
    if isinstance(expected, tuple) and "argument" in expected[1]:
        assert isinstance(got, tuple)
        assert got[0] is expected[0], "only the wording about the signature may differ"
    else:
        assert got == expected


def test_release_of_a_free_lock_fails_as_the_lock_itself(recorder, raw):
    lock = recorder.lock("l", raw)
    fresh = threading.Lock() if isinstance(raw, type(threading.Lock())) else type(raw)()
    assert outcome(lock.release) == outcome(fresh.release)


def test_a_held_lock(recorder, reader, raw):
    lock = recorder.lock("l", raw)
    with lock:
        assert in_thread(lock.acquire, False) is False
        assert in_thread(lambda: lock.acquire(timeout=0.01)) is False
    assert in_thread(lambda: (lock.acquire(timeout=1), lock.release())[0]) is True
    assert reader(recorder).count("lock.wait", "l") == 2, "an acquire that failed counts nowhere"
    assert recorder.lock_sites() == [] or all(row[4] == 0 for row in recorder.lock_sites())


def test_locked(recorder):
    lock = recorder.lock("l", threading.Lock())
    assert lock.locked() is False
    with lock:
        assert lock.locked() is True


def test_pickling_and_copying_fail_as_the_lock_itself(lock, raw):
    for act in (pickle.dumps, copy.deepcopy):
        assert outcome(act, lock) == outcome(act, raw)


def test_other_attributes_reach_the_lock(recorder):
    semaphore = threading.Semaphore(3)
    assert recorder.lock("s", semaphore)._value == 3
    with pytest.raises(AttributeError):
        _ = recorder.lock("l", threading.Lock()).nonsense


def test_wrapping_twice_is_wrapping_once(recorder, raw):
    lock = recorder.lock("l", raw)
    assert recorder.lock("l", lock) is lock


def test_reentry_is_one_hold(timed, clock, reader):
    lock = timed.lock("l", threading.RLock())
    with lock:
        clock.tick(1)
        with lock:
            clock.tick(2)
            assert in_thread(lock.acquire, False) is False
        clock.tick(4)
    assert (reader(timed).count("lock.hold", "l"), reader(timed).sum("lock.hold", "l")) == (1, 7)
    assert reader(timed).count("lock.wait", "l") == 1
    assert outcome(lock.release)[0] is RuntimeError


def test_hand_off_release_by_another_thread(timed, clock, reader):
    lock = timed.lock("l", threading.Lock())
    lock.acquire()
    clock.tick(5)
    in_thread(lock.release)
    assert lock.locked() is False
    assert reader(timed).count("lock.hold", "l") == 0, "nobody ended what he began"
    with lock:
        clock.tick(3)
    assert reader(timed).sum("lock.hold", "l") == 3


def test_semaphore_permits(timed, clock, reader):
    lock = timed.lock("s", threading.Semaphore(2))
    lock.acquire()
    clock.tick(1)
    lock.acquire()
    clock.tick(2)
    assert lock.acquire(blocking=False) is False
    lock.release(2)
    assert reader(timed).count("lock.hold", "s") == 2
    assert reader(timed).sum("lock.hold", "s") == 5
    lock.acquire()
    in_thread(lock.release)
    assert reader(timed).count("lock.hold", "s") == 2


def test_a_condition_over_an_instrumented_lock(recorder, reader):
    for made in (threading.Lock, threading.RLock):
        lock = recorder.lock("l", made())
        condition = threading.Condition(lock)
        items = []

        def consume(condition=condition, items=items):
            with condition:
                return condition.wait_for(lambda: items, timeout=5)

        def produce(condition=condition, items=items):
            with condition:
                items.append(1)
                condition.notify()

        thread = threading.Timer(0.01, produce)
        thread.start()
        assert consume()
        thread.join()
        with pytest.raises(RuntimeError, match="un-acquired"):
            condition.notify()
    assert reader(recorder).count("lock.hold", "l") >= 6


def test_a_reentrant_lock_gives_all_its_levels_up_inside_a_condition(recorder):
    lock = recorder.lock("l", threading.RLock())
    condition = threading.Condition(lock)
    with lock, lock, condition:
        assert condition.wait(timeout=0.01) is False
        assert lock._is_owned()
        assert in_thread(lock.acquire, False) is False
    assert in_thread(lambda: (lock.acquire(False), lock.release())[0]) is True


def test_waiting_on_an_instrumented_condition_is_no_hold(recorder, reader):
    condition = recorder.lock("c", threading.Condition())
    with condition:
        assert condition.wait(0.05) is False
        assert condition.wait_for(lambda: False, 0.01) is False
        assert condition.wait_for(lambda: 5) == 5
    assert reader(recorder).count("lock.hold", "c") >= 2
    assert reader(recorder).sum("lock.hold", "c") < 50_000_000
    done = []

    def wait():
        with condition:
            done.append(condition.wait_for(lambda: done, 5))

    with condition:
        thread = threading.Thread(target=wait)
        thread.start()
    time.sleep(0.01)
    with condition:
        done.append("told")
        condition.notify_all()
    thread.join()
    assert done[-1] == ["told"] or done[-1]


def test_a_queue_over_an_instrumented_mutex(recorder):
    box = queue.Queue(1)
    box.mutex = recorder.lock("q", threading.Lock())
    box.not_empty = threading.Condition(box.mutex)
    box.not_full = threading.Condition(box.mutex)
    thread = threading.Thread(target=lambda: [box.put(n) for n in range(50)])
    thread.start()
    assert [box.get(timeout=5) for _ in range(50)] == list(range(50))
    thread.join()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_at_fork_reinit_frees_the_lock(recorder, reader):
    for made in (threading.Lock, threading.RLock):
        lock = recorder.lock("l", made())
        lock.acquire()
        lock._at_fork_reinit()
        assert in_thread(lambda lock=lock: (lock.acquire(False), lock.release())[0]) is True
        with lock:
            pass


def slow_holder(lock, held, release):
    with lock:
        held.set()
        release.wait(5)
        time.sleep(0.002)


def test_a_waiter_blames_the_holder_and_places_its_wait(recorder, reader, raw):
    lock = recorder.lock("rules", raw)
    held, release = threading.Event(), threading.Event()

    def reload():
        with recorder.request("reload", cls="nightly"), recorder.stage("rebuild"):
            slow_holder(lock, held, release)

    holder = threading.Thread(target=reload)
    holder.start()
    held.wait(5)
    threading.Timer(0.02, release.set).start()
    with recorder.request("score"), recorder.stage("apply"), lock:
        pass
    holder.join()
    record = next(record for record in reader(recorder).drain() if recorder.classes()[record.cls][1] == "score")
    vector = reader(recorder).vector(record)
    assert vector["lock:rules"] > 15_000_000
    assert sum(record.vector) == record.wall_ns
    (span,) = [span for span in record.spans if recorder.columns()[span[4]] == ("lock", "rules")]
    assert span[6] & SpanFlag.CONTENDED
    assert record.spans[span[5]][4] == recorder.columns().index(("stage", "apply"))
    (site,) = recorder.lock_sites()
    name, number, where, stage, waits, wait_ns, longest, request = site
    assert (name, request, stage, waits) == ("rules", "reload (nightly)", "rebuild", 1)
    assert number == span[2] >= 1
    assert where.startswith("slow_holder (test_locks.py:")
    assert wait_ns == vector["lock:rules"]
    assert longest > 15_000_000
    counts, count, total, _ = reader(recorder).counts("lock.wait", "rules")
    assert (count, counts[0], total) == (2, 1, wait_ns)


def test_the_root_of_a_convoy_is_blamed(recorder, reader):
    """One slow holder; a second thread waits for it and holds for next to nothing; those who wait for the second blame the first."""
    lock = recorder.lock("l", threading.Lock())
    held, release = threading.Event(), threading.Event()
    slow = threading.Thread(target=slow_holder, args=(lock, held, release))
    slow.start()
    held.wait(5)
    order = []

    def quick(number, hold_s):
        with lock:
            order.append(number)
            time.sleep(hold_s)

    first = threading.Thread(target=quick, args=(1, 0.005))
    first.start()
    time.sleep(0.03)
    release.set()
    while not order:
        time.sleep(0.0005)
    in_thread(quick, 2, 0)  # waits for `quick` number 1, which itself had waited six times as long as it holds
    for thread in (slow, first):
        thread.join()
    sites = {row[2].split(" ")[0]: row for row in recorder.lock_sites()}
    assert sites["slow_holder"][4] == 2
    assert all(row[4] == 0 for name, row in sites.items() if name != "slow_holder")


def test_a_holder_that_is_slow_itself_is_to_blame_although_it_waited(recorder):
    lock = recorder.lock("l", threading.Lock())
    held, release = threading.Event(), threading.Event()
    first = threading.Thread(target=slow_holder, args=(lock, held, release))
    first.start()
    held.wait(5)
    order = []

    def slower():
        with lock:
            order.append(1)
            time.sleep(0.06)

    second = threading.Thread(target=slower)
    second.start()
    time.sleep(0.005)
    release.set()
    while not order:
        time.sleep(0.0005)
    in_thread(lambda: (lock.acquire(), lock.release()))
    first.join()
    second.join()
    waits = {row[2].split(" ")[0].split(".")[-1]: row[4] for row in recorder.lock_sites()}
    assert waits["slower"] == 1


def test_looking_at_the_holder_is_safe_while_the_collector_runs(recorder):
    """CPython 3.11 hangs when a collection inside `sys._current_frames` frees a `threading.local`."""
    program = """
import gc, os, threading, time
from inferscope.record.sites import site_of_thread

class Cycle:
    def __init__(self):
        self.me = self
        self.local = threading.local()

def fresh(depth):
    if depth:
        return fresh(depth - 1)
    time.sleep(0.0002)

def work():
    while True:
        fresh(3)

threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
for thread in threads:
    thread.start()
for number in range(200):
    gc.disable()
    gc.collect()
    for _ in range(10):
        Cycle()
    gc.set_threshold(gc.get_count()[0] + number % 5)
    gc.enable()
    site_of_thread(threads[0].ident)
    time.sleep(0.0005)
assert gc.isenabled()
gc.disable()
assert site_of_thread(threads[0].ident).startswith(("fresh (", "work ("))
assert not gc.isenabled()
print("alive", flush=True)
os._exit(0)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "alive\n", done.stderr


def test_contended_threads_lose_no_hold(recorder, reader):
    lock = recorder.lock("l", threading.Lock())

    def work():
        for _ in range(2000):
            with lock:
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert reader(recorder).count("lock.hold", "l") == reader(recorder).count("lock.wait", "l") == 8000


def test_holds_can_be_left_untimed(recorder, reader, raw):
    recorder.lock_holds = False
    lock = recorder.lock("l", raw)
    with lock:
        pass
    assert reader(recorder).count("lock.hold", "l") == 0
    assert reader(recorder).count("lock.wait", "l") == 1
