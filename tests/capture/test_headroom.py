"""Diagnoses beside a service: only where memory and quota leave room, within a share of a CPU, and later otherwise."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import resource
import statistics
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
from inferscope.diagnose import __main__ as diagnose
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


def test_a_signal_that_comes_while_another_is_handled_does_not_end_the_child(monkeypatch):
    handlers = []
    monkeypatch.setattr(diagnose.signal, "signal", lambda _number, handler: handlers.append(handler))
    monkeypatch.setattr(diagnose.signal, "setitimer", lambda *_: None)
    monkeypatch.setattr(diagnose.atexit, "register", lambda *_: None)
    slept, nested = [], []

    def spent() -> float:
        """CPU seconds; the first look in a handler is interrupted by the whole of the next one."""
        now = spent.now = spent.now + 0.01
        if handlers and not nested:
            nested.append(True)
            handlers[0](0, None)
        return now

    spent.now = 0.0
    monkeypatch.setattr(diagnose.time, "process_time", spent)
    monkeypatch.setattr(diagnose.time, "sleep", slept.append)
    diagnose.pace_self(0.5)
    handlers[0](0, None)
    assert slept == [pytest.approx(0.02), 0.0]


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


GROUPS = Path("/sys/fs/cgroup")
PROGRAM = """
import json, os, sys, time
from pathlib import Path
cpu, memory, incident, share, seconds = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), float(sys.argv[4]), float(sys.argv[5])
import inferscope.capture.child as child
from inferscope.capture.bundle import Bundle
for place in (cpu, memory):
    (place / "cgroup.procs").write_text(str(os.getpid()))
used = int((memory / "memory.usage_in_bytes").read_text())
resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
(memory / "memory.limit_in_bytes").write_text(str(max(used, resident) + (300 << 20)))
def throttled():
    return int(dict(line.split() for line in (cpu / "cpu.stat").read_text().splitlines())["nr_throttled"])
def serve(ends):
    due, took = time.perf_counter(), []
    while not ends():
        due = max(due + 0.01, time.perf_counter())
        time.sleep(max(0.0, due - time.perf_counter()))
        until = time.thread_time() + 0.003
        while time.thread_time() < until: pass
        took.append(time.perf_counter() - due)
    return sorted(took)[int(0.99 * (len(took) - 1))]
def after(wait):
    end = time.monotonic() + wait
    return lambda: time.monotonic() > end
def idle():
    return sum(map(int, Path("/proc/stat").read_text().splitlines()[0].split()[4:6])) / os.sysconf("SC_CLK_TCK")
def spent():
    times = os.times()
    return times.children_user + times.children_system
found, stops, children, spare = [], {True: 0, False: 0}, [], []
end = time.monotonic() + seconds
serve(after(0.5))
while time.monotonic() < end:
    p99, lasted = {}, 1.5
    for beside in (True, False) if len(found) % 2 else (False, True):
        before, cpu_before, begun = throttled(), spent(), time.monotonic()
        if beside:
            one = child.DiagnosisChild(incident, 60, share)
            p99[True] = serve(lambda: not one.running())
            lasted = time.monotonic() - begun
            children.append((spent() - cpu_before, lasted, one.complaint))
        else:
            idle_before = idle()
            p99[False] = serve(after(lasted))
            spare.append((idle() - idle_before) / (time.monotonic() - begun))
        stops[beside] += throttled() - before
    found.append((p99[True], p99[False]))
print(json.dumps({"pairs": found, "with": stops[True], "without": stops[False], "children": children, "spare": spare,
    "refused": int((memory / "memory.failcnt").read_text())}))
"""


@pytest.fixture(scope="module")
def quota():
    """Real control groups of one CPU and of memory, where they can be made."""
    places = [GROUPS / kind / f"inferscope-{os.getpid()}" for kind in ("cpu", "memory")]
    try:
        for place in places:
            place.mkdir()
        (places[0] / "cpu.cfs_quota_us").write_text("100000")
    except OSError:
        pytest.skip("control groups cannot be written here; the tree that stands for them is tested above")
    yield places
    for place in places:
        for _ in range(50):
            with contextlib.suppress(OSError):
                place.rmdir()
                break
            time.sleep(0.1)


def median_bounds(values: list[float]) -> tuple[float, float, float]:
    """Median and its 95 % interval, from order statistics."""
    ordered, spread = sorted(values), 0.98 * len(values) ** 0.5
    low, high = int(max(0, len(ordered) / 2 - spread)), int(min(len(ordered), len(ordered) / 2 + spread + 1)) - 1
    return ordered[low], statistics.median(ordered), ordered[high]


@pytest.fixture(scope="module")
def beside(quota, tmp_path_factory, planted):
    """Blocks of a service that needs a third of the CPU, with a real diagnosis beside it and without one, in turn, for a minute."""
    made = incident(tmp_path_factory.mktemp("state") / "svc" / "0", planted)
    command = [sys.executable, "-c", PROGRAM, *map(str, (*quota, made.path)), "0.35", "60"]
    found = SimpleNamespace(**json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
    found.seconds = sum(wall for _, wall, _ in found.children)
    return found


@pytest.mark.soak
def test_in_a_group_of_one_cpu_and_300_mb_the_service_keeps_its_share(beside):
    """What was counted, which no other work on the machine can make worse."""
    assert len(beside.children) >= 5
    assert [words for *_, words in beside.children if words] == [], "each diagnosis ends well within the memory"
    assert beside.refused == 0, "no page was refused or taken back"
    assert sum(cpu for cpu, *_ in beside.children) / beside.seconds < 0.45
    assert getattr(beside, "with") - beside.without <= 0.05 * 10 * beside.seconds, "of the ten periods of a second"


@pytest.mark.soak
def test_in_a_group_of_one_cpu_the_service_answers_as_fast_as_before(beside):
    """Other work makes single blocks slow, not one kind of block: the ratio of neighbours is judged, by the interval of its median.

    Where others want every CPU, whatever the group runs comes out of its share of them, a child in the idle class too.
    """
    low, middle, high = median_bounds([with_child / alone for with_child, alone in beside.pairs])
    words = f"P99 with a diagnosis over P99 without: {middle:.2f} [{low:.2f}, {high:.2f}] in {len(beside.pairs)} pairs"
    spare = statistics.median(beside.spare)
    if spare < 1.0:
        pytest.skip(f"{spare:.1f} CPUs were idle beside the service, so its latency is not judged; {words}")
    assert low <= 1.25, words


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
