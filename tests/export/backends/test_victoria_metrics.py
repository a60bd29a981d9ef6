"""A real database: percentiles read back, and the shipped rules over real numbers."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from inferscope import semconv
from inferscope.export import ExportBatch, Exporter, Total

RULES = Path(__file__).parents[3] / "integrations" / "prometheus" / "rules.yaml"
SECOND = 1_000_000_000


def export(make, backend, service, replicas, *, points=2, scale=5, objective_s=0.02):
    """`points` exports of each replica, a minute apart, the last one now."""
    now = time.time_ns()
    who = ((semconv.ATTR_REQUEST, "score"),)
    slo = (semconv.ATTR_SLO, "score-p99")
    for index, values in enumerate(replicas):
        exporter = Exporter(endpoint=backend.otlp, scale=scale, environ={})
        for point in range(1, points + 1):
            seen = values[: len(values) * point // points]
            totals = (
                Total(semconv.REQUESTS, len(seen), who),
                Total(semconv.SLO_VIOLATIONS, int((seen > objective_s * 1e9).sum()), (*who, slo)),
                Total(semconv.SLO_TARGET, objective_s, (*who, slo, ("inferscope.slo.quantile", 0.99)), monotonic=False),
            )
            at = now - (points - point) * 60 * SECOND
            resource = {"service.name": service, "service.instance.id": f"replica-{index}"}
            exporter.offer(ExportBatch((make.distribution(seen),), totals, now - 600 * SECOND, at, resource))
            assert exporter.run_once(2.0)
        exporter.shutdown()


def value(backend, text):
    found = backend.query(text)
    assert len(found) == 1, (text, found)
    return found[0][1]


def arrived(backend, service, count):
    until = time.monotonic() + 15
    while sum(each for _, each in backend.query(f'inferscope_requests_total{{job="{service}"}}')) != count:
        assert time.monotonic() < until
        time.sleep(0.1)


def test_percentiles_of_three_replicas_are_read_back(make, victoria_metrics):
    rng = np.random.default_rng(13)
    replicas = [rng.lognormal(mu, sigma, 40_000).astype(np.int64) for mu, sigma in ((16, 0.2), (16.5, 0.6), (15, 1.0))]
    export(make, victoria_metrics, "replicas", replicas, points=1)
    arrived(victoria_metrics, "replicas", 120_000)
    whole = np.concatenate(replicas)
    for quantile in (0.5, 0.95, 0.99, 0.999):
        text = f'histogram_quantile({quantile}, sum(inferscope_request_duration_seconds_bucket{{job="replicas"}}) by (vmrange))'
        assert value(victoria_metrics, text) == pytest.approx(np.quantile(whole, quantile) / 1e9, rel=0.012)


def test_the_shipped_rules_are_valid(vmalert):
    done = subprocess.run([vmalert, f"-rule={RULES}", "-dryRun"], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr


def test_the_shipped_rules_say_what_their_unit_tests_expect(promtool):
    for words in (["check", "rules", str(RULES)], ["test", "rules", str(RULES.with_name("rules.test.yaml"))]):
        done = subprocess.run([promtool, *words], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_burn_rate_is_what_the_requests_say(make, victoria_metrics):
    yaml = pytest.importorskip("yaml")
    values = np.full(20_000, 9_000_000)
    values[::20] = 46_000_000  # 5 % above an objective that allows 1 %
    export(make, victoria_metrics, "burning", [values, values])
    arrived(victoria_metrics, "burning", 40_000)
    recorded = {}
    for rule in [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"] if "record" in rule]:
        recorded.setdefault(rule["record"], []).append(rule["expr"])

    def expanded(expr):
        for name in sorted(recorded, key=len, reverse=True):
            if name in expr:
                expr = expr.replace(name, "(" + " or ".join(f"({expanded(each)})" for each in recorded[name]) + ")")
        return expr

    def measured(name):
        found = [(labels, each) for labels, each in victoria_metrics.query(expanded(name)) if labels.get("job") == "burning"]
        assert len(found) == 1, found
        assert found[0][0]["inferscope_request"] == "score"
        return found[0][1]

    assert measured("inferscope:slo_budget:ratio") == pytest.approx(0.01)
    assert measured("inferscope:slo_violations:ratio_rate5m") == pytest.approx(0.05, rel=0.01)
    assert measured("inferscope:slo_burn:rate5m") == pytest.approx(5, rel=0.01)
    assert measured("inferscope:request_duration_seconds:p50") == pytest.approx(0.009, rel=0.012)
    assert measured("inferscope:request_duration_seconds:p99") == pytest.approx(0.046, rel=0.012)
