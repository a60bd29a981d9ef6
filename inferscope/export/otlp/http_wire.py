"""OTLP over HTTP with protobuf, on a urllib3 pool of our own.

Not on a `requests` session as in OpenTelemetry's exporter: that spends 0.5 to 1 ms of Python a post, in one piece, which requests of the
service would wait for; urllib3 underneath takes a third. Proxies, certificates and CA bundles come from the same variables.
"""

from __future__ import annotations

import functools
import gzip
import http.client
import io
import os
import time
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies_environment, proxy_bypass

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection

from inferscope.export.otlp import protobuf
from inferscope.export.otlp.wire import Reply, retry_after_s

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


def _pool_classes(deadline: _Deadline) -> dict[str, Any]:
    """urllib3's pools with answers that end at a deadline."""
    answer: Any = functools.partial(_Response, deadline)
    plain = type("Plain", (HTTPConnection,), {"response_class": answer})
    secure = type("Secure", (HTTPSConnection,), {"response_class": answer})
    return {
        "http": type("PlainPool", (urllib3.HTTPConnectionPool,), {"ConnectionCls": plain}),
        "https": type("SecurePool", (urllib3.HTTPSConnectionPool,), {"ConnectionCls": secure}),
    }


def _authorities(target: Target) -> str | None:
    """CA bundle: the target's, else what `requests` would take; None is the system's own."""
    found = target.certificate or os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE")
    if found:
        return found
    try:
        import certifi
    except ImportError:
        return None
    return certifi.where()


def _manager(target: Target) -> urllib3.PoolManager:
    options: dict[str, Any] = {"num_pools": 2, "maxsize": 1}
    parts = urlsplit(target.endpoint)
    if parts.scheme == "https":
        options |= {"cert_reqs": "CERT_REQUIRED", "ca_certs": _authorities(target)}
        options |= {"cert_file": target.client_certificate, "key_file": target.client_key}
    proxies = getproxies_environment()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if not proxy or proxy_bypass(parts.hostname or ""):
        return urllib3.PoolManager(**options)
    about = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    if about.username:
        basic = f"{unquote(about.username)}:{unquote(about.password or '')}"
        options["proxy_headers"] = urllib3.make_headers(proxy_basic_auth=basic)
    host = about.netloc.rpartition("@")[2]
    return urllib3.ProxyManager(f"{about.scheme}://{host}", **options)


class HttpWire:
    """A keep-alive connection to one URL; honours proxies, client certificates and headers of the target."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._deadline = _Deadline()
        self._headers = {"content-type": "application/x-protobuf", "user-agent": "inferscope-otlp", **target.headers}
        if target.compression == "gzip":
            self._headers["content-encoding"] = "gzip"
        self._pools = _manager(target)
        self._pools.pool_classes_by_scheme = _pool_classes(self._deadline)

    def post(self, payload: bytes, timeout_s: float) -> Reply:
        """Try once."""
        self._deadline.at = time.monotonic() + timeout_s
        if self._target.compression == "gzip":
            payload = gzip.compress(payload, 6, mtime=0)
        response = self._pools.urlopen(
            "POST",
            self._target.endpoint,
            body=payload,
            headers=self._headers,
            # Each address of a name (::1 and 127.0.0.1, say) gets the connect timeout, hence half of the time.
            timeout=urllib3.Timeout(connect=timeout_s / 2, read=timeout_s),
            retries=False,
            redirect=False,
            preload_content=False,
        )
        try:
            body = response.read(_ANSWER_LIMIT, decode_content=True)  # an answer that was read keeps its connection
        finally:
            response.release_conn()
        status = response.status
        if 200 <= status < 300:
            refused, reason = protobuf.rejected(self._target.signal, body) if body else (0, "")
            return Reply(ok=True, refused=refused, reason=reason)
        wait = retry_after_s(response.headers.get("retry-after"), time.time())
        return Reply(ok=False, retryable=status in _RETRYABLE, reason=f"HTTP {status}", retry_after_s=wait)

    def close(self) -> None:
        """Drop the connection."""
        self._pools.clear()
