"""Planted services start as forks of a parent that has imported what they need: an import of torch would cost each run more than its service.

There is one parent with torch and one without, because torch in a process is evidence too. Neither starts a thread or a profiler, so a fork of it
is a process that has just begun; what was imported is frozen, so that no collection of the service walks through it.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import traceback
from pathlib import Path

HEAVY = ("torch", "torch.distributed", "torch.profiler", "torch._dynamo", "inferscope.testing.accelerator", "inferscope.device.room")
LONGEST_S = 150.0


class Parent:
    """Starts services one after another; `with_torch` says what it has imported."""

    def __init__(self, *, with_torch):
        command = [sys.executable, str(Path(__file__).with_name("scenarios.py")), "--parent", *(HEAVY if with_torch else ())]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, name, seconds, seed):
        """What the service printed.

        Raises:
            RuntimeError: It ended with an error, or took too long.
        """
        print(json.dumps([name, seconds, seed]), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{name}: the parent of services ended with {self._process.wait(10)}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{name}: {answer['error']}")
        return answer

    def close(self):
        """End it."""
        self._process.stdin.close()
        self._process.wait(10)


def serve(modules, start):
    """What a parent does until its input ends: `start(name, seconds, seed)` runs in a fork and gives JSON types."""
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError:
            pass  # the service that needs it says so
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(_forked(start, *json.loads(line))) + "\n")
        sys.stdout.flush()


def _forked(start, *arguments):
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ours)
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)
        os.dup2(2, 1)  # what a library prints is not an answer
        _answer(theirs, start, arguments)
    os.close(theirs)
    answer, late = b"", False
    while True:
        ready, _, _ = select.select([ours], [], [], LONGEST_S)
        if not ready:
            os.kill(child, signal.SIGKILL)
            late = True
            break
        part = os.read(ours, 1 << 16)
        if not part:
            break
        answer += part
    os.close(ours)
    _, status = os.waitpid(child, 0)
    if late:
        return {"error": f"took longer than {LONGEST_S:g} s"}
    return json.loads(answer) if answer else {"error": f"ended with status {status} and said nothing"}


def _answer(pipe, start, arguments):
    try:
        answer = start(*arguments)
    except BaseException:  # noqa: BLE001  (whatever it was, the parent prints it)
        answer = {"error": traceback.format_exc()[-2000:]}
    with os.fdopen(pipe, "w") as file:
        file.write(json.dumps(answer))
    os._exit(0)  # whatever threads and exit handlers the service has left
