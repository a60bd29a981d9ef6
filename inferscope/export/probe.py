"""Asks an OTLP endpoint what it takes, by sending a little of everything, and names the setting that is missing where it can be seen.

A receiver that accepts a request says nothing of the store behind it: some drop exponential histograms silently. Prometheus and VictoriaMetrics
are recognised and asked back; a collector cannot be, and the answer says so.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import quote, urlsplit

import numpy as np
import urllib3

from inferscope import semconv
from inferscope.export.otlp.buckets import Buckets
from inferscope.export.otlp.logs import Event
from inferscope.export.otlp.metrics import encode
from inferscope.export.otlp.series import Series
from inferscope.export.otlp.target import GRPC, resolve
from inferscope.export.otlp.traces import TraceSpan
from inferscope.export.otlp.transport import Outcome, Sender

if TYPE_CHECKING:
    from inferscope.export.otlp.target import Target

__all__ = ["PROBE", "Answer", "probe"]

PROBE: Final = "inferscope.doctor.probe"
"""Name of the metric, the event and the span that are sent."""
_RESOURCE: Final = {semconv.SERVICE_NAME: "inferscope-doctor", semconv.SERVICE_INSTANCE_ID: "doctor"}
_WAIT_S: Final = 10.0
_SEND_S: Final = 1.0
_ADDRESS: Final = (
    "nothing takes {signal} at {endpoint}; Prometheus: the base URL ends in /api/v1/otlp and --web.enable-otlp-receiver is set; "
    "VictoriaMetrics: it ends in /opentelemetry and takes metrics alone"
)
_HINTS: Final = {
    "HTTP 400": _ADDRESS,
    "HTTP 404": _ADDRESS,
    "HTTP 401": "credentials are missing or wrong: OTEL_EXPORTER_OTLP_HEADERS=authorization=…",
    "HTTP 403": "the credentials do not allow it: OTEL_EXPORTER_OTLP_HEADERS=authorization=…",
    "HTTP 413": "the receiver's limit on the size of a request is too small even for a probe",
    "HTTP 415": "it speaks another encoding; http/protobuf is what is sent",
    "gRPC UNIMPLEMENTED": "nothing takes {signal} there",
    "gRPC UNAVAILABLE": "nobody answers gRPC at {endpoint}; 4318 is the usual port of HTTP, 4317 that of gRPC",
    "ProtocolError": "no HTTP is spoken at {endpoint}: 4317 is the usual port of gRPC, and TLS wants https://",
    "SSLError": "TLS fails: OTEL_EXPORTER_OTLP_CERTIFICATE names the authority's certificate",
}


class Answer(NamedTuple):
    """One line of the result."""

    check: str
    result: str
    """`ok`, `note` or `problem`."""
    detail: str


def probe(endpoint: str, *, protocol: str | None = None, wait_s: float = _WAIT_S) -> list[Answer]:
    """Send a probe and look for it.

    Args:
        endpoint: Base URL as for OTEL_EXPORTER_OTLP_ENDPOINT; headers and certificates come from the environment.
        protocol: `http/protobuf` or `grpc`; default by the port.
        wait_s: How long a store that can be asked is given.
    """
    now = time.time_ns()
    payloads = _payloads(now)
    found: list[Answer] = []
    taken = False
    for signal, payload in payloads.items():
        target = resolve(signal, endpoint=endpoint, protocol=protocol)
        if target is None:
            return [Answer("endpoint", "problem", "OTEL_SDK_DISABLED=true: nothing is sent")]
        answer = _send(target, signal, payload)
        taken = taken or (signal == "metrics" and answer.result == "ok")
        found.append(answer)
        if answer.result == "problem" and not answer.detail.startswith(("HTTP", "gRPC UNIMPLEMENTED", target.endpoint)):
            break  # nobody there: the other signals would only wait
    if taken:
        found += _look(endpoint, wait_s)
    elif found[0].detail.startswith("HTTP 5"):
        # Prometheus without native histograms may answer 500 and not say why; its flags do.
        found += [answer for answer in _look(endpoint, 0.0) if answer.check != "store"]
    return found


def _payloads(now: int) -> dict[str, bytes]:
    from inferscope.export.otlp import protobuf

    buckets = Buckets(100, 1.0, -214, np.full(4, 25, dtype=np.int64), scale=5)
    point = Series(PROBE, ((semconv.ATTR_REQUEST, "probe"),), now - 1_000_000_000, now, buckets)
    span = TraceSpan(f"{now:032x}", f"{now & (1 << 63) - 1:016x}", None, PROBE, now - 1_000_000, now, (("inferscope.keep", True),))
    return {
        "metrics": encode([point], _RESOURCE),
        "logs": protobuf.logs_request([Event(PROBE, now, "a probe of inferscope doctor")], _RESOURCE),
        "traces": protobuf.traces_request([protobuf.span(span)], _RESOURCE),
    }


def _send(target: Target, signal: str, payload: bytes) -> Answer:
    name = f"OTLP {signal}"
    try:
        sender = Sender(target)
    except ImportError as error:
        return Answer(name, "problem", f"{target.protocol} needs {error.name}, which is not installed: pip install 'inferscope-sdk[grpc]'")
    try:
        outcome = sender.send(payload, _SEND_S, force=True)
    finally:
        sender.close()
    if outcome is Outcome.SENT:
        said = f"{target.endpoint} takes them over {target.protocol}"
        return Answer(
            name, "problem" if sender.refused else "ok", f"{said}, but refused {sender.refused} of them" if sender.refused else said
        )
    hint = _HINTS.get(sender.last_error, "is it running, and is this its address?")
    detail = f"{sender.last_error}: {hint.format(signal=signal, endpoint=target.endpoint)}"
    return Answer(name, "problem" if signal == "metrics" else "note", detail)


def _get(url: str) -> bytes | None:
    try:
        with urllib3.PoolManager() as pool:
            answer = pool.request("GET", url, timeout=2.0, retries=False)
            return bytes(answer.data) if answer.status == 200 else None
    except (urllib3.exceptions.HTTPError, OSError):
        return None


def _json(url: str) -> Any:
    try:
        return json.loads(_get(url) or b"null")
    except ValueError:
        return None


def _look(endpoint: str, wait_s: float) -> list[Answer]:
    """Whether the store kept the histogram, where it can be asked."""
    target = resolve("metrics", endpoint=endpoint)
    parts = urlsplit(endpoint)
    about = b"" if target is None or target.protocol == GRPC else _get(f"{parts.scheme}://{parts.netloc}/metrics") or b""
    base = f"{parts.scheme}://{parts.netloc}"
    if b"vm_app_version" in about:
        return _victoriametrics(base, wait_s)
    if b"prometheus_build_info" in about:
        return _prometheus(base, wait_s)
    return [
        Answer(
            "store",
            "note",
            "a collector or another receiver: whether the store behind it keeps exponential histograms cannot be seen from here. Prometheus needs "
            "--enable-feature=native-histograms, VictoriaMetrics -opentelemetry.usePrometheusNaming; try their own addresses",
        )
    ]


def _query(base: str, text: str) -> list[Any]:
    found: Any = _json(f"{base}/api/v1/query?query={quote(text)}")
    return found["data"]["result"] if isinstance(found, dict) and "data" in found else []  # pyright: ignore[reportUnknownVariableType]


def _victoriametrics(base: str, wait_s: float) -> list[Answer]:
    until = time.monotonic() + wait_s
    while True:
        _get(f"{base}/internal/force_flush")
        if _query(base, 'inferscope_doctor_probe_seconds_bucket{vmrange!=""}'):
            return [
                Answer("VictoriaMetrics", "ok", "keeps exponential histograms, under the names that the shipped rules and dashboard use")
            ]
        if _query(base, '{__name__=~"inferscope.doctor.probe_bucket"}'):
            return [
                Answer(
                    "VictoriaMetrics",
                    "problem",
                    "keeps them under names with dots, which rules, dashboard and 'inferscope report --from' do not find: start it with "
                    "-opentelemetry.usePrometheusNaming (and -relabelConfig=integrations/prometheus/relabel.yaml)",
                )
            ]
        if time.monotonic() > until:
            return [
                Answer(
                    "VictoriaMetrics", "problem", f"took the histogram and does not find it after {wait_s:g} s: 1.112 and later keep them"
                )
            ]
        time.sleep(0.2)


def _prometheus(base: str, wait_s: float) -> list[Answer]:
    until = time.monotonic() + wait_s
    while time.monotonic() <= until:
        if _query(base, "inferscope_doctor_probe_seconds"):
            return [Answer("Prometheus", "ok", "keeps exponential histograms as native ones")]
        time.sleep(0.2)
    flags: Any = _json(f"{base}/api/v1/status/flags")
    if "native-histograms" not in json.dumps(flags):
        return [
            Answer(
                "Prometheus",
                "problem",
                "does not keep exponential histograms, some versions silently: start it with --enable-feature=native-histograms",
            )
        ]
    return [Answer("Prometheus", "problem", f"took the histogram and does not find it after {wait_s:g} s")]
