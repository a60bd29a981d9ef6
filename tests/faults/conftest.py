"""Runs planted services, each in a process of its own, and prints how their diagnoses compare with the truth."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

ROWS = pytest.StashKey[list]()


def load():
    spec = importlib.util.spec_from_file_location("fault_scenarios", Path(__file__).with_name("scenarios.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def scenarios():
    return load()


@pytest.fixture(scope="session")
def rows(pytestconfig):
    """What was judged so far; printed at the end."""
    return pytestconfig.stash.setdefault(ROWS, [])


def pytest_generate_tests(metafunc):
    if "fault" in metafunc.fixturenames:
        seeds = range(1, int(os.environ.get("FAULT_SEEDS") or 1) + 1)
        metafunc.parametrize(("fault", "seed"), [(name, seed) for seed in seeds for name in load().SCENARIOS])


def pytest_terminal_summary(terminalreporter, config):
    held = config.stash.get(ROWS, [])
    if held:
        terminalreporter.section("planted faults")
        for line in (*load().table(held), *load().verdict(held)):
            terminalreporter.line(line)
