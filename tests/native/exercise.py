"""Runs every type and path of the C core once or more, for a memory checker to watch; prints `done`.

Needs nothing but the standard library: `python tests/native/exercise.py [rounds]`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import pickle
import struct
import sys
import threading
from array import array
from typing import Any

from inferscope.record import _native, compiled


def spans(recorder: Any) -> None:
    stage = recorder.stage("a")
    with recorder.request("score", size=3, model="m", cls="gold", items=2) as request:
        with recorder.stage("b") as span, stage, stage:
            recorder.interval("copy", "h2d", request.start_ns, request.start_ns + 5, request=request, flags=1, aux=9)
        recorder.interval("lock.hold", "l", 1, 2)
        recorder.interval("nonsense")
        request.trace, request.error, request.size = ("a" * 32, "b" * 16), "Late", "no number"
        request.error = ValueError
        repr((span, request, span.name, request.id, request.name, request.model, request.cls, request.open, request.packed))
        with recorder.request("nested", started_ns=request.start_ns), recorder.stage("deep"):
            pass
    with contextlib.suppress(KeyError), recorder.request("score"), recorder.stage("c"):
        raise KeyError
    with recorder.attach(request), recorder.stage("late"):
        pass
    with recorder.attach(None), recorder.request("score") as dropped:
        dropped.discard()
        dropped.finish(error="x")
    with recorder.request("many"):
        for number in range(70):
            with recorder.stage(f"s{number % 3}"):
                pass
    recorder.stage("left open").__enter__()
    open_request = recorder.request("left open")
    open_request.__enter__()
    recorder.stage("x").__enter__()
    del open_request
    with contextlib.suppress(TypeError):
        recorder.request("x", wrong=1)
    with contextlib.suppress(TypeError):
        stage(1, 2)
    with recorder.attach(None):
        one, two = recorder.stage("one"), recorder.stage("two")
        with recorder.request("crossed"):
            one.__enter__()
            two.__enter__()
            one.__exit__(None, None, None)
            two.__exit__(None, None, None)


def decorated(recorder: Any) -> None:
    @recorder.stage("plain")
    def plain(x: int, by: int = 2) -> int:
        return x * by

    @recorder.request("asked")
    def asked(fail: bool) -> None:
        if fail:
            raise LookupError

    @recorder.stage("gen")
    def generator() -> Any:
        with contextlib.suppress(KeyError):
            yield 1
        return (yield 2)

    class Thing:
        @recorder.stage("method")
        def method(self, x: int = 1) -> int:
            return x

        @recorder.stage("static")
        @staticmethod
        def static() -> int:
            return 1

    plain(1), plain(x=3), Thing().method(), Thing.static(), repr(plain), plain.__name__
    asked(False)
    with contextlib.suppress(LookupError):
        asked(True)
    list(generator())
    running = generator()
    next(running)
    running.throw(KeyError())
    running.close()
    next(generator())
    asyncio.run(tasks(recorder))


async def tasks(recorder: Any) -> None:
    @recorder.stage("co")
    async def coroutine(n: int) -> int:
        await asyncio.sleep(0)
        if n < 0:
            raise ValueError
        return n

    @recorder.stage("agen")
    async def stream() -> Any:
        for n in range(3):
            await asyncio.sleep(0)
            yield n

    @recorder.request("async")
    async def serve(n: int) -> list[int]:
        with recorder.stage("around"):
            return [await coroutine(n), *[x async for x in stream()]]

    await asyncio.gather(*(serve(n) for n in range(5)))
    await asyncio.gather(coroutine(-1), return_exceptions=True)
    halted = asyncio.create_task(serve(1))
    await asyncio.sleep(0)
    halted.cancel()
    await asyncio.gather(halted, return_exceptions=True)
    unfinished = stream()
    await unfinished.__anext__()
    await unfinished.aclose()
    coroutine(1).close()
    lock = recorder.lock("async lock", asyncio.Lock())
    async with lock:
        waiting = asyncio.create_task(lock.acquire())
        await asyncio.sleep(0.001)
    await waiting
    lock.release()


def locks(recorder: Any) -> None:
    for raw in (threading.Lock(), threading.RLock(), threading.Semaphore(2), threading.BoundedSemaphore(2), threading.Condition()):
        lock = recorder.lock(type(raw).__name__, raw)
        with lock:
            pass
        if lock.acquire(timeout=1):
            lock.release()
        with contextlib.suppress(Exception):
            lock.acquire(wrong=1)
        repr((lock, lock.name, lock.wrapped))
    lock = recorder.lock("contended", threading.Lock())
    condition = threading.Condition(lock)
    started = threading.Barrier(3)

    def holder() -> None:
        started.wait()
        for _ in range(20):
            with recorder.request("locked"), recorder.stage("critical"), lock:
                sum(range(200))
        with condition:
            condition.wait(0.001)

    threads = [threading.Thread(target=holder) for _ in range(2)]
    for thread in threads:
        thread.start()
    started.wait()
    with lock:
        threading.Event().wait(0.005)
    for thread in threads:
        thread.join()
    recorder.lock_sites()
    site = recorder._site("contended", "f (x.py:1)", None, None)
    recorder._blame(site, 5, 7)
    recorder._stage_of(None)


def carriers(recorder: Any) -> None:
    with recorder.request("a") as one, recorder.attach(None), recorder.request("b") as two, recorder.stage("wait"):
        with recorder.attach(None), recorder.carrier("work") as carrier:
            repr((carrier.name, carrier.packed, carrier.id))
            for _ in range(70):
                with recorder.stage("forward"):
                    recorder.interval("copy", "h2d", carrier.start_ns, carrier.start_ns + 1)
        packed = pickle.loads(pickle.dumps(carrier.packed))
        for request in (one, two, carrier, None):
            recorder.splice(packed, request)
        recorder.splice((1, packed[1], packed[2], False), two)
        span = struct.pack("<qqqIHBB", 9, 1, 0, 1, 0, 255, 0)
        for bad in ((), (1, (), b"", False), (1, (("a", "b"),), span, False), (1, ("a",), span, False), (1, (("a", 1),), span, False)):
            recorder.splice(bad, two)
        recorder.idle_since(two)
        with carrier:
            pass
        carrier(len)
        recorder.carrier("dropped").__enter__()
    recorder.entry(compiled.stage, compiled.traced_stage)("x")
    recorder.entry(compiled.request, compiled.traced_request)("x", items=1)


def settle(recorder: Any) -> None:
    queue, forward = recorder.column("gpu-queue", "sim:0"), recorder.column("stage", "forward")
    refs = []
    for _ in range(40):
        with recorder.request("settled") as request, recorder.stage("forward"):
            refs += [recorder.pin(request), recorder.pin(request)]
            recorder.settle(refs[-1], forward, queue, 10)
    recorder.drain()
    recorder.set_edges("settled", [1, 50])
    recorder.set_edges("settled", [3])
    for number, ref in enumerate(refs):
        recorder.settle(ref, forward, queue, 1 + number)
        recorder.settle(ref, forward, recorder.column("late", str(number % 3)), 5)
        if number % 5:
            recorder.unpin(ref)
    with recorder.request("settled") as request:
        recorder.pin(request)
        request.discard()
    dropped = recorder.request("settled")
    dropped.__enter__()
    recorder.pin(dropped)
    for early in (True, False):
        with recorder.request("settled") as request, recorder.stage("forward"):
            with recorder.attach(None), recorder.carrier("work") as carrier, recorder.stage("forward"):
                shared = [recorder.pin(carrier), recorder.pin(carrier)]
            recorder.settle(shared[0], forward, queue, 3)
            recorder.splice(carrier.packed, request)
            if early:
                recorder.unpin(shared[0])
        recorder.settle(shared[0], forward, queue, 3)
        recorder.unpin(shared[1])
    for bad in ((0, 0, 1, 1), ("x", 0, 1, 1), (refs[0], "x", 1, 1), (refs[0], 0, 1, 1 << 80), (1 << 80, 0, 1, 1)):
        recorder.settle(*bad)
    recorder.unpin(None), recorder.pin(None), recorder.column(1, None)
    with contextlib.suppress(TypeError):
        recorder.settle(1)


def read(recorder: Any) -> None:
    recorder.columns()
    for index, _kind, _labels, _digits, _lowest, length in recorder.series():
        recorder.read_counts(index, array("q", bytes(8 * length)))
        with contextlib.suppress(Exception):
            recorder.read_counts(index, bytearray(3))
    for index, *_ in recorder.classes():
        recorder.read_class(index)
        recorder.read_bands(index)
    with contextlib.suppress(Exception):
        recorder.read_class(999)
    for row in recorder.drain():
        assert sum(array("q", row[14])) == row[3]
        assert all(end >= start for start, end, *_ in struct.iter_unpack("<qqqIHBB", row[15]))
    recorder.counters()
    recorder.begin_epoch(breaching=3, reservoir=2, slowest=2)
    recorder._record_values("stage", "bulk", array("q", [1, -5, 10**12]))


def overflow() -> None:
    recorder = _native.Recorder()
    for number in range(600):
        with recorder.stage(f"stage {number}" + "x" * 200):
            pass
        with recorder.request(f"request {number}", model=str(number)):
            pass
    read(recorder)
    recorder.enabled = False
    with recorder.request("off") as request, recorder.stage("off"), recorder.carrier("off"):
        request.items = 3


def hooks() -> None:
    recorder = _native.Recorder(clock=iter(range(10**9)).__next__)
    told: list[Any] = []

    def raises(*_: Any) -> None:
        raise RuntimeError

    recorder.armed = True

    def tell(*what: Any) -> None:
        told.append(what)

    for hook in (tell, raises):
        recorder.set_hooks(on_start=lambda request: True, on_enter=hook, on_exit=hook, on_finish=hook)
        with recorder.request("hooked") as request, recorder.stage("x"):
            request.profiled = True
    recorder.set_edges("hooked", [5, 1, 3, 3])
    recorder.set_edges("hooked", [2])
    recorder.set_hooks(on_start=lambda _: recorder)  # a cycle
    read(recorder)
    recorder.after_fork()


def main(rounds: int) -> None:
    recorder = _native.Recorder()
    recorder.set_edges("score", [1])
    recorder.cpu_mode = "on"
    for _ in range(rounds):
        for part in (spans, decorated, locks, carriers, settle, read):
            part(recorder)
        threads = [threading.Thread(target=spans, args=(recorder,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        hooks()
        gc.collect()
    overflow()
    recorder.after_fork()
    assert recorder.counters()["late_spans"] == 0
    del recorder
    gc.collect()
    sys.stdout.write("done\n")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
