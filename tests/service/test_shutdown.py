"""The end: within a second whatever the state, nothing said, the exit code the application's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from inferscope.capture.bundle import list_incidents, verify
from inferscope.testing.receiver import OtlpReceiver

HEAD = """
import json, os, sys, threading, time
import inferscope as scope
from inferscope.capture import incident

def serve(n, seconds=0.0):
    for _ in range(n):
        with scope.request("score"):
            with scope.stage("work"):
                if seconds: time.sleep(seconds)

def start(**more):
    scope.configure(service="ending", slo=scope.SLO("score", p99_ms=5, min_requests=1, window_s=5), tick_s=0.1, export_interval_s=0.2,
                    warmup_requests=20, **more)

def breach():
    serve(60)
    from inferscope import api
    from inferscope.clock import now_ns
    rooms = api._runtime.rooms
    assert rooms.keeper.open(rooms.trigger.manual(now_ns()), now_ns())
    time.sleep(0.5)
    assert scope.status()["incident"], scope.status()
"""
ENDS = """
begun = time.monotonic()
scope.shutdown()
took = time.monotonic() - begun
print(json.dumps({"took": took, "alive": [t.name for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()]}))
"""
STATES = {
    "fresh": "start()",
    "healthy": "start(); serve(100); time.sleep(0.3)",
    "incident being collected": "start(); breach()",
    "incident being diagnosed": "incident.CAPTURE_S = 0.1; incident.SETTLE_S = 0.0; start(); breach(); time.sleep(0.6)",
    "nothing running": "",
    "twice configured": "start(); serve(10); start(); serve(10)",
}


@pytest.mark.parametrize("state", STATES)
def test_shutdown_takes_no_second_and_says_nothing(script, state, state_dir):
    done = script(HEAD + STATES[state] + ENDS + "\nsys.exit(7)")
    assert (done.returncode, done.stderr) == (7, "")
    told = json.loads(done.stdout)
    assert told["took"] <= 1.0
    assert told["alive"] == []
    for path in list_incidents(state_dir):
        assert verify(path) == []


@pytest.mark.parametrize("mode", ["black_hole", "drip", "refuse"])
def test_a_receiver_that_does_not_answer_keeps_nobody(script, mode):
    with OtlpReceiver(mode) as receiver:
        done = script(HEAD + "start(); serve(100); time.sleep(0.5)" + ENDS, OTEL_EXPORTER_OTLP_ENDPOINT=receiver.url)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["took"] <= 1.0


def test_a_process_that_ends_without_shutdown_delivers_and_is_clean(script):
    with OtlpReceiver() as receiver:
        done = script(HEAD + "start(); serve(123); sys.exit(3)", OTEL_EXPORTER_OTLP_ENDPOINT=receiver.url)
        assert (done.returncode, done.stdout, done.stderr) == (3, "", "")
        assert receiver.last("inferscope.requests").value == 123


@pytest.mark.parametrize(("end", "code"), [("raise SystemExit(4)", 4), ("raise ValueError('theirs')", 1), ("os._exit(5)", 5)])
def test_exit_codes_stay_the_applications(script, end, code):
    done = script(HEAD + "start(); serve(10)\n" + end)
    assert done.returncode == code
    assert done.stderr.count("Traceback") == (code == 1)
    assert "inferscope" not in done.stderr.replace("script.py", "")


@pytest.mark.parametrize("state", ["healthy", "incident being collected"])
def test_sigterm_ends_the_process_as_without_us(tmp_path, state_dir, state):
    path = tmp_path / "script.py"
    path.write_text(HEAD + STATES[state] + "\nprint('up', flush=True)\ntime.sleep(60)\n")
    process = subprocess.Popen([sys.executable, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        begun = time.monotonic()
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=10)
        assert time.monotonic() - begun < 1.0
        assert (process.returncode, said) == (-signal.SIGTERM, "")
    finally:
        process.kill()
        process.communicate()


def test_a_handler_of_the_application_that_exits_lets_us_deliver(tmp_path):
    with OtlpReceiver() as receiver:
        path = tmp_path / "script.py"
        path.write_text(
            HEAD
            + "import signal\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\nstart(); serve(42)\nprint('up', flush=True)\ntime.sleep(60)\n"
        )
        process = subprocess.Popen(
            [sys.executable, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url},
        )  # fmt: skip
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            process.send_signal(signal.SIGTERM)
            _, said = process.communicate(timeout=10)
            assert (process.returncode, said) == (0, "")
            assert receiver.last("inferscope.requests").value == 42
        finally:
            process.kill()
            process.communicate()


def test_requests_go_on_after_shutdown(script):
    done = script(HEAD + "start(); serve(5); scope.shutdown(); serve(5); scope.shutdown(); print(scope.status()['running'], scope.flush())")
    assert (done.returncode, done.stdout, done.stderr) == (0, "False False\n", "")


def test_a_profile_under_way_does_not_crash_the_end(script):
    pytest.importorskip("torch")
    source = (
        HEAD
        + """
import torch
torch.set_num_threads(1)
start()
serve(5)
print(scope.capture_now(reason="test", requests=2) != "", flush=True)
stop = threading.Event()
def work():
    x = torch.ones(64, 64)
    while not stop.is_set():
        with scope.request("score"):
            with scope.stage("work"):
                for _ in range(200): x = (x @ x).clamp(0, 1)
threads = [threading.Thread(target=work) for _ in range(2)]
[t.start() for t in threads]
time.sleep(1.0)
begun = time.monotonic()
scope.shutdown()
print(time.monotonic() - begun < 1.0)
# torch itself aborts when the interpreter ends under a daemon thread of the application that computes
stop.set()
[t.join() for t in threads]
sys.exit(6)
"""
    )
    done = script(source, timeout=60)
    assert (done.returncode, done.stdout) == (6, "True\nTrue\n"), done.stderr


def test_a_server_that_raises_its_signal_again_has_delivered_before(serve):
    with OtlpReceiver() as receiver:
        server = serve(
            "uvicorn", "app:app", "--host", "127.0.0.1", "--port", "0",
            OTEL_EXPORTER_OTLP_ENDPOINT=receiver.url, INFERSCOPE_INTEGRATIONS="asgi", SERVICE_EXPORT_S="3600",
        )  # fmt: skip
        for _ in range(9):
            server.get("/score")
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(10)
        assert receiver.last("inferscope.requests", inferscope__request="score").value == 18  # at the edge and in the handler
        assert "Traceback" not in server.said()
