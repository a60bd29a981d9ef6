"""`inferscope top` over what services keep on disk."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from inferscope import cli, semconv
from inferscope.export import ExportBatch, Exporter, Total
from inferscope.export.overview import overview
from inferscope.export.store import Store

SECOND = 1_000_000_000


@pytest.fixture
def write(make):
    """Writes the windows of one worker: values in ms by tick, 10 s apart, the last one ending `ago_s` before now."""

    now = time.time_ns()  # of this test: the suite takes minutes

    def write(root, service, slot, ticks, *, ago_s=1.0, scale=5, objective=20.0, request="score"):
        directory = root / service / str(slot)
        exporter = Exporter(directory, environ={}, scale=scale)
        seen: list[float] = []
        start = now - int((ago_s + 10 * len(ticks)) * SECOND)
        for tick, values in enumerate(ticks, 1):
            seen += values
            who = ((semconv.ATTR_REQUEST, request),)
            slo = ((semconv.ATTR_SLO, f"{request}-p99"),)
            totals = [Total(semconv.REQUESTS, len(seen) - 1, who), Total(semconv.REQUESTS, 1, (*who, (semconv.ERROR_TYPE, "_OTHER")))]
            if objective:
                totals.append(Total(semconv.SLO_VIOLATIONS, sum(value > objective for value in seen), (*who, *slo)))
                target = (*slo, *who, ("inferscope.slo.quantile", 0.99))
                totals.append(Total(semconv.SLO_TARGET, objective / 1e3, target, monotonic=False))
            histogram = make.distribution(np.asarray(seen) * 1e6, labels=(request, "", ""))
            exporter.offer(ExportBatch((histogram,), tuple(totals), start, start + tick * 10 * SECOND, {"service.name": service}))
            assert exporter.run_once()
        exporter.shutdown()

    return write


@pytest.fixture
def top(capsys):
    def top(*words):
        status = cli.main(["top", *map(str, words)])
        return status, capsys.readouterr().out

    return top


def test_workers_add_up_and_stand_below_their_service(write, top, tmp_path):
    rng = np.random.default_rng(3)
    parts = [list(rng.lognormal(2, 0.4, 2000)) for _ in range(2)]
    for slot, part in enumerate(parts):
        write(tmp_path, "scoring", slot, [part[:1000], part[1000:]])
    status, out = top("--state-dir", tmp_path, "--once", "--json")
    whole, *each = json.loads(out)["rows"]
    exact = np.concatenate(parts)
    assert (whole["slot"], [row["slot"] for row in each]) == (None, [0, 1])
    assert whole["requests"] == 4000
    assert whole["rate"] == pytest.approx(4000 / 20)
    assert whole["errors"] == 2
    assert whole["p50_s"] == pytest.approx(np.quantile(exact, 0.5) / 1e3, rel=0.012)
    assert whole["p99_s"] == pytest.approx(np.quantile(exact, 0.99) / 1e3, rel=0.012)
    assert whole["violations"] == int((exact > 20).sum()) == sum(row["violations"] for row in each)
    assert whole["threshold_s"] == 0.02
    assert status == (2 if whole["broken"] else 0)


def test_only_the_asked_time_counts(write, tmp_path):
    write(tmp_path, "scoring", 0, [[100.0] * 50] * 3 + [[5.0] * 50] * 3)
    rows = {window: overview(tmp_path, time.time_ns(), window_s=window).rows[0] for window in (15, 120)}
    assert rows[15].requests == 100
    assert rows[15].p99_s == pytest.approx(0.005, rel=0.03)
    assert not rows[15].broken
    assert rows[120].p99_s == pytest.approx(0.1, rel=0.03)
    assert rows[120].broken


def test_text_for_people_says_what_is_broken_and_who_is_quiet(write, top, tmp_path):
    write(tmp_path, "scoring", 0, [[46.0] * 30 + [9.0] * 70])
    write(tmp_path, "ranking", 3, [[2.0] * 10], ago_s=500)
    status, out = top("--state-dir", tmp_path)
    assert status == 2
    line = next(line for line in out.splitlines() if line.startswith("scoring"))
    assert "P99 20 ms" in line
    assert "30 (30.00 %)" in line
    assert "nothing in this time from ranking/3" in out


def test_workers_of_two_scales_are_shown_at_the_coarser_one(write, tmp_path):
    values = list(np.random.default_rng(4).lognormal(2, 0.4, 2000))
    write(tmp_path, "scoring", 0, [values], scale=5)
    write(tmp_path, "scoring", 1, [values], scale=3)
    whole = overview(tmp_path, time.time_ns()).rows[0]
    assert whole.p99_s == pytest.approx(np.quantile(values, 0.99) / 1e3, rel=0.045)


def test_a_service_without_an_objective_is_never_broken(write, top, tmp_path):
    write(tmp_path, "scoring", 0, [[500.0] * 40], objective=None)
    status, out = top("--state-dir", tmp_path, "--json")
    (row,) = json.loads(out)["rows"]
    assert status == 0
    assert row["violations"] is None
    assert row["objective"] is None


def test_an_open_incident_is_shown(write, top, tmp_path):
    from inferscope.capture.bundle import Bundle
    from inferscope.types import Breach

    write(tmp_path, "scoring", 0, [[5.0] * 40])
    breach = Breach("20260501T120000Z-score-00ff", "score-p99", "score", 20.0, 0.99, 1, 2, 3, 100, 9, "e_detector", 12.0, 1.0)
    root = tmp_path / "scoring" / "0"
    bundle = Bundle.create(root, breach, {}, {})
    bundle.publish("open")
    status, out = top("--state-dir", tmp_path)
    assert status == 2
    assert f"incident {breach.id}  scoring/0  open" in out
    bundle.publish("closed")
    assert top("--state-dir", tmp_path)[0] == 0


def test_nothing_here_is_said(top, tmp_path):
    status, out = top("--state-dir", tmp_path)
    assert status == 1
    assert "no service keeps anything" in out


def test_a_target_is_no_sum_after_an_hour(tmp_path):
    from inferscope.export.otlp.series import Series

    store = Store(tmp_path / "index.sqlite")
    for tick in range(6):
        at = tick * 10 * SECOND
        store.add([Series(semconv.SLO_TARGET, ((semconv.ATTR_SLO, "s"),), at, at + 10 * SECOND, None, 0.02, monotonic=False)])
    store.add([Series(semconv.REQUESTS, (), 0, 7200 * SECOND, None, 1)])
    assert {window.total for window in store.windows(name=semconv.SLO_TARGET)} == {0.02}
    assert len(store.windows(name=semconv.SLO_TARGET)) < 6
    store.close()


def test_live_on_a_terminal_until_interrupted(write, tmp_path):
    write(tmp_path, "scoring", 0, [[5.0] * 40])
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "inferscope", "top", "--state-dir", str(tmp_path), "--every", "200ms"]
    child = subprocess.Popen(command, stdout=slave, stderr=slave, env={**os.environ, "COLUMNS": "140", "LINES": "30", "TERM": "xterm"})
    os.close(slave)
    seen = b""
    try:
        until = time.monotonic() + 20
        while b"scoring" not in seen and time.monotonic() < until:
            seen += os.read(master, 65536)
        child.send_signal(signal.SIGINT)
        while time.monotonic() < until:
            try:
                seen += os.read(master, 65536)
            except OSError:
                break
        assert child.wait(10) == 0
    finally:
        child.kill()
        child.wait()
        os.close(master)
    assert b"scoring" in seen
    assert b"Traceback" not in seen
