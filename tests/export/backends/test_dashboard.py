"""Every query of the shipped dashboard and rules, over real numbers in both databases that speak PromQL."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import numpy as np
import pytest

from inferscope import semconv
from inferscope.export import ExportBatch, Exporter, Total
from inferscope.testing.receiver import OtlpReceiver

yaml = pytest.importorskip("yaml")
ASSETS = Path(__file__).parents[3] / "integrations"
RULES = yaml.safe_load((ASSETS / "prometheus" / "rules.yaml").read_text())["groups"]
BOARDS = {"prometheus": "inferscope.json", "victoriametrics": "inferscope-victoriametrics.json"}
RECORDED = {}
for _rule in [rule for group in RULES for rule in group["rules"] if "record" in rule]:
    RECORDED.setdefault(_rule["record"], _rule["expr"])


def expanded(expr):
    """With recorded names replaced by what they record, and the dashboard's variables by everything."""
    while re.search(r"inferscope:[a-z0-9_:]+", expr):
        expr = re.sub(r"(inferscope:[a-z0-9_:]+)(\{[^}]*\})?", lambda found: f"({RECORDED[found[1]]})", expr)
    return expr.replace("$job", ".*").replace("$request", ".*").replace("$__rate_interval", "5m")


def totals(seconds):
    who = ((semconv.ATTR_REQUEST, "score"),)
    slo = (semconv.ATTR_SLO, "score-p99")
    about = (*who, (semconv.ATTR_BAND, "0.02"))
    tail = (*who, (semconv.ATTR_BAND, "+Inf"), (semconv.ATTR_TAIL, True))
    rows = [
        (semconv.REQUESTS, 99 * seconds, who),
        (semconv.REQUESTS, seconds, (*who, (semconv.ERROR_TYPE, "_OTHER"))),
        (semconv.SLO_VIOLATIONS, 5 * seconds, (*who, slo)),
        (semconv.BAND_REQUESTS, 95 * seconds, about),
        (semconv.BAND_REQUESTS, 5 * seconds, tail),
        (semconv.BAND_TIME, 0.9 * seconds, (*about, (semconv.ATTR_STAGE, "model"))),
        (semconv.BAND_TIME, 0.2 * seconds, (*tail, (semconv.ATTR_STAGE, "model"))),
        (semconv.SELF_OVERHEAD, 0.001 * seconds, (("thread.name", "inferscope-worker"),)),
        (semconv.SELF_DROPPED, seconds, ((semconv.ATTR_REASON, "trace"),)),
        (semconv.SELF_ERRORS, seconds, ((semconv.ATTR_REASON, "export"),)),
    ]
    target = (*who, slo, ("inferscope.slo.quantile", 0.99))
    return (*(Total(*row) for row in rows), Total(semconv.SLO_TARGET, 0.02, target, monotonic=False))


SERIES = (
    ("request", ("score", "", "")),
    ("stage", ("model",)),
    ("lock.wait", ("rules",)),
    ("copy", ("h2d", "sync")),
    ("queue", ("backlog",)),
    ("gc", ("gen2",)),
)


@pytest.fixture
def filled(request, make, collect):
    """Asks a database, by its name, that has everything that a service can export."""
    return lambda kind: fill(request.getfixturevalue({"victoriametrics": "victoria_metrics"}.get(kind, kind)), kind, make, collect)


def fill(backend, kind, make, collect):
    now, rng = time.time_ns(), np.random.default_rng(3)
    with OtlpReceiver() as receiver:
        exporter = Exporter(endpoint=backend.otlp if kind == "victoriametrics" else receiver.url, environ={})
        for point in range(1, 5):
            seen = rng.lognormal(16, 0.4, 4000 * point).astype(np.int64)
            batch = ExportBatch(
                tuple(make.distribution(seen, *each) for each in SERIES),
                totals(60 * point),
                now - 300 * 10**9,
                now - (4 - point) * 60 * 10**9,
                {"service.name": f"board-{now}", "service.instance.id": f"{kind}-{now}"},
            )
            exporter.offer(batch)
            assert exporter.run_once(2.0)
        exporter.shutdown()
        if kind == "prometheus":
            collect.remote_write(backend.url, receiver.metrics())
    return backend.query


@pytest.mark.parametrize("kind", BOARDS)
def test_every_panel_shows_something(kind, filled):
    ask = filled(kind)
    panels = json.loads((ASSETS / "grafana" / BOARDS[kind]).read_text())["panels"]
    asked = [(panel["title"], target["expr"]) for panel in panels for target in panel["targets"]]
    assert [(title, expr) for title, expr in asked if not ask(expanded(expr), within_s=3)] == []


@pytest.mark.parametrize("kind", BOARDS)
def test_every_alert_and_recording_can_be_asked(kind, filled):
    ask = filled(kind)
    for group in RULES:
        for rule in group["rules"]:
            found = ask(expanded(rule["expr"]), within_s=0)
            assert found or "alert" in rule, rule


@pytest.mark.parametrize("kind", BOARDS)
def test_five_times_its_budget_is_five_times_its_budget(kind, filled):
    ask = filled(kind)
    values = [value for labels, value in ask(expanded("inferscope:slo_burn:rate5m")) if labels.get("job", "").startswith("board-")]
    assert values
    assert all(value == pytest.approx(5, rel=0.01) for value in values)


@pytest.mark.parametrize("name", BOARDS.values())
def test_grafana_s_own_models_know_everything_in_a_dashboard(name, grafana_models):
    """What a model does not know it drops; so what comes back is what the schema has a place for."""
    dashboard, encoder = grafana_models
    board = json.loads((ASSETS / "grafana" / name).read_text())
    back = json.loads(encoder(sort_keys=True).encode(dashboard.from_json(json.loads(json.dumps(board)))))

    def lost(mine, theirs, place):
        if isinstance(mine, dict):
            for key, value in mine.items():
                yield from lost(value, theirs[key], f"{place}.{key}") if key in theirs else [f"{place}.{key}"]
        elif isinstance(mine, list):
            for index, (one, other) in enumerate(zip(mine, theirs, strict=True)):
                yield from lost(one, other, f"{place}[{index}]")
        elif mine != theirs:
            yield f"{place}: {mine!r} is {theirs!r}"

    assert list(lost(board, back, "")) == []
