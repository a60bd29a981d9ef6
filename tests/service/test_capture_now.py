"""Captures on demand: granted with an id, refused with a reason, over by themselves."""

from __future__ import annotations

import gzip
import json

import pytest

from inferscope.capture.bundle import list_incidents, verify
from inferscope.capture.schema import unlisted

HEAD = """
import json, os, sys, threading, time
import inferscope as scope
from inferscope.capture import incident
incident.CAPTURE_S, incident.SETTLE_S = 3.0, 0.5

def refused(**more):
    try:
        return "granted " + scope.capture_now(reason="test", **more)
    except scope.InferscopeError as error:
        return type(error).__name__ + ": " + str(error)

def start(**more):
    scope.configure(service="asked", slo=scope.SLO("score", p99_ms=500), tick_s=0.1, diagnose="off", **more)

def over(seconds=12):
    deadline = time.monotonic() + seconds
    while scope.status()["incident"] and time.monotonic() < deadline:
        time.sleep(0.05)
    return scope.status()["incident"] is None
"""


def test_refusals_say_why(script):
    source = (
        HEAD
        + """
said = {"unconfigured": refused()}
start(capture=False); said["off"] = refused()
start(); said["torch"] = refused(); said["range"] = refused(requests=0)
from inferscope import settings
settings._state_dir = lambda *_: None
start(); said["memory"] = refused()
scope.shutdown(); said["after"] = refused()
print(json.dumps(said))
"""
    )
    done = script(source)
    assert (done.returncode, done.stderr) == (0, "")
    said = json.loads(done.stdout)
    assert "not configured" in said["unconfigured"]
    assert "INFERSCOPE_CAPTURE=0" in said["off"]
    assert said["torch"] == "CaptureRefusedError: the application has not imported torch"
    assert said["range"].startswith("ConfigurationError: requests=0")
    assert "no state directory" in said["memory"]
    assert "not configured" in said["after"]


def test_a_capture_holds_what_was_asked_for_and_closes_by_itself(script, state_dir):
    pytest.importorskip("torch")
    source = (
        HEAD
        + """
import logging
import torch
from inferscope_integrations.logs import IdsFilter
torch.set_num_threads(1)
x = torch.ones(32, 32)
start()
def logged():
    line = logging.makeLogRecord({"msg": "slow"})
    IdsFilter().filter(line)
    return line.inferscope_incident
def serve(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with scope.request("score"):
            with scope.stage("work"):
                (x @ x).sum()
        time.sleep(0.005)
serve(0.3)
first = refused(requests=3)
same = refused(requests=3)
lines = set()
while scope.status()["incident"]:
    serve(0.1)
    lines.add(logged())
pending = refused(requests=2)
waited = over()
time.sleep(0.5)
lines.add(logged())
print(json.dumps({"lines": sorted(lines), "first": first, "same": same, "pending": pending, "waited": waited, "failures": scope.status()["failures"]}))
scope.shutdown()
"""
    )
    done = script(source, timeout=60)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["first"].startswith("granted ")
    assert told["same"] == told["first"]
    assert told["pending"].startswith("granted ")
    assert told["waited"]
    assert told["failures"] == {}
    assert told["first"].removeprefix("granted ") in told["lines"]  # log lines name the open incident, and none when it is closed
    assert told["lines"][0] == ""
    empty, full = list_incidents(state_dir)
    assert [f"granted {path.name}" for path in (full, empty)] == [told["first"], told["pending"]]
    assert len(list((full / "captures").glob("*.trace.json"))) == 3
    assert len(list((full / "captures").glob("*[0-9].json"))) == 3
    assert not list((empty / "captures").iterdir())
    for path in (full, empty):
        assert verify(path) == []
        manifests = sorted(path.glob("manifest-*.json"), key=lambda each: int(each.stem[9:]))
        last = json.loads(manifests[-1].read_text())
        assert last["state"] == "closed"
        assert last["objective"]["asked_by"]["reason"] == "test"
        assert json.loads((path / "breach.json").read_text())["trigger"] == "manual"


def test_windows_and_deep_captures_on_demand(script, state_dir):
    """Refused where torch would crash, unless somebody takes the risk; then all threads, or shapes and stacks, as asked."""
    pytest.importorskip("torch")
    source = (
        HEAD
        + """
import torch
from inferscope.capture.budget import CaptureBudget
torch.set_num_threads(1)
x = torch.ones(32, 32)
stop = threading.Event()
os.environ["API_TOKEN"] = "canary-environment"
def serve():
    from torch._C._profiler import _RecordFunctionFast
    token = "canary-local"
    secret = torch.full((32, 32), 7654321.25)
    while not stop.is_set():
        try:
            with scope.request("score"):
                with scope.stage("work"), torch.profiler.record_function("canary-annotation"), _RecordFunctionFast("user::canary-fast"):
                    (x @ x).sum()
                    torch.add(secret, x, alpha=1234567.75)
                raise ValueError("canary-exception " + token)
        except ValueError:
            pass
        time.sleep(0.002)
threads = [threading.Thread(target=serve) for _ in range(2)]
for thread in threads: thread.start()
from inferscope.record import core
said = {"core": hasattr(core.default, "_open")}
start()
said["unsafe"] = refused(tier=2)
scope.shutdown()
incident.CAPTURE_S = 6.0
start(budget=CaptureBudget(all_threads=True, free_memory_mb=0, cooldown_s=0))
said["windows"] = refused(tier=2, window_ms=100, requests=2)
said["over"] = over(20)
said["no_stall"] = refused(tier=3, shapes=True)
said["deep"] = refused(tier=3, shapes=True, stacks=True, allow_stall_ms=200, requests=1)
said["over_too"] = over(20)
said["failures"] = scope.status()["failures"]
stop.set()
for thread in threads: thread.join()
print(json.dumps(said))
scope.shutdown()
"""
    )
    done = script(source, timeout=100)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    if not told["core"]:
        assert "C core" in told["unsafe"]
        return
    assert "all_threads=True" in told["unsafe"]
    assert told["no_stall"].startswith("ConfigurationError: allow_stall_ms")
    assert (told["over"], told["over_too"], told["failures"]) == (True, True, {})
    deep, windows = list_incidents(state_dir)[:2]
    assert (told["windows"], told["deep"]) == (f"granted {windows.name}", f"granted {deep.name}")
    sides = [json.loads(path.read_text()) for path in sorted((windows / "captures").glob("*-w?.json"))]
    assert len(sides) == 2
    named = set()
    for side in sides:
        assert (side["tier"], side["gil_gap_ms"] > 0) == (2, True)
        named |= {event.get("name") for event in json.loads((windows / side["trace"]).read_text())["traceEvents"]}
    assert any(name.startswith("aten::") for name in named)
    (side,) = [json.loads(path.read_text()) for path in (deep / "captures").glob("*-r*[0-9].json")]
    assert (side["tier"], side["shapes"], side["stacks"]) == (3, True, True)
    asked = json.loads((deep / "manifest-1.json").read_text())["objective"]["asked_by"]
    assert (asked["tier"], asked["allow_stall_ms"]) == (3, 200)
    for path in (windows, deep):
        assert verify(path) == []
        assert unlisted(path) == [], "every string that is written has its class in the schema"
    everything = [path for path in state_dir.rglob("*") if path.is_file()]
    assert len(everything) > 20
    for path in everything:
        content = path.read_bytes()
        content += gzip.decompress(content) if path.suffix == ".gz" else b""
        for canary in (b"canary", b"7654321", b"1234567.75", str(state_dir.parent).encode()):
            if canary == b"canary" or (path.suffix == ".json" and not path.name.startswith("diagnosis")):
                assert canary not in content, (path, canary)
    events = json.loads((deep / side["trace"]).read_text())["traceEvents"]
    assert {"annotation-1", "aten::add"} <= {event["name"] for event in events}


def test_without_torch_an_incident_still_says_where_slow_requests_are(script, state_dir):
    source = (
        HEAD
        + """
from inferscope.capture.budget import CaptureBudget
from inferscope.record import core
def guilty():
    time.sleep(0.06)
def serve(seconds):
    end = time.monotonic() + seconds
    n = 0
    while time.monotonic() < end:
        n += 1
        with scope.request("score"), scope.stage("rules"):
            guilty() if n % 4 == 0 else time.sleep(0.002)
scope.configure(service="asked", slo=scope.SLO("score", p99_ms=20, window_s=5, min_requests=10), tick_s=0.1, diagnose="off",
                warmup_s=300, warmup_requests=40)
serve(9)
said = {"core": hasattr(core.default, "_open"), "torch": "torch" in sys.modules, "failures": scope.status()["failures"]}
scope.shutdown()
print(json.dumps(said))
"""
    )
    done = script(source, timeout=60)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["torch"], told["failures"]) == (False, {})
    path = list_incidents(state_dir)[-1]
    assert verify(path) == []
    assert unlisted(path) == []
    said = json.loads((path / "stacks-0-1.json").read_text())
    if not told["core"]:
        assert "C core" in said["reason"]
        return
    assert said["reason"] is None
    named = [frame[0] for seen in said["stacks"] for frame in seen["frames"]]
    assert "guilty" in named
    assert {seen["stage"] for seen in said["stacks"]} == {"rules"}
    assert not list((path / "captures").iterdir())
