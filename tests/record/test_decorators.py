"""A decorated function is the same function, only timed."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import pickle
from typing import Any

import pytest

from inferscope.record import fallback

_pure: Any = fallback.Recorder()


@_pure.stage("module level")
def module_level(a, b=2, *, c=3):
    """Docstring."""
    return a + b + c


def decorators(recorder):
    return [recorder.stage("f"), recorder.request("f")]


@pytest.fixture(params=["stage", "request"])
def decorator(request, timed):
    return getattr(timed, request.param)("f")


@pytest.fixture
def calls(timed, reader, decorator):
    """How many calls were counted."""

    def count():
        requests = sum(timed.read_class(index)["count"] for index, *_ in timed.classes())  # one that was given up has no latency
        return reader(timed).count("stage", "f") + requests

    return count


def test_identity_of_a_function(decorator):
    def function(a: int, /, b: str = "x", *args: float, c: bool = True, **rest: int) -> list[int]:
        """Says what it does."""
        return [a]

    function.mark = 5
    timed_function = decorator(function)
    assert timed_function(1, "y", c=False) == [1]
    assert inspect.signature(timed_function) == inspect.signature(function)
    assert timed_function.__wrapped__ is function
    for name in ("__name__", "__qualname__", "__module__", "__doc__", "__annotations__"):
        assert getattr(timed_function, name) == getattr(function, name)
    assert timed_function.mark == 5
    assert callable(timed_function)
    assert not inspect.iscoroutinefunction(timed_function)


def test_kinds_stay(decorator):
    @decorator
    async def coroutine():
        return 1

    @decorator
    def generator():
        yield 1

    @decorator
    async def stream():
        yield 1

    assert inspect.iscoroutinefunction(coroutine)
    assert asyncio.iscoroutinefunction(coroutine)
    assert inspect.isgeneratorfunction(inspect.unwrap(generator))
    assert list(generator()) == [1]

    async def use():
        return await coroutine(), [item async for item in stream()]

    assert asyncio.run(use()) == (1, [1])


def test_pickles_by_qualified_name():
    assert pickle.loads(pickle.dumps(module_level)) is module_level
    assert copy.deepcopy(module_level) is module_level


def test_methods(decorator, calls):
    class Model:
        @decorator
        def predict(self, x):
            return self, x

        @classmethod
        @decorator
        def make(cls):
            return cls

        @staticmethod
        @decorator
        def pure(x):
            return x

    model = Model()
    assert model.predict(1) == (model, 1)
    assert Model.predict(model, 1) == (model, 1)
    assert Model.make() is Model
    assert model.pure(4) == Model.pure(4) == 4
    assert calls() == 5
    assert "predict" in Model.__dict__
    assert inspect.signature(model.predict) == inspect.signature(lambda x: 0)


def test_partials_and_callable_objects(decorator, calls):
    class Model:
        def __call__(self, x):
            return x + 1

    assert decorator(Model())(1) == 2
    assert decorator(functools.partial(max, 3))(2) == 3
    assert calls() == 2


def test_what_cannot_be_wrapped_comes_back(decorator):
    class Model:
        pass

    assert decorator(Model) is Model
    assert decorator(5) == 5


def test_exceptions_pass_unchanged(decorator, calls):
    error = KeyError("x")

    @decorator
    def function():
        raise error

    with pytest.raises(KeyError) as caught:
        function()
    assert caught.value is error
    assert calls() == 1


def test_coroutine_is_timed_over_its_awaits(timed, clock, reader):
    @timed.stage("c")
    async def work():
        clock.tick(1)
        await asyncio.sleep(0)
        clock.tick(2)
        return 5

    assert asyncio.run(work()) == 5
    assert reader(timed).sum("stage", "c") == 3


def test_a_coroutine_never_awaited_counts_nothing(timed, reader):
    @timed.stage("c")
    async def work():
        return 5

    coroutine = work()
    coroutine.close()
    assert reader(timed).count("stage", "c") == 0


def test_cancellation_passes_and_closes(decorator, calls):
    seen = []

    @decorator
    async def work():
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    async def main():
        task = asyncio.create_task(work())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert seen == ["cancelled"]
    assert calls() == 1


def test_coroutines_work_as_tasks_and_in_gather(decorator, calls):
    @decorator
    async def work(n):
        await asyncio.sleep(0)
        return n

    async def main():
        task = asyncio.create_task(work(0))
        return [await task, *await asyncio.gather(*(work(n) for n in range(1, 4))), await asyncio.wait_for(work(4), 5)]

    assert asyncio.run(main()) == [0, 1, 2, 3, 4]
    assert calls() == 5


def test_generator_protocol(decorator, calls):
    log = []

    @decorator
    def echo():
        try:
            value = yield "ready"
            while True:
                try:
                    value = yield value
                except KeyError as error:
                    value = f"caught {error.args[0]}"
        finally:
            log.append("closed")

    generator = echo()
    assert next(generator) == "ready"
    assert generator.send(1) == 1
    assert generator.throw(KeyError("x")) == "caught x"
    generator.close()
    assert log == ["closed"]
    assert calls() == 1


def test_generator_result_and_delegation(decorator):
    @decorator
    def inner():
        yield 1
        return 2

    def outer():
        result = yield from inner()
        yield result

    assert list(outer()) == [1, 2]


def test_generator_spans_from_first_step_to_the_end(timed, clock, reader):
    @timed.stage("g")
    def numbers():
        clock.tick(1)
        yield 1
        clock.tick(2)

    generator = numbers()
    clock.tick(1000)
    for _ in generator:
        clock.tick(10)
    assert reader(timed).sum("stage", "g") == 13


def test_async_generator_protocol(decorator, calls):
    log = []

    @decorator
    async def echo():
        try:
            value = yield "ready"
            while True:
                try:
                    value = yield value
                except KeyError as error:
                    value = f"caught {error.args[0]}"
        finally:
            await asyncio.sleep(0)
            log.append("closed")

    async def main():
        stream = echo()
        assert await stream.asend(None) == "ready"
        assert await stream.asend(1) == 1
        assert await stream.athrow(KeyError("x")) == "caught x"
        await stream.aclose()
        assert log == ["closed"]
        with pytest.raises(StopAsyncIteration):
            await stream.asend(None)

    asyncio.run(main())
    assert calls() == 1


def test_async_generator_exceptions_pass_unchanged(decorator, calls):
    error = ValueError("x")

    @decorator
    async def stream():
        yield 1
        raise error

    async def main():
        got = []
        with pytest.raises(ValueError, match="x") as caught:  # noqa: PT012 - the loop is what raises
            async for item in stream():
                got.append(item)
        assert caught.value is error
        assert got == [1]

    asyncio.run(main())
    assert calls() == 1


def test_decorated_request_carries_its_arguments(timed, clock):
    @timed.request("r", size=2.5, items=3, model="m", cls="c")
    def function():
        clock.tick(4)
        return timed.current()

    first, second = function(), function()
    assert first is not second
    rows = timed.drain()
    assert [(row[7], row[8]) for row in rows] == [(2.5, 3)] * 2
    assert timed.classes()[0][1:4] == ("r", "m", "c")


def test_a_request_decorator_is_current_inside_coroutines(timed):
    @timed.request("r")
    async def work():
        await asyncio.sleep(0)
        return timed.current()

    async def main():
        requests = await asyncio.gather(work(), work())
        assert None not in requests
        assert requests[0] is not requests[1]
        assert timed.current() is None

    asyncio.run(main())
    assert timed.read_class(0)["count"] == 2


def test_disabled_later_runs_the_bare_function(timed, calls, decorator):
    @decorator
    def function():
        return 1

    function()
    timed.enabled = False
    assert function() == 1
    assert calls() == 1


def test_recursion_and_threads_share_a_decorated_function(recorder, reader):
    @recorder.stage("fib")
    def fib(n):
        return n if n < 2 else fib(n - 1) + fib(n - 2)

    with recorder.request("r"):
        assert fib(8) == 21
    assert reader(recorder).count("stage", "fib") == 67
    (record,) = reader(recorder).drain()
    assert sum(record.vector) == record.wall_ns


def test_a_stream_tells_its_first_value_once(timed, clock, reader):
    @timed.request("s")
    def stream():
        clock.tick(3)
        sent = yield "a"
        clock.tick(7)
        try:
            yield sent
        except KeyError:
            yield "caught"
        return "end"

    def outer():
        got.append((yield from stream()))

    got: list[Any] = []
    running = outer()
    assert next(running) == "a"
    clock.tick(100)
    assert running.send("b") == "b"
    assert running.throw(KeyError()) == "caught"
    assert next(running, None) is None
    assert got == ["end"]
    assert (reader(timed).count("first_byte", "s"), reader(timed).sum("first_byte", "s")) == (1, 3)
    assert [record.wall_ns for record in reader(timed).drain()] == [110]
    assert ("first_byte", "s") not in timed.columns(), "it overlaps with what the request does, and owns nothing of it"


def test_an_asynchronous_stream_tells_its_first_value_once(timed, clock, reader):
    @timed.request("s")
    async def stream():
        clock.tick(3)
        await asyncio.sleep(0)  # hands nothing out
        clock.tick(2)
        yield 1
        clock.tick(7)
        await asyncio.sleep(0)
        yield 2

    async def main():
        return [item async for item in stream()]

    assert asyncio.run(main()) == [1, 2]
    assert (reader(timed).count("first_byte", "s"), reader(timed).sum("first_byte", "s")) == (1, 5)
    assert [record.wall_ns for record in reader(timed).drain()] == [12]


def test_a_value_handed_out_after_a_cancelled_wait_is_the_first(timed, clock, reader):
    @timed.request("s")
    async def stream():
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            clock.tick(4)
            yield "shortened"

    async def main():
        task = asyncio.ensure_future(anext(stream()))
        await asyncio.sleep(0)
        task.cancel()
        return await task

    assert asyncio.run(main()) == "shortened"
    assert (reader(timed).count("first_byte", "s"), reader(timed).sum("first_byte", "s")) == (1, 4)


def test_what_hands_nothing_out_has_no_first_value(timed, reader):
    @timed.request("empty")
    def empty():
        yield from ()

    @timed.request("broken")
    def broken():
        raise KeyError
        yield

    @timed.request("coroutine")
    async def coroutine():
        await asyncio.sleep(0)

    @timed.request("over")
    def over():
        timed.current().finish()
        yield 1

    @timed.stage("stage")
    def stage():
        yield 1

    assert list(empty()) == []
    with pytest.raises(KeyError):
        next(broken())
    asyncio.run(coroutine())
    assert list(over()) == [1]
    assert list(stage()) == [1]
    unused = stage()
    unused.close()
    assert [kind for kind, *_ in (row[1:] for row in timed.series()) if kind == "first_byte"] == []
    assert sum(timed.read_class(index)["count"] for index, *_ in timed.classes()) == 4


def test_a_stream_judged_by_its_first_value_in_the_next_one_made(timed, clock, reader):
    """The objects that wrap streams are used again: what the last one told is forgotten."""

    @timed.request("s")
    def stream(ns):
        clock.tick(ns)
        yield ns

    for ns in (1, 2, 3):
        assert list(stream(ns)) == [ns]
    assert (reader(timed).count("first_byte", "s"), reader(timed).sum("first_byte", "s")) == (3, 6)
