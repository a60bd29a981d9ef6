"""The C core neither leaks nor frees too early: reference counts and allocated blocks before and after many rounds of everything."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

native = pytest.importorskip("inferscope.record._native", reason="the C core was not built")


def grown(action: Callable[[], object], rounds: int = 300) -> float:
    """Blocks that each round of an action leaves allocated: the least of a few tries, as caches fill up in the first."""
    measured = []
    for _ in range(4):
        gc.collect()
        before = sys.getallocatedblocks()
        for _ in range(rounds):
            action()
        gc.collect()
        measured.append((sys.getallocatedblocks() - before) / rounds)
    return min(measured)


@pytest.fixture
def recorder() -> Any:
    made = native.Recorder()
    made.set_edges("score", [1])
    return made


def spans(recorder: Any) -> None:
    stage = recorder.stage("a")
    with recorder.request("score", size=3, model="m") as request:
        with recorder.stage("b") as span, stage, stage:
            recorder.interval("copy", "h2d", request.start_ns, request.start_ns + 5, request=request)
        assert span.name == "b"
        request.trace = ("a" * 32, "b" * 16)
        request.error = "Late"
    with contextlib.suppress(KeyError), recorder.request("score"), recorder.stage("c"):
        raise KeyError
    with recorder.attach(request), recorder.stage("late"):
        pass
    with recorder.request("score") as request:
        request.discard()
    recorder.stage("dropped").__enter__()
    recorder.drain()
    recorder.begin_epoch()


def decorated(recorder: Any) -> None:
    @recorder.request("score")
    def score(value: int) -> int:
        return inner(value)

    @recorder.stage("inner")
    def inner(value: int) -> int:
        if value < 0:
            raise ValueError(value)
        return value

    @recorder.stage("numbers")
    def numbers() -> Iterator[int]:
        yield from range(3)

    score(1)
    with contextlib.suppress(ValueError):
        score(-1)
    list(numbers())
    next(numbers())
    recorder.drain()


def awaited(recorder: Any) -> None:
    @recorder.stage("step")
    async def step(*, fail: bool = False) -> int:
        if fail:
            raise ValueError
        return 1

    @recorder.stage("stream")
    async def stream() -> AsyncIterator[int]:
        for number in range(3):
            yield number

    @recorder.request("score")
    async def score() -> int:
        with contextlib.suppress(ValueError):
            await step(fail=True)
        total = sum(await asyncio.gather(step(), step()))
        async for number in stream():
            total += number
        return total

    loop = asyncio.new_event_loop()
    assert loop.run_until_complete(score()) == 5
    loop.close()
    step().close()
    recorder.drain()


def locked(recorder: Any) -> None:
    lock, again = recorder.lock("rules", threading.Lock()), recorder.lock("again", threading.RLock())
    with lock, again, again:
        assert not lock.acquire(blocking=False)
    with pytest.raises(RuntimeError):
        lock.release()
    condition = threading.Condition(again)
    with condition:
        condition.wait(0)
    assert recorder._site("rules", "here (a.py:1)", None, None) > 0
    recorder.lock_sites()


def read(recorder: Any) -> None:
    for index, *_, length in recorder.series():
        recorder.read_counts(index, bytearray(8 * length))
    for index, *_ in recorder.classes():
        recorder.read_class(index)
        recorder.read_bands(index)
    recorder.columns()
    recorder.counters()
    recorder.set_edges("score", [5, 1])
    with pytest.raises(IndexError):
        recorder.read_class(999)


@pytest.mark.parametrize("action", [spans, decorated, awaited, locked, read])
def test_nothing_stays_allocated(recorder: Any, action: Callable[[Any], None]) -> None:
    assert grown(lambda: action(recorder), rounds=150) < 0.3


def test_recorders_go_away() -> None:
    def use() -> None:
        made = native.Recorder(clock=lambda: 5)
        made.set_hooks(on_finish=lambda *_: made)  # a cycle through a hook
        spans(made)

    assert grown(use, rounds=40) < 6  # the context variable stays known to the thread's context


def test_arguments_keep_their_reference_counts(recorder: Any) -> None:
    name, model, function, error, request = "x" * 200, "m" * 200, lambda: None, ValueError(), recorder.request("score")
    kept = [name, model, function, error, request, recorder]
    before = [sys.getrefcount(value) for value in kept]
    for _ in range(1000):
        with contextlib.suppress(ValueError), recorder.request(name, model=model), recorder.stage(name):
            raise error
        recorder.stage(name)(function)()
        with recorder.attach(request):
            pass
    error.__traceback__ = None
    recorder.drain()
    gc.collect()
    assert max(abs(a - b) for a, b in zip([sys.getrefcount(value) for value in kept], before, strict=True)) < 10


def test_open_request_survives_its_names() -> None:
    recorder = native.Recorder()
    span = recorder.stage("outer").__enter__()
    with recorder.request("r") as request:
        inner = recorder.stage("inner").__enter__()
        reference = weakref.ref(request)
    del recorder, request
    gc.collect()
    inner.__exit__(None, None, None)
    span.__exit__(None, None, None)
    del inner, span
    gc.collect()
    assert reference() is None
