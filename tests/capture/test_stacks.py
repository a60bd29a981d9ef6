"""Where slow requests are, without torch: stacks of late requests' threads."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import pytest

from inferscope.capture import stacks as module
from inferscope.capture.stacks import SlowStacks
from inferscope.record import core

MS = 1_000_000
needs_core = pytest.mark.skipif(not hasattr(core.Recorder, "_open"), reason="stacks are read by the C core")


def row(number, start, thread, name="score", stage="rules", carrier=False):
    return (number, name, stage, start, thread, carrier, None)


def build(rows, stack=(("hold", "app/rules.py", 7),)):
    read = []

    def look(ident, depth):
        read.append(ident)
        return stack

    one = SlowStacks(lambda: rows, look)
    one.arm("score", 20 * MS)
    one.read = read
    return one


def test_only_late_requests_of_that_name_are_looked_at():
    me = threading.get_native_id()
    one = build([row(1, 90 * MS, me), row(2, 0, me, name="other"), row(3, 0, me, carrier=True)])
    one.sample(100 * MS)
    assert one.samples == 0
    one = build([row(1, 87 * MS, me)])
    one.sample(100 * MS)
    one.sample(120 * MS)
    (seen,) = one.document(0)["stacks"]
    assert seen == {"stage": "rules", "samples": 2, "requests": [1], "frames": [["hold", "app/rules.py", 7]]}
    assert one.read == [threading.get_ident()] * 2


def test_the_oldest_come_first_and_no_more_than_a_few_a_sample():
    one = build([row(n, n, 1000 + n) for n in range(20)])
    one._ident = lambda native: native
    one.sample(1000 * MS)
    assert one.read == [1000, 1001, 1002, 1003]


def test_tasks_of_one_thread_have_no_stack_of_their_own():
    me = threading.get_native_id()
    one = build([row(1, 0, me), row(2, 1, me)])
    one.sample(100 * MS)
    assert (one.samples, one.shared) == (0, 1)


def test_what_is_kept_is_bounded(monkeypatch):
    monkeypatch.setattr(module, "DISTINCT", 2)
    me = threading.get_native_id()
    rows = [row(1, 0, me)]
    one = build(rows)
    for n in range(5):
        rows[0] = row(n, 0, me, stage=f"s{n}")
        one.sample(100 * MS)
    assert (len(one.document(0)["stacks"]), one.dropped) == (2, 3)


def test_a_thread_that_is_gone_costs_nothing():
    one = build([row(1, 0, 1)], stack=None)
    one.sample(100 * MS)
    assert one.samples == 0


def test_without_the_core_the_evidence_says_so():
    one = SlowStacks(None, None)
    one.arm("score", MS)
    one.sample()
    assert "C core" in one.document(0)["reason"]


@needs_core
def test_a_threads_stack_is_function_file_and_line():
    entered, leave = threading.Event(), threading.Event()
    recorder = core.Recorder()

    def hold(secret):
        entered.set()
        leave.wait()

    def serve():
        with recorder.request("score"), recorder.stage("rules"):
            hold("hunter2")

    thread = threading.Thread(target=serve)
    thread.start()
    entered.wait()
    one = SlowStacks(recorder._open, recorder._stack)
    one.arm("score", 0)
    one.sample()
    leave.set()
    thread.join()
    (seen,) = one.document(3)["stacks"]
    names = [frame[0].rpartition(".")[2] for frame in seen["frames"]]
    assert names[: names.index("serve") + 1][-2:] == ["hold", "serve"]
    assert all(frame[1].count("/") <= 1 for frame in seen["frames"])
    assert seen["stage"] == "rules"
    assert "hunter2" not in json.dumps(one.document(3))
    assert recorder._stack(thread.ident, 8) is None
    for wrong in ((), (1,), (1, 0), (1, 65), ("x", 3)):
        with pytest.raises(TypeError):
            recorder._stack(*wrong)


PROGRAM = """
import sys, threading, time
from inferscope.record import core
recorder = core.Recorder()
def deep(n):
    return n if n == 0 else deep(n - 1)
def work(stop):
    while not stop.is_set():
        with recorder.request("score"), recorder.stage("a"):
            deep(40)
            [[] for _ in range(300)]
stop = threading.Event()
threads = [threading.Thread(target=work, args=(stop,), daemon=True) for _ in range(4)]
for thread in threads: thread.start()
sys.setswitchinterval(1e-5)
end = time.monotonic() + 2
reads = 0
while time.monotonic() < end:
    for thread in threads:
        reads += len(recorder._stack(thread.ident, 64) or ())
    for row in recorder._open():
        assert row[1] == "score"
stop.set()
print(reads)
"""


@needs_core
def test_stacks_that_move_can_be_read():
    done = subprocess.run([sys.executable, "-X", "faulthandler", "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 1000
