"""Captures on demand: granted with an id, refused with a reason, over by themselves."""

from __future__ import annotations

import json

import pytest

from inferscope.capture.bundle import list_incidents, verify

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
import torch
torch.set_num_threads(1)
x = torch.ones(32, 32)
start()
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
while scope.status()["incident"]:
    serve(0.1)
pending = refused(requests=2)
waited = over()
print(json.dumps({"first": first, "same": same, "pending": pending, "waited": waited, "failures": scope.status()["failures"]}))
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
