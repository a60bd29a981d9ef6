"""What `inferscope doctor --endpoint` says of real receivers, well and badly configured."""

from __future__ import annotations

import gzip
import http.server
import threading
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest

from inferscope import cli
from inferscope.export.otlp.decode import metric_points
from inferscope.export.probe import probe


def test_victoriametrics_as_it_should_be(victoria_metrics):
    answers = {answer.check: answer for answer in probe(victoria_metrics.otlp)}
    assert answers["OTLP metrics"].result == "ok"
    assert answers["VictoriaMetrics"].result == "ok"
    assert answers["OTLP traces"].result == "note", "it takes metrics alone"


def test_victoriametrics_without_prometheus_names(serve):
    with serve.victoria_metrics(naming=False) as backend:
        answers = {answer.check: answer for answer in probe(backend.otlp)}
    assert answers["VictoriaMetrics"].result == "problem"
    assert "-opentelemetry.usePrometheusNaming" in answers["VictoriaMetrics"].detail


def test_a_wrong_path_names_the_right_one(victoria_metrics, prometheus):
    for url in (victoria_metrics.url, prometheus.url):
        (metrics, *_) = probe(url)
        assert metrics.result == "problem"
        assert "/opentelemetry" in metrics.detail


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_a_collector_cannot_be_looked_behind(behind_rotel, protocol):
    grpc, http, _ = behind_rotel
    answers = {answer.check: answer for answer in probe(grpc if protocol == "grpc" else http, protocol=protocol)}
    assert {answers[f"OTLP {signal}"].result for signal in ("metrics", "logs", "traces")} == {"ok"}
    assert answers["store"].result == "note"


@contextmanager
def with_otlp(backend, collect, *, keep_histograms=True):
    """Prometheus' own OTLP endpoint, which Debian's build leaves out, in front of a real one: what it takes it writes there natively.

    Without `--enable-feature=native-histograms` 2.53 answers 500; versions that say nothing are stood in for by writing nothing.
    """

    class Front(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_GET(self):
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{backend.url}{self.path}", timeout=10) as answer:
                self.answer(answer.status, answer.read())

        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            if self.path != "/api/v1/otlp/v1/metrics":
                self.answer(404, b"")
                return
            try:
                if keep_histograms:
                    collect.remote_write(backend.url, metric_points(body))
            except urllib.error.HTTPError as error:
                self.answer(error.code, error.read())
                return
            self.answer(200, b"")

        def answer(self, status, body):
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Front)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/api/v1/otlp"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_prometheus_as_it_should_be(prometheus, collect):
    with with_otlp(prometheus, collect) as url:
        answers = {answer.check: answer for answer in probe(url)}
    assert answers["OTLP metrics"].result == "ok"
    assert answers["Prometheus"].result == "ok", answers["Prometheus"].detail
    assert answers["OTLP traces"].result == "note"


@pytest.mark.parametrize("silent", [False, True], ids=["as it answers", "silently"])
def test_prometheus_without_native_histograms_is_told_the_flag(serve, collect, capsys, silent):
    with serve.prometheus(features="exemplar-storage") as backend, with_otlp(backend, collect, keep_histograms=not silent) as url:
        answers = {answer.check: answer for answer in probe(url, wait_s=1.0)}
        assert answers["OTLP metrics"].result == ("ok" if silent else "problem")
        assert answers["Prometheus"].result == "problem"
        assert "--enable-feature=native-histograms" in answers["Prometheus"].detail
        if not silent:
            assert cli.main(["doctor", "--endpoint", url]) == 1
            assert "--enable-feature=native-histograms" in capsys.readouterr().out


def test_prometheus_that_keeps_them_elsewhere_is_not_told_to_set_the_flag(prometheus, collect):
    with with_otlp(prometheus, collect, keep_histograms=False) as url:
        prometheus_answer = {answer.check: answer for answer in probe(url, wait_s=0.5)}["Prometheus"]
    # The probe's name is found again when another test of this session left it there.
    assert prometheus_answer.result in {"ok", "problem"}
    assert "--enable-feature" not in prometheus_answer.detail


def test_rotel_in_front_of_victoriametrics_passes_the_probe_on(victoria_metrics, serve):
    with serve.rotel(victoria_metrics.otlp) as (_, http_endpoint):
        answers = {answer.check: answer for answer in probe(http_endpoint)}
    assert answers["OTLP metrics"].result == "ok"
    assert answers["store"].result == "note", "a collector says nothing of what is behind it"
    assert "native-histograms" in answers["store"].detail
