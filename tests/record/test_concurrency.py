"""Greenlets, tasks and threads: requests do not mix, every vector sums, nothing is lost."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from inferscope.record import fallback

GREENLETS = """
import sys
sys.path[:0] = {path!r}
import inferscope, struct
from array import array
{before}
from inferscope.record import fallback
if {native}:
    from inferscope.record import _native
recorder = (_native if {native} else fallback).Recorder()
{after}
import {library}
import threading, time

lock = recorder.lock("shared", threading.Lock())

def serve(number):
    with recorder.request(f"r{{number % 5}}", items=number) as request:
        for step in range(4):
            with recorder.stage(f"own {{number % 5}}"):
                time.sleep(0.001 * (number % 3))
                assert recorder.current() is request
                with lock:
                    time.sleep(0.0005)
                assert recorder.current() is request
    assert recorder.current() is None

{spawn}

rows = recorder.drain()
assert len(rows) == 40, len(rows)
columns = recorder.columns()
for row in rows:
    vector = array("q", row[14])
    assert sum(vector) == row[3]
    own = row[8] % 5
    stages = {{columns[i][1] for i, ns in enumerate(vector) if ns and columns[i][0] == "stage"}}
    assert stages <= {{f"own {{own}}"}}, (own, stages)
    assert row[10] is None, "another greenlet ran in between"
assert recorder.counters()["internal_errors"] == recorder.counters()["late_spans"] == 0
assert {{row[8] for row in rows}} == set(range(40))
waits = sum(recorder.read_counts(i, array("q", bytes(8 * n)))[0] for i, kind, *_, n in recorder.series() if kind == "lock.wait")
assert waits == 160, waits
print("done")
"""

GEVENT = "jobs = [gevent.spawn(serve, n) for n in range(40)]\ngevent.joinall(jobs, raise_error=True)"
EVENTLET = "pool = eventlet.GreenPool(40)\nlist(pool.imap(serve, range(40)))"


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("library", "patch", "spawn"),
    [
        ("gevent", "import gevent.monkey; gevent.monkey.patch_all()", GEVENT),
        ("eventlet", "import eventlet; eventlet.monkey_patch()", EVENTLET),
    ],
)
def test_greenlets(recorder, library, patch, spawn, when):
    """Patched before or after our import."""
    if importlib.util.find_spec(library) is None:  # importing eventlet would have every later fork of this process warn
        pytest.skip(f"{library} is not installed")
    text = GREENLETS.format(
        path=[], before=patch if when == "before" else "", after=patch if when == "after" else "", library=library, spawn=spawn,
        native=not isinstance(recorder, fallback.Recorder),
    )  # fmt: skip
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", text],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "INFERSCOPE_STRICT": "1"},
    )
    assert run.stdout.strip() == "done", run.stderr


async def serve(recorder: Any, number: int) -> None:
    with recorder.request("r", items=number) as request:
        for _step in range(3):
            with recorder.stage(f"own {number % 4}"):
                await asyncio.sleep(0.0005 * (number % 3))
                assert recorder.current() is request
            await asyncio.sleep(0)
    assert recorder.current() is None


def check_own(recorder: Any, records: list[Any], expected: int) -> None:
    columns = recorder.columns()
    assert sorted(one.items for one in records) == list(range(expected))
    for one in records:
        assert sum(one.vector) == one.wall_ns
        stages = {columns[i][1] for i, ns in enumerate(one.vector) if ns and columns[i][0] == "stage"}
        assert stages <= {f"own {one.items % 4}"}
        assert len(one.spans) == 3


async def test_gathered_tasks(recorder, reader):
    await asyncio.gather(*(serve(recorder, number) for number in range(60)))
    check_own(recorder, reader(recorder).drain(), 60)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="TaskGroup came with 3.11")
async def test_task_groups(recorder, reader):
    async with asyncio.TaskGroup() as group:
        for number in range(60):
            group.create_task(serve(recorder, number))
    check_own(recorder, reader(recorder).drain(), 60)


async def test_tasks_of_one_request_share_it(recorder, reader):
    """Tasks inherit the context: what they time belongs to the request that started them, and overlap is resolved."""

    async def part(name: str, seconds: float) -> None:
        with recorder.stage(name):
            await asyncio.sleep(seconds)

    with recorder.request("fan-out"):
        await asyncio.gather(part("short", 0.002), part("long", 0.02))
    (one,) = reader(recorder).drain()
    told = reader(recorder).vector(one)
    assert sum(one.vector) == one.wall_ns
    assert told["long"] > 0.015e9
    assert told.get("short", 0) < 0.002e9, "it ran beside the longer one"


async def test_a_task_cancelled_inside_a_stage(recorder, reader):
    task = asyncio.create_task(serve(recorder, 2))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    told = reader(recorder).classed()
    assert (told["count"], told["cancelled"], told["errors"]) == (1, 1, 0)
    assert reader(recorder).drain() == [], "it has no latency that one could judge"
    assert recorder.current() is None


def test_threads_that_switch_all_the_time(recorder, reader):
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:

        def run(number: int) -> None:
            for _step in range(50):
                with recorder.request("r", items=number) as request:
                    with recorder.stage(f"own {number % 4}"):
                        assert recorder.current() is request
                        sum(range(200))

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(run, range(8)))
    finally:
        sys.setswitchinterval(before)
    assert reader(recorder).classed()["count"] == 400
    assert sum(reader(recorder).count("stage", f"own {n}") for n in range(4)) == 400
    columns = recorder.columns()
    for one in reader(recorder).drain():
        assert sum(one.vector) == one.wall_ns
        assert {columns[i][1] for i, ns in enumerate(one.vector) if ns and i > 1} == {f"own {one.items % 4}"}


def test_a_thread_started_inside_a_request_sees_none(recorder):
    seen: list[Any] = []
    with recorder.request("r") as request:
        thread = threading.Thread(target=lambda: seen.append(recorder.current()))
        thread.start()
        thread.join()

        def attached() -> None:
            with recorder.attach(request):
                seen.append(recorder.current())

        thread = threading.Thread(target=attached)
        thread.start()
        thread.join()
    assert seen == [None, request]
