"""What is switched off stays off, what cannot be used costs one line, and the service starts."""

from __future__ import annotations

import json
import os

import pytest

from inferscope.testing.receiver import OtlpReceiver

HEAD = """
import json, logging, os, sys, threading, time
logging.basicConfig(format="%(message)s")
import inferscope as scope

def serve(n):
    for _ in range(n):
        with scope.request("score"):
            with scope.stage("work"):
                pass
"""


def last(done) -> dict:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_disabled_loads_nothing_and_every_call_works(script):
    source = """
import sys, threading, json
import inferscope as scope

def plain(x): return x + 1
lock = threading.Lock()
assert scope.request("score")(plain) is plain
assert scope.stage("work")(plain) is plain
assert scope.lock("rules", lock) is lock
scope.configure(service="off", slo="score:p99_ms=5", enabled=True)
with scope.request("score") as r, scope.stage("work"):
    pass
model = object()
assert scope.watch(model, "m") is model
states = scope.instrument("asgi", "torch")
assert set(states.values()) == {"skipped: INFERSCOPE_DISABLED=1"}
assert scope.uninstrument() == {}
taken = scope.snapshot()
status = scope.status()
assert status["running"] is False and status["enabled"] is False
assert scope.flush() is False and scope.ready() is False
try:
    scope.capture_now(reason="x")
except scope.InferscopeError as error:
    refused = str(error)
scope.shutdown()
heavy = [m for m in ("numpy", "torch", "opentelemetry", "wrapt", "inferscope.runtime", "inferscope.record._native") if m in sys.modules]
print(json.dumps({"heavy": heavy, "threads": threading.active_count(), "refused": refused}))
"""
    told = last(script(source, INFERSCOPE_DISABLED="1"))
    assert told == {"heavy": [], "threads": 1, "refused": told["refused"]}
    assert "not configured" in told["refused"]


def test_enabled_is_a_hot_switch(script):
    source = (
        HEAD
        + """
scope.configure(service="hot", slo=scope.SLO("score", p99_ms=5), tick_s=0.1)
serve(10)
assert scope.flush()
scope.configure(service="hot", enabled=False)
serve(10)
off = scope.status()
scope.configure(service="hot", slo=scope.SLO("score", p99_ms=5), tick_s=0.1)
serve(10)
scope.flush()
on = scope.status()
print(json.dumps([off["running"], off["enabled"], on["running"], on["enabled"], threading.active_count() - len(on["threads"]),
      len(on["threads"]) - sum(1 for t in threading.enumerate() if t.name.startswith("inferscope"))]))
"""
    )
    off_running, off_enabled, on_running, on_enabled, threads, ours = last(script(source))
    assert (off_running, off_enabled, on_running, on_enabled) == (False, False, True, True)
    assert (threads, ours) == (1, 0), "none of the first start is left"


def test_parts_are_switched_by_the_environment(script):
    source = (
        HEAD
        + """
scope.configure(service="parts", slo=scope.SLO("score", p99_ms=5))
serve(10)
try:
    refused = scope.capture_now(reason="x")
except scope.InferscopeError as error:
    refused = str(error)
status = scope.status()
print(json.dumps([status["capture"], status["export"], refused, status["integrations"], sorted(t.name for t in threading.enumerate())]))
"""
    )
    with OtlpReceiver() as receiver:
        done = script(
            source,
            INFERSCOPE_CAPTURE="0",
            INFERSCOPE_EXPORT="0",
            INFERSCOPE_INTEGRATIONS="torch,asgi",
            OTEL_EXPORTER_OTLP_ENDPOINT=receiver.url,
        )
        assert receiver.attempts == 0
    capture, export, refused, integrations, _ = last(done)
    assert (capture, export) == ("off", "off")
    assert "INFERSCOPE_CAPTURE=0" in refused
    assert integrations == {"torch": "waiting", "asgi": "waiting"}
    assert done.stderr == ""


def test_unknown_integrations_of_the_environment_cost_a_line(script):
    done = script(
        HEAD + "scope.configure(service='x')\nserve(3)\nprint(json.dumps(scope.status()['running']))",
        INFERSCOPE_INTEGRATIONS="torch,nosuch",
    )
    assert last(done) is True
    assert done.stderr.count("nosuch") == 1
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "bad",
    [
        "slo=[scope.SLO('score', p99_ms=5), scope.SLO('score', p99_ms=9)]",
        "export_interval_s=-1",
        "protocol='carrier-pigeon'",
        "budget=3",
        "nonsense=1",
        "tick_s='soon'",
    ],
)
def test_bad_keywords_change_nothing_that_runs(script, bad):
    source = (
        HEAD
        + f"""
scope.configure(service="good", slo=scope.SLO("score", p99_ms=5), tick_s=0.1)
serve(10)
before = scope.status()
try:
    scope.configure(service="worse", {bad})
except (scope.InferscopeError, TypeError) as error:
    raised = str(error)
after = scope.status()
serve(5)
print(json.dumps([raised, before["instance_id"] == after["instance_id"], after["service"], list(after["threads"].values()),
                  after["objectives"].keys() == before["objectives"].keys(), scope.flush()]))
"""
    )
    raised, same, service, threads, objectives, flushed = last(script(source))
    assert raised
    assert (same, service, threads, objectives, flushed) == (True, "good", [True] * len(threads), True, True)


STARTS = (
    HEAD
    + """
# become
scope.configure(service="svc", slo=scope.SLO("score", p99_ms=5), tick_s=0.1, export_interval_s=0.2)
serve(25)
status = scope.status()
sent = scope.flush(3.0)
print(json.dumps([status["running"], sent, status["problems"], status["failures"], status["instance_id"] != ""]))
"""
)


def check_memory_only(done, receiver, total: int = 25) -> None:
    running, sent, _, failures, named = last(done)
    assert (running, sent, failures, named) == (True, True, {}, True)
    assert receiver.last("inferscope.requests").value == total
    said = done.stderr.strip().splitlines()
    assert len(said) == 1, done.stderr
    assert "evidence stays in memory" in said[0]
    assert "OTLP still works" in said[0]


def test_a_file_in_place_of_the_state_directory(script, tmp_path):
    place = tmp_path / "taken"
    place.write_text("mine")
    with OtlpReceiver() as receiver:
        done = script(STARTS, INFERSCOPE_STATE_DIR=str(place), OTEL_EXPORTER_OTLP_ENDPOINT=receiver.url)
        check_memory_only(done, receiver)
    assert place.read_text() == "mine"


def test_a_directory_of_the_service_that_cannot_be_used(script, tmp_path):
    place = tmp_path / "state"
    (place / "svc").mkdir(parents=True)
    (place / "svc" / "slots").write_text("a file where a directory belongs")
    with OtlpReceiver() as receiver:
        check_memory_only(script(STARTS, INFERSCOPE_STATE_DIR=str(place), OTEL_EXPORTER_OTLP_ENDPOINT=receiver.url), receiver)


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize("mode", [0o700, 0o555])
def test_somebody_elses_or_a_read_only_directory(script, tmp_path, mode):
    place = tmp_path / "foreign"
    place.mkdir(mode=mode)
    # the first start imports everything while that is still allowed
    source = STARTS.replace(
        "# become",
        f"scope.configure(state_dir={str(tmp_path / 'mine')!r}); serve(5); scope.flush(); scope.shutdown(); os.chdir('/'); os.setuid(65534)",
    )
    with OtlpReceiver() as receiver:
        done = script(source, INFERSCOPE_STATE_DIR=str(place), OTEL_EXPORTER_OTLP_ENDPOINT=receiver.url, PYTHONDONTWRITEBYTECODE="1")
        check_memory_only(done, receiver, total=30)
    assert list(place.iterdir()) == []


def test_a_state_directory_that_vanishes_costs_no_request(script, tmp_path):
    source = (
        HEAD
        + """
import shutil
scope.configure(service="svc", slo=scope.SLO("score", p99_ms=5), tick_s=0.1, export_interval_s=0.2)
serve(10)
scope.flush()
shutil.rmtree(os.environ["INFERSCOPE_STATE_DIR"])
for _ in range(10):
    serve(10)
    time.sleep(0.05)
scope.flush()
print(json.dumps([scope.status()["running"], scope.snapshot() is not None]))
"""
    )
    assert last(script(source)) == [True, True]
