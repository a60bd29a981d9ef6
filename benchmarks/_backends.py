"""Real receivers for tests and benchmarks, started on free ports of 127.0.0.1 and ended by whoever started them; `_fetch` has them."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

HERE = Path(__file__).resolve().parent
if str(HERE) not in sys.path:
    sys.path.insert(0, str(HERE))

from _fetch import BackendAbsentError, chdb, grafana, kubernetes, otelcol, program, rotel  # noqa: E402  (the folder must be on the path)

__all__ = ["BackendAbsentError", "chdb", "grafana", "kubernetes", "otelcol", "program", "rotel"]
_ALONE = {"http_proxy": "", "https_proxy": "", "all_proxy": "", "no_proxy": "*"}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def running(command, ready, *, timeout_s=30.0, **environ):
    """A process until the block ends; `ready()` is asked until it is true."""
    with tempfile.TemporaryFile() as log:
        child = subprocess.Popen(
            [str(word) for word in command], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, **_ALONE, **environ}
        )
        try:
            until = time.monotonic() + timeout_s
            while not ready():
                if child.poll() is not None or time.monotonic() > until:
                    log.seek(0)
                    tail = log.read()[-500:].decode(errors="replace")
                    raise BackendAbsentError(f"{Path(command[0]).name} does not start: {tail}")
                time.sleep(0.05)
            yield child
        finally:
            child.terminate()
            try:
                child.wait(5)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def listens(port):
    with socket.socket() as probe:
        probe.settimeout(0.2)
        return probe.connect_ex(("127.0.0.1", port)) == 0


class Database:
    """A database to ask in PromQL."""

    health = "/-/ready"

    def __init__(self, port):
        self.url = f"http://127.0.0.1:{port}"
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def get(self, path, **query):
        with self._opener.open(f"{self.url}{path}?{urllib.parse.urlencode(query)}", timeout=10) as answer:
            return answer.read()

    def healthy(self):
        try:
            return bool(self.get(self.health))
        except (OSError, urllib.error.URLError):
            return False

    def settle(self):
        """Make what was written visible."""

    def query(self, text, *, within_s=10.0):
        """`[(labels, value)]` of an instant query; asked again for a while when empty, because what was written is found a little later."""
        until = time.monotonic() + within_s
        while True:
            self.settle()
            found = json.loads(self.get("/api/v1/query", query=text))["data"]["result"]
            if found or time.monotonic() > until:
                return [(each["metric"], float(each["value"][1])) for each in found]
            time.sleep(0.1)

    def series(self, name):
        """How many series a metric has."""
        return len(self.query(f'{{__name__="{name}"}}'))


class VictoriaMetrics(Database):
    """It takes OTLP itself."""

    health = "/health"

    def __init__(self, port):
        super().__init__(port)
        self.otlp = f"{self.url}/opentelemetry"

    def settle(self):
        self.get("/internal/force_flush")


@contextlib.contextmanager
def serve_prometheus(program, *, features="native-histograms,exemplar-storage"):
    port = free_port()
    with tempfile.TemporaryDirectory() as data:
        config = Path(data) / "prometheus.yml"
        config.write_text("global:\n  scrape_interval: 1h\nstorage:\n  tsdb:\n    out_of_order_time_window: 2h\n")
        command = [program, f"--web.listen-address=127.0.0.1:{port}", f"--storage.tsdb.path={data}/data", f"--config.file={config}"]
        command += ["--web.enable-remote-write-receiver", f"--enable-feature={features}", "--log.level=error"]
        backend = Database(port)
        with running(command, backend.healthy):
            yield backend


@contextlib.contextmanager
def serve_clickhouse(directory):
    """URL of a server whose database `otel` has the collector's tables."""
    port = free_port()
    with tempfile.TemporaryDirectory() as data:
        command = [sys.executable, HERE / "_clickhouse.py", port, Path(data) / "db"]
        with running(command, lambda: listens(port), PYTHONPATH=str(directory)):
            yield f"http://127.0.0.1:{port}/otel"


@contextlib.contextmanager
def serve_victoria_metrics(program, *, relabel=None, naming=True):
    port = free_port()
    with tempfile.TemporaryDirectory() as data:
        command = [program, f"-httpListenAddr=127.0.0.1:{port}", f"-storageDataPath={data}", "-retentionPeriod=2d", "-loggerLevel=ERROR"]
        command += ["-search.latencyOffset=0s", "-memory.allowedBytes=256MB", "-search.disableCache"]
        command += (["-opentelemetry.usePrometheusNaming"] if naming else []) + ([f"-relabelConfig={relabel}"] if relabel else [])
        backend = VictoriaMetrics(port)
        with running(command, backend.healthy):
            yield backend


@contextlib.contextmanager
def serve_rotel(program, to):
    """rotel in front of an OTLP/HTTP receiver at `to`; gives its gRPC and HTTP endpoints."""
    grpc, http = free_port(), free_port()
    command = [program, "start", "--otlp-grpc-endpoint", f"127.0.0.1:{grpc}", "--otlp-http-endpoint", f"127.0.0.1:{http}"]
    command += ["--exporter", "otlp", "--otlp-exporter-protocol", "http", "--otlp-exporter-endpoint", to]
    with running(command, lambda: listens(grpc) and listens(http)):
        yield f"http://127.0.0.1:{grpc}", f"http://127.0.0.1:{http}"


@contextlib.contextmanager
def serve_otelcol(program, to):
    """The collector core in front of an OTLP/HTTP receiver at `to`, profiles included; gives its gRPC and HTTP endpoints."""
    grpc, http = free_port(), free_port()
    signals = ("metrics", "logs", "traces", "profiles")
    config = {
        "receivers": {"otlp": {"protocols": {"grpc": {"endpoint": f"127.0.0.1:{grpc}"}, "http": {"endpoint": f"127.0.0.1:{http}"}}}},
        "exporters": {"otlp_http": {"endpoint": to, "sending_queue": {"enabled": False}}},
        "service": {
            "telemetry": {"metrics": {"level": "none"}},
            "pipelines": {signal: {"receivers": ["otlp"], "exporters": ["otlp_http"]} for signal in signals},
        },
    }
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "config.yaml"
        path.write_text(json.dumps(config))  # JSON is YAML
        command = [program, "--config", path, "--feature-gates=+service.profilesSupport"]
        with running(command, lambda: listens(grpc) and listens(http)):
            yield f"http://127.0.0.1:{grpc}", f"http://127.0.0.1:{http}"
