"""Targets that die, hang or babble in the middle, and rates beyond the machine: one clear line, and what was measured is kept and marked."""

from __future__ import annotations

import json
import os
import sys

import numpy as np
import pytest

from inferscope.bench import load, patience, runs
from inferscope.bench.generators import Generators
from inferscope.bench.load import LoadPlan
from inferscope.bench.patience import Patience
from inferscope.bench.targets import Service, ServiceError, free_port
from inferscope.cli import main

DYING = """
import asyncio, os, sys
port, after, how = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
seen = 0
async def talk(reader, writer):
    global seen
    try:
        while True:
            head = await reader.readuntil(b"\\r\\n\\r\\n")
            if b"/healthz" not in head:
                seen += 1
            if seen > after:
                if how == "die":
                    os._exit(9)
                if how == "hang":
                    await asyncio.sleep(60)
                if how == "garbage":
                    writer.write(b"\\x00\\x01garbage\\r\\n\\r\\n")
                    continue
            await asyncio.sleep(0.002)
            writer.write(b"HTTP/1.1 200 OK\\r\\nContent-Length: 2\\r\\n\\r\\nok")
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()
async def main():
    async with await asyncio.start_server(talk, "127.0.0.1", port) as server:
        await server.serve_forever()
asyncio.run(main())
"""

FUNCTIONS = """
import os, time
calls = 0
def dies():
    global calls
    calls += 1
    if calls > 60:
        os._exit(7)
    time.sleep(0.005)
def hangs():
    global calls
    calls += 1
    time.sleep(60 if calls > 40 else 0.005)
"""


def status_of(*words):
    try:
        return main(list(map(str, words)))
    except SystemExit as ended:
        return ended.code


@pytest.fixture
def dying(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dying.py").write_text(DYING)
    (tmp_path / "mid.py").write_text(FUNCTIONS)

    def start(after, how):
        port = free_port()
        return Service([sys.executable, str(tmp_path / "dying.py"), str(port), str(after), how], port, {}, tmp_path, tmp_path / "log")

    return start


@pytest.mark.parametrize(
    ("how", "said"),
    [("die", "the target is gone: "), ("hang", "the target hangs: "), ("garbage", "the target is gone: ")],
)
def test_a_target_that_ends_is_given_up(dying, how, said, monkeypatch):
    monkeypatch.setattr(patience, "GONE_AFTER_S", 0.3)
    with dying(60, how) as service:
        service.start()
        plan = LoadPlan(f"http://127.0.0.1:{service.port}/", 200.0, 30.0, drain_s=0.5)
        result = load.generate(plan)
    assert result.stopped.startswith(said)
    assert 50 <= result.fine.sum() <= 60
    assert result.status.size < 600


def test_what_was_measured_before_is_kept_and_marked(dying, capsys, tmp_path):
    with dying(60, "die") as service:
        service.start()
        url = f"http://127.0.0.1:{service.port}/"
        words = ["--rate", 100, "--duration", "30s", "--warmup", 0, "--baseline", 0, "--max-lag", "10s"]
        assert status_of("bench", url, *words, "-o", "run.json", "--json", "d.json") == 1
    lines = capsys.readouterr().err.strip().splitlines()
    assert "the target is gone: " in lines[-1]
    assert "kept and marked partial" in lines[-1]
    value = json.loads((tmp_path / "d.json").read_text())
    assert (value["partial"], value["valid"]) == (True, False)
    kept = runs.read(tmp_path / "run.json")
    assert kept.load.stopped.startswith("the target is gone: ")
    assert kept.load.fine.sum() >= 50
    assert status_of("compare", "run.json", "run.json") in {1, 3}
    assert "is invalid: partial" in capsys.readouterr().out


def test_a_closed_loop_says_that_its_target_died(dying):
    with dying(30, "die") as service:
        service.start()
        result = load.generate(LoadPlan(f"http://127.0.0.1:{service.port}/", 1.0, 20.0, mode="closed", connections=2))
    assert result.stopped == "the target is gone: nobody listens there any more"
    assert 25 <= result.fine.sum() <= 30


@pytest.mark.parametrize(
    ("name", "said", "least"), [("dies", "its process ended with status 7", 10), ("hangs", "it hangs: 1 calls are under way", 40)]
)
def test_a_function_that_ends_its_process_leaves_what_it_did(dying, capsys, tmp_path, name, said, least):
    words = ["bench", f"mid:{name}", "--repeat", 200, "--warmup", 0, "--baseline", 0, "--timeout", "500ms", "--json", "d.json"]
    assert status_of(*words) == 1
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert said in last
    assert "kept and marked partial" in last
    value = json.loads((tmp_path / "d.json").read_text())
    assert value["partial"]
    assert least <= value["metrics"]["requests"] <= 60


def test_a_rate_beyond_the_machine_is_said_at_once_or_makes_the_run_invalid(dying, capsys, tmp_path):
    with dying(10**9, "no") as service:
        service.start()
        url = f"http://127.0.0.1:{service.port}/"
        assert status_of("bench", url, "--rate", 1e6, "--duration", "30s", "--baseline", 0) == 1
        assert "1e+06 requests/s for 37.5 s are more than the 5000000" in capsys.readouterr().err
        code = status_of("bench", url, "--rate", 30_000, "--duration", "300ms", "--warmup", 0, "--baseline", 0, "--json", "d.json")
    value = json.loads((tmp_path / "d.json").read_text())
    assert code == 3
    assert value["problems"][0].startswith("generator-bound: its own lateness")
    assert "INVALID: generator-bound" in capsys.readouterr().out
    assert value["metrics"]["requests"] > 5000


def test_several_generators_send_one_schedule(dying):
    with dying(10**9, "no") as service:
        service.start()
        plan = LoadPlan(f"http://127.0.0.1:{service.port}/", 90.0, 1.0, seed=3)
        with Generators(2) as generators:
            result = generators.measure(plan)
            again = generators.measure(LoadPlan(plan.url, 1.0, 10.0, mode="closed", connections=4, requests=50))
        single = load.generate(plan)
    assert result.fine.all()
    assert np.array_equal(result.intended_ns - result.intended_ns[0], single.intended_ns - single.intended_ns[0])
    assert again.fine.sum() == 50
    assert result.plan == plan


def test_a_generator_that_dies_is_named():
    with Generators() as generators:
        generators._start()
        os.kill(generators._processes[0].pid, 9)
        generators._processes[0].wait()
        with pytest.raises(ServiceError, match="the load generator ended with status -9"):
            generators.measure(LoadPlan("http://127.0.0.1:9/", 1.0, 0.1))


def test_patience_ends_with_silence_or_with_nobody():
    s = 1_000_000_000
    waits = Patience(2.0)
    waits.begin(0)
    waits.sent(s)
    assert waits.over(2 * s) == ""
    assert waits.over(4 * s).startswith("the target hangs: 1 requests")
    waits.ended(4 * s, answered=True, sent=True)
    assert waits.over(100 * s) == ""
    for _ in range(20):
        waits.ended(5 * s, answered=False, sent=False)
    assert waits.over(6 * s) == ""
    assert waits.over(8 * s).startswith("the target is gone: 20 requests in a row failed")
