"""What is written for a real card runs on the simulated one, so that a card's first day is not the code's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent

pytestmark = pytest.mark.slow


def test_the_tests_for_a_card_run(sim) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "tests/gpu/test_device.py", "--device", "simulated", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "passed" in done.stdout


def test_the_benchmark_for_a_card_runs(sim, tmp_path) -> None:
    command = [sys.executable, "benchmarks/gpu/device.py", "--quick", "--device", "simulated", "--json", str(tmp_path / "rows.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert (tmp_path / "rows.json").exists(), done.stderr[-3000:]
    assert "graph captures killed by us" in done.stdout
