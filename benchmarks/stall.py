"""The longest gap that aggregation and export put into a request: 5 000 requests/s over 64 series, everything of ours running or nothing.

    python benchmarks/stall.py [--quick] [--json FILE]

A request does one operation of about 35 us without the interpreter lock and then needs the lock back, as a model's forward does. The gap
is what it waited for: wall time less its own CPU time and less the time it was ready and the machine ran something else (schedstat), and
never more than the CPU time that other threads of this process burnt meanwhile. A busy machine therefore cannot make a gap, and a thread
of ours that keeps the lock cannot hide one. Windows with the runtime's threads at work and windows with them asleep take turns; recording
goes on in both. The row is the one-sided 95 % bound of the median over rounds of what the longest gap of a window grows by; one longest gap
of all is a single reading, of which the machine makes some of over 1 ms. The receiver is a process of its own. After a gap over 0.2 ms the stacks of our threads are read: they stand where the
lock was given up, and the rows say where that was.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import hashlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from _harness import ROOT, Row, arguments, finish, median_bounds, row

from inferscope import guard, settings
from inferscope.detect import SLO
from inferscope.record.core import default as recorder
from inferscope.runtime import Runtime

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import FrameType

RATE = 5000
CLASSES, SERIES, STAGES_A_REQUEST = 4, 64, 4
LIMIT_MS = 0.5
NOTED_MS = 0.2
TRIES = 6

RECEIVER = """
import sys
from inferscope.testing.receiver import OtlpReceiver
with OtlpReceiver() as receiver:
    print(receiver.url, flush=True)
    for line in sys.stdin:
        print(receiver.attempts, flush=True)
        receiver.clear()
"""


class Gated(Runtime):
    """The runtime whose threads sleep on while `working` is False."""

    working = False
    ticks = exports = 0

    def start(self) -> None:
        """Start with an export that can be put to sleep."""
        export = self.rooms.export

        def gated(timeout_s: float = 2.0, *, force: bool = False) -> bool:
            if not self.working and not force:
                return True
            self.exports += 1
            return export(timeout_s, force=force)

        self.rooms.export = gated  # type: ignore[method-assign]  # the loop takes what it finds at start
        super().start()

    def tick(self) -> None:
        """A tick, unless it is asleep."""
        if self.working:
            self.ticks += 1
            super().tick()


class Delay:
    """Time this thread was ready to run and did not, ns: the second number of its schedstat; zero where the kernel keeps none."""

    def __init__(self) -> None:
        try:
            self._file: int | None = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
        except OSError:
            self._file = None

    def __call__(self) -> int:
        return 0 if self._file is None else int(os.pread(self._file, 64, 0).split()[1])

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)


class Collections:
    """Garbage collections that ran on threads of ours; they keep the lock from start to end, whoever's objects they walk."""

    def __init__(self) -> None:
        self.spent: list[tuple[int, float]] = []
        self.ended_ns = 0
        self.running = False
        self._begun = 0

    def __call__(self, phase: str, about: dict[str, int]) -> None:
        if not threading.current_thread().name.startswith("inferscope-"):
            return
        if phase == "start":
            self._begun, self.running = time.thread_time_ns(), True
            return
        self.spent.append((about["generation"], (time.thread_time_ns() - self._begun) / 1e6))
        self.ended_ns, self.running = time.perf_counter_ns(), False


class Model(threading.Thread):
    """Burns as much CPU time a second as our threads, in slices of 0.1 ms with a sleep after each: what the machine makes of that."""

    def __init__(self) -> None:
        super().__init__(name="model", daemon=True)
        self.working = False
        self.share = 0.025

    def run(self) -> None:
        while True:
            time.sleep(0.5)
            if self.working:
                for _ in range(round(self.share * 0.5 / 0.0001)):
                    until = time.thread_time_ns() + 100_000
                    while time.thread_time_ns() < until:
                        pass
                    time.sleep(0.00005)  # with 0 the waiting thread often loses the race for the lock


@dataclass
class Window:
    """Gaps of one window in ns, those that overlapped a collection of ours apart."""

    gaps: list[int] = field(default_factory=list)
    collected: list[int] = field(default_factory=list)

    @property
    def longest_ms(self) -> float:
        return max(self.gaps) / 1e6


def _short(file: str) -> str:
    return os.path.relpath(file, ROOT).rpartition("site-packages/")[2]


class Load:
    """The request thread: fixed schedule, one operation a request."""

    def __init__(self) -> None:
        names = [f"stage{index}" for index in range(SERIES - CLASSES)]
        self._chosen = [
            (f"score{index % CLASSES}", [names[(index * STAGES_A_REQUEST + part) % len(names)] for part in range(STAGES_A_REQUEST)])
            for index in range(len(names))
        ]
        self.holders: dict[str, list[int]] = collections.defaultdict(list)
        self.collections = Collections()

    def serve(self, seconds: float, *, noting: bool = False) -> Window:
        """Serve at the rate for that long."""
        delay, found, collected = Delay(), Window(), self.collections
        block = b"x" * 20_000
        sha, wall, own, everyone = hashlib.sha256, time.perf_counter_ns, time.thread_time_ns, time.process_time_ns
        request, stage = recorder.request, recorder.stage
        begun = wall()
        for number in range(int(seconds * RATE)):
            due = begun + number * 1_000_000_000 // RATE
            ahead = due - wall()
            if ahead > 20_000:
                time.sleep(ahead / 1e9)
            elif ahead < -seconds * 1e9:
                break  # a machine that cannot serve the rate at all
            name, (first, second, third, fourth) = self._chosen[number % len(self._chosen)]
            with request(name):
                with stage(first):
                    pass
                with stage(second):
                    pass
                with stage(third):
                    ready, at, mine, all_ = delay(), wall(), own(), everyone()
                    sha(block)
                    burnt, used, passed, waited = everyone() - all_, own() - mine, wall() - at, delay() - ready
                with stage(fourth):
                    pass
            gap = max(0, min(passed - used - waited, burnt - used))
            (found.collected if collected.running or collected.ended_ns > at else found.gaps).append(gap)
            if noting and gap > NOTED_MS * 1e6:
                self._note(gap)
        delay.close()
        return found

    def _note(self, gap: int) -> None:
        """Where our threads stand just after they let go of the lock; one that waits for its next turn is named when no other is there."""
        frames = sys._current_frames()
        stacks: list[str] = []
        for thread in threading.enumerate():
            frame: FrameType | None = frames.get(thread.ident or 0)
            if not thread.name.startswith("inferscope-"):
                continue
            calls: list[str] = []
            while frame is not None and len(calls) < 5:
                calls.append(f"{frame.f_code.co_name} ({_short(frame.f_code.co_filename)}:{frame.f_lineno})")
                frame = frame.f_back
            if calls and "threading.py" not in calls[0]:
                stacks.append(f"{thread.name}: {' < '.join(calls)}")
        collecting = "in a garbage collection, " if self.collections.running else ""
        self.holders[collecting + (" | ".join(stacks) or "threads of ours already wait for their next turn")].append(gap)


@contextlib.contextmanager
def service(interval_s: float) -> Iterator[tuple[Gated, Callable[[], int]]]:
    """The runtime with its threads, exporting to a receiver in another process; and how many requests that has seen."""
    child = subprocess.Popen([sys.executable, "-c", RECEIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert child.stdin is not None
    assert child.stdout is not None
    asking, answering = child.stdin, child.stdout

    def seen() -> int:
        asking.write("\n")
        asking.flush()
        return int(answering.readline())

    with tempfile.TemporaryDirectory() as state:
        keywords: dict[str, Any] = {
            "service": "stall",
            "slo": [SLO(f"score{index}", p99_ms=20) for index in range(CLASSES)],
            "state_dir": state,
            "endpoint": answering.readline().strip(),
            "export_interval_s": interval_s,
            "capture": False,
            "diagnose": "off",
        }
        runtime = Gated(settings.load(keywords), recorder)
        runtime.start()
        try:
            yield runtime, seen
        finally:
            runtime.shutdown(5.0)
            asking.close()
            child.wait(10)
            answering.close()


def quantile_us(windows: Sequence[Window], quantile: float) -> float:
    gaps = sorted(gap for window in windows for gap in window.gaps)
    return gaps[int(len(gaps) * quantile)] / 1e3


def rows_of(windows: Mapping[str, Sequence[Window]], load: Load, seconds: float, about: str, burnt: float) -> list[Row]:
    working = windows["working"]
    longest = {kind: [window.longest_ms for window in each] for kind, each in windows.items()}
    served = sum(len(window.gaps) + len(window.collected) for window in working)
    over = {kind: sum(gap > LIMIT_MS * 1e6 for window in each for gap in window.gaps) for kind, each in windows.items()}
    low, middle, added = median_bounds([mine - idle for mine, idle in zip(longest["working"], longest["asleep"], strict=True)], level=0.9)
    collected = [gap / 1e6 for window in working for gap in window.collected]
    generations = dict(sorted(collections.Counter(generation for generation, _ in load.collections.spent).items()))
    note = f"longest of a window of {seconds:g} s, median {middle:.2f} ({low:.2f} to {added:.2f}) in {len(working)} windows"
    return [
        row("aggregation and export, longest gap added to a request", added, "ms", f"<= {LIMIT_MS} ms", holds=added <= LIMIT_MS, note=note),
        row(
            "longest gap of all", max(longest["working"]), "ms", "reported", note=f"of {served} requests; one reading, see the floor below"
        ),
        row("longest gap, our threads asleep", max(longest["asleep"]), "ms", "reported", note="the same requests, recorded all the same"),
        row(
            "longest gap, a thread with 0.1 ms slices",
            max(longest["model"]),
            "ms",
            "reported",
            note="as much CPU time as ours: the noise floor",
        ),
        row(
            "requests that waited over 0.5 ms",
            over["working"],
            "",
            "reported",
            note=f"of {served}; asleep {over['asleep']}, model thread {over['model']}",
        ),
        row("gap, P99.9", quantile_us(working, 0.999), "us", "reported", note=f"model thread {quantile_us(windows['model'], 0.999):.1f}"),
        row(
            "longest gap while a garbage collection ran on a thread of ours",
            max(collected, default=0.0),
            "ms",
            "reported",
            note=f"{len(collected)} requests; collections by generation {generations}, longest"
            f" {max((spent for _, spent in load.collections.spent), default=0.0):.1f} ms of CPU",
        ),
        row("requests served", served / (len(working) * seconds), "1/s", "reported", note=f"of {RATE}; {about}"),
        row("CPU of our threads", burnt * 1e3, "ms/s", "reported", note="a tick and an export a second"),
    ]


def measure(rounds: int, seconds: float) -> tuple[list[Row], dict[str, Any]]:
    load, model = Load(), Model()
    windows: dict[str, list[Window]] = {"working": [], "asleep": [], "model": []}
    model.start()
    with service(1.0) as (runtime, seen):
        runtime.working = True
        load.serve(3.0)  # every series exists, everything was imported and exported once
        gc.callbacks.append(load.collections)
        ticks = exports = 0
        burnt = 0.0
        for number in range(rounds):
            order = ("working", "asleep") if number % 2 else ("model", "asleep", "working")
            for kind in order:
                runtime.working, model.working = kind == "working", kind == "model"
                load.serve(1.2 if kind == "working" else 0.3)  # what the others left is taken up outside the window
                for _ in range(TRIES):  # on a machine so busy that our thread got no turn a window says nothing: it is taken again
                    before = runtime.ticks, runtime.exports, time.process_time() - time.thread_time()
                    window = load.serve(seconds, noting=kind == "working")
                    if kind != "working" or runtime.ticks > before[0]:
                        break
                windows[kind].append(window)
                if kind == "working":
                    ticks += runtime.ticks - before[0]
                    exports += runtime.exports - before[1]
                    burnt += time.process_time() - time.thread_time() - before[2]
                    model.share = burnt / seconds / len(windows[kind])
        gc.callbacks.remove(load.collections)
        model.working = False
        arrived, series = seen(), len(recorder.series())
    failures = {component: count for component, count in guard.counts().items() if count}
    if failures or arrived < rounds or ticks < rounds:
        raise SystemExit(f"the runtime did not work: failures {failures}, {ticks} ticks, {arrived} posts received")
    about = f"{series} series, {ticks} ticks, {exports} export rounds, {arrived} posts received"
    rows = rows_of(windows, load, seconds, about, burnt / (rounds * seconds))
    holders = [
        {"where": where, "longest_ms": round(max(spent) / 1e6, 2), "times": len(spent)}
        for where, spent in sorted(load.holders.items(), key=lambda item: -max(item[1]))[:10]
    ]
    return rows, {"holders": holders, "longest_ms": {kind: [round(w.longest_ms, 3) for w in each] for kind, each in windows.items()}}


def main() -> int:
    asked = arguments(__doc__)
    rows, more = measure(*((8, 1.25) if asked.quick else (16, 5.0)))
    status: int = finish(rows, asked.json, **more)
    for each in more["holders"]:
        print(f"  held up to {each['longest_ms']:5.2f} ms, {each['times']:3} times over {NOTED_MS} ms: {each['where']}")
    return status


if __name__ == "__main__":
    sys.exit(main())
