"""TLS with our own authority, client certificates, and proxies."""

from __future__ import annotations

import http.server
import shutil
import ssl
import subprocess
import threading

import pytest

from inferscope.export.otlp.target import resolve
from inferscope.export.otlp.transport import Outcome, Sender

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make certificates")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    where = tmp_path_factory.mktemp("tls")

    def openssl(*args):
        subprocess.run(["openssl", *args], cwd=where, check=True, capture_output=True)

    openssl(
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-keyout",
        "ca.key",
        "-out",
        "ca.pem",
        "-days",
        "2",
        "-subj",
        "/CN=test authority",
    )
    (where / "names").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    for name in ("server", "client"):
        openssl(
            "req",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-keyout",
            f"{name}.key",
            "-out",
            f"{name}.csr",
            "-subj",
            f"/CN={name}",
        )
        openssl(
            "x509",
            "-req",
            "-in",
            f"{name}.csr",
            "-CA",
            "ca.pem",
            "-CAkey",
            "ca.key",
            "-CAcreateserial",
            "-out",
            f"{name}.pem",
            "-days",
            "2",
            "-extfile",
            "names",
        )
    return where


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.server.seen.append((self.path, dict(self.headers)))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args):
        pass


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *args):
        pass


@pytest.fixture
def serve():
    servers = []

    def start(context=None):
        server = Server(("127.0.0.1", 0), Handler)
        server.seen = []
        if context is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def server_context(certificates, *, client=False):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "server.pem", certificates / "server.key")
    if client:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(certificates / "ca.pem")
    return context


def send(url, environ, **keywords):
    mine = Sender(resolve("metrics", endpoint=url, environ=environ, **keywords))
    try:
        return mine.send(b"", 1.0)
    finally:
        mine.close()


def test_our_authority_is_trusted_and_no_other(serve, certificates):
    server = serve(server_context(certificates))
    url = f"https://127.0.0.1:{server.server_port}"
    assert send(url, {"OTEL_EXPORTER_OTLP_CERTIFICATE": str(certificates / "ca.pem")}) is Outcome.SENT
    assert send(url, {}) is Outcome.FAILED
    assert len(server.seen) == 1


def test_a_client_certificate_is_shown(serve, certificates):
    server = serve(server_context(certificates, client=True))
    url = f"https://127.0.0.1:{server.server_port}"
    environ = {"OTEL_EXPORTER_OTLP_CERTIFICATE": str(certificates / "ca.pem")}
    assert send(url, environ) is Outcome.FAILED
    environ |= {
        "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE": str(certificates / "client.pem"),
        "OTEL_EXPORTER_OTLP_METRICS_CLIENT_KEY": str(certificates / "client.key"),
    }
    assert send(url, environ) is Outcome.SENT


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_grpc_over_tls_with_a_client_certificate(certificates):
    grpc = pytest.importorskip("grpc")
    from concurrent.futures import ThreadPoolExecutor

    class Any(grpc.GenericRpcHandler):
        def service(self, details):
            return grpc.unary_unary_rpc_method_handler(lambda request, context: b"")

    read = lambda name: (certificates / name).read_bytes()
    server = grpc.server(ThreadPoolExecutor(1), handlers=[Any()])
    port = server.add_secure_port(
        "127.0.0.1:0", grpc.ssl_server_credentials([(read("server.key"), read("server.pem"))], read("ca.pem"), require_client_auth=True)
    )
    server.start()
    try:
        environ = {
            "OTEL_EXPORTER_OTLP_CERTIFICATE": str(certificates / "ca.pem"),
            "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE": str(certificates / "client.pem"),
            "OTEL_EXPORTER_OTLP_CLIENT_KEY": str(certificates / "client.key"),
        }
        assert send(f"https://localhost:{port}", environ, protocol="grpc") is Outcome.SENT
        assert send(f"https://localhost:{port}", {**environ, "OTEL_EXPORTER_OTLP_CERTIFICATE": ""}, protocol="grpc") is Outcome.FAILED
    finally:
        server.stop(0).wait()


def test_a_proxy_is_used_with_its_credentials(serve, monkeypatch):
    proxy = serve()
    monkeypatch.setenv("http_proxy", f"http://user:p%40ss@127.0.0.1:{proxy.server_port}")
    monkeypatch.delenv("no_proxy", raising=False)
    assert send("http://collector.invalid:4318", {}) is Outcome.SENT
    path, headers = proxy.seen[0]
    assert path == "http://collector.invalid:4318/v1/metrics"
    assert headers["proxy-authorization"] == "Basic dXNlcjpwQHNz"


def test_a_proxy_is_left_out_where_it_should_be(serve, monkeypatch):
    proxy, server = serve(), serve()
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.server_port}")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert send(f"http://127.0.0.1:{server.server_port}", {}) is Outcome.SENT
    assert proxy.seen == []
