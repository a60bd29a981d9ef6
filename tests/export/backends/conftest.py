"""Real receivers and databases, started on free ports of 127.0.0.1 and ended with the tests; skipped with the reason where there are none.

`make test-backends` unpacks them; nothing is downloaded here.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from inferscope.testing.receiver import OtlpReceiver

ROOT = Path(__file__).parents[3]


def load(name):
    """A module of benchmarks, which both use."""
    folder = str(ROOT / "benchmarks")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(name)


backends, collector, replicas = load("_backends"), load("_collector"), load("_replicas")


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.backends)


def have(find, *names):
    try:
        return find(*names)
    except backends.BackendAbsentError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def victoria_metrics():
    program = have(backends.program, "victoria-metrics")
    with backends.serve_victoria_metrics(program, relabel=ROOT / "integrations" / "prometheus" / "relabel.yaml") as backend:
        yield backend


@pytest.fixture
def serve():
    """Starts databases of one's own."""

    class Serve:
        @staticmethod
        def victoria_metrics(**more):
            return backends.serve_victoria_metrics(have(backends.program, "victoria-metrics"), **more)

        @staticmethod
        def prometheus(**more):
            return backends.serve_prometheus(have(backends.program, "prometheus"), **more)

        @staticmethod
        def rotel(to):
            return backends.serve_rotel(have(backends.rotel), to)

    return Serve


@pytest.fixture(scope="session")
def prometheus():
    with backends.serve_prometheus(have(backends.program, "prometheus")) as backend:
        yield backend


@pytest.fixture(scope="session")
def clickhouse():
    with backends.serve_clickhouse(have(backends.chdb)) as url:
        yield url


@pytest.fixture
def behind_rotel():
    """rotel in front of a receiver of ours: (gRPC endpoint, HTTP endpoint, receiver)."""
    program = have(backends.rotel)
    with OtlpReceiver() as receiver, backends.serve_rotel(program, receiver.url) as (grpc, http):
        yield grpc, http, receiver


@pytest.fixture
def behind_otelcol():
    """The collector core in front of a receiver of ours, as `behind_rotel`."""
    program = have(backends.otelcol)
    with OtlpReceiver() as receiver, backends.serve_otelcol(program, receiver.url) as (grpc, http):
        yield grpc, http, receiver


@pytest.fixture
def grafana_models(monkeypatch):
    """Grafana's models of a dashboard, generated from its schemas: (class, encoder)."""
    monkeypatch.syspath_prepend(str(have(backends.grafana)))
    plugins = importlib.import_module("grafana_foundation_sdk.cog.plugins")
    plugins.register_default_plugins()
    encoder = importlib.import_module("grafana_foundation_sdk.cog.encoder").JSONEncoder
    return importlib.import_module("grafana_foundation_sdk.models.dashboard").Dashboard, encoder


@pytest.fixture
def otelcol():
    return have(backends.otelcol)


@pytest.fixture
def kubernetes(monkeypatch):
    """Validates a document against the schema of a version, every field known: ValueError says what is wrong."""
    monkeypatch.syspath_prepend(str(have(backends.kubernetes)))
    validate = importlib.import_module("kubernetes_validate")

    def check(document, version):
        try:
            assert validate.validate(document, version, strict=True) == version
        except validate.ValidationError as error:
            raise ValueError(error.message) from error

    return check


@pytest.fixture
def vmalert():
    return have(backends.program, "vmalert")


@pytest.fixture
def promtool():
    return have(backends.program, "promtool")


@pytest.fixture(scope="session")
def collect():
    """What a collector does; see benchmarks/_collector.py."""
    return collector


@pytest.fixture(scope="session")
def shapes():
    """Three replicas of different shape; see benchmarks/_replicas.py."""
    return replicas


@pytest.fixture(scope="session")
def deliver(tmp_path_factory, request):
    """Export replicas into a backend by its name; gives what `inferscope report --from` takes."""

    def export(kind, found, service, **more):
        if kind == "ring":
            place = tmp_path_factory.mktemp("rings")
            replicas.export(found, None, service=service, directory=place, **more)
            return f"ring={place}"
        backend = request.getfixturevalue({"victoriametrics": "victoria_metrics"}.get(kind, kind))
        if kind == "victoriametrics":
            replicas.export(found, backend.otlp, service=service, **more)
            backend.settle()
            return f"victoriametrics={backend.url}"
        with OtlpReceiver() as receiver:
            replicas.export(found, receiver.url, service=service, **more)
            if kind == "clickhouse":
                collector.clickhouse_rows(backend, receiver.metrics())
                return f"clickhouse={backend}"
            collector.remote_write(backend.url, receiver.metrics())
            return f"prometheus={backend.url}"

    return export
