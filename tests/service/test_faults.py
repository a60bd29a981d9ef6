"""Whatever of ours fails, the application gets the same results, exceptions and status codes."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("faults.py")


def _sites() -> dict[str, tuple[str, str]]:
    spec = importlib.util.spec_from_file_location("service_faults", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.SITES


SITES = _sites()


@pytest.fixture(scope="module")
def outcome(tmp_path_factory) -> dict:
    environment = {**os.environ, "INFERSCOPE_STRICT": "0", "INFERSCOPE_STATE_DIR": str(tmp_path_factory.mktemp("faults"))}
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=100, check=False, cwd=SCRIPT.parent
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_a_healthy_run_changes_nothing(outcome):
    assert outcome["healthy"]["results"] == [outcome["plain"]]
    assert outcome["healthy"]["failures"] == {}


@pytest.mark.parametrize("site", SITES)
def test_the_application_does_not_notice(outcome, site):
    seen = outcome[site]
    component = SITES[site][1]
    assert seen["results"] == [outcome["plain"]]
    assert seen["ending"] < 3.5
    if component:
        assert seen["failures"].get(component, 0) >= 3
        assert component in seen["off"]
