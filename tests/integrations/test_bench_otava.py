"""The CSV of `inferscope history` in the hands of the real Apache Otava: a planted change is found where it was planted, and nowhere else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from inferscope.bench import fingerprint, metrics, runs
from inferscope.bench.result import LoadPlan, LoadResult
from inferscope.cli import main

pytestmark = [pytest.mark.servers, pytest.mark.slow, pytest.mark.timeout(300)]
OTAVA = Path(__file__).parents[2] / "build" / "otava-venv"
RUNS, CHANGE = 30, 15
CONFIG = """
tests:
  bench:
    type: csv
    file: history.csv
    time_column: time
    attributes: [commit, target, fingerprint]
    metrics:
      p50_ms: {direction: -1}
      p95_ms: {direction: -1}
      p99_ms: {direction: -1}
      throughput: {direction: 1}
      error_rate: {direction: -1}
"""


@pytest.fixture(scope="module")
def otava():
    """Otava in an environment of its own: its pins stay out of the one that is tested."""
    program = OTAVA / "bin" / "otava"
    if not program.exists():
        if os.environ.get("SERVERS_FETCH") != "1":
            pytest.skip("Apache Otava is not here; 'make test-integrations' installs it")
        subprocess.run([sys.executable, "-m", "venv", str(OTAVA)], check=True, capture_output=True)
        done = subprocess.run([str(OTAVA / "bin" / "pip"), "install", "--quiet", "apache-otava==0.8.0"], check=False, capture_output=True)
        if done.returncode:
            pytest.skip("Apache Otava cannot be installed here")
    return program


def save(path, number, rng):
    """A run of 1000 requests; from `CHANGE` on each takes 30 % longer."""
    slower = 1.3 if number >= CHANGE else 1.0
    intended = (np.arange(1000) * 10_000_000).astype(np.int64) + 1
    done = intended + (rng.lognormal(np.log(5.0 * slower * rng.normal(1, 0.02)), 0.2, 1000) * 1e6).astype(np.int64)
    load = LoadResult(LoadPlan("http://service/", 100.0, 10.0), intended, intended, intended, done, np.full(1000, 200))
    document = {
        "written_unix_ns": (1_760_000_000 + 86_400 * number) * 10**9,
        "settings": {"target": "http://service/", "model": None},
        "source": {"commit": f"{number:040x}", "dirty": False},
        "fingerprint": fingerprint.fingerprint(),
        "warmup": {"cut": 0, "method": "none"},
        "metrics": metrics.describe(load),
        "problems": [],
        "valid": True,
    }
    runs.save(path, document, load)


def test_a_planted_change_is_found_where_it_was_planted(otava, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    rng = np.random.default_rng(4)
    for number in range(RUNS):
        save(tmp_path / "runs" / f"{number:03}.json", number, rng)
    assert main(["history", "runs", "--csv", "history.csv"]) == 0
    assert "p999_ms" in capsys.readouterr().err
    (tmp_path / "otava.yaml").write_text(CONFIG)
    done = subprocess.run(
        [str(otava), "analyze", "bench", "--since", "2025-01-01", "--output", "json"],
        capture_output=True, text=True, check=False, timeout=240, env={**os.environ, "OTAVA_CONFIG": "otava.yaml"},
    )  # fmt: skip
    assert "ERROR" not in done.stdout + done.stderr, done.stdout + done.stderr
    found = json.loads(done.stdout[done.stdout.index("{") :])["bench"]
    (row,) = found
    assert {each["metric"] for each in row["changes"]} == {"p50_ms", "p95_ms", "p99_ms"}
    assert all(20 < float(each["forward_change_percent"]) < 40 for each in row["changes"])
    assert row["attributes"]["commit"] == f"{CHANGE:040x}"
