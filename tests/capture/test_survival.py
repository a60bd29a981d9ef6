"""The process that is captured survives: each scenario runs in a process of its own and its exit status counts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from inferscope.record import core

SCENARIOS = Path(__file__).with_name("scenarios.py")
EXITS = ["exit_on_main", "exit_with_daemon", "exit_after_thread_died", "exit_by_exception"]
FORKS = ["fork_from_recording_thread", "fork_beside_recording_thread", "fork_after_captures"]
USERS = ["user_waits_in_vain", "user_overtakes", "user_before_us"]
BOTH = ["", "kineto+"]
"""Sessions as they are by default, which Kineto has no part in, and as they are where torch no longer has those."""
WINDOWS = [
    "exit_in_a_window",
    "exit_with_a_parked_window",
    "fork_in_a_window",
    "fork_beside_a_parked_window",
    "user_beside_a_parked_window",
]
needs_core = pytest.mark.skipif(not hasattr(core.Recorder, "_open"), reason="requests in flight are known to the C core")
pytestmark = [pytest.mark.skipif(not hasattr(os, "fork"), reason="POSIX only"), pytest.mark.timeout(600)]


class Run(NamedTuple):
    root: Path
    statuses: dict[str, int]

    def survived(self, scenario: str) -> Any:
        """Assert it; returns the JSON of its last line, or None when it said nothing."""
        out, errors = ((self.root / f"{scenario}.{name}").read_text() for name in ("stdout", "stderr"))
        assert self.statuses[scenario] == 0, f"{scenario}: status {self.statuses[scenario]}\n{out}\n{errors[-4000:]}"
        lines = [line for line in out.splitlines() if line.startswith("{")]
        return json.loads(lines[-1]) if lines else None


def run(root: Path, *calls: str) -> Run:
    command = [sys.executable, "-X", "faulthandler", str(SCENARIOS), str(root), *calls]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return Run(root, json.loads(done.stdout))


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    calls = ["storm:200", *EXITS, *FORKS, *USERS, "first_capture", "growth:220", "exit_without_us"]
    if hasattr(core.Recorder, "_open"):
        calls += ["window_storm:100", *WINDOWS]
    return run(tmp_path_factory.mktemp("scenarios"), *calls)


@pytest.fixture(scope="module")
def ran_kineto(tmp_path_factory):
    """The same where Kineto records."""
    calls = [f"kineto+{name}" for name in ("storm:40", *EXITS, *FORKS, *USERS)]
    return run(tmp_path_factory.mktemp("kineto"), *calls)


@pytest.fixture
def either(request, how):
    return request.getfixturevalue("ran_kineto" if how else "ran")


@pytest.mark.parametrize("how", BOTH)
def test_hundreds_of_captures_under_saturated_operators_and_the_users_own_profiler(either, how):
    scenario = f"{how}storm"
    said = either.survived(scenario)
    assert said["sessions"] >= (40 if how else 200)
    assert said["hook_errors"] == 0
    assert said["uses"] >= 1
    assert said["incomplete"] == [], "the user's own traces are complete"
    assert said["abandoned"] == 0
    assert set(said["children"]) <= {0}, "forked children end well"
    assert said["saved"] == said["kept"] >= (2 if how else 8)
    traces = sorted((either.root / scenario / "captures").glob("*.trace.json"))
    assert len(traces) == said["saved"]
    threads = set()
    for path in traces:
        events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("name") == "aten::add"]
        side = json.loads(path.with_name(path.name.replace(".trace.json", ".json")).read_text())
        assert len(events) == 40 or side["truncated"]
        assert {event["tid"] for event in events} == set(side["threads"])
        threads |= set(side["threads"])
    assert how or len(threads) > 1, "more than one worker was captured, where there is time for it"


@pytest.mark.parametrize("how", BOTH)
@pytest.mark.parametrize("scenario", EXITS)
def test_exit_in_the_middle_of_a_capture(either, scenario, how):
    either.survived(how + scenario)


def test_without_us_that_exit_crashes(ran):
    import torch

    if tuple(map(int, torch.__version__.split("+")[0].split(".")[:2])) > (2, 13):
        pytest.skip("known of torch up to 2.13")
    assert ran.statuses["exit_without_us"] == -signal.SIGSEGV


@pytest.mark.parametrize("how", BOTH)
@pytest.mark.parametrize("scenario", FORKS)
def test_fork_in_the_middle_of_a_capture_and_after(either, scenario, how):
    either.survived(how + scenario)


def test_a_childs_output_is_flushed(ran):
    ran.survived("fork_after_captures")
    assert (ran.root / "fork_after_captures.stdout").read_text() == "from the child\n"


@pytest.mark.parametrize("how", BOTH)
@pytest.mark.parametrize("scenario", USERS)
def test_a_region_that_does_not_end_does_not_keep_the_user_from_profiling(either, scenario, how):
    either.survived(how + scenario)


def test_the_first_capture_imports_nothing(ran):
    said = ran.survived("first_capture")
    assert said["modules"] == 0
    assert said["ours_ns"] * 5 < said["inductor_ns"], said


def test_memory_stays_where_it_was(ran):
    said = ran.survived("growth")
    assert said["sessions"] == 220
    assert said["growth_bytes"] < 10 * 1024 * 1024


@needs_core
def test_a_hundred_windows_of_all_threads(ran):
    said = ran.survived("window_storm")
    assert said["recorded"] >= 100
    assert said["uses"] >= 1
    assert said["incomplete"] == [], "the user's own traces are complete"
    assert said["abandoned"] == 0
    assert set(said["children"]) == {0}
    assert said["saved"] == said["kept"] >= 3
    seen = [json.loads(path.read_text())["traceEvents"] for path in (ran.root / "window_storm" / "captures").glob("*.trace.json")]
    assert max(len({event["tid"] for event in events if event.get("name") == "aten::add"}) for events in seen) > 1, "many threads"


@needs_core
@pytest.mark.parametrize("scenario", WINDOWS)
def test_windows_end_well_whatever_the_process_does(ran, scenario):
    ran.survived(scenario)


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("how", BOTH)
def test_capture_two_thousand_requests(tmp_path, how):
    for n in range(10):
        root = tmp_path / str(n)
        root.mkdir()
        assert run(root, f"{how}storm:200").survived(f"{how}storm")["incomplete"] == []


@needs_core
@pytest.mark.soak
@pytest.mark.timeout(0)
def test_capture_a_thousand_windows(tmp_path):
    for n in range(5):
        root = tmp_path / str(n)
        root.mkdir()
        said = run(root, "window_storm:200").survived("window_storm")
        assert (said["recorded"] >= 200, said["incomplete"]) == (True, [])
