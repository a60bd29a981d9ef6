"""Slots, the lead and pooled counts, with real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from inferscope import pod

HOLD = """
import sys, time, pathlib
from inferscope import pod
p = pod.Pod(pod.lease(pathlib.Path(sys.argv[1]), "svc"))
print(p.slot.index, p.slot.instance_id, p.leads(), flush=True)
p.publish(time.perf_counter_ns(), [(10, 2, 0)])
sys.stdin.readline()
p.publish(time.perf_counter_ns(), [(30, 5, 1)])
print("published", flush=True)
sys.stdin.readline()
"""


def worker(state: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", HOLD, str(state)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def say(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def test_workers_take_the_lowest_free_slots_and_a_recycled_one_keeps_its_id(tmp_path: Path) -> None:
    workers = [worker(tmp_path) for _ in range(3)]
    try:
        told = [say(process).split() for process in workers]
        assert sorted(int(row[0]) for row in told) == [0, 1, 2]
        assert len({row[1] for row in told}) == 3
        assert [row[2] for row in told].count("True") == 1
        victim = next(i for i, row in enumerate(told) if row[0] == "1")
        end(workers[victim])
        again = worker(tmp_path)
        workers.append(again)
        index, instance, _ = say(again).split()
        assert (index, instance) == ("1", told[victim][1])
    finally:
        for process in workers:
            end(process)


def test_the_leader_sums_what_all_workers_counted_since_it_looked(tmp_path: Path) -> None:
    leader = pod.Pod(pod.lease(tmp_path, "svc"))
    other = worker(tmp_path)
    try:
        assert leader.leads()
        assert say(other).split()[2] == "False"
        leader.publish(time.perf_counter_ns(), [(100, 1, 0)])
        deadline = time.monotonic() + 5
        while len(leader.workers(time.perf_counter_ns())) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert leader.collect(time.perf_counter_ns(), 1) == [(0, 0, 0, 0, 0)]  # history before the first look
        leader.publish(time.perf_counter_ns(), [(107, 2, 0)])
        go_on(other)
        assert say(other) == "published"
        assert leader.collect(time.perf_counter_ns(), 1) == [(27, 4, 1, 0, 0)]
    finally:
        end(other)
        leader.close()


def test_an_announcement_reaches_the_other_workers(tmp_path: Path) -> None:
    first, second = (pod.Pod(pod.lease(tmp_path, "svc")) for _ in range(2))
    try:
        assert first.leads()
        assert not second.leads()
        assert first.slot.directory is not None
        incident = first.slot.directory / "incidents" / "x"
        first.announce(open_=True, onset_ns=5, until_ns=9, directory=str(incident))
        heard = second.announcement()
        assert heard is not None
        assert (heard.open, heard.onset_ns, heard.until_ns, Path(heard.directory)) == (True, 5, 9, incident)
        first.close()
        assert second.leads()
        again = second.announcement()
        assert again is not None
        assert not again.open
    finally:
        second.close()


def test_without_a_state_directory_a_process_is_alone_and_leads() -> None:
    alone = pod.Pod(pod.lease(None, "svc"))
    alone.publish(1, [(5, 1, 0)])
    assert alone.leads()
    assert alone.collect(1, 1) == [(0, 0, 0, 0, 0)]
    alone.publish(2, [(9, 3, 1)])
    assert alone.collect(2, 1) == [(4, 2, 1, 0, 0)]


def test_names_are_one_path_component() -> None:
    assert pod.safe_name("../a/b c") == "_a_b_c"
    assert pod.safe_name("..") == "service"
    assert os.sep not in pod.safe_name("x/y")
