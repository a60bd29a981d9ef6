from __future__ import annotations

import logging

import numpy as np
import pytest

from inferscope import guard
from inferscope.export import ExportBatch
from inferscope.export.otlp.buckets import hdr_bounds
from inferscope.types import Distribution

REQUEST = (3, 1000, 18432)
STAGE = (2, 1, 3840)
START = 1_700_000_000_000_000_000
SECOND = 1_000_000_000


def distribution(values_ns, kind="request", labels=("score", "", "")):
    digits, lowest, length = REQUEST if kind == "request" else STAGE
    low, _ = hdr_bounds(digits, lowest, length)
    values = np.asarray(values_ns, dtype=np.int64)
    counts = np.bincount(np.searchsorted(low, values, side="right") - 1, minlength=length).astype(np.int64)
    return Distribution(kind, labels, digits, lowest, counts, len(values), int(values.sum()), 0)


def batch(*distributions, totals=(), tick=1, start=START):
    return ExportBatch(
        tuple(distributions), tuple(totals), start, start + tick * 10 * SECOND, {"service.name": "scoring", "process.pid": 7}
    )


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("INFERSCOPE_STRICT", "1")
    guard.reset()
    yield
    guard.reset()


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.WARNING, logger="inferscope")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "inferscope"]


@pytest.fixture
def make():
    """The builders, for test modules: conftest cannot be imported in importlib mode."""

    class Make:
        pass

    Make.distribution = staticmethod(distribution)
    Make.batch = staticmethod(batch)
    Make.START, Make.SECOND = START, SECOND
    return Make
