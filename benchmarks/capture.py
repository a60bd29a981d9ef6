"""What request-scoped captures cost and whether a process survives them, beside the plain way with torch.profiler.

Crashes are counted in processes of their own, under six threads that run small operators without pause. What a capture adds to its request
is the difference of neighbouring requests with and without one, in wall time; the value is the median over pairs, and the row holds on the
upper end of its 95 % interval. The plain way is `torch.profiler.profile`, for crashes with all threads recorded.
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
        budget = CaptureBudget(max_share=1.0, slow=64, body=64, free_memory_mb=0, armed_s=3600)
        self.capture = RequestScopedCapture(budget, set_armed=lambda armed: setattr(self.recorder, "armed", armed))
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


def added(one: Child, pairs: int) -> list[int]:
    """Differences of neighbouring requests with and without a capture, ns; which comes first alternates."""
    found = []
    for n in range(pairs + 5):
        took = {}
        for wanted in (True, False) if n % 2 else (False, True):
            one.wanted = wanted
            took[wanted] = one.serve(200)
        if n >= 5:
            found.append(took[True] - took[False])
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
    begun = {"first_ns": first(one)}
    if not pairs:
        return begun
    return {**begun, "added_ns": added(one, pairs), "growth": growth(one, captures), "idle": idle(one, rounds)}


def run_plain(directory: str, captures: int) -> dict:
    one = Child(directory)
    return {"first_ns": first_plain(one), "growth": growth_plain(one, directory, captures)}


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
    return {"sessions": counts.sessions, "written": counts.saved}


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
    processes, sessions = (1, 250) if quick else (4, 500)
    ours = [child("storm", sessions) for _ in range(processes)]
    done = sum(each["sessions"] for each in ours if each)
    written = sum(each["written"] for each in ours if each)
    died = ours.count(None)
    tries = 1 if quick else 4
    plain = [child("storm_plain", 100) for _ in range(tries)].count(None)
    return [
        harness.row(
            "crashes",
            died,
            "",
            f"0 in {processes * sessions}",
            holds=died == 0 and done >= processes * sessions,
            note=f"{done} captures, {written} written, 6 threads",
        ),
        harness.row("crashes, torch.profiler, all threads", plain, "", "reported", note=f"of {tries} processes with up to 100 captures"),
    ]


def costs(*, quick: bool) -> list[harness.Row]:
    captures = 200 if quick else 1000
    ours = child("ours", 150 if quick else 1000, 50 if quick else 400, captures)
    plain = child("plain", captures)
    first = [ours["first_ns"] / 1e6] + [child("ours", 0, 0, 0)["first_ns"] / 1e6 for _ in range(1 if quick else 6)]
    low, added, high = (value / 1e6 for value in harness.median_bounds(ours["added_ns"]))
    grown, grown_plain = ours["growth"] / MB, plain["growth"] / MB
    rows = [
        harness.row(
            "added to a captured request",
            added,
            "ms",
            "<= 1.5 (upper bound)",
            holds=high <= 1.5,
            low=low,
            high=high,
            note=f"[{low:.2f}, {high:.2f}]",
        ),
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
    arguments = harness.arguments(__doc__)
    return harness.finish(crashes(quick=arguments.quick) + costs(quick=arguments.quick), arguments.json, distributions=["torch"])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        _, _, mode, where, *numbers = sys.argv
        sys.stdout.write(json.dumps(globals()[f"run_{mode}"](where, *map(int, numbers))) + "\n")
    else:
        sys.exit(main())
