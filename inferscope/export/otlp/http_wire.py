"""OTLP over HTTP with protobuf, on a `requests` session as OpenTelemetry's own exporter uses it."""

from __future__ import annotations

import functools
import gzip
import http.client
import io
import time
from typing import TYPE_CHECKING, Any, Final

import requests
from requests.adapters import HTTPAdapter
from urllib3 import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.connection import HTTPConnection, HTTPSConnection

from inferscope.export.otlp import protobuf
from inferscope.export.otlp.transport import Reply, retry_after_s

if TYPE_CHECKING:
    import socket

    from inferscope.export.otlp.target import Target

__all__ = ["HttpWire"]

_RETRYABLE: Final = frozenset({429, 502, 503, 504})
_ANSWER_LIMIT: Final = 65536


class _Deadline:
    """The instant on `time.monotonic` by which the answer must be read."""

    at = 0.0


class _Reader(io.RawIOBase):
    """A socket's bytes until the deadline: a socket's own timeout starts anew with each byte, so that a dripping receiver never ends it."""

    def __init__(self, sock: socket.socket, deadline: _Deadline, opened: io.BufferedIOBase) -> None:
        self._sock = sock
        self._deadline = deadline
        self._opened = opened

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        left = self._deadline.at - time.monotonic()
        if left <= 0:
            raise TimeoutError("the answer took too long")
        self._sock.settimeout(left)
        return self._sock.recv_into(buffer)

    def close(self) -> None:
        self._opened.close()  # gives back the reference that the response holds on the socket
        super().close()


class _Response(http.client.HTTPResponse):
    def __init__(self, deadline: _Deadline, sock: socket.socket, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self.fp = io.BufferedReader(_Reader(sock, deadline, self.fp))


class _Adapter(HTTPAdapter):
    """An adapter whose answers end at a deadline."""

    def __init__(self, deadline: _Deadline) -> None:
        self._deadline = deadline
        super().__init__(max_retries=0, pool_connections=1, pool_maxsize=1)

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, **kwargs)
        answer = functools.partial(_Response, self._deadline)

        class Plain(HTTPConnection):
            response_class = answer  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]

        class Secure(HTTPSConnection):
            response_class = answer  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]

        class PlainPool(HTTPConnectionPool):
            ConnectionCls = Plain  # pyright: ignore[reportAssignmentType]

        class SecurePool(HTTPSConnectionPool):
            ConnectionCls = Secure  # pyright: ignore[reportAssignmentType]

        self.poolmanager.pool_classes_by_scheme = {"http": PlainPool, "https": SecurePool}


class HttpWire:
    """A keep-alive connection to one URL; honours proxies, client certificates and headers of the target."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._deadline = _Deadline()
        session = requests.Session()
        session.mount("http://", _Adapter(self._deadline))
        session.mount("https://", _Adapter(self._deadline))
        session.verify = target.certificate or True
        if target.client_certificate:
            session.cert = (target.client_certificate, target.client_key) if target.client_key else target.client_certificate
        session.auth = _unchanged  # else requests replaces an Authorization header by what ~/.netrc has for the host
        session.headers.update({"content-type": "application/x-protobuf", "user-agent": "inferscope-otlp", **target.headers})
        if target.compression == "gzip":
            session.headers["content-encoding"] = "gzip"
        self._session = session

    def post(self, payload: bytes, timeout_s: float) -> Reply:
        """Try once."""
        self._deadline.at = time.monotonic() + timeout_s
        if self._target.compression == "gzip":
            payload = gzip.compress(payload, 6, mtime=0)
        # Each address of a name (::1 and 127.0.0.1, say) gets the connect timeout, hence half of the time.
        with self._session.post(
            self._target.endpoint, data=payload, timeout=(timeout_s / 2, timeout_s), allow_redirects=False, stream=True
        ) as response:
            status = response.status_code
            if 200 <= status < 300:
                body = response.raw.read(_ANSWER_LIMIT, decode_content=True)
                refused, reason = protobuf.rejected(self._target.signal, body)
                return Reply(ok=True, refused=refused, reason=reason)
            wait = retry_after_s(response.headers.get("retry-after"), time.time())
            response.raw.read(_ANSWER_LIMIT)  # an answer that was read keeps its connection
            return Reply(ok=False, retryable=status in _RETRYABLE, reason=f"HTTP {status}", retry_after_s=wait)

    def close(self) -> None:
        """Drop the connection."""
        self._session.close()


def _unchanged(request: requests.PreparedRequest) -> requests.PreparedRequest:
    return request
