"""Both versions of the service: same answers, a truth that adds up, and the faults where they were planted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from examples.risk_scoring import data, truth
from inferscope.bench import load

ROOT = Path(__file__).parents[2]
BAD = [b"", b"[]", b"{}", b'{"student": 1, "balance": 2, "income": 3}', b'{"student": true, "balance": -1, "income": 3}', b"\xff"]
VERSIONS = ("slow", "fixed")


def loaded(port: int, cache: Path, seconds: float, rate: float = 80) -> load.LoadResult:
    plan = load.LoadPlan(f"http://127.0.0.1:{port}/score", rate=rate, seconds=seconds, seed=11)
    return load.measure(plan, data.bodies(data.load(cache), 200))


def affordable(port: int, cache: Path) -> float:
    """80 requests a second, fewer where one takes longer than the sleeps that it is made of."""
    return min(80.0, 700.0 / loaded(port, cache, seconds=2, rate=8).summary()["latency_ms"]["p50"])


def test_both_versions_give_the_same_answers(cache, ports, ask):
    decisions = set()
    for body in [
        *data.bodies(data.load(cache), 60, seed=2),
        b'{"student": true, "balance": 2600, "income": 15000}',
        b'{"student": false, "balance": 0, "income": 0}',
    ]:
        slow, fixed = (ask(ports[name], "POST", "/score", body) for name in VERSIONS)
        assert slow == fixed
        assert slow[0] == 200
        answer = json.loads(slow[1])
        assert 0 <= answer["score"] <= answer["stress"] <= 1
        decisions.add(answer["decision"])
    assert decisions == {"approve", "review", "decline"}


@pytest.mark.parametrize("name", VERSIONS)
def test_under_load_every_request_is_answered_and_accounted_for(cache, ports, ask, name):
    rate = affordable(ports[name], cache)
    began = time.perf_counter_ns()
    result = loaded(ports[name], cache, seconds=5, rate=rate)
    assert result.summary()["ok"] == len(result.status) > 3.75 * rate
    status, body = ask(ports[name], "GET", f"/truth?from_ns={began}")
    told = json.loads(body)
    assert status == 200
    assert told["requests"] == len(result.status)
    # The client sees at least what the edge saw.
    assert told["p50_ms"] <= result.summary()["latency_ms"]["p50"]
    if name == "slow":
        assert sum(told["shares"].values()) == pytest.approx(1)
        # Five seconds hold three or four stalls of each kind: enough to see both, too few to say how much.
        assert told["by_cause_ms"]["copy:h2d"] > 0.5
        assert told["by_cause_ms"]["lock:rules"] > 0.5
    half = json.loads(ask(ports[name], "GET", f"/truth?from_ns={began}&to_ns={result.done_ns[len(result.status) // 2]}")[1])
    assert 0.4 < half["requests"] / told["requests"] < 0.6


def test_what_is_no_applicant_is_told_so(ports, ask):
    for body in BAD:
        status, answer = ask(ports["slow"], "POST", "/score", body)
        assert status == 400
        assert "error" in json.loads(answer)
    assert ask(ports["slow"], "GET", "/healthz") == (200, b'{"status":"ok"}')
    assert ask(ports["slow"], "GET", "/score")[0] == 405
    assert ask(ports["slow"], "GET", "/truth?from_ns=soon")[0] == 400


def test_a_version_starts_by_its_path_and_leaves_its_account(cache, serve):
    port = serve(str(ROOT / "examples" / "risk_scoring" / "slow.py"))
    result = loaded(port, cache, seconds=1)
    serve.stop()
    (log,) = (serve.folder / "truth").iterdir()
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(rows) == len(result.status)
    assert all(row["status"] == 200 and sum(row[cause] for cause in truth.CAUSES) == row["end_ns"] - row["start_ns"] for row in rows)
    assert all(min(row[cause] for cause in truth.CAUSES) >= 0 for row in rows)


@pytest.mark.slow
def test_uvicorn_runs_several_workers(cache, serve):
    port = serve("-m", "uvicorn", "--workers", "2", "--log-level", "warning", "examples.risk_scoring.slow:app")
    time.sleep(5)  # both come up at their own pace, and only one has answered so far
    result = loaded(port, cache, seconds=2)
    assert result.summary()["ok"] == len(result.status)
    serve.stop()
    accounts = [len(path.read_text().splitlines()) for path in (serve.folder / "truth").iterdir()]
    assert len(accounts) == 2
    assert sum(accounts) == len(result.status)


def test_the_import_starts_nothing():
    code = (
        "import threading, sys; before = threading.active_count(); import examples.risk_scoring.service as s; from starlette.applications import Starlette;"
        "assert isinstance(s.application(s.Scoring), Starlette); print(threading.active_count() - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "0"
