"""asyncio's locks, instrumented."""

from __future__ import annotations

import asyncio

import pytest

from inferscope.types import SpanFlag

KINDS = {
    "Lock": asyncio.Lock,
    "Semaphore": asyncio.Semaphore,
    "BoundedSemaphore": asyncio.BoundedSemaphore,
    "Condition": asyncio.Condition,
}


@pytest.fixture(params=KINDS)
def kind(request):
    return KINDS[request.param]


async def test_is_what_it_wraps(recorder, reader, kind):
    raw = kind()
    lock = recorder.lock("l", raw)
    assert isinstance(lock, kind)
    assert (lock.wrapped, lock.name) == (raw, "l")
    assert recorder.lock("l", lock) is lock
    async with lock as entered:
        assert entered is None
        assert lock.locked()
    assert await lock.acquire() is True
    lock.release()
    assert not lock.locked()
    counts, count, total, _ = reader(recorder).counts("lock.wait", "l")
    assert (count, counts[0], total) == (2, 2, 0)
    assert reader(recorder).count("lock.hold", "l") == 2


async def test_a_release_too_many_fails_as_the_lock_itself(recorder):
    lock = recorder.lock("l", asyncio.Lock())
    with pytest.raises(RuntimeError, match="not acquired"):
        lock.release()


async def rebuild_rules(lock, held):
    async with lock:
        held.set()
        await asyncio.sleep(0.02)


async def test_a_waiter_blames_the_holder_and_places_its_wait(recorder, reader, kind):
    lock = recorder.lock("rules", kind())
    held = asyncio.Event()

    async def holder():
        with recorder.request("reload"):
            await rebuild_rules(lock, held)

    async def waiter():
        with recorder.request("score"):
            async with lock:
                pass

    task = asyncio.create_task(holder())
    await held.wait()
    await asyncio.gather(task, asyncio.create_task(waiter()))
    record = next(record for record in reader(recorder).drain() if recorder.classes()[record.cls][1] == "score")
    assert reader(recorder).vector(record)["lock:rules"] > 5_000_000
    assert sum(record.vector) == record.wall_ns
    (span,) = record.spans
    assert span[6] & SpanFlag.CONTENDED
    (site,) = [row for row in recorder.lock_sites() if row[4]]
    assert site[0] == "rules"
    assert site[1] == span[2]
    assert site[2].startswith("rebuild_rules (test_async_locks.py:")
    assert site[5] > 5_000_000
    assert site[6] > 5_000_000
    assert site[7] == "reload"


async def test_a_cancelled_wait_counts_nowhere(recorder, reader):
    lock = recorder.lock("l", asyncio.Lock())
    async with lock:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(lock.acquire(), 0.01)
    async with lock:
        pass
    assert reader(recorder).count("lock.wait", "l") == 2


async def test_fairness_and_order_stay(recorder):
    lock = recorder.lock("l", asyncio.Lock())
    order = []

    async def work(number):
        async with lock:
            order.append(number)
            await asyncio.sleep(0)

    await asyncio.gather(*(work(number) for number in range(10)))
    assert order == list(range(10))


async def test_waiting_on_a_condition_is_no_hold(recorder, reader):
    condition = recorder.lock("c", asyncio.Condition())
    items = []

    async def consume():
        async with condition:
            await condition.wait_for(lambda: items)
            return items.pop()

    task = asyncio.create_task(consume())
    await asyncio.sleep(0.03)
    async with condition:
        items.append(7)
        condition.notify()
    assert await task == 7
    assert reader(recorder).sum("lock.hold", "c") < 20_000_000


async def test_an_instrumented_lock_inside_a_condition(recorder):
    lock = recorder.lock("l", asyncio.Lock())
    condition = asyncio.Condition(lock)
    async with condition:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(condition.wait(), 0.01)
        assert lock.locked()
    assert not lock.locked()
