"""The protobuf of OTLP, one small message at a time.

The only module with the generated OTLP classes; it is imported in functions, from the export thread's set-up.
Concatenated encodings of one message type merge (repeated fields append), which lets large requests be built from small pieces.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest, ExportLogsServiceResponse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest, ExportMetricsServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, InstrumentationScope, KeyValue, KeyValueList
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord, ResourceLogs, ScopeLogs
from opentelemetry.proto.metrics.v1 import metrics_pb2 as pb
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1 import trace_pb2

from inferscope import semconv

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from google.protobuf.message import Message

    from inferscope.export.otlp.logs import Event
    from inferscope.export.otlp.series import Series
    from inferscope.export.otlp.traces import TraceSpan

__all__ = [
    "any_value",
    "framed",
    "logs_request",
    "metric",
    "point",
    "point_attributes",
    "rejected",
    "request",
    "request_message",
    "span",
    "traces_request",
]

EXPONENTIAL = "exponential_histogram"
EXPLICIT = "histogram"
SUM = "sum"
GAUGE = "gauge"


def any_value(value: Any) -> AnyValue:
    """A Python value as AnyValue; mappings and sequences nest, anything foreign becomes its type's name."""
    if isinstance(value, bool):
        return AnyValue(bool_value=value)
    if isinstance(value, int):
        return AnyValue(int_value=value) if -(1 << 63) <= value < 1 << 63 else AnyValue(double_value=float(value))
    if isinstance(value, float):
        return AnyValue(double_value=value)
    if isinstance(value, str):
        return AnyValue(string_value=value)
    if isinstance(value, dict):
        return AnyValue(kvlist_value=KeyValueList(values=key_values(value.items())))  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]
    if isinstance(value, (list, tuple)):
        return AnyValue(array_value=ArrayValue(values=[any_value(item) for item in value]))  # pyright: ignore[reportUnknownVariableType]
    return AnyValue() if value is None else AnyValue(string_value=type(value).__name__)


def key_values(items: Iterable[tuple[Any, Any]]) -> list[KeyValue]:
    """Attributes in OTLP's form."""
    return [KeyValue(key=str(key), value=any_value(value)) for key, value in items]


def point(series: Series) -> tuple[str, bytes]:
    """Field of Metric that holds the series, and its serialized data point without attributes."""
    start, now = series.start_unix_ns, series.now_unix_ns
    buckets = series.buckets
    if buckets is None:
        number = pb.NumberDataPoint(start_time_unix_nano=start, time_unix_nano=now)
        if isinstance(series.value, int):
            number.as_int = series.value
        else:
            number.as_double = series.value
        return (SUM if series.monotonic else GAUGE), number.SerializeToString()
    if buckets.scale is None:
        shaped = pb.HistogramDataPoint(
            count=buckets.count,
            sum=buckets.total,
            bucket_counts=buckets.counts.tolist(),
            explicit_bounds=buckets.bounds,
            start_time_unix_nano=start,
            time_unix_nano=now,
        )
        shaped.exemplars.extend(_exemplars(series))
        _extremes(shaped, buckets.low, buckets.high)
        return EXPLICIT, shaped.SerializeToString()
    body = pb.ExponentialHistogramDataPoint(
        count=buckets.count,
        sum=buckets.total,
        scale=buckets.scale,
        zero_count=buckets.zero_count,
        zero_threshold=buckets.zero_threshold,
        positive=pb.ExponentialHistogramDataPoint.Buckets(offset=buckets.offset, bucket_counts=buckets.counts.tolist()),
        start_time_unix_nano=start,
        time_unix_nano=now,
    )
    body.exemplars.extend(_exemplars(series))
    _extremes(body, buckets.low, buckets.high)
    return EXPONENTIAL, body.SerializeToString()


def _exemplars(series: Series) -> list[pb.Exemplar]:
    return [
        pb.Exemplar(
            as_double=item.value,
            time_unix_nano=item.time_unix_ns,
            trace_id=bytes.fromhex(item.trace[0]) if item.trace else b"",
            span_id=bytes.fromhex(item.trace[1]) if item.trace else b"",
        )
        for item in series.exemplars
    ]


def _extremes(body: pb.HistogramDataPoint | pb.ExponentialHistogramDataPoint, low: float | None, high: float | None) -> None:
    if low is not None:
        body.min = low
    if high is not None:
        body.max = high


def point_attributes(series: Series) -> bytes:
    """The attributes alone, in the encoding of the series' kind of data point."""
    attributes = key_values(series.attributes)
    if series.buckets is None:
        return pb.NumberDataPoint(attributes=attributes).SerializeToString()
    if series.buckets.scale is None:
        return pb.HistogramDataPoint(attributes=attributes).SerializeToString()
    return pb.ExponentialHistogramDataPoint(attributes=attributes).SerializeToString()


_POINTS: Final = {
    EXPONENTIAL: pb.ExponentialHistogram.DATA_POINTS_FIELD_NUMBER,
    EXPLICIT: pb.Histogram.DATA_POINTS_FIELD_NUMBER,
    SUM: pb.Sum.DATA_POINTS_FIELD_NUMBER,
    GAUGE: pb.Gauge.DATA_POINTS_FIELD_NUMBER,
}


def framed(shape: str, *pieces: bytes) -> list[bytes]:
    """A data point, serialized in pieces, as it stands in the message of its kind."""
    return _wrapped(_POINTS[shape], pieces)


def metric(name: str, unit: str, shape: str, points: Sequence[bytes], temporality: int) -> list[bytes]:
    """A Metric around framed data points, as it stands in ScopeMetrics; in pieces, because each copy of all points costs time in one go."""
    chosen = pb.AggregationTemporality.ValueType(temporality)
    if shape == EXPONENTIAL:
        head = pb.ExponentialHistogram(aggregation_temporality=chosen).SerializeToString()
        outer = pb.Metric.EXPONENTIAL_HISTOGRAM_FIELD_NUMBER
    elif shape == EXPLICIT:
        head = pb.Histogram(aggregation_temporality=chosen).SerializeToString()
        outer = pb.Metric.HISTOGRAM_FIELD_NUMBER
    elif shape == SUM:
        head = pb.Sum(aggregation_temporality=chosen, is_monotonic=True).SerializeToString()
        outer = pb.Metric.SUM_FIELD_NUMBER
    else:
        head = b""
        outer = pb.Metric.GAUGE_FIELD_NUMBER
    about = pb.Metric(name=name, unit=unit).SerializeToString()
    return _wrapped(pb.ScopeMetrics.METRICS_FIELD_NUMBER, [about, *_wrapped(outer, [head, *points])])


def request(metrics: Sequence[bytes], resource: Mapping[str, Any]) -> list[bytes]:
    """A serialized ExportMetricsServiceRequest around the pieces of its metrics, in pieces."""
    scope = pb.ScopeMetrics(scope=InstrumentationScope(name=semconv.SCOPE)).SerializeToString()
    outer = pb.ResourceMetrics(resource=_resource(resource)).SerializeToString()
    return _wrapped(
        ExportMetricsServiceRequest.RESOURCE_METRICS_FIELD_NUMBER,
        [outer, *_wrapped(pb.ResourceMetrics.SCOPE_METRICS_FIELD_NUMBER, [scope, *metrics])],
    )


def logs_request(events: Iterable[Event], resource: Mapping[str, Any]) -> bytes:
    """A serialized ExportLogsServiceRequest."""
    records = [
        LogRecord(
            time_unix_nano=event.time_unix_ns,
            observed_time_unix_nano=event.time_unix_ns,
            severity_number=event.severity,  # type: ignore[arg-type]
            severity_text=event.severity_text,
            event_name=event.name,
            body=any_value(event.body),
            attributes=key_values(event.attributes.items()),
            trace_id=bytes.fromhex(event.trace[0]) if event.trace else b"",
            span_id=bytes.fromhex(event.trace[1]) if event.trace else b"",
        )
        for event in events
    ]
    scope = ScopeLogs(scope=InstrumentationScope(name=semconv.SCOPE), log_records=records)
    return ExportLogsServiceRequest(resource_logs=[ResourceLogs(resource=_resource(resource), scope_logs=[scope])]).SerializeToString()


_SAMPLED: Final = 0x1
_KNOWN_LOCAL: Final = 0x100
"""SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE: whether the parent is remote is known, and it is not."""


def span(item: TraceSpan) -> bytes:
    """A serialized span as it stands in ScopeSpans."""
    body = trace_pb2.Span(
        trace_id=bytes.fromhex(item.trace_id),
        span_id=bytes.fromhex(item.span_id),
        parent_span_id=bytes.fromhex(item.parent_id or ""),
        flags=_SAMPLED | _KNOWN_LOCAL,
        name=item.name,
        kind=trace_pb2.Span.SPAN_KIND_INTERNAL,
        start_time_unix_nano=item.start_unix_ns,
        end_time_unix_nano=item.end_unix_ns,
        attributes=key_values(item.attributes),
        events=[
            trace_pb2.Span.Event(time_unix_nano=event.time_unix_ns, name=event.name, attributes=key_values(event.attributes))
            for event in item.events
        ],
        links=[
            trace_pb2.Span.Link(trace_id=bytes.fromhex(trace), span_id=bytes.fromhex(other), flags=_KNOWN_LOCAL)  # not sampled
            for trace, other in item.links
        ],
    )
    if item.error:
        body.status.code = trace_pb2.Status.STATUS_CODE_ERROR
    return _wrap(trace_pb2.ScopeSpans.SPANS_FIELD_NUMBER, body.SerializeToString())


def traces_request(spans: Sequence[bytes], resource: Mapping[str, Any]) -> bytes:
    """A serialized ExportTraceServiceRequest around serialized spans."""
    scope = trace_pb2.ScopeSpans(scope=InstrumentationScope(name=semconv.SCOPE)).SerializeToString()
    outer = trace_pb2.ResourceSpans(resource=_resource(resource)).SerializeToString()
    inside = [outer, *_wrapped(trace_pb2.ResourceSpans.SCOPE_SPANS_FIELD_NUMBER, [scope, *spans])]
    return b"".join(_wrapped(ExportTraceServiceRequest.RESOURCE_SPANS_FIELD_NUMBER, inside))


_REQUESTS: Final = {"metrics": ExportMetricsServiceRequest, "logs": ExportLogsServiceRequest, "traces": ExportTraceServiceRequest}


def request_message(signal: str) -> Message:
    """An empty request of a signal."""
    message: Message = _REQUESTS[signal]()
    return message


def rejected(signal: str, body: bytes) -> tuple[int, str]:
    """Points or records that a receiver refused in a successful answer (partial success), and its reason."""
    try:
        if signal == "metrics":
            metrics = ExportMetricsServiceResponse.FromString(body).partial_success
            return metrics.rejected_data_points, metrics.error_message
        if signal == "traces":
            traces = ExportTraceServiceResponse.FromString(body).partial_success
            return traces.rejected_spans, traces.error_message
        logs = ExportLogsServiceResponse.FromString(body).partial_success
    except Exception:  # noqa: BLE001  (some receivers answer a success with JSON or text)
        return 0, ""
    return logs.rejected_log_records, logs.error_message


def _resource(resource: Mapping[str, Any]) -> Resource:
    return Resource(attributes=key_values(sorted((key, value) for key, value in resource.items() if value is not None)))


def _wrap(field: int, payload: bytes) -> bytes:
    """A length-delimited field: tag, length as varint, payload."""
    return b"".join(_wrapped(field, [payload]))


def _wrapped(field: int, pieces: Sequence[bytes]) -> list[bytes]:
    """The same around a payload in pieces."""
    return [_varint(field << 3 | 2) + _varint(sum(map(len, pieces))), *pieces]


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)
