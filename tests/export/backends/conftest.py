"""Real receivers, started on free ports of 127.0.0.1 and ended with the tests; skipped with the reason where there are none.

Nothing is downloaded unless BACKENDS_FETCH=1 (`make test-backends`).
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from inferscope.testing.receiver import OtlpReceiver

ROOT = Path(__file__).parents[3]


def load():
    name = "inferscope_benchmark_backends"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / "_backends.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


backends = load()
FETCH = os.environ.get("BACKENDS_FETCH") == "1"


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.slow)


def have(find):
    try:
        return find(fetch=FETCH)
    except backends.BackendAbsentError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def victoria_metrics():
    program = have(backends.victoria_metrics)
    with backends.serve_victoria_metrics(program, relabel=ROOT / "integrations" / "prometheus" / "relabel.yaml") as backend:
        yield backend


@pytest.fixture
def behind_rotel():
    """rotel in front of a receiver of ours: (gRPC endpoint, HTTP endpoint, receiver)."""
    program = have(backends.rotel)
    with OtlpReceiver() as receiver, backends.serve_rotel(program, receiver.url) as (grpc, http):
        yield grpc, http, receiver


@pytest.fixture
def vmalert():
    program = have(backends.victoria_metrics).with_name("vmalert")
    if not os.access(program, os.X_OK):
        pytest.skip("vmalert is not beside victoria-metrics")
    return program
