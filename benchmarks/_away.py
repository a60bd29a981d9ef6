"""Ten minutes without a collector, in every way there is, side by side: a service of its own for each way, and one whose collector is there.

    python benchmarks/_away.py MODE SECONDS      one of them; prints a line of JSON

Each serves a few requests a second for the whole time. The one whose collector is well is the control: what the machine does, and what the
evidence's horizon takes, falls on it too. Afterwards the collector comes back, and the totals that it then has must be exact; then it goes away again
and the service ends.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
for _place in (str(HERE), str(ROOT)):
    if _place not in sys.path:
        sys.path.insert(0, _place)

import _harness  # noqa: E402  (the folders must be on the path)
import _outages  # noqa: E402  (the folders must be on the path)

CONTROL = "ok"
AWAY_S = 600.0
AWAY = "seven ways for 10 min, side by side"
RATE = 50
PARTS = 10
"""Of the time; a part of each service is compared with the same part of the control."""
SETTLE_S = 5.0
BACK_S = 150.0
"""The breaker tries once a minute."""


def one(mode, seconds):
    """What one service sees: requests delayed by part, memory, totals, and how long its end took."""
    import inferscope

    with _outages.Receiver() as receiver, tempfile.TemporaryDirectory() as state:
        inferscope.configure(
            service="away", slo=inferscope.SLO("away", p99_ms=20), endpoint=receiver.url, state_dir=state, export_interval_s=1.0,
            capture=False, warmup_s=86_400, warmup_requests=10_000_000,
        )  # fmt: skip
        served = 0
        for index in range(60):
            with inferscope.request("away"), inferscope.stage(f"stage{index}"):
                served += 1
        served += len(_outages.serve(SETTLE_S, RATE, inferscope.request))
        begun = _outages.resident_kb()
        delayed, longest, grown = [], 0, []
        with _outages.away(receiver, mode):
            for _ in range(PARTS):
                took = _outages.serve(seconds / PARTS, RATE, inferscope.request)
                served += len(took)
                delayed.append(1e4 * sum(each > _outages.DELAY_NS for each in took) / max(len(took), 1))
                longest = max(longest, *took)
                grown.append(_outages.resident_kb() - begun)
        total = _outages.come_back(receiver, served, BACK_S)
        with _outages.away(receiver, mode):
            time.sleep(2.0 * (_outages.MODES.index(mode) if mode in _outages.MODES else len(_outages.MODES)))  # one after the other
            left = time.perf_counter()
            inferscope.shutdown()
            left = time.perf_counter() - left
    return {
        "mode": mode,
        "delayed": delayed,
        "longest_ms": longest / 1e6,
        "grown_kb": grown,
        "served": served,
        "total": total,
        "exit_s": left,
    }


def side_by_side(seconds=AWAY_S, modes=_outages.MODES):
    """All of them at the same time; results by mode."""
    return {
        mode: subprocess.Popen([sys.executable, str(HERE / "_away.py"), mode, str(seconds)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
        for mode in (CONTROL, *modes)
    }


def gather(children, seconds=AWAY_S):
    """Wait for what `side_by_side` began.

    Raises:
        RuntimeError: One of them failed.
    """
    until = time.monotonic() + seconds + SETTLE_S + BACK_S + 60
    found = {}
    try:
        for mode, child in children.items():
            said, _ = child.communicate(timeout=max(until - time.monotonic(), 1))
            if child.returncode:
                raise RuntimeError(f"the service with mode {mode} ended with {child.returncode}")
            found[mode] = json.loads(said.splitlines()[-1])
    finally:
        for child in children.values():
            if child.poll() is None:
                child.kill()
                child.wait()
    return found


def rows(found):
    """Ten minutes of each way to be away, beside the service whose collector is there."""
    control = found[CONTROL]
    modes = [each for mode, each in found.items() if mode != CONTROL]
    more = {each["mode"]: _outages.bounds(np.subtract(each["delayed"], control["delayed"]), level=0.99) for each in modes}
    worst = max(more, key=lambda mode: more[mode][1])
    low, mean, high = more[worst]
    yield _harness.row(
        f"requests delayed, {AWAY}", mean, "1e-4", "0 more delayed", holds=all(each[0] <= 0 for each in more.values()),
        note=f"worst {worst}, 99 % [{low:.1f}, {high:.1f}] over {PARTS} parts; control {np.mean(control['delayed']):.1f};"
        f" longest {max(each['longest_ms'] for each in modes):.1f} ms, control {control['longest_ms']:.1f}",
    )  # fmt: skip
    # From the first minute on: what is made once is made by then.
    grown = {each["mode"]: each["grown_kb"][-1] - each["grown_kb"][0] for each in (*modes, control)}
    most = max((each["mode"] for each in modes), key=lambda mode: grown[mode])
    beyond = grown[most] - grown[CONTROL]
    yield _harness.row(
        f"memory, {AWAY}", beyond / 1024, "MB", "flat (<= 8 MB)", holds=beyond <= 8192,
        note=f"{most} grew by {grown[most] / 1024:.1f} MB after the first minute, the control by {grown[CONTROL] / 1024:.1f} MB",
    )  # fmt: skip
    wrong = {each["mode"]: each["served"] - each["total"] for each in (*modes, control)}
    yield _harness.row(
        f"totals once it is back, {AWAY}", sum(map(abs, wrong.values())), "req", "exact", holds=not any(wrong.values()),
        note=f"of {sum(each['served'] for each in modes)} requests" + "".join(f"; {mode} {off}" for mode, off in wrong.items() if off),
    )  # fmt: skip
    slowest = max(modes, key=lambda each: each["exit_s"])
    yield _harness.row(f"exit, {AWAY}", slowest["exit_s"], "s", "<= 1 s", holds=slowest["exit_s"] <= 1.0, note=f"slowest {slowest['mode']}")


if __name__ == "__main__":
    print(json.dumps(one(sys.argv[1], float(sys.argv[2]))), flush=True)
