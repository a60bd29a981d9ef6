"""`kill -9` at 200 random points of writing ring, index and incident: readable up to the last whole record."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time

import pytest

from inferscope import semconv
from inferscope.capture.bundle import Bundle, list_incidents
from inferscope.capture.chain import verify
from inferscope.errors import EvidenceError
from inferscope.export import Exporter, read_ring, read_store

POINTS = 200
VERIFIED: list[str] = []
WRITERS = """
import os, sys, time
from pathlib import Path
import numpy as np
from inferscope import semconv
from inferscope.capture.bundle import Bundle
from inferscope.capture.held import write_evidence
from inferscope.export import Event, ExportBatch, Exporter, Total, ring
from inferscope.export.otlp.buckets import hdr_bounds
from inferscope.types import Breach, Distribution

ring.PART_BYTES = 30_000
low, _ = hdr_bounds(3, 1000, 18432)

def write(directory):
    exporter = Exporter(directory, environ={})
    for signal_, held in exporter._rings.items():
        held._part = 30_000  # rotations among the points
    start, count, rng = time.time_ns(), 0, np.random.default_rng(1)
    while True:
        count += 1
        values = rng.lognormal(16, 0.5, 50 * count).astype(np.int64)
        counts = np.bincount(np.searchsorted(low, values, side="right") - 1, minlength=18432).astype(np.int64)
        held = Distribution("request", ("score", "", ""), 3, 1000, counts, len(values), int(values.sum()), 0)
        exporter.event(Event("inferscope.slo.breach", start + count, "broken", {"n": count}))
        exporter.offer(ExportBatch((held,), (Total(semconv.REQUESTS, count),), start, start + count * 10**9, {"service.name": "kill"}))
        exporter.run_once()
        breach = Breach(f"20260501T120000Z-score-{count:04x}", "p99", "score", 20.0, 0.99, 1, 2, 3, 100, 9, "e_detector", 12.0, 1.0)
        bundle = Bundle.create(directory, breach, {}, {})
        write_evidence(bundle.path / "evidence-0-1.json", {"schema": 1, "n": count, "fill": "x" * 20_000})
        bundle.add_rest()
        bundle.publish("open")
        bundle.publish("closed")

for line in sys.stdin:
    directory = Path(line.strip())
    pid = os.fork()
    if pid == 0:
        try:
            write(directory)
        finally:
            os._exit(1)
    print(pid, flush=True)
    os.waitpid(pid, 0)
"""


@pytest.fixture
def writers():
    child = subprocess.Popen([sys.executable, "-c", WRITERS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    yield child
    child.stdin.close()
    child.wait(10)
    child.stdout.close()


def counts(directory):
    """Totals of requests in the ring's lines, in order."""
    damaged = []
    found = []
    for request in read_ring(directory, "metrics", damaged):
        for metric in request["resourceMetrics"][0]["scopeMetrics"][0]["metrics"]:
            if metric["name"] == semconv.REQUESTS:
                found.append(int(metric["sum"]["dataPoints"][0]["asInt"]))
    return found, damaged


@pytest.mark.soak
def test_everything_is_readable_up_to_the_last_whole_record(writers, tmp_path):
    mixer, seen = random.Random(5), 0
    for point in range(POINTS):
        directory = tmp_path / str(point)
        writers.stdin.write(f"{directory}\n")
        writers.stdin.flush()
        pid = int(writers.stdout.readline())
        time.sleep(mixer.uniform(0.0, 0.25))
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 5
        with contextlib.suppress(ProcessLookupError):
            while time.monotonic() < deadline:
                os.kill(pid, 0)
                time.sleep(0.002)
        seen += whole(directory)
        shutil.rmtree(directory, ignore_errors=True)  # killed before it was made
    assert len(VERIFIED) > POINTS / 2, "incidents were among what was being written"
    assert seen > POINTS, f"{seen} records in {POINTS} lives: the points were too early to say anything"


def whole(directory):
    """Check one killed writer's files; how many records there are."""
    found, damaged = counts(directory)
    assert found == list(range(1, len(found) + 1)), "no record is lost before the last one, none is there twice"
    assert len(damaged) <= 1, "one torn line at most"
    index = directory / "index.sqlite"
    if index.exists():
        connection = sqlite3.connect(index)
        assert connection.execute("PRAGMA quick_check").fetchone() == ("ok",)
        connection.close()
        _, events = read_store(index)
        numbers = [event.attributes["n"] for event in events]
        assert numbers == list(range(1, len(numbers) + 1))
    for incident in list_incidents(directory.parent.parent):
        if incident.parent.parent == directory:
            try:
                bundle = Bundle.open(incident)
            except EvidenceError:
                continue  # not published yet: nothing claims that it is whole
            VERIFIED.append(bundle.state)
            assert verify(incident) == []
            if bundle.state == "closed":
                assert json.loads((incident / "evidence-0-1.json").read_bytes())["schema"] == 1
    again = Exporter(directory, environ={})  # the next life of this slot goes on
    again.shutdown()
    return len(found)
