"""What a user of `configure`, the environment or a file gets of detection: triggers, promises, turns on a host."""

from __future__ import annotations

import fcntl
import json

from inferscope.capture.bundle import list_incidents

HEAD = """
import json, logging, os, sys, time
logging.basicConfig(format="%(message)s")
import inferscope as scope

def serve(seconds, until=lambda: False, error=None):
    end = time.monotonic() + seconds
    while time.monotonic() < end and not until():
        with scope.request("score", size=700) as request, scope.stage("work"):
            request.error = error
        time.sleep(0.002)
"""


def last(done):
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_predicate_of_the_users_opens_an_incident(script, state_dir):
    source = (
        HEAD
        + """
seen = []
def bad(window):
    seen.append(sum(held.count for held in window.classes))
    return len(seen) > 5
scope.configure(service="asked", slo=scope.SLO("score", p99_ms=500, jitter_ms=400, min_throughput=1, max_gpu_mem=0.9), tick_s=0.1,
                triggers={"predicate": bad, "lock_wait_ms": 1000, "memory_headroom": 0.001}, diagnose="off", export=False)
scope.ready(True)
serve(15, lambda: scope.status()["incident"] is not None)
status = scope.status()
print(json.dumps([status["objectives"], status["incident"], status["fleet"], sum(seen) > 0, status["failures"]]))
"""
    )
    objectives, incident, fleet, called, failures = last(script(source))
    assert list(objectives) == [
        "score",
        "score:jitter",
        "score:throughput",
        "score:gpu_memory",
        "predicate",
        "lock_wait",
        "memory_headroom",
    ]
    assert (objectives["predicate"]["phase"], called, failures) == ("open", True, {})
    assert (fleet["probability"], fleet["drawn"], fleet["host_lock"]) == (1.0, 1, "held")
    (path,) = list_incidents(state_dir)
    assert str(path) == incident
    told = json.loads((path / "breach.json").read_text())
    assert (told["slo"], told["request"], told["trigger"]) == ("predicate", "score", "predicate")


def test_triggers_and_promises_from_the_environment_and_a_file(script, tmp_path):
    (tmp_path / "inferscope.toml").write_text(
        "[[slo]]\nname = 'rank'\np95_ms = 5\nsize = [0, 512]\nuntil = 'last_byte'\n[triggers]\ngc_pause_ms = 200\n[budget]\nslow = 2\n"
    )
    source = (
        HEAD
        + """
scope.configure(service="asked", export=False)
status = scope.status()
from inferscope import api
rooms = api._runtime.rooms
print(json.dumps([status["objectives"], rooms.budget.slow, rooms.aggregator.sampling, status["problems"], rooms.trigger.slos[0].size]))
"""
    )
    environ = {"INFERSCOPE_TRIGGERS": "error_rate=0.05,throughput_drop=0.5", "INFERSCOPE_SAMPLING": "reservoir=9"}
    objectives, slow, sampling, problems, size = last(script(source, **environ))
    assert list(objectives) == ["rank", "error_rate", "throughput_drop"]
    assert (slow, sampling, problems, size) == (2, {"reservoir": 9}, [], [0.0, 512.0])


def test_triggers_that_cannot_be_used_cost_a_line(script):
    source = (
        HEAD
        + "scope.configure(service='asked', slo=scope.SLO('score', p99_ms=5), export=False)\nprint(json.dumps(list(scope.status()['objectives'])))"
    )
    done = script(source, INFERSCOPE_TRIGGERS="lock_wait_ms=soon", INFERSCOPE_BUDGET="slow=1000")
    assert last(done) == ["score"]
    assert done.stderr.count("triggers.lock_wait_ms='soon' is not usable") == 1
    assert done.stderr.count("slow=1000 is not usable") == 1


def test_a_host_that_captures_refuses_another_capture(script, state_dir):
    state_dir.mkdir(mode=0o700, exist_ok=True)
    source = (
        HEAD
        + """
import types
sys.modules.setdefault("torch", types.ModuleType("torch"))
scope.configure(service="asked", export=False)
serve(0.1)
try:
    said = scope.capture_now(reason="slow", id="a1")
except scope.InferscopeError as error:
    said = str(error)
print(json.dumps(said))
"""
    )
    with (state_dir / "capture.lock").open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert last(script(source)) == "another process of this host is capturing"
