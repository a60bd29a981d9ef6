"""A real service in a process of its own, asked by the command line."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from inferscope.capture.bundle import Bundle
from inferscope.control import workers

HERE = Path(__file__).parent
MAIN = "import inferscope.cli as cli; cli.VERBS.update(status='', capture='', inspect=''); raise SystemExit(cli.main())"


def verb(*words):
    done = subprocess.run([sys.executable, "-c", MAIN, *words, "--json"], capture_output=True, text=True, check=False, timeout=30)
    return done.returncode, json.loads(done.stdout) if done.stdout else None, done.stderr


@pytest.fixture
def start(state_dir, tmp_path):
    state_dir.mkdir(mode=0o700)
    processes = []

    def run(*words):
        environ = {**os.environ, "INFERSCOPE_STRICT": "0", "INFERSCOPE_CONTROL_SIGNAL": "SIGUSR2"}
        process = subprocess.Popen([sys.executable, str(HERE / "served.py"), *words], env=environ, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert int(process.stdout.readline()) == process.pid
        return process

    yield run
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


def until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="profiles need torch")
def test_the_life_of_a_service(start, state_dir):
    process = start("torch")
    until(lambda: list(state_dir.glob("blocked/0/control.sock")))
    status, value, _ = verb("status")
    assert status == 0
    assert (value["workers"][0]["pid"], value["workers"][0]["status"]["service"]) == (process.pid, "blocked")

    status, value, _ = verb("capture", "--pid", str(process.pid), "--requests", "2", "--reason", "slow since noon")
    assert status == 0
    path = Path(value["path"])
    until(lambda: (path / "manifest-1.json").exists() and Bundle.open(path).state == "closed", 60)
    status, value, _ = verb("inspect", str(path))
    assert (status, value["problems"]) == (0, [])
    asked = value["manifests"][0]["objective"]["asked_by"]
    assert asked["reason"].startswith(f"slow since noon (socket uid {os.geteuid()} pid ")
    assert len(value["captures"]) == 2

    # a signal, to a process whose main thread sleeps
    before = set(path.parent.iterdir())
    process.send_signal(signal.SIGUSR2)
    until(lambda: set(path.parent.iterdir()) - before)
    assert process.poll() is None

    # one that is stopped does not hang whoever asks
    process.send_signal(signal.SIGSTOP)
    begun = time.monotonic()
    status, value, _ = verb("status")
    assert (status, "no answer within" in value["workers"][0]["why"]) == (1, True)
    assert time.monotonic() - begun < 10
    process.send_signal(signal.SIGCONT)

    # one that was killed leaves a name that the next one takes over
    process.kill()
    process.wait()
    status, value, _ = verb("status")
    assert (status, "nobody answers" in value["workers"][0]["why"]) == (1, True)
    second = start()
    until(lambda: any(worker.refusal is None for worker in workers.find(state_dir)))
    assert verb("status")[1]["workers"][0]["pid"] == second.pid
