"""What is shipped for collectors, Prometheus and Grafana agrees with what is exported."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from inferscope import semconv
from inferscope.export.otlp.traces import KEEP
from inferscope.export.prometheus import metric_name
from inferscope.forms import KEYS

yaml = pytest.importorskip("yaml")
ASSETS = Path(__file__).parents[2] / "integrations"
COUNTERS = {semconv.REQUESTS, semconv.ITEMS, semconv.SLO_VIOLATIONS, semconv.PROFILED, semconv.COPY_IO, semconv.CAPTURES}
COUNTERS |= {semconv.BAND_SIZES, semconv.BAND_SIZES_SQUARED}
COUNTERS |= {semconv.BAND_TIME, semconv.BAND_REQUESTS, semconv.SELF_DROPPED, semconv.SELF_ERRORS, semconv.SELF_OVERHEAD}
HISTOGRAMS = {name for name in semconv.UNITS if name.endswith((".duration", ".pause"))}
EXPORTED = {metric_name(name, counter=name in COUNTERS) for name in semconv.UNITS}
EXPORTED |= {f"{metric_name(name)}_{part}" for name in HISTOGRAMS for part in ("bucket", "sum", "count")}
LABELS = {value.replace(".", "_") for name, value in vars(semconv).items() if name.startswith("ATTR_")}
LABELS |= {"error_type", "thread_name", "inferscope_slo_quantile", "job", "instance", "le", "vmrange", "service_version"}


def rules():
    return [rule for group in yaml.safe_load((ASSETS / "prometheus" / "rules.yaml").read_text())["groups"] for rule in group["rules"]]


def dashboard():
    return json.loads((ASSETS / "grafana" / "inferscope.json").read_text())


def expressions():
    yield from (rule["expr"] for rule in rules())
    board = dashboard()
    yield from (target["expr"] for panel in board["panels"] for target in panel["targets"])
    yield from (variable["query"]["query"] for variable in board["templating"]["list"] if variable["type"] == "query")


def grouped(expr):
    """Labels that an expression groups, joins or selects by."""
    for listed in re.findall(r"\b(?:by|on|ignoring|without|group_left)\s*\(([^)]*)\)", expr):
        yield from (label.strip() for label in listed.split(",") if label.strip())
    yield from re.findall(r"[{,]\s*([a-z_]+)\s*(?:=~|!~|!=|=)", expr)


def test_every_metric_in_rules_and_dashboard_is_exported_or_recorded():
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    for expr in expressions():
        assert set(re.findall(r"inferscope:[a-z0-9_:]+", expr)) <= recorded, expr
        bare = re.sub(r"inferscope:[a-z0-9_:]+", "", expr)
        assert set(re.findall(r"\binferscope_[a-z0-9_]+\b", bare)) - LABELS <= EXPORTED, expr


def test_every_label_is_one_that_we_set_or_prometheus_does():
    for expr in expressions():
        assert set(grouped(expr)) <= LABELS, expr
    for rule in rules():
        for text in rule.get("annotations", {}).values():
            assert set(re.findall(r"\$labels\.([a-z_]+)", text)) <= LABELS


def test_alerts_have_two_windows_a_minimum_of_requests_and_an_instruction():
    burning = [rule for rule in rules() if "Burns" in rule.get("alert", "")]
    assert len(burning) == 3
    for rule in burning:
        assert len(set(re.findall(r"inferscope:slo_burn:rate(\w+)", rule["expr"]))) == 2
        assert re.search(r"inferscope:slo_requests:rate\w+ \* \d+ > \d+", rule["expr"])
        assert rule["labels"]["severity"] in {"page", "ticket"}
        assert "inferscope incidents" in rule["annotations"]["description"]


def test_every_quantile_that_an_objective_can_have_has_a_budget():
    (expr,) = [rule["expr"] for rule in rules() if rule.get("record") == "inferscope:slo_budget:ratio"]
    found = re.findall(r'quantile="([\d.]+)"}\) \* 0 \+ ([\d.]+)', expr)
    assert {float(quantile): float(budget) for quantile, budget in found} == {q: pytest.approx(1 - q) for q in (0.95, 0.99, 0.999)}


def test_parentheses_and_braces_are_balanced():
    for expr in expressions():
        for opening, closing in ("()", "{}", "[]"):
            assert expr.count(opening) == expr.count(closing), expr


def test_the_dashboard_is_whole():
    board = dashboard()
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    variables = {variable["name"] for variable in board["templating"]["list"]}
    assert set(re.findall(r"\$\{?([a-z]+)\}?", json.dumps(board["panels"]))) <= variables
    for panel in board["panels"]:
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
        assert [target["refId"] for target in panel["targets"]] == ["A", "B", "C"][: len(panel["targets"])]


def test_the_dashboard_for_victoriametrics_is_the_same_without_what_it_does_not_know():
    other = json.loads((ASSETS / "grafana" / "inferscope-victoriametrics.json").read_text())
    mine = [re.sub(r" or histogram_sum\(rate\([^()]*\)\)", "", t["expr"]) for panel in dashboard()["panels"] for t in panel["targets"]]
    assert [target["expr"] for panel in other["panels"] for target in panel["targets"]] == mine
    assert "histogram_" not in "".join(expr for expr in mine if "quantile" not in expr)


def test_the_collector_s_pipelines_use_what_is_configured_and_nothing_is_left_over():
    config = yaml.safe_load((ASSETS / "otel-collector" / "config.yaml").read_text())
    pipelines = config["service"]["pipelines"]
    assert set(pipelines) == {"metrics", "logs", "traces"}
    for kind in ("receivers", "processors", "exporters"):
        assert {part for pipeline in pipelines.values() for part in pipeline[kind]} == set(config[kind])
    for pipeline in pipelines.values():
        assert pipeline["processors"][0] == "memory_limiter"


def test_the_collector_keeps_what_inferscope_chose():
    config = yaml.safe_load((ASSETS / "otel-collector" / "config.yaml").read_text())
    first = config["processors"]["tail_sampling"]["policies"][0]
    assert first["type"] == "boolean_attribute"
    assert first["boolean_attribute"] == {"key": KEEP, "value": True}


@pytest.mark.parametrize("store", ["victoriametrics.yaml", "clickhouse.yaml"])
def test_another_store_replaces_the_pipeline_of_metrics_alone(store):
    base = yaml.safe_load((ASSETS / "otel-collector" / "config.yaml").read_text())
    other = yaml.safe_load((ASSETS / "otel-collector" / store).read_text())
    (pipeline,) = other["service"]["pipelines"].values()
    assert set(other["service"]["pipelines"]) == {"metrics"}
    assert pipeline["exporters"] == list(other["exporters"])
    assert set(pipeline["receivers"]) <= set(base["receivers"])
    assert set(pipeline["processors"]) <= set(base["processors"])


@pytest.mark.parametrize("name", ["sidecar.yaml", "daemonset.yaml"])
def test_manifests_name_settings_that_exist_and_volumes_that_they_mount(name):
    config = (ASSETS / "otel-collector" / "config.yaml").read_text()
    for document in yaml.safe_load_all((ASSETS / "kubernetes" / name).read_text()):
        spec = document["spec"]["template"]["spec"]
        assert document["spec"]["selector"]["matchLabels"] == document["spec"]["template"]["metadata"]["labels"]
        volumes = {volume["name"] for volume in spec["volumes"]}
        for container in spec["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
            defined: set[str] = set()
            for variable in container["env"]:
                assert set(re.findall(r"\$\((\w+)\)", str(variable.get("value", "")))) <= defined, "used before it is defined"
                defined.add(variable["name"])
                if variable["name"].startswith("INFERSCOPE_"):
                    key = variable["name"].removeprefix("INFERSCOPE_").lower()
                    KEYS[key][0](variable["value"])
                if container["name"] == "collector":
                    assert f"${{env:{variable['name']}" in config
