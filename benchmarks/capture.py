"""What captures cost and whether a process survives them, beside the plain ways with torch.profiler.

Crashes are counted in processes of their own, under six threads that run small operators without pause. What a capture adds to its request
is the difference of neighbouring requests with and without one, in wall time; the value is the median over pairs, and the row holds on the
upper end of its 95 % interval. The percentiles of a service compare neighbouring blocks of time with and without two captures a second, one
of a request and one of all threads. A gap is the longest time in which a thread that wants the interpreter every 0.2 ms did not get it.
The plain ways are `torch.profiler.profile`: on all threads for crashes, from a background thread, with a window of a second, and with
`key_averages` in the process that serves. `--demo N` also runs the demo with N seeds and looks for the cause in what was kept.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import _harness as harness

HOOKS = ("on_start", "on_enter", "on_exit", "on_finish")
MB = 1 << 20


def child(mode: str, *numbers: int) -> dict | None:
    """Run this script in its own process; None when that process crashed."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, __file__, "--child", mode, directory, *map(str, numbers)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    lines = done.stdout.strip().splitlines()
    if done.returncode > 0:
        sys.exit(f"{mode}: status {done.returncode}\n{done.stderr[-2000:]}")
    return None if done.returncode < 0 else json.loads(lines[-1])


# In the child


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Child:
    """torch, a recorder and captures that are not paced."""

    def __init__(self, directory: str) -> None:
        import torch

        from inferscope.capture import CaptureBudget, RequestScopedCapture, Target
        from inferscope.record import core

        torch.set_num_threads(1)
        self.torch, self.small = torch, torch.randn(8, 8)
        self.recorder = core.Recorder()
        budget = CaptureBudget(max_share=1.0, slow=64, body=64, free_memory_mb=0, armed_s=3600, all_threads=True)
        in_flight = getattr(self.recorder, "_open", None)
        self.capture = RequestScopedCapture(budget, set_armed=lambda armed: setattr(self.recorder, "armed", armed), in_flight=in_flight)
        self.hooks = {name: getattr(self.capture, name) for name in HOOKS}
        self.target = Target("bench", Path(directory), "score", 1 << 62)
        self.wanted = True
        self.capture.recording.spending.draw = lambda _now, **_: self.wanted
        self.capture.recording.spending.spend = lambda *_: None

    def arm(self) -> None:
        self.recorder.set_hooks(**self.hooks)
        refused = self.capture.arm(self.target)
        if refused:
            sys.exit(refused)
        self.windows = self.capture.windows
        self.windows._next_ns = 1 << 62  # only where a case asks for one

    def window(self) -> None:
        """One window of all threads, if nothing speaks against it."""
        before = self.windows.recorded
        while self.windows.recorded == before:
            self.windows._next_ns, self.windows._kept = 0, 0
            self.capture.run_once()
            time.sleep(0.001)
        self.windows._next_ns = 1 << 62

    def operators(self, count: int) -> None:
        add, small = self.torch.add, self.small
        for _ in range(count):
            add(small, small)

    def serve(self, operators: int) -> int:
        begun = time.perf_counter_ns()
        with self.recorder.request("score"):
            self.operators(operators)
        return time.perf_counter_ns() - begun


def first(one: Child) -> int:
    """Start and stop of the first capture of a process, ns."""
    one.arm()
    one.serve(50)
    stalls = one.capture.recording.counts.stalls_ns
    return stalls["start"] + stalls["stop"]


def first_plain(one: Child) -> int:
    """The same with torch.profiler."""
    begun = time.perf_counter_ns()
    profile = one.torch.profiler.profile(activities=[one.torch.profiler.ProfilerActivity.CPU])
    profile.start()
    started = time.perf_counter_ns()
    one.operators(50)
    ended = time.perf_counter_ns()
    profile.stop()
    return started - begun + time.perf_counter_ns() - ended


def added(one: Child, pairs: int, *, kept: bool, shapes: bool = False) -> list[int]:
    """Differences of neighbouring requests with and without a capture that is kept or dropped, ns; which comes first alternates."""
    counts, found = one.capture.recording.counts, []
    stops, threshold = one.capture.recording._stops, one.target.threshold_ns
    cheap, stops.shapes_are_cheap = stops.shapes_are_cheap, lambda _region: shapes
    object.__setattr__(one.target, "threshold_ns", 0 if kept else 1 << 62)
    for n in range(pairs + 5):
        took = {}
        for wanted in (True, False) if n % 2 else (False, True):
            one.wanted, before = wanted, counts.sessions
            one.capture._armed.slow = one.capture._armed.shaped = one.capture._armed.shape_tries = 0
            took[wanted] = one.serve(200)
            if (counts.sessions > before) is not wanted:
                sys.exit(f"a capture was {'not made' if wanted else 'made where none was wanted'}")
            one.capture.shelf.clear()
        if n >= 5:
            found.append(took[True] - took[False])
    object.__setattr__(one.target, "threshold_ns", threshold)
    stops.shapes_are_cheap = cheap
    return found


def idle(one: Child, rounds: int) -> dict:
    """What hooks add to a stage of a request that is not captured, ns: set, and set with an incident open."""
    one.wanted = False
    from inferscope.record import core

    bare, hooked, armed = core.Recorder(), core.Recorder(), one.recorder
    hooked.set_hooks(**one.hooks)
    stages = 400

    def case(recorder: core.Recorder):
        def work() -> None:
            stage = recorder.stage
            with recorder.request("score"):
                for _ in range(stages):
                    with stage("forward"):
                        pass

        return work

    for recorder in (bare, hooked, armed):
        recorder.cpu_mode = "off"
    found = harness.interleaved({"bare": case(bare), "hooked": case(hooked), "armed": case(armed)}, rounds)
    pairs = {name: [(a - b) / stages for a, b in zip(found[name], found["bare"], strict=True)] for name in ("hooked", "armed")}
    return {name: harness.median_bounds(values) for name, values in pairs.items()}


def growth(one: Child, captures: int) -> int:
    """Bytes that the process grew by over captures of 400 operators each, a quarter of them written."""
    one.wanted = True
    begin = 0
    for n in range(captures + 20):
        if n == 20:
            begin = resident()
        object.__setattr__(one.target, "threshold_ns", 0 if n % 4 == 0 else 1 << 62)
        one.serve(400)
        while one.capture.shelf.unsaved:
            one.capture.run_once()
        one.capture._armed.slow = 0
    return resident() - begin


def growth_plain(one: Child, directory: str, captures: int) -> int:
    """The same with torch.profiler."""
    begin = 0
    for n in range(captures + 20):
        if n == 20:
            begin = resident()
        with one.torch.profiler.profile(activities=[one.torch.profiler.ProfilerActivity.CPU]) as profile:
            one.operators(400)
        if n % 4 == 0:
            profile.export_chrome_trace(str(Path(directory) / f"{n}.json"))
    return resident() - begin


def run_ours(directory: str, pairs: int, rounds: int, captures: int) -> dict:
    one = Child(directory)
    begun = {"first_ns": first(one), "inductor": "torch._inductor" in sys.modules}
    if not pairs:
        return begun
    differences = {f"{'kept' if kept else 'dropped'}_ns": added(one, pairs, kept=kept) for kept in (False, True)}
    begun_ns = time.thread_time_ns()
    one.operators(20_000)
    differences["operator_ns"] = (time.thread_time_ns() - begun_ns) / 20_000
    differences["shapes_ns"] = added(one, min(pairs, 300), kept=True, shapes=True)
    return {**begun, **differences, "growth": growth(one, captures), "idle": idle(one, rounds)}


def run_stalls(directory: str, attempts: int) -> dict:
    """(start, stop, what the budget is charged) of attempts on requests of 100 operators, ns: not kept, kept, and kept with shapes."""
    one = Child(directory)
    one.arm()
    recording = one.capture.recording
    found: dict = {}
    charged: list[int] = []
    recording.spending.spend = lambda stall_ns, _now: charged.append(stall_ns)
    for kind, threshold, shapes in (("dropped", 1 << 62, False), ("kept", 0, False), ("shapes", 0, True)):
        rows = found[kind] = []
        recording._stops.shapes_are_cheap = lambda _region, shapes=shapes: shapes
        object.__setattr__(one.target, "threshold_ns", threshold)
        for n in range(attempts + 20):
            before = dict(recording.counts.stalls_ns)
            one.capture._armed.slow = one.capture._armed.shaped = one.capture._armed.shape_tries = 0
            one.serve(100)
            one.capture.shelf.clear()
            if n >= 20:
                rows.append([*(recording.counts.stalls_ns[key] - before[key] for key in ("start", "stop")), charged[-1]])
            time.sleep(0.002)
    return found


def run_plain(directory: str, captures: int) -> dict:
    one = Child(directory)
    return {"first_ns": first_plain(one), "inductor": "torch._inductor" in sys.modules, "growth": growth_plain(one, directory, captures)}


def under_load(one: Child, work) -> None:
    stop = threading.Event()

    def serve() -> None:
        while not stop.is_set():
            one.serve(40)

    threads = [threading.Thread(target=serve) for _ in range(6)]
    for thread in threads:
        thread.start()
    try:
        work()
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def run_storm(directory: str, sessions: int) -> dict:
    one = Child(directory)
    one.arm()
    counts = one.capture.recording.counts

    def wait() -> None:
        while counts.sessions < sessions:
            # Some are written while others record.
            object.__setattr__(one.target, "threshold_ns", 0 if counts.sessions % 10 == 0 else 1 << 62)
            one.capture.run_once()
            one.capture._armed.slow = 0
            time.sleep(0.002)

    under_load(one, wait)
    return {"sessions": counts.sessions, "written": len(list(Path(directory).glob("captures/*.trace.json")))}


def run_windows(directory: str, wanted: int) -> dict:
    """Windows of all threads in the same storm."""
    from inferscope.capture import windows as module

    one = Child(directory)
    one.arm()
    one.wanted, module.GAP_NS, module.JUDGE_NS = False, 0, 0

    def wait() -> None:
        while one.windows.recorded < wanted:
            one.window()

    under_load(one, wait)
    status = one.windows.status()
    return {"windows": status["recorded"], "parked": status["parked"]}


class Heart:
    """Asks for the interpreter every 0.2 ms and keeps the longest time that it had to wait."""

    def __init__(self) -> None:
        self.longest = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat)

    def _beat(self) -> None:
        last = time.perf_counter_ns()
        while not self._over.is_set():
            time.sleep(0.0002)
            now = time.perf_counter_ns()
            self.longest = max(self.longest, now - last)
            last = now

    def __enter__(self):
        self._thread.start()
        return self

    def take(self) -> int:
        """The longest since the last call, ns."""
        longest, self.longest = self.longest, 0
        return longest

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def run_gap(directory: str, rounds: int) -> dict:
    """Gaps at the end of windows of about 1 000 events, and of nothing; and the way without us: a second of all threads, then a summary."""
    from inferscope.capture import session
    from inferscope.capture.window import Window

    one = Child(directory)
    one.serve(2000)
    gaps, quiet, cpu = [], [], []
    with Heart() as heart:
        for _ in range(rounds):
            heart.take()
            time.sleep(0.02)
            quiet.append(heart.take())
            window = Window(session.Options(all_threads=True), one.recorder._open)
            window.open(one.torch)
            one.serve(1000)
            window.silence()
            window.drain(1.0)
            heart.take()
            window.close()
            gaps.append(max(heart.take(), window.stop_cost_ns))
            cpu.append(window.stop_cpu_ns)
            window.results = None
    return {"gaps": gaps, "quiet": quiet, "cpu": cpu}


def run_naive(directory: str, seconds: int) -> dict:
    """torch.profiler from a background thread: what it sees of the workers, and what a window of a second and its summary cost them."""
    from torch._C._profiler import _ExperimentalConfig

    one = Child(directory)
    found: dict = {}
    stop = threading.Event()

    def serve() -> None:
        while not stop.is_set():
            one.serve(40)
            time.sleep(0.004)

    threads = [threading.Thread(target=serve) for _ in range(4)]
    for thread in threads:
        thread.start()
    activities = [one.torch.profiler.ProfilerActivity.CPU]
    with Heart() as heart:
        with one.torch.profiler.profile(activities=activities) as plain:
            time.sleep(0.3)
        found["seen"] = sum(event.name == "aten::add" for event in plain.events())
        profile = one.torch.profiler.profile(activities=activities, experimental_config=_ExperimentalConfig(profile_all_threads=True))
        profile.start()
        time.sleep(seconds)
        heart.take()
        profile.stop()
        found["stop"] = heart.take()
        begun = time.perf_counter_ns()
        profile.key_averages()
        found["summary"], found["summary_took"] = heart.take(), time.perf_counter_ns() - begun
        stop.set()
        for thread in threads:
            thread.join()
    return found


def run_paced(directory: str, pairs: int, seconds_tenths: int) -> dict:
    """A service of four threads at about 240 requests/s, in pairs of blocks with and without two captures a second."""
    import random

    one = Child(directory)
    one.arm()
    one.wanted = False
    layers = one.torch.nn.Sequential(*[one.torch.nn.Linear(64, 64) for _ in range(6)])
    rows = one.torch.randn(8, 64)
    walls: list[int] = []
    stop = threading.Event()
    wanted = threading.Event()

    def serve(seed: int) -> None:
        chance, due = random.Random(seed), time.perf_counter()
        while not stop.is_set():
            due += chance.expovariate(60.0)
            time.sleep(max(0.0, due - time.perf_counter()))
            due = max(due, time.perf_counter() - 0.05)
            begun = time.perf_counter_ns()
            if wanted.is_set():
                wanted.clear()
                one.wanted = True
            with one.recorder.request("score"), one.torch.inference_mode():
                one.wanted = False
                layers(rows)
            walls.append(time.perf_counter_ns() - begun)

    threads = [threading.Thread(target=serve, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    found: list[dict] = []
    seconds, captures, cpu = seconds_tenths / 10, 0, 0
    for n in range(pairs + 1):
        blocks: dict = {}
        for on in (True, False) if n % 2 else (False, True):
            walls.clear()
            begun, last = time.perf_counter(), time.thread_time_ns()
            ends = begun + seconds
            while time.perf_counter() < ends:
                if on:
                    wanted.set()
                    time.sleep(0.5)
                    one.window()
                    time.sleep(max(0.0, min(0.45, ends - time.perf_counter())))
                    captures += 2
                else:
                    time.sleep(0.05)
            if on:
                cpu += time.thread_time_ns() - last
            blocks[on] = sorted(walls)
        if n:  # the first pair warms up
            found.append({str(on): [block[int(q * (len(block) - 1))] for q in (0.5, 0.99, 0.999)] for on, block in blocks.items()})
    stop.set()
    for thread in threads:
        thread.join()
    counts = one.capture.recording.counts
    return {"pairs": found, "captures": captures, "cpu_ns": cpu, "on_s": (pairs + 1) * seconds, "stalls": counts.stalls_ns}


def run_storm_plain(directory: str, sessions: int) -> dict:
    """All threads, 3 ms windows, stopped while operators run."""
    one = Child(directory)
    from torch._C._profiler import _ExperimentalConfig

    def record() -> None:
        for _ in range(sessions):
            with one.torch.profiler.profile(
                activities=[one.torch.profiler.ProfilerActivity.CPU], experimental_config=_ExperimentalConfig(profile_all_threads=True)
            ):
                time.sleep(0.003)

    under_load(one, record)
    return {"sessions": sessions}


# In the parent


def crashes(*, quick: bool) -> list[harness.Row]:
    processes, sessions, windows = (1, 200, 60) if quick else (4, 500, 250)
    ours = [child("storm", sessions) for _ in range(processes)]
    done = sum(each["sessions"] for each in ours if each)
    written = sum(each["written"] for each in ours if each)
    died = ours.count(None)
    every = [child("windows", windows) for _ in range(processes)]
    recorded = sum(each["windows"] for each in every if each)
    tries = 1 if quick else 7
    plain = [child("storm_plain", 100) for _ in range(tries)].count(None)
    return [
        harness.row(
            "crashes",
            died,
            "",
            f"0 in {processes * sessions}",
            holds=died == 0 and done >= processes * sessions,
            note=f"{done} captures of requests, {written} traces written, 6 threads",
        ),
        harness.row(
            "crashes, windows of all threads",
            every.count(None),
            "",
            f"0 in {processes * windows}",
            holds=every.count(None) == 0 and recorded >= processes * windows,
            note=f"{recorded} windows, {sum(each['parked'] for each in every if each)} parked, 6 threads",
        ),
        harness.row("crashes, torch.profiler, all threads", plain, "", "reported", note=f"of {tries} processes with up to 100 captures"),
    ]


def gaps(*, quick: bool) -> list[harness.Row]:
    ours = child("gap", 40 if quick else 200)
    naive = child("naive", 1)
    low, gap, high = (value / 1e6 for value in harness.median_bounds(ours["gaps"]))
    quiet, cpu = (harness.median_bounds(ours[key])[1] / 1e6 for key in ("quiet", "cpu"))
    note = f"[{low:.1f}, {high:.1f}], {cpu:.1f} ms of CPU; {quiet:.1f} without a window"
    rows = [
        harness.row("gap at a window of 1 000 events", gap, "ms", "<= 10 (upper bound)", holds=high <= 10.0, low=low, high=high, note=note)
    ]
    if naive is None:
        return [*rows, harness.row("gap, torch.profiler, 1 s of all threads", float("nan"), "ms", "reported", note="the process crashed")]
    took = naive["summary_took"] / 1e6
    return [
        *rows,
        harness.row("operators seen, torch.profiler on a background thread", naive["seen"], "", "reported", note="of four busy workers"),
        harness.row("gap, torch.profiler, 1 s of all threads", naive["stop"] / 1e6, "ms", "reported", note="at its stop"),
        harness.row("gap, key_averages in the process", naive["summary"] / 1e6, "ms", "reported", note=f"it took {took:.0f} ms"),
    ]


def service(*, quick: bool) -> list[harness.Row]:
    """The percentiles of a service beside captures; `--quick` has time for what they take of a CPU."""
    said = child("paced", 1 if quick else 40, 30 if quick else 50)
    share = 100 * said["cpu_ns"] / (said["on_s"] * 1e9)
    stall = sum(said["stalls"].values()) / 1e6 / said["on_s"]
    note = f"{said['captures']} captures in {said['on_s']:.0f} s; {stall:.1f} ms of stall a second"
    rows = [harness.row("CPU taken by two captures a second", share, "%", "<= 3", holds=share <= 3.0, note=note)]
    if quick:
        return rows
    for name, position, target in (("median", 0, None), ("P99", 1, 1.25), ("P99.9", 2, 2.0)):
        ratios = [pair["True"][position] / pair["False"][position] for pair in said["pairs"]]
        low, middle, high = harness.median_bounds(ratios)
        text = "reported" if target is None else f"<= {target:g} (upper bound)"
        holds = target is None or high <= target
        note = f"[{low:.2f}, {high:.2f}] over {len(ratios)} pairs"
        rows.append(harness.row(f"service {name}, two captures a second", middle, "x", text, holds=holds, low=low, high=high, note=note))
    differences = [(pair["True"][0] - pair["False"][0]) / 1e6 for pair in said["pairs"]]
    low, middle, high = harness.median_bounds(differences)
    note = f"[{low:.3f}, {high:.3f}], of medians: fewer than 1 % of the requests are captured"
    rows.append(
        harness.row("added to the other requests", middle, "ms", "0 (lower bound <= 0)", holds=low <= 0.0, low=low, high=high, note=note)
    )
    return rows


def cause_is_kept(incident: Path) -> bool | None:
    """Whether the largest cause of a diagnosed incident can be seen in a slow capture: a lock or queue in the side file, others in the trace.

    None when there is no diagnosis or no slow capture.
    """
    try:
        diagnosis = json.loads(max(incident.glob("diagnosis-*.json")).read_text())
    except (ValueError, OSError):
        return None
    shares = [share for share in diagnosis["attribution"] if share["kind"] not in {"unattributed", "other"}]
    sides = [json.loads(path.read_text()) for path in (incident / "captures").glob("*-r*.json") if not path.name.endswith(".trace.json")]
    slow = [side for side in sides if side["slow"]]
    if not shares or not slow:
        return None
    cause = shares[0]
    if cause["kind"] in {"lock", "queue", "copy", "stage"}:
        return any(span["column"] == cause["name"] for side in slow for span in side["spans"])
    return any(side["events"] for side in slow)


def demo(seeds: int) -> list[harness.Row]:
    """The cause of the demo's breach in what was kept of it."""
    found: list[bool] = []
    for seed in range(1, seeds + 1):
        with tempfile.TemporaryDirectory() as state:
            command = [sys.executable, "-m", "inferscope", "demo", "--seed", str(seed), "--seconds", "45"]
            subprocess.run(command, env={**os.environ, "INFERSCOPE_STATE_DIR": state}, capture_output=True, check=False)
            for path in Path(state).glob("**/incidents/2*"):
                kept = cause_is_kept(path)
                if kept is not None:
                    found.append(kept)
    share = 100 * sum(found) / max(len(found), 1)
    return [
        harness.row("cause in the kept evidence", share, "%", ">= 95", holds=bool(found) and share >= 95, note=f"{len(found)} incidents")
    ]


def costs(*, quick: bool) -> list[harness.Row]:
    captures = 200 if quick else 1000
    ours = child("ours", 150 if quick else 1000, 50 if quick else 400, captures)
    plain = child("plain", captures)
    first = [ours["first_ns"] / 1e6] + [child("ours", 0, 0, 0)["first_ns"] / 1e6 for _ in range(1 if quick else 6)]
    grown, grown_plain = ours["growth"] / MB, plain["growth"] / MB
    rows = []
    for what, words in (("dropped", "dropped"), ("kept", "kept"), ("shapes", "kept with shapes")):
        low, added, high = (value / 1e6 for value in harness.median_bounds(ours[f"{what}_ns"]))
        text = "reported" if what == "shapes" else "<= 1.5 (upper bound)"
        note = f"[{low:.2f}, {high:.2f}], wall time; 200 operators of {ours['operator_ns'] / 1e3:.1f} us"
        holds = what == "shapes" or high <= 1.5
        rows.append(harness.row(f"added to a captured request, {words}", added, "ms", text, holds=holds, low=low, high=high, note=note))
    rows += [
        harness.row("inductor imported by the first capture", int(ours["inductor"]), "", "0", holds=not ours["inductor"]),
        harness.row("inductor imported by the first capture, torch.profiler", int(plain["inductor"]), "", "reported"),
        harness.row("first capture", max(first), "ms", "<= 50", holds=max(first) <= 50, note=f"slowest of {len(first)}"),
        harness.row("first capture, torch.profiler", plain["first_ns"] / 1e6, "ms", "reported"),
        harness.row("memory growth", grown, "MB", "<= 10", holds=grown <= 10, note=f"over {captures} captures"),
        harness.row("memory growth, torch.profiler", grown_plain, "MB", "reported", note=f"over {captures} captures"),
    ]
    for name, what in (("hooked", "idle"), ("armed", "incident open, request not drawn")):
        low, middle, high = ours["idle"][name]
        note = f"[{low:.1f}, {high:.1f}]"
        rows.append(
            harness.row(f"cost a stage, {what}", middle, "ns", "<= 50 (upper bound)", holds=high <= 50, low=low, high=high, note=note)
        )
    return rows


def main() -> int:
    more = {"type": int, "default": 0, "metavar": "N", "help": "also run the demo with N seeds, 50 s each (default 0)"}
    arguments = harness.arguments(__doc__, lambda parser: parser.add_argument("--demo", **more))
    quick = arguments.quick
    rows = [*crashes(quick=quick), *gaps(quick=quick), *service(quick=quick), *costs(quick=quick)]
    if arguments.demo:
        rows += demo(arguments.demo)
    return harness.finish(rows, arguments.json, distributions=["torch"])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        _, _, mode, where, *numbers = sys.argv
        sys.stdout.write(json.dumps(globals()[f"run_{mode}"](where, *map(int, numbers))) + "\n")
    else:
        sys.exit(main())
