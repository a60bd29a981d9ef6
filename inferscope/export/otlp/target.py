"""Where a signal goes: keyword > OTEL_EXPORTER_OTLP_{METRICS,LOGS,TRACES}_* > OTEL_EXPORTER_OTLP_* > nothing.

Without an endpoint there is no target and no connection, not even to localhost.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote, urlsplit

from inferscope import guard

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["GRPC", "HTTP", "TIMEOUT_S", "Target", "delta_preferred", "explicit_preferred", "parse_headers", "resolve"]

HTTP: Final = "http/protobuf"
GRPC: Final = "grpc"

TIMEOUT_S: Final = 2.0
"""The most that one export may take, whatever the environment says."""

_MILLISECONDS_FROM: Final = 1000.0


@dataclass(frozen=True, slots=True)
class Target:
    """One signal's receiver."""

    signal: str
    """`metrics`, `logs`, `traces` or `profiles`."""
    protocol: str
    endpoint: str
    """The full URL for HTTP, `host:port` (or a gRPC target) for gRPC."""
    # Headers carry credentials: they stay out of the repr and so out of logs.
    headers: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    compression: str = "gzip"
    timeout_s: float = TIMEOUT_S
    insecure: bool = False
    certificate: str | None = None
    client_key: str | None = None
    client_certificate: str | None = None


class _Environment:
    """`OTEL_EXPORTER_OTLP_<SIGNAL>_<KEY>`, else `OTEL_EXPORTER_OTLP_<KEY>`; empty counts as absent."""

    def __init__(self, environ: Mapping[str, str], signal: str) -> None:
        self._environ = environ
        self._prefix = f"OTEL_EXPORTER_OTLP_{signal.upper()}_"

    def own(self, key: str) -> str:
        return self._environ.get(self._prefix + key, "").strip()

    def any(self, key: str) -> str:
        return self.own(key) or self._environ.get(f"OTEL_EXPORTER_OTLP_{key}", "").strip()


def resolve(
    signal: str,
    *,
    endpoint: str | None = None,
    protocol: str | None = None,
    headers: Mapping[str, str] | str | None = None,
    timeout_s: float | None = None,
    environ: Mapping[str, str] | None = None,
) -> Target | None:
    """The receiver of a signal, or None when there is none.

    Args:
        signal: `metrics`, `logs`, `traces` or `profiles`.
        endpoint: A base URL, as in OTEL_EXPORTER_OTLP_ENDPOINT; a trailing `/v1/<signal>` is taken off.
        protocol: `http/protobuf` or `grpc`; without one, port 4317 means gRPC and anything else HTTP.
        headers: Added to those of the environment, and stronger.
        timeout_s: At most `TIMEOUT_S`.
        environ: Default `os.environ`.
    """
    environ = os.environ if environ is None else environ
    variables = _Environment(environ, signal)
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    if endpoint is None and environ.get(f"OTEL_{signal.upper()}_EXPORTER", "").strip().lower() == "none":
        return None
    base, verbatim = (endpoint.strip(), False) if endpoint else _from_environment(variables)
    if not base:
        return None
    chosen = _protocol(protocol, variables, base)
    scheme = urlsplit(base).scheme if "://" in base else ""
    url = _grpc_target(base) if chosen == GRPC else _http_url(base if scheme else f"http://{base}", signal, verbatim=verbatim)
    return Target(
        signal=signal,
        protocol=chosen,
        endpoint=url,
        headers={**parse_headers(variables.any("HEADERS")), **_given_headers(headers)},
        compression=_compression(variables.any("COMPRESSION")),
        timeout_s=_timeout(timeout_s, variables.any("TIMEOUT")),
        insecure=_insecure(scheme, variables.any("INSECURE")),
        certificate=variables.any("CERTIFICATE") or None,
        client_key=variables.any("CLIENT_KEY") or None,
        client_certificate=variables.any("CLIENT_CERTIFICATE") or None,
    )


def delta_preferred(environ: Mapping[str, str] | None = None) -> bool:
    """Whether OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE asks for delta; `lowmemory` does for counters and histograms alike."""
    environ = os.environ if environ is None else environ
    return environ.get("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "").strip().lower() in {"delta", "lowmemory"}


def explicit_preferred(environ: Mapping[str, str] | None = None) -> bool:
    """Whether OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION asks for explicit buckets, for a backend without exponential ones.

    The standard's own default is explicit too; ours is exponential, and only what was written decides.
    """
    environ = os.environ if environ is None else environ
    asked = environ.get("OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION", "")
    return asked.strip().lower() == "explicit_bucket_histogram"


def parse_headers(text: str) -> dict[str, str]:
    """`key=value,key2=value2` with percent-encoded values, as OTEL_EXPORTER_OTLP_HEADERS has it; what does not parse is left out."""
    found: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        key, value = unquote(key.strip()).lower(), unquote(value.strip())
        # A line break inside would let a header's value add headers.
        if equals and key and not any(character in key + value for character in "\r\n\0"):
            found[key] = value
        elif part.strip():
            guard.log_once("otlp-headers", "one of the OTLP headers is not of the form key=value; it is left out")
    return found


def _given_headers(headers: Mapping[str, str] | str | None) -> dict[str, str]:
    if isinstance(headers, str):
        return parse_headers(headers)
    return {key.lower(): value for key, value in (headers or {}).items()}


def _from_environment(variables: _Environment) -> tuple[str, bool]:
    own = variables.own("ENDPOINT")
    return (own, True) if own else (variables.any("ENDPOINT"), False)


def _protocol(keyword: str | None, variables: _Environment, base: str) -> str:
    asked = keyword or variables.any("PROTOCOL")
    if asked in {HTTP, GRPC}:
        return asked
    if asked:
        guard.log_once("otlp-protocol", f"OTLP protocol {asked!r} is not spoken here; {HTTP} is used")
        return HTTP
    try:
        port = urlsplit(base if "://" in base else f"//{base}").port
    except ValueError:
        port = None
    return GRPC if port == 4317 else HTTP


def _http_url(base: str, signal: str, *, verbatim: bool) -> str:
    if verbatim:
        return base if urlsplit(base).path else f"{base}/"
    path = "/v1development/profiles" if signal == "profiles" else f"/v1/{signal}"
    return f"{base.rstrip('/').removesuffix(path)}{path}"


def _grpc_target(base: str) -> str:
    parts = urlsplit(base)
    return parts.netloc if parts.scheme in {"http", "https"} and parts.netloc else base


def _insecure(scheme: str, variable: str) -> bool:
    if scheme in {"http", "https"}:
        return scheme == "http"
    return variable.lower() == "true"


def _compression(text: str) -> str:
    lowered = text.lower()
    if lowered in {"", "gzip"}:
        return "gzip"
    if lowered != "none":
        guard.log_once("otlp-compression", f"OTLP compression {text!r} is not supported; the payload goes uncompressed")
    return "none"


def _timeout(keyword: float | None, variable: str) -> float:
    if keyword is not None:
        return min(keyword, TIMEOUT_S)
    try:
        value = float(variable) if variable else TIMEOUT_S
    except ValueError:
        guard.log_once("otlp-timeout", f"OTLP timeout {variable!r} is not a number; {TIMEOUT_S:g} s is used")
        return TIMEOUT_S
    if value >= _MILLISECONDS_FROM:
        # The specification says milliseconds, OpenTelemetry's Python reads seconds: taken literally, 10000 waits for hours.
        guard.log_once("otlp-timeout", f"OTLP timeout {variable} is taken as milliseconds; an export waits for at most {TIMEOUT_S:g} s")
        value /= 1000
    return min(value, TIMEOUT_S) if value > 0 else TIMEOUT_S
