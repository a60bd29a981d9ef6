"""Four workers of one service: one detector, one incident, parts of all of them; workers that die cost nobody else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from inferscope.capture.bundle import list_incidents, verify

UVICORN = ("uvicorn", "app:app", "--host", "127.0.0.1", "--port", "0", "--workers", "4")


def cli(*arguments: str, state: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "INFERSCOPE_STATE_DIR": str(state)}
    return subprocess.run(
        [sys.executable, "-m", "inferscope", *arguments], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_one_incident_with_parts_of_all_workers_and_recycled_ones_take_the_freed_slots(serve, state_dir):
    server = serve(*UVICORN, SERVICE_CAPTURE_S="3", SERVICE_SETTLE_S="4")
    with server.load():
        first = server.workers(4)
        assert sorted(row["slot"] for row in first.values()) == [0, 1, 2, 3]
        assert len({row["instance_id"] for row in first.values()}) == 4
        deadline = time.monotonic() + 10
        while not any(row["leads"] for row in first.values()) and time.monotonic() < deadline:
            time.sleep(0.1)  # the lead is taken with the first tick
            first = server.workers(4)
        assert [row["leads"] for row in first.values()].count(True) == 1
        # warm-up is the pod's: a follower is ready as well
        server.wait(lambda: all(row["now_ready"] for row in server.workers(4).values()))

    with server.load("/score?slow=1"):
        server.wait(lambda: list_incidents(state_dir), 30)
        assert len(list_incidents(state_dir)) == 1
        path = list_incidents(state_dir)[0]
        server.wait(lambda: len(list(path.glob("evidence-*-1.json"))) >= 4, 30)
    # the diagnosis runs when the machine is idle: on a busy one it takes its time
    server.wait(lambda: list(path.glob("diagnosis-*.json")) and list(path.glob("manifest-3.json")), 90)
    assert sorted(p.name for p in path.glob("evidence-*")) == [f"evidence-{slot}-1.json" for slot in range(4)]
    assert list_incidents(state_dir) == [path]
    assert verify(path) == []

    diagnosis = json.loads(next(path.glob("diagnosis-*.json")).read_text())
    counted = sum(row["count"] for p in path.glob("evidence-*") for row in json.loads(p.read_text())["classes"])
    assert diagnosis["requests"] == counted
    assert len([p for p in path.glob("evidence-*") if json.loads(p.read_text())["classes"]]) >= 2

    listed = cli("incidents", "--json", state=state_dir)
    assert listed.returncode == 0
    rows = json.loads(listed.stdout)["incidents"]
    assert [row["id"] for row in rows] == [path.name]
    assert rows[0]["state"] != "undiagnosed"
    assert cli("verify", state=state_dir).returncode == 0
    assert cli("report", state=state_dir).returncode in {0, 2}

    # a follower dies: its successor takes slot and instance id
    victim = next(pid for pid, row in first.items() if not row["leads"])
    os.kill(victim, signal.SIGKILL)
    server.wait(lambda: victim not in server.workers(4))
    again = server.workers(4)
    newcomer = next(row for pid, row in again.items() if pid not in first)
    assert (newcomer["slot"], newcomer["instance_id"]) == (first[victim]["slot"], first[victim]["instance_id"])

    # the leader dies: another leads within a few ticks, what it left reads well
    leader = next(pid for pid, row in again.items() if row["leads"])
    os.kill(leader, signal.SIGKILL)
    server.wait(lambda: leader not in server.workers(4))
    server.wait(lambda: sum(row["leads"] for row in server.workers(4).values()) == 1, 10)
    server.wait(lambda: all(not verify(each) for each in list_incidents(state_dir)))
    assert len(list(path.glob("diagnosis-*.json"))) == 1
    assert "Traceback" not in server.said()


def test_a_leader_that_dies_in_an_open_incident_is_succeeded(serve, state_dir):
    server = serve(*UVICORN[:-1], "2", SERVICE_CAPTURE_S="4", SERVICE_SETTLE_S="3")
    with server.load("/score?slow=1"):
        workers = server.workers(2)
        leader = server.wait(lambda: next((pid for pid, row in server.workers(2).items() if row["leads"]), None))
        path = server.wait(lambda: list_incidents(state_dir), 30)[0]
        server.wait(lambda: (path / "manifest-1.json").exists())
        other = next(row for pid, row in workers.items() if pid != leader)
        server.wait(lambda: any(row["incident"] for row in server.workers(2).values() if row["pid"] == other["pid"]))
        os.kill(leader, signal.SIGKILL)
        assert cli("incidents", state=state_dir).returncode == 0
        # the diagnosis runs when the machine is idle: on a busy one it takes its time
        server.wait(lambda: list(path.glob("diagnosis-*.json")), 90)
    server.wait(lambda: not verify(path) and len(list(path.glob("manifest-*.json"))) >= 3)
    assert (path / f"evidence-{other['slot']}-1.json").exists()
    assert "Traceback" not in server.said()


def test_profiles_of_all_workers_together_keep_to_the_budget(serve, state_dir):
    pytest.importorskip("torch")
    server = serve(*UVICORN[:-1], "2", SERVICE_CAPTURE_S="5", SERVICE_SETTLE_S="6", SERVICE_TORCH="1")
    with server.load("/score?slow=1"):
        server.workers(2)
        path = server.wait(lambda: list_incidents(state_dir), 30)[0]
        server.wait(lambda: len(list(path.glob("evidence-*-1.json"))) == 2, 40)
    kept = {side.name.split("-")[0] for side in (path / "captures").glob("s*[0-9].json")}
    traces = list((path / "captures").glob("*.trace.json"))
    assert 2 <= len(traces) <= 5
    assert kept == {"s0", "s1"}
    states = server.workers(2).values()
    assert sum(row["capture"]["kept"] for row in states) <= 5
    server.wait(lambda: list(path.glob("diagnosis-*.json")) and not verify(path), 90)
