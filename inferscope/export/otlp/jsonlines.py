"""OTLP/JSON as the collector's `file` exporter writes it: one request a line, 64-bit integers as strings, ids in hex.

Written by hand from the same series as the protobuf, in slices: it needs no package, and a JSON library would hold the interpreter for
milliseconds on a whole request.
"""

from __future__ import annotations

import json
import math
from json.encoder import encode_basestring_ascii as _quoted
from typing import TYPE_CHECKING, Any

from inferscope import semconv
from inferscope.export.otlp.series import CUMULATIVE, Slices

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from inferscope.export.otlp.logs import Event
    from inferscope.export.otlp.series import Attributes, Exemplar, Scalar, Series
    from inferscope.export.otlp.traces import TraceSpan

__all__ = ["logs_line", "metrics_line", "metrics_pieces", "span_pieces", "traces_pieces"]


def metrics_line(series: Iterable[Series], resource: Mapping[str, Any], temporality: int = CUMULATIVE, slices: Slices | None = None) -> str:
    """An ExportMetricsServiceRequest on one line, without the newline."""
    return b"".join(metrics_pieces(series, resource, temporality, slices)).decode()


def metrics_pieces(
    series: Iterable[Series], resource: Mapping[str, Any], temporality: int = CUMULATIVE, slices: Slices | None = None
) -> list[bytes]:
    """The same in pieces that are never put together: copying a line of a megabyte holds the interpreter for as long as 50 points take."""
    slices = slices or Slices()
    points: dict[tuple[str, str], list[bytes]] = {}
    for item in series:
        shape, text = _point(item)
        held = points.setdefault((item.name, shape), [])
        held.append((f",{text}" if held else text).encode())
        slices.step()
    pieces = [
        f'{{"resourceMetrics":[{{"resource":{_resource(resource)},"scopeMetrics":[{{"scope":{{"name":"{semconv.SCOPE}"}},"metrics":['.encode()
    ]
    for (name, shape), texts in points.items():
        extra = "" if shape == "gauge" else f',"aggregationTemporality":{temporality}' + (',"isMonotonic":true' if shape == "sum" else "")
        unit = json.dumps(semconv.UNITS.get(name, "s"))
        comma = "" if len(pieces) == 1 else ","
        pieces.append(f'{comma}{{"name":{json.dumps(name)},"unit":{unit},"{shape}":{{"dataPoints":['.encode())
        pieces += texts
        pieces.append(f"]{extra}}}}}".encode())
        slices.step()
    pieces.append(b"]}]}]}")
    return pieces


def logs_line(events: Iterable[Event], resource: Mapping[str, Any]) -> str:
    """An ExportLogsServiceRequest on one line, without the newline."""
    records = ",".join(_record(event) for event in events)
    return (
        f'{{"resourceLogs":[{{"resource":{_resource(resource)},"scopeLogs":[{{"scope":{{"name":"{semconv.SCOPE}"}},'
        f'"logRecords":[{records}]}}]}}]}}'
    )


def span_pieces(spans: Iterable[TraceSpan], slices: Slices | None = None) -> list[bytes]:
    """Spans, one by one."""
    slices = slices or Slices()
    pieces: list[bytes] = []
    for item in spans:
        pieces.append(_span(item).encode())
        slices.step()
    return pieces


def traces_pieces(spans: Iterable[bytes], resource: Mapping[str, Any]) -> list[bytes]:
    """An ExportTraceServiceRequest around `span_pieces`, on one line without the newline, in pieces."""
    pieces = [
        f'{{"resourceSpans":[{{"resource":{_resource(resource)},"scopeSpans":[{{"scope":{{"name":"{semconv.SCOPE}"}},"spans":['.encode()
    ]
    for item in spans:
        pieces += (item,) if len(pieces) == 1 else (b",", item)
    pieces.append(b"]}]}]}")
    return pieces


def _span(item: TraceSpan) -> str:
    """Put together from text: a dictionary for each of a span's attributes would be work for the garbage collector, 64 requests at a time."""
    parts = [
        f'{{"traceId":"{item.trace_id}","spanId":"{item.span_id}",',
        f'"parentSpanId":"{item.parent_id}",' if item.parent_id else "",
        f'"flags":257,"name":{_quoted(item.name)},"kind":1,"startTimeUnixNano":"{item.start_unix_ns}","endTimeUnixNano":"{item.end_unix_ns}",',
        f'"attributes":{_scalars(item.attributes)}',
    ]
    if item.events:
        events = ",".join(
            f'{{"timeUnixNano":"{event.time_unix_ns}","name":{_quoted(event.name)},"attributes":{_scalars(event.attributes)}}}'
            for event in item.events
        )
        parts.append(f',"events":[{events}]')
    if item.links:
        links = ",".join(f'{{"traceId":"{trace}","spanId":"{other}","flags":256}}' for trace, other in item.links)
        parts.append(f',"links":[{links}]')
    parts.append(',"status":{"code":2}}' if item.error else "}")
    return "".join(parts)


def _scalars(items: Attributes) -> str:
    return f"[{','.join(_scalar(key, value) for key, value in items)}]"


def _scalar(key: str, value: Scalar) -> str:
    if isinstance(value, str):
        text = f'"stringValue":{_quoted(value)}'
    elif isinstance(value, bool):
        text = f'"boolValue":{"true" if value else "false"}'
    elif isinstance(value, int):
        text = f'"intValue":"{value}"'
    else:
        text = f'"doubleValue":{_double(value)}'
    return f'{{"key":{_quoted(key)},"value":{{{text}}}}}'


def _exemplar(item: Exemplar) -> str:
    ids = f',"traceId":"{item.trace[0]}","spanId":"{item.trace[1]}"' if item.trace else ""
    return f'{{"timeUnixNano":"{item.time_unix_ns}","asDouble":{_double(item.value)}{ids}}}'


def _point(series: Series) -> tuple[str, str]:
    head = f'{{"attributes":{_attributes(series.attributes)},"startTimeUnixNano":"{series.start_unix_ns}","timeUnixNano":"{series.now_unix_ns}",'
    buckets = series.buckets
    if buckets is None:
        value = f'"asInt":"{series.value}"' if isinstance(series.value, int) else f'"asDouble":{_double(series.value)}'
        return ("sum" if series.monotonic else "gauge"), f"{head}{value}}}"
    body = f'{head}"count":"{buckets.count}","sum":{_double(buckets.total)}'
    if buckets.low is not None and buckets.high is not None:
        body += f',"min":{_double(buckets.low)},"max":{_double(buckets.high)}'
    if series.exemplars:
        body += f',"exemplars":[{",".join(map(_exemplar, series.exemplars))}]'
    counts = '["' + '","'.join(map(str, buckets.counts.tolist())) + '"]' if buckets.counts.size else "[]"
    if buckets.scale is None:
        bounds = ",".join(_double(bound) for bound in buckets.bounds)
        return "histogram", f'{body},"bucketCounts":{counts},"explicitBounds":[{bounds}]}}'
    return "exponentialHistogram", (
        f'{body},"scale":{buckets.scale},"zeroCount":"{buckets.zero_count}","zeroThreshold":{_double(buckets.zero_threshold)},'
        f'"positive":{{"offset":{buckets.offset},"bucketCounts":{counts}}}}}'
    )


def _record(event: Event) -> str:
    record: dict[str, Any] = {
        "timeUnixNano": str(event.time_unix_ns),
        "observedTimeUnixNano": str(event.time_unix_ns),
        "severityNumber": event.severity,
        "severityText": event.severity_text,
        "eventName": event.name,
        "body": _any(event.body),
        "attributes": _pairs(event.attributes.items()),
    }
    if event.trace:
        record["traceId"], record["spanId"] = event.trace
    return json.dumps(record, separators=(",", ":"))


def _resource(resource: Mapping[str, Any]) -> str:
    return f'{{"attributes":{_attributes(sorted((key, value) for key, value in resource.items() if value is not None))}}}'


def _attributes(items: Iterable[tuple[str, Any]]) -> str:
    return json.dumps(_pairs(items), separators=(",", ":"))


def _pairs(items: Iterable[tuple[Any, Any]]) -> list[dict[str, Any]]:
    return [{"key": str(key), "value": _any(value)} for key, value in items]


def _any(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value if math.isfinite(value) else _double(value).strip('"')}
    if isinstance(value, str):
        return {"stringValue": value}
    if isinstance(value, dict):
        return {"kvlistValue": {"values": _pairs(value.items())}}  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]
    if isinstance(value, (list, tuple)):
        return {"arrayValue": {"values": [_any(item) for item in value]}}  # pyright: ignore[reportUnknownVariableType]
    return {} if value is None else {"stringValue": type(value).__name__}


def _double(value: float) -> str:
    """Protobuf's JSON form: names in quotes for what JSON has no number for."""
    if math.isfinite(value):
        return repr(float(value))
    return '"NaN"' if math.isnan(value) else ('"Infinity"' if value > 0 else '"-Infinity"')
