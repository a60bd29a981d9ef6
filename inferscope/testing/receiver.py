"""An OTLP/HTTP receiver in this process, for tests of what a service exports.

    with OtlpReceiver() as receiver:
        inferscope.configure(service="scoring", endpoint=receiver.url)
        ...
        point = receiver.last("inferscope.request.duration")
        assert percentile(point.buckets, 0.99) < 0.020

It listens on 127.0.0.1 at a free port and can be told to misbehave: to refuse connections, to answer 503, to take a request and never
answer, to let its answer drip, and to answer late.
"""

from __future__ import annotations

import contextlib
import gzip
import socket
import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Final, cast

from inferscope.export.otlp.buckets import merge
from inferscope.export.otlp.buckets import quantile as buckets_quantile

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from typing_extensions import Self

    from inferscope.export.otlp.buckets import Buckets
    from inferscope.export.otlp.decode import ReceivedLog, ReceivedPoint
    from inferscope.export.otlp.traces import TraceSpan

__all__ = ["OtlpReceiver", "ReceivedRequest", "merge", "percentile"]

MODES: Final = ("ok", "refuse", "unavailable", "black_hole", "drip", "slow", "reject", "partial")


@dataclass(frozen=True, slots=True)
class ReceivedRequest:
    """One POST as it arrived, with the body after decompression."""

    path: str
    headers: Mapping[str, str]
    body: bytes
    wire_bytes: int
    """Size of the body as it was sent."""


class OtlpReceiver:
    """The receiver; use it as a context manager.

    Attributes:
        mode: `ok` · `refuse` (nobody listens) · `unavailable` (503, with `retry_after` if set) · `black_hole` (accepted, never answered) ·
            `drip` (the answer comes one byte at a time) · `slow` (answers after `delay_s`) · `reject` (400) · `partial` (200, one refused).
        retry_after: Value of the Retry-After header in mode `unavailable`.
        delay_s: Delay of mode `slow`, and the pause between bytes of mode `drip`.
        attempts: Connections' requests seen in any mode, also those that were not taken.
    """

    def __init__(self, mode: str = "ok", *, retry_after: str | None = None, delay_s: float = 0.2) -> None:
        self.retry_after = retry_after
        self.delay_s = delay_s
        self.attempts = 0
        self._requests: list[ReceivedRequest] = []
        self._arrived = threading.Condition()
        self._released = threading.Event()
        self._mode = mode
        self._server: _Server | None = None
        # Bound but not listening: refuses, and keeps the port for later.
        self._port = self._bind()

    @staticmethod
    def _bind() -> int:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return int(probe.getsockname()[1])

    @property
    def url(self) -> str:
        """Base URL, as for OTEL_EXPORTER_OTLP_ENDPOINT."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def mode(self) -> str:
        """How the receiver behaves at present."""
        return self._mode

    @mode.setter
    def mode(self, mode: str) -> None:
        if mode not in MODES:
            raise ValueError(f"mode={mode!r}: expected one of {', '.join(MODES)}")
        self._mode = mode
        if mode == "refuse":
            self._stop()
        elif self._server is None:
            self._start()

    def __enter__(self) -> Self:
        """Start listening."""
        self.mode = self._mode
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop listening and let go of every request that is held."""
        self._released.set()
        self._stop()

    def _start(self) -> None:
        self._server = _Server(self, self._port)
        threading.Thread(target=self._server.serve_forever, args=(0.02,), name="otlp-receiver", daemon=True).start()

    def _stop(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()
            server.hang_up()

    def requests(self, path: str | None = None) -> list[ReceivedRequest]:
        """Requests that were taken, oldest first."""
        with self._arrived:
            return [request for request in self._requests if path is None or request.path == path]

    def metrics(self, name: str | None = None) -> list[ReceivedPoint]:
        """Data points of all requests, oldest first."""
        from inferscope.export.otlp.decode import metric_points

        points = [point for request in self.requests("/v1/metrics") for point in metric_points(request.body)]
        return [point for point in points if name is None or point.name == name]

    def logs(self, name: str | None = None) -> list[ReceivedLog]:
        """Log records of all requests, oldest first."""
        from inferscope.export.otlp.decode import log_records

        records = [record for request in self.requests("/v1/logs") for record in log_records(request.body)]
        return [record for record in records if name is None or record.name == name]

    def spans(self, name: str | None = None) -> list[TraceSpan]:
        """Spans of all requests, oldest first."""
        from inferscope.export.otlp.decode import trace_spans

        spans = [span for request in self.requests("/v1/traces") for span in trace_spans(request.body)]
        return [span for span in spans if name is None or span.name == name]

    def profiles(self) -> list[Any]:
        """Requests of the development signal for profiles, parsed, oldest first; needs opentelemetry-proto 1.45."""
        from inferscope.export.otlp.profiles import parsed

        return [parsed(request.body) for request in self.requests("/v1development/profiles")]

    def last(self, name: str, **attributes: Any) -> ReceivedPoint:
        """The newest point of a metric; keywords are attributes with `__` for dots.

        Raises:
            LookupError: None arrived.
        """
        wanted = {key.replace("__", "."): value for key, value in attributes.items()}
        for point in reversed(self.metrics(name)):
            if all(point.attributes.get(key) == value for key, value in wanted.items()):
                return point
        raise LookupError(f"no {name} with {wanted} among {sorted({point.name for point in self.metrics()})}")

    def wait(self, until: Callable[[OtlpReceiver], bool], timeout_s: float = 5.0) -> bool:
        """Wait for requests until the condition holds; False when it does not in time."""
        deadline = time.monotonic() + timeout_s
        while not until(self):
            with self._arrived:
                if not self._arrived.wait(min(deadline - time.monotonic(), 0.1)) and time.monotonic() >= deadline:
                    return until(self)
        return True

    def clear(self) -> None:
        """Forget what arrived."""
        with self._arrived:
            self._requests.clear()

    def take(self, request: ReceivedRequest) -> None:
        """Keep a request."""
        with self._arrived:
            self._requests.append(request)
            self._arrived.notify_all()

    def hold(self, seconds: float | None = None) -> None:
        """Wait as long, or until the receiver stops."""
        self._released.wait(seconds)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128  # with the default of 5 a connection of a pod's tenth worker waits a second for its repeated handshake

    def __init__(self, receiver: OtlpReceiver, port: int) -> None:
        self.receiver = receiver
        self._open: set[socket.socket] = set()
        super().__init__(("127.0.0.1", port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def hang_up(self) -> None:
        """Cut connections that clients keep alive, else they would outlive the listening socket."""
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hung up is not worth a traceback."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  (the base class names it)
        """Say nothing."""

    def do_POST(self) -> None:
        receiver = cast(_Server, self.server).receiver
        raw = self.rfile.read(int(self.headers.get("content-length", "0")))
        receiver.attempts += 1
        mode = receiver.mode
        if mode == "black_hole":
            receiver.hold()
            self.close_connection = True
            return
        if mode == "unavailable":
            self._answer(503, b"", {"Retry-After": receiver.retry_after} if receiver.retry_after else {})
            return
        if mode == "reject":
            self._answer(400, b"")
            return
        if mode == "drip":
            self._drip(receiver)
            return
        if mode == "slow":
            receiver.hold(receiver.delay_s)
        body = gzip.decompress(raw) if self.headers.get("content-encoding") == "gzip" else raw
        receiver.take(ReceivedRequest(self.path, {key.lower(): value for key, value in self.headers.items()}, body, len(raw)))
        # partial_success { rejected_data_points: 1, error_message: "no" }, the same fields for every signal
        self._answer(200, b"\x0a\x06\x08\x01\x12\x02no" if mode == "partial" else b"")

    def _drip(self, receiver: OtlpReceiver) -> None:
        for byte in b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nX-Filler: " + b"x" * 4096 + b"\r\n\r\n":
            if receiver.mode != "drip":
                break
            self.wfile.write(bytes([byte]))
            receiver.hold(receiver.delay_s)
        self.close_connection = True

    def _answer(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def percentile(buckets: Buckets | None, quantile: float) -> float:
    """Quantile of an exponential histogram in seconds, as Prometheus computes it: exponential interpolation inside the bucket that holds
    the rank, between the smallest and the largest value.

    Raises:
        ValueError: The point is no exponential histogram or is empty.
    """
    found = buckets_quantile(buckets, quantile) if buckets is not None and buckets.scale is not None else None
    if found is None:
        raise ValueError("an exponential histogram with counts is needed")
    return found
