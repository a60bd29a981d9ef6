"""Queues between threads, the lag of event loops, ids in log records."""

from __future__ import annotations

import asyncio
import json
import logging
import queue
import threading
import time

import pytest

from inferscope.record import core
from inferscope.slots import slots
from inferscope_integrations.logs import KEYS, IdsFilter
from inferscope_integrations.queues import watch_queue


def test_the_time_an_item_lay_in_a_named_queue_is_measured(seen, instrument) -> None:
    instrument("queue")
    work: queue.Queue[object] = queue.Queue()
    work.put("before it was named")
    assert watch_queue("jobs", work) is work
    item = object()
    work.put(item)
    assert work.get() == "before it was named"
    time.sleep(0.05)
    with core.default.request("consume"):
        assert work.get() is item
    (record,) = seen.requests()
    assert seen.series("queue")["jobs"] >= 1
    assert record.wall_ns < 40e6  # the wait lies before the request and is in the series only


def test_queues_that_were_not_named_are_not_touched_and_threads_lose_nothing(seen, instrument) -> None:
    instrument("queue")
    named, other = queue.Queue(maxsize=4), queue.Queue()
    watch_queue("many", named)
    before = seen.series("queue").get("many", 0)

    def consume() -> None:
        while named.get() is not None:
            other.put(1)

    threads = [threading.Thread(target=consume) for _ in range(4)]
    for thread in threads:
        thread.start()
    for number in range(2000):
        named.put(number)
    for _ in threads:
        named.put(None)
    for thread in threads:
        thread.join()
    assert other.qsize() == 2000
    assert seen.series("queue")["many"] - before == 2004


def test_instants_do_not_slip_when_the_integration_was_off_for_a_while(seen, instrument) -> None:
    instrument("queue")
    work: queue.Queue[int] = watch_queue("slip", queue.Queue())
    work.put(1)
    from inferscope.integration import Registry

    registry = Registry()
    registry.instrument(["queue"])  # a second registry patches over the first: both are undone in order
    registry.uninstrument()
    before = seen.series("queue").get("slip", 0)
    assert work.get() == 1
    assert seen.series("queue").get("slip", 0) == before  # its instant was forgotten, not invented


@pytest.mark.parametrize("wrong", [queue.LifoQueue(), queue.PriorityQueue(), queue.SimpleQueue(), []])
def test_a_queue_that_reorders_is_refused(wrong: object) -> None:
    with pytest.raises(TypeError, match="keeps the order of arrival"):
        watch_queue("jobs", wrong)  # type: ignore[arg-type]


LOOPS = [None, pytest.param("uvloop", marks=pytest.mark.servers)]


def new_loop(maker):
    return asyncio.new_event_loop() if maker is None else pytest.importorskip(maker).new_event_loop()


@pytest.mark.parametrize("maker", LOOPS)
def test_a_loop_that_is_blocked_shows_lag(seen, instrument, maker) -> None:
    loop = new_loop(maker)
    instrument(*filter(None, ("asyncio", maker)))

    async def main() -> None:
        await asyncio.sleep(0.12)
        time.sleep(0.25)  # noqa: ASYNC251  (the fault)
        await asyncio.sleep(0.12)

    before = seen.series("queue").get("event_loop", 0)
    loop.run_until_complete(main())
    loop.close()
    assert seen.series("queue")["event_loop"] - before >= 2
    index = next(i for i, kind, labels, *_ in core.default.series() if kind == "queue" and labels[0] == "event_loop")
    from array import array

    size = next(s for i, *_, s in core.default.series() if i == index)
    counts = array("q", bytes(8 * size))
    total = core.default.read_counts(index, counts)
    assert total[1] > 0.1e9 or max(total) > 0.1e9


@pytest.mark.parametrize("maker", LOOPS)
def test_a_loop_ends_as_it_does_without_us(instrument, maker) -> None:
    loop = new_loop(maker)
    instrument(*filter(None, ("asyncio", maker)))
    assert loop.run_until_complete(asyncio.sleep(0, "value")) == "value"
    loop.close()
    with pytest.raises(RuntimeError, match="closed"):
        loop.run_forever()


def test_log_records_carry_ids_and_what_they_had_stays() -> None:
    lines: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = lines.append  # type: ignore[method-assign]
    handler.addFilter(IdsFilter())
    log = logging.getLogger("scores")
    log.setLevel(logging.WARNING)  # a worker of Celery's in an earlier test leaves the root logger at a level of its own
    log.propagate = False
    log.addHandler(handler)
    slots.open_incident = "20260101T000000Z-score-0001"
    try:
        with core.default.request("score") as request:
            log.warning("slow", extra={"trace_id": "mine"})
        log.warning("outside")
    finally:
        slots.open_incident = None
        log.removeHandler(handler)
    inside, outside = lines
    assert inside.inferscope_request == "score"  # type: ignore[attr-defined]
    assert inside.inferscope_request_id == str(request.id)  # type: ignore[attr-defined]
    assert inside.inferscope_incident.endswith("-score-0001")  # type: ignore[attr-defined]
    assert inside.trace_id == "mine"  # type: ignore[attr-defined]
    assert outside.inferscope_request == outside.inferscope_request_id == ""  # type: ignore[attr-defined]
    assert json.dumps({key: getattr(outside, key) for key in KEYS})


def test_log_records_carry_the_applications_span() -> None:
    trace = pytest.importorskip("opentelemetry.trace")
    context = trace.SpanContext(trace_id=0xABC, span_id=0xDEF, is_remote=False)
    token_record = logging.LogRecord("n", logging.INFO, "", 0, "m", (), None)
    with trace.use_span(trace.NonRecordingSpan(context)):
        assert IdsFilter().filter(token_record)
    assert token_record.trace_id == format(0xABC, "032x")  # type: ignore[attr-defined]
    assert token_record.span_id == format(0xDEF, "016x")  # type: ignore[attr-defined]
