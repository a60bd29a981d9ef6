"""Ten million requests of forty threads over five hundred series: memory stays where it is, nothing is lost.

`SOAK_SCALE=0.1 make soak ARGS="tests/record/test_soak.py"` takes a tenth of it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from array import array
from pathlib import Path
from typing import Any

import pytest

from inferscope.record import fallback

SCALE = float(os.environ.get("SOAK_SCALE", "1"))
THREADS, CLASSES, STAGES, LOCKS = 40, 50, 410, 20
MEBIBYTE = 1 << 20


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def work(recorder: Any, number: int, requests: int) -> None:
    names = [f"stage {n}" for n in range(STAGES)]
    locks = shared_locks
    for step in range(requests):
        turn = step * THREADS + number
        with recorder.request(f"request {turn % CLASSES}", items=1):
            with recorder.stage(names[turn % STAGES]), locks[turn % LOCKS]:
                pass
            if turn % 64 == 0:
                with recorder.carrier("batch") as carrier, recorder.stage(names[turn % 7]):
                    pass
                recorder.splice(carrier.packed, recorder.current())


shared_locks: list[Any] = []


def read_everything(recorder: Any, buffers: dict[int, Any]) -> None:
    recorder.drain()
    for index, _kind, _labels, _digits, _lowest, length in recorder.series():
        recorder.read_counts(index, buffers.setdefault(index, array("q", bytes(8 * length))))
    for index, *_ in recorder.classes():
        recorder.read_bands(index)
    recorder.begin_epoch()


@pytest.mark.soak
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_memory_stays_flat(implementation):
    recorder = implementation()
    pure = implementation is fallback.Recorder
    requests = int((500_000 if pure else 10_000_000) * SCALE) // THREADS
    shared_locks[:] = [recorder.lock(f"lock {n}", threading.Lock()) for n in range(LOCKS)]
    for n in range(CLASSES):
        recorder.set_edges(f"request {n}", [1_000_000])
    threads = [threading.Thread(target=work, args=(recorder, number, requests)) for number in range(THREADS)]
    begun = time.monotonic()
    for thread in threads:
        thread.start()
    samples, buffers = [], {}
    while any(thread.is_alive() for thread in threads):
        read_everything(recorder, buffers)
        samples.append(resident())
        time.sleep(0.1)
    for thread in threads:
        thread.join()
    took = time.monotonic() - begun
    read_everything(recorder, buffers)
    quarter = len(samples) // 4
    early, late = max(samples[quarter : 2 * quarter + 1]), max(samples[-quarter - 1 :])
    grown = (late - early) / MEBIBYTE
    sys.stdout.write(f"{requests * THREADS} requests in {took:.0f} s, {late / MEBIBYTE:.1f} MiB, {grown:+.2f} MiB, {len(buffers)} series\n")
    assert sum(recorder.read_class(index)["count"] for index, *_ in recorder.classes()) == requests * THREADS
    assert len(buffers) >= CLASSES + STAGES + 2 * LOCKS
    counters = recorder.counters()
    assert {counters[name] for name in ("internal_errors", "late_spans", "hook_errors", "series_overflow")} == {0}
    assert late - early < 4 * MEBIBYTE
