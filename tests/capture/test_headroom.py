"""Diagnoses beside a service: only where memory and quota leave room, within a share of a CPU, and later otherwise."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from inferscope import guard
from inferscope.capture import child, diagnosing, headroom
from inferscope.capture.bundle import Bundle, verify
from inferscope.capture.child import SHARE, DiagnosisChild
from inferscope.capture.diagnosing import Diagnosing, resume, undiagnosed
from inferscope.capture.headroom import CHILD_BYTES, Headroom
from inferscope.capture.held import Open
from inferscope.types import Breach

MB = 1 << 20


@pytest.fixture(scope="module")
def planted():
    """What the tests of the diagnosis plant."""
    path = Path(__file__).parents[1] / "diagnose" / "service.py"
    spec = importlib.util.spec_from_file_location("planted_service", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    evidence = json.loads(json.dumps(module.evidence(module.simulate(60, 200, seed=3), [20 * module.MS])))
    return SimpleNamespace(breach=module.breach(), evidence=evidence)


def incident(root: Path, planted, identity="20260101T000000Z-score-0001", state="captured") -> Bundle:
    made = Bundle.create(root, Breach(**{**planted.breach, "id": identity}), {}, {"name": "score"}, {})
    made.add_json("evidence-0-1.json", planted.evidence)
    made.publish(state)
    return made


def group(tmp_path, version: int, quota: str, spent_s: float) -> tuple[Path, Path]:
    """A tree of control groups with this process in it."""
    root, own = tmp_path / "cgroup", tmp_path / "own"
    if version == 2:
        place = root / "pod"
        place.mkdir(parents=True, exist_ok=True)
        own.write_text("0::/pod\n")
        (place / "cpu.max").write_text(f"{quota} 100000\n")
        (place / "cpu.stat").write_text(f"usage_usec {int(spent_s * 1e6)}\nnr_periods 1\nnr_throttled 0\nthrottled_usec 0\n")
    else:
        for name, file, text in (
            ("cpu", "cpu.cfs_quota_us", quota if quota != "max" else "-1"),
            ("cpu", "cpu.cfs_period_us", "100000"),
            ("cpuacct", "cpuacct.usage", str(int(spent_s * 1e9))),
        ):
            (root / name / "pod").mkdir(parents=True, exist_ok=True)
            (root / name / "pod" / file).write_text(f"{text}\n")
        own.write_text("4:cpu:/pod\n3:cpuacct:/pod\n")
    return root, own


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("used", "share", "refused"), [(0.3, 0.35, False), (0.95, 0.025, True), (1.2, 0.0, True)])
def test_a_child_gets_half_of_what_the_quota_leaves(tmp_path, version, used, share, refused):
    now = [0.0]
    root, own = group(tmp_path, version, "100000", 10.0)
    room = Headroom(root, own, lambda: 300 * MB, lambda: now[0])
    room.look()
    now[0] = 4.0
    group(tmp_path, version, "100000", 10.0 + 4 * used)
    room.look()
    assert room.share() == pytest.approx(share, abs=0.001)
    assert (room.refusal() is not None) is refused
    group(tmp_path, version, "max", 0)
    assert room.share() is None
    assert room.refusal() is None


@pytest.mark.parametrize(("free", "refused"), [(300 * MB, False), (CHILD_BYTES - 1, True), (None, False)])
def test_memory_comes_first(tmp_path, free, refused):
    root, own = group(tmp_path, 2, "max", 0)
    words = Headroom(root, own, lambda: free).refusal()
    assert (words is not None) is refused
    assert words is None or "MB of memory are free" in words


def test_without_a_tree_nothing_is_said(tmp_path):
    room = Headroom(tmp_path / "absent", tmp_path / "absent", lambda: None)
    room.look()
    assert (room.share(), room.refusal()) == (None, None)


# The child


def test_the_child_takes_less_memory_than_it_is_said_to_need(tmp_path, planted):
    made = incident(tmp_path / "svc" / "0", planted)
    program = (
        "import runpy, sys; sys.argv = ['x', sys.argv[1]]\n"
        "try: runpy.run_module('inferscope.diagnose', run_name='__main__', alter_sys=True)\n"
        "except SystemExit as end: code = end.code\n"
        "print(code, open('/proc/self/status').read().partition('VmHWM:')[2].split()[0])"  # ru_maxrss counts who started it
    )
    done = subprocess.run([sys.executable, "-c", program, str(made.path)], capture_output=True, text=True, check=True)
    status, peak = done.stdout.split()
    assert status == "0"
    assert int(peak) * 1024 < CHILD_BYTES * 0.8


BUSY = "import time; from inferscope.diagnose.__main__ import pace_self; pace_self(float({0!r}))\nend = time.process_time() + 0.15\nwhile time.process_time() < end: sum(range(1000))"


def test_the_child_keeps_to_its_share_of_a_cpu():
    def run(share: str) -> tuple[float, float]:
        before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        subprocess.run([sys.executable, "-c", BUSY.format(share)], check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime - before.ru_utime, time.monotonic() - begun

    cpu, wall = run("0.2")
    assert cpu / wall < 0.4
    assert wall > 0.5
    done = subprocess.run(
        [sys.executable, "-m", "inferscope.diagnose", "absent"], env={**os.environ, SHARE: "much"}, capture_output=True, check=False
    )
    assert done.returncode == 1, "a share that is none is no reason to fail"


def test_the_share_reaches_the_child(tmp_path, monkeypatch):
    seen = []
    real = subprocess.Popen
    monkeypatch.setattr(child.subprocess, "Popen", lambda *words, env, **more: seen.append(env) or real(*words, env=env, **more))
    for share in (None, 0.35):
        one = DiagnosisChild(tmp_path / "absent", 10, share)
        while one.running():
            time.sleep(0.01)
        assert "no such incident" in one.complaint
    assert [env.get(SHARE) for env in seen] == [None, "0.350"]


CPU = Path("/sys/fs/cgroup/cpu")
PROGRAM = """
import os, subprocess, sys, time
from pathlib import Path
place, share = Path(sys.argv[1]), sys.argv[2]
(place / "cgroup.procs").write_text(str(os.getpid()))
def stat():
    return int(dict(line.split() for line in (place / "cpu.stat").read_text().splitlines())["nr_throttled"])
def serve(seconds):
    end, took = time.monotonic() + seconds, []
    while time.monotonic() < end:
        begun = time.perf_counter()
        until = time.thread_time() + 0.003
        while time.thread_time() < until: pass
        took.append(time.perf_counter() - begun)
        time.sleep(0.007)
    return sorted(took)[int(0.99 * len(took))]
before = stat()
code = "from inferscope.diagnose.__main__ import pace_self, limit_self; limit_self(); pace_self(float(%r))\\nwhile True: sum(range(1000))" % share
child = subprocess.Popen([sys.executable, "-c", code])
p99 = serve(4)
used = sum(map(int, Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[11:13])) / os.sysconf("SC_CLK_TCK")
child.kill(); child.wait()
print(stat() - before, round(p99 * 1e3, 1), used / 4)
"""


@pytest.fixture
def quota():
    """A real control group of one CPU, where one can be made."""
    place = CPU / f"inferscope-{os.getpid()}"
    try:
        place.mkdir()
    except OSError:
        pytest.skip("control groups cannot be written here; the tree that stands for them is tested above")
    (place / "cpu.cfs_quota_us").write_text("100000")
    yield place
    for _ in range(50):
        with contextlib.suppress(OSError):
            place.rmdir()
            return
        time.sleep(0.1)


@pytest.mark.soak
def test_in_a_group_of_one_cpu_the_service_is_not_stopped(quota):
    """The service needs a third of the CPU; a child without its share would take the rest and the service with it."""

    def run(share: str) -> tuple[int, float, float]:
        done = subprocess.run([sys.executable, "-c", PROGRAM, str(quota), share], capture_output=True, text=True, check=True)
        throttled, p99, used = done.stdout.split()
        return int(throttled), float(p99), float(used)

    throttled, _, used = run("0.35")
    assert throttled <= 2, "of 40 periods"
    assert used < 0.5
    throttled_without, _, used_without = run("1")
    if used_without > 0.6:  # the machine had the time: then the quota was used up
        assert throttled_without > 5


# When


@pytest.fixture
def sources():
    guard.reset()
    said = []
    return SimpleNamespace(diagnose="local", on_incident=said.append, emit=lambda *words: said.append(words[0]), said=said)


class Room:
    words: str | None = None

    def look(self):
        return None

    def refusal(self):
        return self.words

    def share(self):
        return 0.5


def held(made: Bundle, planted) -> Open:
    return Open(Breach(**{**planted.breach, "id": made.path.name}), made.path, 0, made, owned=True)


def finish(one: Diagnosing) -> None:
    deadline = time.monotonic() + 60
    while one.running and time.monotonic() < deadline:
        one.poll()
        time.sleep(0.02)


def test_no_room_means_later(tmp_path, planted, sources, monkeypatch):
    monkeypatch.setattr(diagnosing, "AGAIN_S", 0.0)
    made, room = incident(tmp_path / "svc" / "0", planted), Room()
    room.words = "100 MB of memory are free"
    one = Diagnosing(sources, room)
    one.want(held(made, planted))
    one.poll()
    assert (one.running, one.put_off, one.status()["why"]) == (False, 2, "100 MB of memory are free")
    room.words = None
    one.poll()
    assert one.running
    finish(one)
    assert (one.done, sources.said) == (1, ["diagnosed", made.path])
    assert made.state == "diagnosed"
    assert verify(made.path) == []


def test_no_room_for_long_means_that_somebody_else_does_it(tmp_path, planted, sources, monkeypatch, caplog):
    monkeypatch.setattr(diagnosing, "PATIENCE_S", -1.0)
    made, room = incident(tmp_path / "svc" / "0", planted), Room()
    room.words = "the CPU quota is used up"
    one = Diagnosing(sources, room)
    one.want(held(made, planted))
    assert (one.left, one.status()["waiting"]) == (1, 0)
    assert "inferscope explain" in caplog.text


def test_a_diagnosis_that_comes_after_the_end_leaves_the_incident_closed(tmp_path, planted, sources):
    made = incident(tmp_path / "svc" / "0", planted)
    one, opened = Diagnosing(sources, Room()), held(made, planted)
    one.want(opened)
    made.publish("closed")
    finish(one)
    assert made.state == "closed"
    assert any(name.startswith("diagnosis-") for name in made.artefacts)
    assert verify(made.path) == []


@pytest.mark.parametrize("mode", ["deferred", "off"])
def test_other_modes_start_no_child(tmp_path, planted, sources, mode):
    sources.diagnose = mode
    one = Diagnosing(sources, Room())
    one.want(held(incident(tmp_path / "svc" / "0", planted), planted))
    assert not one.running
    assert one.status() == {"mode": mode, "running": False, "waiting": 0, "why": None, "done": 0, "put_off": 0, "left": 0}


def test_a_child_that_is_killed_leaves_the_incident_as_it_was(tmp_path, planted, sources, caplog):
    made = incident(tmp_path / "svc" / "0", planted)
    root_hash = made.root_hash
    one = Diagnosing(sources, Room())
    one.want(held(made, planted))
    one._child[0]._process.kill()
    finish(one)
    assert (one.done, one.left, made.state) == (0, 1, "captured")
    assert verify(made.path, root_hash) == []
    assert "status -9" in caplog.text


# At a start


def test_what_was_left_undiagnosed_is_taken_up(tmp_path, planted, sources):
    root = tmp_path / "svc" / "0"
    names = [f"2026010{n}T000000Z-score-0001" for n in range(1, 8)]
    made = [
        incident(root, planted, name, state)
        for name, state in zip(names, ["captured", "closed", "open", "captured", "captured", "captured", "captured"], strict=True)
    ]
    made[6].add_json("diagnosis-1.json", {})
    os.utime(made[5].path / "breach.json", (0, 0))
    (made[4].path / "evidence-0-1.json").unlink()
    assert undiagnosed(root, None, time.time()) == [made[n].path for n in (3, 2, 1)]
    assert undiagnosed(root, str(made[3].path), time.time()) == [made[n].path for n in (2, 1, 0)]
    jobs = []
    one = Diagnosing(sources, Room())
    assert resume(one, root, str(made[3].path), jobs.append) == 3
    for job in jobs:
        job()
    deadline = time.monotonic() + 100
    while one.done < 3 and time.monotonic() < deadline:
        one.poll()
        time.sleep(0.02)
    states = [Bundle.open(each.path).state for each in made[:3]]
    assert states == ["diagnosed", "closed", "diagnosed"]
    for each in made[:3]:
        assert verify(each.path) == []


def test_a_damaged_incident_is_no_reason_to_fail_at_a_start(tmp_path, planted, sources, caplog):
    root = tmp_path / "svc" / "0"
    made = incident(root, planted)
    (made.path / "manifest-1.json").write_bytes(b"{")
    jobs = []
    one = Diagnosing(sources, Room())
    resume(one, root, None, jobs.append)
    for job in jobs:
        job()
    assert not one.running
    assert "cannot be taken up" in caplog.text


def test_the_need_is_stated_once():
    assert headroom.CHILD_BYTES < 300 * MB
