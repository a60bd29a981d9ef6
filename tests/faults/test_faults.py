"""`make faults`: the planted cause is ranked first, planted pairs stand among the first three, healthy services hear nothing loud."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.faults
@pytest.mark.timeout(240)
def test_the_planted_cause_is_named(scenarios, rows, fault, seed):
    missing = scenarios.SCENARIOS[fault].needs()
    if missing is not None:
        rows.append(scenarios.judge(fault, {"skipped": missing}))
        pytest.skip(missing)
    result = scenarios.diagnosis(fault, seed=seed)
    row = scenarios.judge(fault, result)
    rows.append(row)
    said = (row, result["verdict"], result["shares"], result["notes"])
    if not row["truth"]:
        assert not row["loud"], said
        return
    assert row["right"], said
    assert row["in_three"], said


def test_a_diagnosis_is_judged_by_rank_place_and_severity(scenarios):
    figures = {"requests": 1, "exceeding": 1, "p50_ms": 1.0, "p99_ms": 1.0, "cpu": 0.1, "run_queue": 0.1, "raised": True}
    figures |= {"episodes": 50, "seconds": 10.0, "children_cpu": 0.0, "wall_s": 12.0, "seed": 1}

    def judged(name, *found):
        findings = [{"id": id_, "severity": severity, "where": where} for id_, severity, where in found]
        return scenarios.judge(name, {**figures, "findings": findings})

    assert judged("slow_model", ("MODEL_SLOW", "high", "forward"))["right"]
    assert not judged("slow_model", ("MODEL_SLOW", "low", "forward"))["right"]
    assert not judged("slow_model", ("MODEL_SLOW", "high", "elsewhere"))["right"]
    assert not judged("slow_model", ("STAGE_SLOW", "high", "forward"), ("MODEL_SLOW", "high", "forward"))["right"]
    assert not judged("slow_model")["right"]
    pair = judged("copies_and_lock", ("LOCK_CONTENTION", "high", ""), ("QUEUEING", "high", ""), ("H2D_SYNC_PAGEABLE", "high", ""))
    assert (pair["right"], pair["in_three"], pair["other_high"]) == (True, True, ["QUEUEING"])
    assert not judged("copies_and_lock", ("LOCK_CONTENTION", "high", ""))["in_three"]
    assert judged("healthy", ("QUEUEING", "low", ""))["loud"] == []
    assert judged("healthy", ("QUEUEING", "medium", ""))["loud"] == ["QUEUEING"]
    assert judged("healthy", ("X", "low", ""))["right"]
    assert "skipped" in scenarios.table([scenarios.judge("throttled", {"skipped": "no"})])[1]
    quiet = judged("healthy", ("QUEUEING", "low", ""))
    assert scenarios.verdict([pair, quiet]) == [
        "planted cause first: 1 of 1 (100 %); pairs among the first three: 1 of 1; loud findings on 1 healthy runs: 0",
        "fewer than 60 slow episodes in 15 s: none; over 40 % of a CPU: none; 5 seeds take 2 minutes",
    ]
    lazy, busy = {**pair, "episodes_15s": 59.0}, {**quiet, "cpu": 0.41, "seed": 2}
    assert scenarios.sparse([pair, lazy, {**lazy, "few": "why"}, quiet]) == [lazy]
    assert scenarios.hot([pair, busy, {**busy, "hot": "why"}]) == [busy]
    assert scenarios.minutes([pair, busy]) == 1.0
    assert "why" in scenarios.verdict([{**lazy, "few": "why"}])[-1]


def test_slow_requests_that_overlap_are_one_episode(scenarios):
    slow = [(0, 50), (10, 40), (49, 90), (100, 110), (105, 200), (300, 301)]
    assert scenarios.harness.episodes(slow) == scenarios.harness.episodes(slow[::-1]) == 3
    assert scenarios.harness.episodes([]) == 0


def test_a_service_that_fails_or_dies_is_an_error_and_the_next_one_runs():
    program = """
import os, sys
sys.path.insert(0, sys.argv[1])
import serving
def start(name, seconds, seed):
    if name == "raises":
        raise ValueError("planted")
    if name == "dies":
        os._exit(3)
    print("what a library prints")
    return {"name": name, "seconds": seconds, "seed": seed}
serving.serve((), start)
"""
    lines = "".join(json.dumps([name, 1.5, 7]) + "\n" for name in ("raises", "dies", "well"))
    command = [sys.executable, "-c", program, str(Path(__file__).parent)]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=60, check=True)
    raised, died, well = map(json.loads, done.stdout.splitlines())
    assert "planted" in raised["error"]
    assert "said nothing" in died["error"]
    assert well == {"name": "well", "seconds": 1.5, "seed": 7}
    assert "what a library prints" in done.stderr


def test_the_suite_has_what_was_asked_for(scenarios):
    truths = [scenario.truth for scenario in scenarios.SCENARIOS.values()]
    assert len(truths) >= 28
    assert truths.count(()) >= 3
    assert sum(len(truth) > 1 for truth in truths) >= 3
