"""OTLP requests back to values: what a receiver sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from inferscope.export.otlp.buckets import Buckets
from inferscope.export.otlp.series import Exemplar
from inferscope.export.otlp.traces import SpanEvent, TraceSpan

if TYPE_CHECKING:
    from collections.abc import Iterable

    from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

__all__ = ["ReceivedLog", "ReceivedPoint", "log_records", "metric_points", "trace_spans"]


@dataclass(frozen=True, slots=True)
class ReceivedPoint:
    """One data point as it arrived."""

    name: str
    unit: str
    kind: str
    """`exponential_histogram`, `histogram`, `sum` or `gauge`."""
    attributes: dict[str, Any]
    resource: dict[str, Any]
    temporality: int
    start_unix_ns: int
    unix_ns: int
    value: int | float | None
    """None for histograms."""
    buckets: Buckets | None
    exemplars: tuple[Exemplar, ...] = ()


@dataclass(frozen=True, slots=True)
class ReceivedLog:
    """One log record as it arrived."""

    name: str
    unix_ns: int
    severity: int
    body: Any
    attributes: dict[str, Any]
    resource: dict[str, Any]
    trace: tuple[str, str] | None


def _value(value: AnyValue) -> Any:
    which = value.WhichOneof("value")
    if which == "array_value":
        return [_value(item) for item in value.array_value.values]
    if which == "kvlist_value":
        return _attributes(value.kvlist_value.values)
    return getattr(value, which) if which else None


def _attributes(pairs: Iterable[KeyValue]) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _buckets(kind: str, point: Any) -> Buckets | None:
    if kind not in {"exponential_histogram", "histogram"}:
        return None
    exponential = kind == "exponential_histogram"
    return Buckets(
        count=point.count,
        total=point.sum,
        offset=point.positive.offset if exponential else 0,
        counts=np.asarray(point.positive.bucket_counts if exponential else point.bucket_counts, dtype=np.int64),
        zero_count=point.zero_count if exponential else 0,
        zero_threshold=point.zero_threshold if exponential else 0.0,
        scale=point.scale if exponential else None,
        bounds=() if exponential else tuple(point.explicit_bounds),
        low=point.min if point.HasField("min") else None,
        high=point.max if point.HasField("max") else None,
    )


def metric_points(body: bytes) -> list[ReceivedPoint]:
    """Every data point of a serialized ExportMetricsServiceRequest, in order.

    Raises:
        google.protobuf.message.DecodeError: The bytes are no such request.
    """
    found: list[ReceivedPoint] = []
    for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
        about = _attributes(resource.resource.attributes)
        for metric in (metric for scope in resource.scope_metrics for metric in scope.metrics):
            kind = metric.WhichOneof("data") or ""
            data: Any = getattr(metric, kind)
            for point in data.data_points:
                number = point.WhichOneof("value") if kind in {"sum", "gauge"} else None
                found.append(
                    ReceivedPoint(
                        name=metric.name,
                        unit=metric.unit,
                        kind=kind,
                        attributes=_attributes(point.attributes),
                        resource=about,
                        temporality=0 if kind == "gauge" else data.aggregation_temporality,
                        start_unix_ns=point.start_time_unix_nano,
                        unix_ns=point.time_unix_nano,
                        value=getattr(point, number) if number else None,
                        buckets=_buckets(kind, point),
                        exemplars=tuple(
                            Exemplar(
                                each.as_double, each.time_unix_nano, (each.trace_id.hex(), each.span_id.hex()) if each.trace_id else None
                            )
                            for each in point.exemplars
                        ),
                    )
                )
    return found


def log_records(body: bytes) -> list[ReceivedLog]:
    """Every record of a serialized ExportLogsServiceRequest, in order.

    Raises:
        google.protobuf.message.DecodeError: The bytes are no such request.
    """
    return [
        ReceivedLog(
            name=record.event_name,
            unix_ns=record.time_unix_nano,
            severity=int(record.severity_number),
            body=_value(record.body),
            attributes=_attributes(record.attributes),
            resource=_attributes(resource.resource.attributes),
            trace=(record.trace_id.hex(), record.span_id.hex()) if record.trace_id else None,
        )
        for resource in ExportLogsServiceRequest.FromString(body).resource_logs
        for scope in resource.scope_logs
        for record in scope.log_records
    ]


def trace_spans(body: bytes) -> list[TraceSpan]:
    """Every span of a serialized ExportTraceServiceRequest, in order.

    Raises:
        google.protobuf.message.DecodeError: The bytes are no such request.
    """
    return [
        TraceSpan(
            trace_id=span.trace_id.hex(),
            span_id=span.span_id.hex(),
            parent_id=span.parent_span_id.hex() or None,
            name=span.name,
            start_unix_ns=span.start_time_unix_nano,
            end_unix_ns=span.end_time_unix_nano,
            attributes=tuple(_attributes(span.attributes).items()),
            events=tuple(
                SpanEvent(event.name, event.time_unix_nano, tuple(_attributes(event.attributes).items())) for event in span.events
            ),
            links=tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
            error=span.status.code == 2,
        )
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
