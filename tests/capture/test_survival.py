"""The process that is captured survives: each scenario runs in its own interpreter and its exit status counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCENARIOS = Path(__file__).with_name("scenarios.py")
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="POSIX only")


def survive(scenario: str, directory: Path, *arguments: int, timeout: float = 100) -> Any:
    """Run a scenario; returns the JSON of its last line, or None when it says nothing."""
    command = [sys.executable, "-X", "faulthandler", str(SCENARIOS), scenario, str(directory), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout)
    assert done.returncode == 0, f"{scenario}: status {done.returncode}\n{done.stdout}\n{done.stderr[-4000:]}"
    lines = done.stdout.strip().splitlines()
    return json.loads(lines[-1]) if lines else None


def test_hundreds_of_captures_under_saturated_operators_and_the_users_own_profiler(tmp_path):
    said = survive("storm", tmp_path, 200)
    assert said["sessions"] >= 200
    assert said["hook_errors"] == 0
    assert said["uses"] >= 5
    assert said["incomplete"] == [], "the user's own traces are complete"
    assert said["yielded"] >= 1
    assert said["abandoned"] == 0
    assert said["saved"] == said["kept"] >= 8
    traces = sorted((tmp_path / "captures").glob("*.trace.json"))
    assert len(traces) == said["saved"]
    threads = set()
    for path in traces:
        events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("name") == "aten::add"]
        side = json.loads(path.with_name(path.name.replace(".trace.json", ".json")).read_text())
        assert len(events) == 40 or side["truncated"]
        assert {event["tid"] for event in events} == set(side["threads"])
        threads |= set(side["threads"])
    assert len(threads) > 1, "more than one worker was captured"


@pytest.mark.parametrize("scenario", ["exit_on_main", "exit_with_daemon", "exit_after_thread_died", "exit_by_exception"])
def test_exit_in_the_middle_of_a_capture(tmp_path, scenario):
    survive(scenario, tmp_path)


@pytest.mark.parametrize("scenario", ["fork_from_recording_thread", "fork_beside_recording_thread"])
def test_fork_in_the_middle_of_a_capture(tmp_path, scenario):
    survive(scenario, tmp_path)


@pytest.mark.parametrize("scenario", ["user_waits_in_vain", "user_overtakes"])
def test_a_region_that_does_not_end_does_not_keep_the_user_from_profiling(tmp_path, scenario):
    survive(scenario, tmp_path)


def test_the_first_capture_imports_nothing(tmp_path):
    said = survive("first_capture", tmp_path)
    assert said["modules"] == 0
    assert said["ours_ns"] * 5 < said["inductor_ns"], said


def test_memory_stays_where_it_was(tmp_path):
    said = survive("growth", tmp_path, 220)
    assert said["sessions"] == 220
    assert said["growth_bytes"] < 10 * 1024 * 1024


@pytest.mark.soak
def test_capture_thousands(tmp_path):
    for n in range(10):
        directory = tmp_path / str(n)
        directory.mkdir()
        assert survive("storm", directory, 600, timeout=300)["incomplete"] == []
