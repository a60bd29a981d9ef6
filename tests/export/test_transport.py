"""Bounds, retries, the breaker and what is said about them."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from inferscope.export.otlp.target import Target, resolve
from inferscope.export.otlp.transport import Breaker, Outcome, Sender, suppressed
from inferscope.export.otlp.wire import Reply, retry_after_s
from inferscope.testing.receiver import OtlpReceiver


class FakeWire:
    def __init__(self, *replies):
        self.replies = list(replies)
        self.posts = 0
        self.closed = False

    def post(self, payload, timeout_s):
        self.posts += 1
        assert timeout_s > 0
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if isinstance(reply, Exception):
            raise reply
        return reply

    def close(self):
        self.closed = True


OK = Reply(ok=True)
BUSY = Reply(ok=False, retryable=True, reason="HTTP 503")
NO = Reply(ok=False, retryable=False, reason="HTTP 400")


def sender(*replies, clock=None, timeout_s=0.5):
    target = Target("metrics", "http/protobuf", "http://c/v1/metrics", timeout_s=timeout_s)
    return Sender(target, FakeWire(*replies), clock or time.monotonic)


def test_a_busy_receiver_is_tried_again_within_the_time(lines):
    mine = sender(BUSY, ConnectionError(), OK)
    assert mine.send(b"x") is Outcome.SENT
    assert mine._wire.posts == 3
    assert lines() == []


def test_retrying_ends_with_the_time():
    mine = sender(BUSY, timeout_s=0.6)
    begun = time.monotonic()
    assert mine.send(b"x") is Outcome.FAILED
    assert time.monotonic() - begun < 0.9
    assert 2 <= mine._wire.posts <= 4


def test_a_refusal_is_final():
    mine = sender(NO)
    assert mine.send(b"x") is Outcome.REJECTED
    assert mine._wire.posts == 1


def test_a_wait_longer_than_the_time_is_kept_for_the_next_export():
    now = [100.0]
    mine = sender(Reply(ok=False, retryable=True, reason="HTTP 429", retry_after_s=30), OK, clock=lambda: now[0])
    assert mine.send(b"x") is Outcome.FAILED
    assert mine.send(b"x") is Outcome.SKIPPED
    now[0] += 31
    assert mine.send(b"x") is Outcome.SENT


def test_the_breaker_opens_after_three_and_tries_once_a_minute(lines):
    now = [0.0]
    mine = sender(NO, clock=lambda: now[0])
    outcomes = []
    for _ in range(130):
        outcomes.append(mine.send(b"x"))
        now[0] += 1
    assert outcomes[:3] == [Outcome.REJECTED] * 3
    assert mine.breaker.open
    assert mine._wire.posts == 3 + 2
    mine._wire.replies = [OK]
    assert mine.send(b"x", force=True) is Outcome.SENT
    assert not mine.breaker.open
    assert len(lines()) == 2
    assert "do not reach" in lines()[0]
    assert "again" in lines()[1]


def test_a_long_retry_after_is_capped():
    now = [0.0]
    breaker = Breaker(lambda: now[0])
    breaker.failed(86400)
    now[0] = 61
    assert breaker.allows()


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None),
        ("", None),
        ("3", 3),
        ("-1", 0),
        ("0.5", 0.5),
        ("inf", None),
        ("nan", None),
        ("soon", None),
        ("Thu, 01 Jan 1970 00:01:40 GMT", 40),
    ],
)
def test_retry_after(value, seconds):
    assert retry_after_s(value, 60.0) == seconds


def test_interrupt_ends_the_wait():
    mine = sender(BUSY, timeout_s=2)
    begun = time.monotonic()
    timer = threading.Timer(0.05, mine.interrupt)
    timer.start()
    assert mine.send(b"x") is Outcome.FAILED
    assert time.monotonic() - begun < 1
    assert mine.send(b"x") is Outcome.SKIPPED
    timer.join()


def test_close_survives_a_wire_that_cannot():
    mine = sender(OK)
    mine._wire.close = lambda: 1 / 0
    mine.close()
    assert mine.send(b"x") is Outcome.SKIPPED


def test_exports_are_hidden_from_the_applications_own_instrumentation():
    context = pytest.importorskip("opentelemetry.context")
    with suppressed():
        assert context.get_value(context._SUPPRESS_INSTRUMENTATION_KEY) is True
        assert context.get_value(context._SUPPRESS_HTTP_INSTRUMENTATION_KEY) is True
    assert context.get_value(context._SUPPRESS_INSTRUMENTATION_KEY) is None


class TestHttp:
    def send(self, receiver, timeout_s=0.5, environ=None, payload=b""):
        mine = Sender(resolve("metrics", endpoint=receiver.url, timeout_s=timeout_s, environ=environ or {}))
        begun = time.monotonic()
        try:
            return mine.send(payload), time.monotonic() - begun, mine
        finally:
            mine.close()

    def test_headers_and_compression_arrive(self):
        with OtlpReceiver() as receiver:
            environ = {"OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20abc"}
            assert self.send(receiver, environ=environ, payload=b"\n\x00" * 500)[0] is Outcome.SENT
            (request,) = receiver.requests()
            assert request.headers["authorization"] == "Bearer abc"
            assert request.headers["content-type"] == "application/x-protobuf"
            assert (request.headers["content-encoding"], request.body) == ("gzip", b"\n\x00" * 500)
            assert request.wire_bytes < 200
            receiver.clear()
            self.send(receiver, environ={"OTEL_EXPORTER_OTLP_COMPRESSION": "none"}, payload=b"\n\x00")
            assert "content-encoding" not in receiver.requests()[0].headers

    def test_netrc_does_not_replace_credentials(self, tmp_path, monkeypatch):
        netrc = tmp_path / "netrc"
        netrc.write_text("machine 127.0.0.1 login other password other\n")
        netrc.chmod(0o600)
        monkeypatch.setenv("NETRC", str(netrc))
        with OtlpReceiver() as receiver:
            self.send(receiver, environ={"OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20abc"})
            assert receiver.requests()[0].headers["authorization"] == "Bearer abc"

    @pytest.mark.parametrize("mode", ["refuse", "unavailable", "black_hole", "drip"])
    def test_no_receiver_takes_longer_than_the_time(self, mode):
        with OtlpReceiver(mode, delay_s=0.05) as receiver:
            outcome, seconds, mine = self.send(receiver)
        assert outcome is Outcome.FAILED
        assert seconds < 0.8
        assert mine.last_error

    def test_a_connection_is_kept_and_renewed_when_the_receiver_restarts(self):
        with OtlpReceiver() as receiver:
            mine = Sender(resolve("metrics", endpoint=receiver.url, environ={}))
            assert [mine.send(b"") for _ in range(3)] == [Outcome.SENT] * 3
            receiver.mode = "refuse"
            receiver.mode = "ok"
            assert mine.send(b"") is Outcome.SENT
            mine.close()
            assert len(receiver.requests()) == 4

    def test_retry_after_is_read(self):
        with OtlpReceiver("unavailable", retry_after="40") as receiver:
            outcome, seconds, mine = self.send(receiver)
            assert (outcome, receiver.attempts) == (Outcome.FAILED, 1)
            assert seconds < 0.4
            assert not mine.breaker.allows()

    def test_partial_success_is_counted_and_said_once(self, lines):
        with OtlpReceiver("partial") as receiver:
            mine = Sender(resolve("metrics", endpoint=receiver.url, environ={}))
            assert [mine.send(b""), mine.send(b"")] == [Outcome.SENT] * 2
            mine.close()
        assert mine.refused == 2
        assert len(lines()) == 1

    def test_a_redirect_is_not_followed_with_our_credentials(self):
        assert self.redirected() is Outcome.REJECTED

    def redirected(self):
        from http.server import BaseHTTPRequestHandler, HTTPServer

        class Redirect(BaseHTTPRequestHandler):
            def do_POST(self):
                self.send_response(307)
                self.send_header("Location", "http://127.0.0.1:9/v1/metrics")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *args):
                pass

        server = HTTPServer(("127.0.0.1", 0), Redirect)
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        mine = Sender(resolve("metrics", endpoint=f"http://127.0.0.1:{server.server_port}", environ={}))
        try:
            return mine.send(b"")
        finally:
            mine.close()
            thread.join()
            server.server_close()


class TestGrpc:
    @pytest.fixture
    def server(self):
        grpc = pytest.importorskip("grpc")
        from concurrent.futures import ThreadPoolExecutor

        got = []

        class Any(grpc.GenericRpcHandler):
            status = None

            def service(self, details):
                def answer(request, context):
                    got.append((details.method, request, dict(context.invocation_metadata())))
                    if self.status:
                        context.abort(self.status, "no")
                    return b""

                return grpc.unary_unary_rpc_method_handler(answer)

        handler = Any()
        server = grpc.server(ThreadPoolExecutor(2), handlers=[handler])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield grpc, handler, got, f"http://127.0.0.1:{port}"
        server.stop(0).wait()

    def test_payload_headers_and_method(self, server):
        _, _, got, url = server
        for signal in ("metrics", "logs"):
            mine = Sender(resolve(signal, endpoint=url, protocol="grpc", headers={"X-Key": "abc"}, environ={}))
            assert mine.send(b"payload") is Outcome.SENT
            mine.close()
        assert [method.split("/")[1].split(".")[-1] for method, _, _ in got] == ["MetricsService", "LogsService"]
        assert {body for _, body, _ in got} == {b"payload"}
        assert got[0][2]["x-key"] == "abc"

    def test_status_decides_about_trying_again(self, server):
        grpc, handler, got, url = server
        handler.status = grpc.StatusCode.INVALID_ARGUMENT
        mine = Sender(resolve("metrics", endpoint=url, protocol="grpc", environ={}))
        assert (mine.send(b""), len(got)) == (Outcome.REJECTED, 1)
        handler.status = grpc.StatusCode.UNAVAILABLE
        assert mine.send(b"", 0.4) is Outcome.FAILED
        assert len(got) > 2
        handler.status = None
        assert mine.send(b"") is Outcome.SENT
        mine.close()

    def test_nobody_there_is_bounded(self):
        pytest.importorskip("grpc")
        with OtlpReceiver("refuse") as receiver:
            mine = Sender(resolve("metrics", endpoint=receiver.url, protocol="grpc", environ={}))
            begun = time.monotonic()
            assert mine.send(b"", 0.5) is Outcome.FAILED
            assert time.monotonic() - begun < 0.9
            mine.close()


def test_reading_the_room_loads_no_opentelemetry():
    code = "import sys, inferscope.export; sys.exit(any(n.split('.')[0] in {'opentelemetry', 'grpc', 'requests', 'torch'} for n in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
