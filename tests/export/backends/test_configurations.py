"""The shipped configurations through those who read them: the collector's own loader, and Kubernetes' schemas."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")
ASSETS = Path(__file__).parents[3] / "integrations"
COLLECTOR = ASSETS / "otel-collector"
ENVIRON = {
    "TRACES_ENDPOINT": "http://tempo:4318",
    "METRICS_ENDPOINT": "http://prometheus:9090/api/v1/write",
    "LOGS_ENDPOINT": "http://loki:3100/otlp",
    "VICTORIAMETRICS_ENDPOINT": "http://victoria-metrics:8428/opentelemetry",
    "CLICKHOUSE_ENDPOINT": "tcp://clickhouse:9000?database=otel",
}
"""As the comments in the files name them."""


@pytest.fixture
def validated(otelcol):
    """`otelcol validate`: decoding, every component's own checks, and building all pipelines."""

    def run(*files, **environ):
        command = [str(otelcol), "validate", *(word for file in files for word in ("--config", str(file)))]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, **ENVIRON, **environ})

    return run


@pytest.mark.slow
@pytest.mark.parametrize("store", [None, "victoriametrics.yaml", "clickhouse.yaml"])
def test_the_collector_takes_the_configuration(validated, store):
    done = validated(COLLECTOR / "config.yaml", *([COLLECTOR / store] if store else []))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("limit_percentage: 80", "limit_percentages: 80", "limit_percentages"),
        ("decision_wait: 30s", "decision_wait: 30", "decision_wait"),
        ("type: boolean_attribute", "type: boolean", "unknown sampling policy type"),
        ("sampling_percentage: 1", "percentage: 1", "percentage"),
        ("exporters: [prometheusremotewrite]", "exporters: [prometheus]", "prometheus"),
        ("resource_to_telemetry_conversion", "resource_to_telemetry", "resource_to_telemetry"),
        ("check_interval: 1s", "check_interval: 0s", "check_interval"),
    ],
)
def test_it_would_not_take_a_broken_one(validated, tmp_path, old, new, said):
    text = (COLLECTOR / "config.yaml").read_text()
    assert old in text
    (tmp_path / "config.yaml").write_text(text.replace(old, new))
    done = validated(tmp_path / "config.yaml")
    assert done.returncode != 0
    assert said in done.stderr


@pytest.mark.slow
def test_an_address_that_nobody_set_is_said(validated):
    done = validated(COLLECTOR / "config.yaml", METRICS_ENDPOINT="")
    assert done.returncode != 0
    assert "prometheusremotewrite" in done.stderr


def documents(name):
    return [each for each in yaml.safe_load_all((ASSETS / "kubernetes" / name).read_text()) if each]


@pytest.mark.parametrize("version", ["1.27", "1.37"])
@pytest.mark.parametrize("name", ["sidecar.yaml", "daemonset.yaml"])
def test_kubernetes_knows_every_field_of_the_manifests(kubernetes, name, version):
    found = documents(name)
    assert found
    for document in found:
        kubernetes(document, version)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda spec: spec["template"]["spec"]["containers"][0].update(evn=[]), "evn"),
        (lambda spec: spec["template"]["spec"]["containers"][0].update(ports=[{"containerPort": "4318"}]), "4318"),
        (lambda spec: spec.pop("selector"), "selector"),
    ],
)
def test_kubernetes_would_not_take_a_broken_one(kubernetes, change, said):
    document = json.loads(json.dumps(documents("sidecar.yaml")[0]))
    change(document["spec"])
    with pytest.raises(ValueError, match=said):
        kubernetes(document, "1.37")


def test_the_configuration_that_the_manifests_mount_is_the_one_that_is_shipped():
    readme = (ASSETS / "kubernetes" / "README.md").read_text()
    for name in ("sidecar.yaml", "daemonset.yaml"):
        for document in documents(name):
            spec = document["spec"]["template"]["spec"]
            for volume in spec["volumes"]:
                if "configMap" in volume:
                    assert f"create configmap {volume['configMap']['name']}" in readme
