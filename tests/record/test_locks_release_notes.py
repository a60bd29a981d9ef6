"""What went wrong in a lock profiler that many use, as a list of tests: each is named after a release note of ddtrace's.

The notes are in `releasenotes/notes` of github.com/DataDog/dd-trace-py; the name of each follows its test in brackets. Wherever a lock
without a name can do the same thing, it does, and the named one must do as it does. gevent and eventlet, patched before and after, are
`test_greenlets` of test_concurrency.py; costs are benchmarks/locks.py.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from array import array
from dataclasses import dataclass, field
from typing import Any, get_type_hints

import pytest

from inferscope.record import fallback

KINDS = {
    "Lock": threading.Lock,
    "RLock": threading.RLock,
    "Semaphore": threading.Semaphore,
    "BoundedSemaphore": threading.BoundedSemaphore,
    "Condition": threading.Condition,
}
ASYNC = {
    "Lock": asyncio.Lock,
    "Semaphore": asyncio.Semaphore,
    "BoundedSemaphore": asyncio.BoundedSemaphore,
    "Condition": asyncio.Condition,
}


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


def outcome(function, *args):
    """What a call does: its result, or its exception's type and message."""
    try:
        return function(*args)
    except Exception as error:  # noqa: BLE001 - it is the outcome
        return type(error), str(error)


def both(recorder, make):
    """The same lock without and with a name."""
    return make(), recorder.lock("l", make())


class Job:
    """A thread whose end is waited for, and what it returned."""

    def __init__(self, function, *args):
        self.result = None
        self._thread = threading.Thread(target=self._run, args=(function, args))
        self._thread.start()

    def _run(self, function, args):
        self.result = function(*args)

    def end(self):
        self._thread.join(10)
        assert not self._thread.is_alive()
        return self.result


# -- what is counted ------------------------------------------------------------------------------------------------------------------


def test_each_hold_is_counted_once_by_the_outermost_lock(recorder, reader, kind):
    """[Added support for profiling of threading.Semaphore, BoundedSemaphore, Condition: no double counting of the lock inside]"""
    lock = recorder.lock("l", kind())
    for _ in range(5):
        with lock:
            pass
    kinds = {(series[1], series[2]): reader(recorder).count(series[1], *series[2]) for series in recorder.series()}
    assert kinds == {("lock.wait", ("l",)): 5, ("lock.hold", ("l",)): 5}


def test_a_failed_acquire_counts_nowhere(recorder, reader, kind):
    """[fix-profiling-lock-spurious-acquire-sample-on-failed-acquire, fix-profiling-thread-lock]"""
    lock = recorder.lock("l", kind())
    with lock:
        assert Job(lambda: (lock.acquire(False), lock.acquire(True, 0.01))).end() == (False, False)
    assert (reader(recorder).count("lock.wait", "l"), reader(recorder).count("lock.hold", "l")) == (1, 1)


@pytest.mark.parametrize("make", [threading.Lock, threading.RLock])
def test_a_hold_that_was_not_seen_to_begin_has_no_length(timed, clock, reader, make):
    """[lock-profiler-fix-inflated-lock-hold-times: releases without their acquire gave 3.24k days a minute, and -970]"""
    raw = make()
    lock = timed.lock("l", raw)
    clock.tick(10**15)
    raw.acquire()  # past the wrapper, by who got hold of the lock before it had a name
    clock.tick(7)
    lock.release()
    assert reader(timed).count("lock.hold", "l") == 0
    with lock:
        clock.tick(3)
    assert (reader(timed).count("lock.hold", "l"), reader(timed).sum("lock.hold", "l")) == (1, 3)


def test_a_hold_ends_with_its_own_beginning(recorder, reader):
    """[profiling-lock-acquired-at: releases captured with a wrong acquire time; -remove: a race for the attribute]"""
    lock = recorder.lock("l", threading.Lock())
    longest = []

    def work():
        for _ in range(300):
            with lock:
                began = time.perf_counter_ns()
                while time.perf_counter_ns() - began < 5_000:
                    pass
                inside = time.perf_counter_ns() - began
            longest.append(inside)

    began = time.perf_counter_ns()
    jobs = [Job(work) for _ in range(4)]
    for job in jobs:
        job.end()
    elapsed = time.perf_counter_ns() - began
    held = reader(recorder).sum("lock.hold", "l")
    assert reader(recorder).count("lock.hold", "l") == 1200
    assert sum(longest) <= held <= elapsed, "holds of one lock do not overlap, so that together they are no longer than the run"


def test_with_and_methods_are_counted_alike(recorder, reader, kind):
    """[profiling-add-lock-with]"""
    lock = recorder.lock("l", kind())
    with lock:
        pass
    lock.acquire()
    lock.release()
    assert reader(recorder).count("lock.hold", "l") == 2


def test_every_level_of_a_reentrant_lock_belongs_to_one_hold(timed, clock, reader):
    """[feat-profiling-rlock-support]"""
    lock = timed.lock("l", threading.RLock())
    for _ in range(3):
        lock.acquire()
        clock.tick(2)
    for _ in range(3):
        lock.release()
        clock.tick(1)
    assert (reader(timed).count("lock.hold", "l"), reader(timed).sum("lock.hold", "l")) == (1, 8)


def test_locks_without_a_name_are_left_alone(recorder):
    """[profiling-lock-exclude-modules, forksafe-lock: what is not ours stays native]"""
    before = (threading.Lock, threading.RLock, threading.Condition, asyncio.Lock, threading._allocate_lock)
    recorder.lock("l", threading.Lock())
    assert (threading.Lock, threading.RLock, threading.Condition, asyncio.Lock, threading._allocate_lock) == before
    assert type(logging.getLogger().manager.loggerDict) is dict
    assert type(logging._lock) is type(threading.RLock())


# -- types ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [*KINDS.values(), *ASYNC.values()])
def test_unions_of_types(recorder, make):
    """[fix-lock-profiler-pep604-type-union: `asyncio.Condition | None` in a class body]"""

    async def run():
        raw, lock = both(recorder, make)
        assert lock.__class__ is type(raw)
        assert outcome(lambda: make | None) == outcome(lambda: type(raw) | None if isinstance(make, type) else make | None)
        assert (lock.__class__ | None) == (type(raw) | None)
        assert isinstance(lock, type(raw) | None)

    asyncio.run(run())


def test_annotations_of_dataclasses(recorder):
    """[the same, as libraries write it]"""

    @dataclass
    class Operator:
        condition: asyncio.Condition | None = None
        mutex: threading.Condition = field(default_factory=threading.Condition)

    made = Operator(mutex=recorder.lock("l", threading.Condition()))
    assert isinstance(made.mutex, get_type_hints(Operator)["mutex"] if sys.version_info >= (3, 10) else threading.Condition)
    with made.mutex:
        made.mutex.notify_all()


class Counted(threading.Semaphore):
    """A subclass with state and methods of its own, as Ray has."""

    def __init__(self, value=2):
        super().__init__(value)
        self.entries = 0

    def acquire(self, blocking=True, timeout=None):
        taken = super().acquire(blocking, timeout)
        self.entries += taken
        return taken

    __enter__ = acquire

    @property
    def half(self):
        return self.entries / 2

    def double(self):
        return self.entries * 2


def test_subclasses_keep_what_they_add(recorder, reader):
    """[profiling-lock-use-vars-instead-of-dir, profiling-fix-lock-subclassing]"""
    raw, lock = Counted(), recorder.lock("l", Counted())
    for each in (raw, lock):
        with each:
            pass
        assert each.acquire(False) is True
        each.release()
        assert (each.entries, each.half, each.double()) == (2, 1.0, 4)
        each.tag = "gpu"
        assert each.tag == "gpu"
        del each.tag
        assert outcome(lambda each=each: each.tag)[0] is AttributeError
        each.entries = 10
        assert (each.entries, each.double()) == (10, 20)
        assert outcome(lambda each=each: each.nothing)[0] is AttributeError
    assert lock.wrapped.entries == 10, "what is set is set on the lock itself"
    assert reader(recorder).count("lock.hold", "l") == 2


class AsyncRLock(asyncio.Lock):
    """As neo4j's driver has one."""

    def __init__(self):
        super().__init__()
        self._owner = None
        self._count = 0

    async def acquire(self):
        task = asyncio.current_task()
        if self._owner is task:
            self._count += 1
            return True
        await super().acquire()
        self._owner, self._count = task, 1
        return True

    def release(self):
        if self._owner is not asyncio.current_task():
            message = "not the owner"
            raise RuntimeError(message)
        self._count -= 1
        if not self._count:
            self._owner = None
            super().release()


def test_an_asyncio_subclass_that_may_be_taken_again(recorder):
    """[profiling-fix-lock-subclassing: neo4j's AsyncRLock]"""

    async def run(make):
        lock = make()
        async with lock, lock:
            assert lock.locked()
            assert lock._count == 2
        assert not lock.locked()
        return outcome(lock.release)

    assert asyncio.run(run(AsyncRLock)) == asyncio.run(run(lambda: recorder.lock("l", AsyncRLock())))


def test_attributes_that_a_lock_gets_later(recorder, kind):
    """[profiling-lock-use-vars-instead-of-dir: two locks of one class need not have the same attributes]"""
    first, second = recorder.lock("first", kind()), kind()
    set_raw = outcome(setattr, second, "owner_name", "rules")
    lock = recorder.lock("second", second)
    got, expected = outcome(getattr, lock, "owner_name"), outcome(getattr, second, "owner_name")
    assert got == expected or (got[0] is expected[0] is AttributeError), "the twin's message names its own class"
    assert outcome(getattr, first, "owner_name")[0] is AttributeError
    assert (outcome(setattr, first, "owner_name", "x") is None) == (set_raw is None)


def test_subclassing_after_a_lock_has_a_name(recorder):
    """[profiling-fix-lock-subclassing: the classes stay classes]"""
    lock = recorder.lock("l", threading.Condition())

    class Own(threading.Condition):
        pass

    class Typed(lock.__class__):  # type: ignore[misc,name-defined]
        pass

    for each in (Own(), Typed()):
        with each:
            pass


def test_pickling_and_copies(recorder, kind):
    """[profiling-fix-lock-pickle-serialization, forksafe-lock-pickle: as the lock itself, which refuses]"""
    raw, lock = both(recorder, kind)
    for act in (pickle.dumps, copy.deepcopy):
        assert outcome(act, lock) == outcome(act, raw)
    copied, expected = outcome(copy.copy, lock), outcome(copy.copy, raw)
    assert type(copied) is type(expected)
    assert not isinstance(copied, tuple) or copied == expected


class Shared(threading.Semaphore):
    """A lock that does pickle."""

    def __reduce__(self):
        return Shared, (self._value,)


def test_a_lock_that_pickles_pickles_as_itself(recorder):
    """[profiling-fix-lock-pickle-serialization]"""
    made = pickle.loads(pickle.dumps(recorder.lock("l", Shared(3))))
    assert type(made) is Shared
    assert made._value == 3


def test_a_manager_starts_while_locks_have_names(recorder):
    """[profiling-fix-lock-pickle-serialization: `multiprocessing.Manager()` raised]"""
    lock = recorder.lock("l", threading.Lock())
    with lock:
        context = multiprocessing.get_context("spawn")
        assert context.Lock().acquire(False)
        assert type(context.Lock()).__module__.startswith("multiprocessing")


# -- errors ---------------------------------------------------------------------------------------------------------------------------


class Angry(threading.Semaphore):
    """Raises what it is told to."""

    error: type[BaseException] | None = None

    def acquire(self, blocking=True, timeout=None):
        if self.error is not None:
            raise self.error("own")
        return super().acquire(blocking, timeout)

    __enter__ = acquire


@pytest.mark.parametrize("error", [AssertionError, KeyboardInterrupt, RuntimeError, OSError])
def test_what_a_lock_raises_passes_unchanged(recorder, reader, error):
    """[fixed-silent-suppression-of-AssertionError-exceptions-in-Lock-profiler]"""
    inner = Angry()
    lock = recorder.lock("l", inner)
    inner.error = error
    with pytest.raises(error, match=r"^own$"):
        lock.acquire()
    with pytest.raises(error, match=r"^own$"), lock:
        pytest.fail("entered")
    inner.error = None
    with lock:
        pass
    assert (reader(recorder).count("lock.wait", "l"), reader(recorder).count("lock.hold", "l")) == (1, 1)


def test_releases_that_fail(recorder, kind):
    """[fixed-silent-suppression, profiling-lock-logging]"""
    raw, lock = both(recorder, kind)
    assert outcome(lock.release) == outcome(raw.release)
    with lock:
        pass
    assert outcome(lock.release) == outcome(raw.release)


def test_an_interrupt_while_waiting_leaves_no_hold(recorder, reader):
    """[the same: BaseException out of a wait]"""
    lock = recorder.lock("l", threading.Lock())
    held, done = threading.Event(), threading.Event()

    def hold():
        with lock:
            held.set()
            done.wait(10)

    job = Job(hold)
    held.wait(10)

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            lock.acquire()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    done.set()
    job.end()
    assert lock.acquire(timeout=5)
    lock.release()
    assert (reader(recorder).count("lock.wait", "l"), reader(recorder).count("lock.hold", "l")) == (2, 2)


def test_nothing_is_logged(recorder, kind, caplog):
    """[profiling-lock-logging, profiling-reduce-lock-profiler-log-spam: logging out of a lock recursed without end]"""
    handler = logging.getLogger().handlers[0] if logging.getLogger().handlers else logging.StreamHandler()
    was, handler.lock = handler.lock, recorder.lock("logging", threading.RLock())
    try:
        with caplog.at_level(logging.DEBUG):
            lock = recorder.lock("l", kind())
            with lock:
                pass
            outcome(lock.release)
            logging.getLogger().debug("one")
    finally:
        handler.lock = was
    assert [record.message for record in caplog.records] == ["one"]


# -- odd moments ----------------------------------------------------------------------------------------------------------------------

MOMENTS = """
import atexit, sys, threading
from inferscope.record import fallback
if {native}:
    from inferscope.record import _native
recorder = (_native if {native} else fallback).Recorder()
lock = recorder.lock("l", threading.RLock())

class Late:
    def __del__(self):
        with lock:
            print("deleted")

def ended():
    with lock:
        print("ended")

atexit.register(ended)
late = Late()
late.me = late
daemon = threading.Thread(target=lambda: [lock.acquire() and lock.release() for _ in iter(int, 1)], daemon=True)
daemon.start()
exec("lock.acquire(); lock.release()", {{"lock": lock}})
"""


def test_where_the_stack_is_shallow_and_at_exit(recorder):
    """[fix-lock-profiler-crash-in-shallow-stack: bootstrap, atexit callbacks; here also `__del__` and a thread that runs on]"""
    text = MOMENTS.format(native=not isinstance(recorder, fallback.Recorder))
    run = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.split()[0] == "ended"


def test_a_waiter_looks_at_a_holder_with_a_shallow_stack(recorder):
    """[the same, seen by who waits: `unknown` rather than a crash]"""
    lock = recorder.lock("l", threading.Lock())
    ident = []
    job = Job(lambda: (ident.append(threading.get_ident()), lock.acquire()))
    job.end()  # the holder is gone and keeps the lock

    Job(lambda: (time.sleep(0.05), lock.release()))
    assert lock.acquire(timeout=5)
    lock.release()
    assert all(row[2] for row in recorder.lock_sites())


def test_a_signal_handler_takes_the_lock_that_it_interrupts(recorder, reader):
    """[PR 19856: re-entrance while a sample is written]"""
    lock = recorder.lock("l", threading.RLock())
    seen = []

    def handler(*_):
        with lock:
            seen.append(lock._is_owned())

    before = signal.signal(signal.SIGALRM, handler)
    rounds = 0
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
        end = time.monotonic() + 0.4
        while time.monotonic() < end:
            with lock:
                rounds += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert seen
    assert all(seen)
    assert not lock._is_owned()
    assert recorder.counters()["internal_errors"] == 0
    assert rounds <= reader(recorder).count("lock.hold", "l") <= rounds + len(seen)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.parametrize("make", [threading.Lock, threading.RLock])
def test_a_child_of_a_fork_uses_the_lock_that_another_thread_held(recorder, make):
    """[fix-fork-child-periodic-thread-deadlock, fix-potential-deadlock-in-writer, profiling-fix-deadlock-gevent]"""
    lock = recorder.lock("l", make())
    held, done = threading.Event(), threading.Event()

    def hold():
        with lock:
            held.set()
            done.wait(10)

    job = Job(hold)
    held.wait(10)
    child = os.fork()
    if child == 0:
        try:
            recorder.after_fork()
            lock._at_fork_reinit()
            took = lock.acquire(timeout=1)
            lock.release()
            count = sum(recorder.read_counts(s[0], array("q", bytes(8 * s[5])))[0] for s in recorder.series() if s[1] == "lock.hold")
            os._exit(0 if took and count == 1 else 1)
        except BaseException:  # noqa: BLE001 - a child ends here whatever happens
            os._exit(2)
    done.set()
    job.end()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# -- asyncio --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ASYNC)
def test_async_with_and_methods(recorder, reader, kind):
    """[asyncio-lock, profiling-asyncio-lock-with, profiling-add-asyncio-locks-support, asyncio.Condition/Semaphore/BoundedSemaphore]"""

    async def run(lock: Any) -> list[Any]:
        async with lock as entered:
            inside = lock.locked()
        answers = [entered, inside, await lock.acquire()]
        lock.release()
        return [*answers, lock.locked(), outcome(lock.release) if kind != "Semaphore" else None]

    async def compare():
        raw, lock = both(recorder, ASYNC[kind])
        assert await run(raw) == await run(lock)

    asyncio.run(compare())
    assert reader(recorder).count("lock.hold", "l") == 2


def test_an_asyncio_condition_over_a_named_lock(recorder, reader):
    """[Added support for profiling of asyncio.Condition]"""

    async def run(lock: Any) -> Any:
        condition = asyncio.Condition(lock)
        items: list[int] = []

        async def produce() -> None:
            async with condition:
                items.append(1)
                condition.notify_all()

        async with condition:
            task = asyncio.create_task(produce())
            await condition.wait_for(lambda: items)  # in this task: `asyncio.wait_for` makes one of its own, which would release
        await task
        return items, lock.locked()

    async def compare():
        raw, lock = both(recorder, asyncio.Lock)
        assert await run(raw) == await run(lock)

    asyncio.run(compare())
    assert reader(recorder).count("lock.hold", "l") == 3


def test_a_cancelled_wait_is_no_hold(recorder, reader):
    """[fix-profiling-lock-spurious-acquire-sample-on-failed-acquire, of asyncio's]"""

    async def run():
        lock = recorder.lock("l", asyncio.Lock())
        async with lock:
            task = asyncio.create_task(lock.acquire())
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        return lock.locked()

    assert asyncio.run(run()) is False
    assert (reader(recorder).count("lock.wait", "l"), reader(recorder).count("lock.hold", "l")) == (1, 1)
