"""The demo asks no more of a machine than a quarter of a CPU, and says why a service opened no incident."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from inferscope.bench.process import Usage
from inferscope.bench.targets import Service
from inferscope.cli import demo, demo_runs


def rate(monkeypatch: pytest.MonkeyPatch, *cpu_s: float | None) -> float:
    """What the demo asks for when so much CPU time is read before and after it has timed its requests."""
    readings = iter(cpu_s)
    asked: list[bytes] = []
    monkeypatch.setattr(demo_runs, "usage", lambda _: None if (found := next(readings)) is None else Usage(found, 0, 0))
    monkeypatch.setattr(demo_runs, "post", lambda _port, _path, body: asked.append(body) or (200, b"{}"))
    service = Service([], 1, {}, Path(), Path("log"))
    found = demo_runs._affordable(demo_runs._Served("slow", service, Path(), set(), [json.dumps(n).encode() for n in range(512)], []))
    assert len(asked) == len(set(asked)) == demo_runs._TIMED
    return found


@pytest.mark.parametrize(
    ("used_ms", "expected"),
    [(1.0, 70.0), (3.5, 70.0), (5.0, 50.0), (10.0, 25.0), (400.0, 1.0)],
)
def test_a_slow_cpu_is_asked_for_less(monkeypatch, used_ms, expected):
    assert rate(monkeypatch, 3.0, 3.0 + demo_runs._TIMED * used_ms / 1e3) == expected


@pytest.mark.parametrize("readings", [(None, None), (1.0, None), (1.0, 1.0)])
def test_where_nothing_is_measured_the_usual_rate_is_asked_for(monkeypatch, readings):
    assert rate(monkeypatch, *readings) == demo_runs.RATE


def test_the_reason_of_a_refused_incident_is_printed():
    each = SimpleNamespace(variant="slow", incident=None, opened=[], refused="this host has captured 12 times within an hour")
    assert demo._problems(each) == [
        "the slow variant gave no diagnosed incident; its objective broke, but this host has captured 12 times within an hour"
    ]
    each.refused = ""
    assert "Try --seconds 60" in demo._problems(each)[0]
