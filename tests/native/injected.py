"""A host program on a core whose n-th internal call fails, for every n: `python injected.py`, started by test_injection.py.

Prints how many failures were planted and `done`; anything else is a result, an exception or a signature that changed.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import sys
import threading
import traceback
from array import array
from typing import Any

from inferscope.record import _native

injector = ctypes.PyDLL(_native.__file__)
injector.inject_arm.argtypes = [ctypes.c_long]
injector.inject_disarm.restype = ctypes.c_long


class HostError(Exception):
    """The application's own."""


def threads(recorder: Any, results: list[Any]) -> None:
    lock = recorder.lock("rules", threading.Lock())
    again = recorder.lock("again", threading.RLock())

    def other(request: Any) -> None:
        with recorder.attach(request), recorder.stage("thread"), lock:
            results.append("thread")

    with recorder.request("threads", size=3, model="m", cls="gold", items=2, started_ns=1) as request:
        with lock:
            thread = threading.Thread(target=other, args=(request,))
            thread.start()
            thread.join(0.001)
        thread.join()
        with again, again:
            results.append(again.acquire(blocking=False))
            again.release()
        results.append(lock.acquire(timeout=1))
        lock.release()
    results.append(isinstance(lock, type(threading.Lock())) or hasattr(lock, "acquire"))


def calls(recorder: Any, results: list[Any]) -> None:
    @recorder.request("decorated")
    @recorder.stage("function")
    def function(x: int, by: int = 2) -> int:
        if x > 2:
            raise HostError(x)
        return x * by

    results.append(str(inspect.signature(function)))
    for x in (1, 2, 3):
        try:
            with recorder.request("outer") as request, recorder.stage("a") as span, span:
                results.append(function(x))
                recorder.interval("copy", "h2d", 1, 2, flags=1)
                recorder.settle(recorder.pin(request), 0, recorder.column("gpu-queue", "d"), 5)
                crossing = recorder.stage("late")
                crossing.__enter__()
                with recorder.stage("b"):
                    crossing.__exit__(None, None, None)
                request.error = "Late"
        except HostError as error:
            results.append(error.args)

    @recorder.stage("numbers")
    def numbers() -> Any:
        yield from range(3)

    results.append(list(numbers()))
    left = recorder.stage("left")
    left.__enter__()
    del left


def batches(recorder: Any, results: list[Any]) -> None:
    with recorder.request("one") as one, recorder.attach(None), recorder.request("two") as two:
        with recorder.attach(None), recorder.carrier("work") as carrier, recorder.stage("forward"):
            results.append("forward")
            ref = recorder.pin(carrier)
            recorder.settle(ref, 2, 0, 1)
        for request in (one, two):
            recorder.splice(carrier.packed, request)
        recorder.settle(ref, 2, 0, 1)
        recorder.unpin(ref)


async def tasks(recorder: Any, results: list[Any]) -> None:
    @recorder.stage("coroutine")
    async def coroutine(n: int) -> int:
        if n > 1:
            raise HostError(n)
        return n

    @recorder.stage("stream")
    async def stream() -> Any:
        yield 1
        yield 2

    @recorder.request("async")
    async def serve(n: int) -> list[int]:
        with recorder.stage("around"):
            return [await coroutine(n), *[x async for x in stream()]]

    results.append(await asyncio.gather(serve(0), serve(1), serve(2), return_exceptions=True))


def hooked(recorder: Any, results: list[Any]) -> None:
    told: list[Any] = []
    recorder.armed = True
    recorder.set_hooks(
        on_start=lambda _: True, on_enter=lambda *a: told.append(a), on_exit=lambda *a: told.append(a), on_finish=lambda *a: None
    )
    with recorder.request("hooked"), recorder.stage("x"):
        results.append("hooked")


def host(recorder: Any, part: Any) -> str:
    results: list[Any] = []
    if part is tasks:
        asyncio.run(tasks(recorder, results))
    else:
        part(recorder, results)
    return repr(results)


def check(recorder: Any) -> None:
    """What is kept is whole, and the recorder still works."""
    for row in recorder.drain():
        assert sum(array("q", row[14])) == row[3], row
    with recorder.request("after") as request, recorder.stage("after"):
        assert recorder.current() is request
    assert recorder.current() is None
    assert any(row[3] >= 0 for row in recorder.drain())


def plant(part: Any, expected: str, failing: int) -> tuple[int, str]:
    """Runs a part with one failing call; gives the calls that it made, and what went wrong."""
    recorder = _native.Recorder()
    recorder.set_edges("outer", [1])
    recorder.cpu_mode = "on"
    wrong, made = "", 0
    injector.inject_arm(failing)
    try:
        got = host(recorder, part)
        made = injector.inject_disarm()
        if got != expected:
            wrong = f"{got} instead of {expected}"
        check(recorder)
    except Exception:  # noqa: BLE001 - whatever it is, it is what this looks for
        made = injector.inject_disarm() or made
        wrong = traceback.format_exc(limit=-2)
    return made, wrong


def main() -> int:
    planted, found = 0, dict[str, str]()
    for part in (calls, threads, batches, tasks, hooked):
        expected = host(_native.Recorder(), part)
        failing, calls_made = 0, 1
        while failing < calls_made:
            made, wrong = plant(part, expected, failing)
            if wrong:
                found.setdefault(wrong, f"{part.__name__}, call {failing}")
            calls_made = max(calls_made, made)
            planted += 1
            failing += 1
    for wrong, where in found.items():
        sys.stdout.write(f"{where}: {wrong}\n")
    sys.stdout.write(f"{planted} planted\n{'done' if not found else 'failed'}\n")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
