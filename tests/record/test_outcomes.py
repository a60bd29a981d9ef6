"""What becomes of requests that were not simply served: refused, given up, too late, failed."""

from __future__ import annotations

import asyncio
import struct

import pytest

MS = 1_000_000


@pytest.fixture
def judged(recorder):
    recorder.set_edges("score", [10 * MS, 50 * MS])
    return recorder


def serve(recorder, error=None, ago_ms=0.0, clock=None, **more):
    import time

    with recorder.request("score", started_ns=time.perf_counter_ns() - int(ago_ms * MS) if ago_ms else None) as request:
        request.error = error
        for name, value in more.items():
            setattr(request, name, value)


def bands(recorder):
    return sum(struct.unpack(f"<{len(recorder.read_bands(0)[1]) // 8}q", recorder.read_bands(0)[1]))


def totals(recorder, *names):
    read = recorder.read_class(0)
    return tuple(read[name] for name in names)


def test_a_shed_request_is_counted_and_nothing_else(judged):
    serve(judged)
    serve(judged, "shed")
    serve(judged, "shed", ago_ms=100)
    assert totals(judged, "count", "errors", "items", "shed", "violations") == (3, 0, 1, 2, (0, 0))
    assert bands(judged) == 1
    assert len(judged.drain()) == 1


@pytest.mark.parametrize("word", ["cancelled", "CancelledError", "GeneratorExit"])
def test_a_cancelled_request_is_judged_once_it_is_late(judged, word):
    serve(judged, word)
    assert totals(judged, "count", "errors", "cancelled", "violations") == (1, 0, 1, (0, 0))
    assert bands(judged) == 0
    serve(judged, word, ago_ms=20)
    assert totals(judged, "count", "errors", "cancelled", "violations") == (2, 0, 1, (1, 0))
    assert bands(judged) == 1


def test_a_cancelled_request_without_an_objective_is_no_latency(recorder):
    serve(recorder, "cancelled", ago_ms=100)
    assert totals(recorder, "count", "errors", "cancelled") == (1, 0, 1)
    assert bands(recorder) == 0


def test_a_request_past_its_deadline_is_above_every_objective(judged):
    serve(judged, "deadline")
    serve(judged, "deadline", ago_ms=20)
    serve(judged, "deadline", ago_ms=100)
    assert totals(judged, "count", "errors", "violations", "overdue") == (3, 3, (3, 3), (1, 2))
    assert bands(judged) == 3


def test_a_failed_request_is_judged_by_its_time(judged):
    serve(judged, "ValueError")
    serve(judged, "ValueError", ago_ms=20)
    assert totals(judged, "count", "errors", "violations", "overdue") == (2, 2, (1, 0), (0, 0))


def test_a_profiled_request_past_its_deadline_stays_out(judged):
    serve(judged, "deadline", profiled=True)
    assert totals(judged, "excluded", "errors", "violations", "overdue") == (1, 1, (1, 1), (0, 0))
    assert bands(judged) == 0


def test_edges_keep_what_was_overdue(judged):
    serve(judged, "deadline")
    judged.set_edges("score", [50 * MS, 70 * MS])
    assert totals(judged, "violations", "overdue") == ((1, 0), (1, 0))


def test_a_task_that_is_cancelled_says_so_by_itself(judged):
    async def main():
        async def work():
            with judged.request("score"):
                await asyncio.sleep(10)

        task = asyncio.ensure_future(work())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert totals(judged, "count", "errors", "cancelled") == (1, 0, 1)


def test_a_stream_that_nobody_reads_on_is_cancelled(judged):
    def stream():
        with judged.request("score"):
            yield 1
            yield 2

    reading = stream()
    next(reading)
    reading.close()
    assert totals(judged, "count", "errors", "cancelled") == (1, 0, 1)


def test_nothing_is_left_after_a_fork(judged):
    serve(judged, "shed")
    serve(judged, "cancelled")
    serve(judged, "deadline")
    judged.after_fork()
    assert totals(judged, "count", "shed", "cancelled", "overdue") == (0, 0, 0, (0, 0))
