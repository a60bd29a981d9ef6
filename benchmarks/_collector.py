"""What a collector does between our OTLP and a store that takes none: Prometheus' remote write with native histograms, rows of ClickHouse.

Only what the tests need of it, after the rules of OpenTelemetry's compatibility specification: bucket i of an exponential histogram is bucket
i + 1 of a native one, `job` and `instance` come from the resource, which itself becomes `target_info`.
"""

from __future__ import annotations

import itertools
import json
import re
import struct
import time
import urllib.request

from inferscope import semconv
from inferscope.export.prometheus import metric_name

_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def post(url, body, headers=()):
    request = urllib.request.Request(url, data=body, headers=dict(headers), method="POST")
    with _OPENER.open(request, timeout=30) as answer:
        return answer.read()


def _varint(number):
    out = bytearray()
    number &= (1 << 64) - 1
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _zigzag(number):
    return _varint((number << 1) ^ (number >> 63))


def _field(number, payload):
    return _varint(number << 3 | 2) + _varint(len(payload)) + payload


def _double(number, value):
    return _varint(number << 3 | 1) + struct.pack("<d", value)


def _integer(number, encoded):
    return _varint(number << 3) + encoded


def _snappy(data):
    """Snappy's block format without any compression: the length, then literals."""
    out = [_varint(len(data))]
    for start in range(0, len(data), 65536):
        piece = data[start : start + 65536]
        out.append(bytes([61 << 2]) + struct.pack("<H", len(piece) - 1) + piece)
    return b"".join(out)


def _label(name, value):
    return _field(1, _field(1, name.encode()) + _field(2, value.encode()))


def _text(value):
    return str(value).lower() if isinstance(value, bool) else str(value)


def _histogram(point, at_ms):
    """prometheus.Histogram (remote write 1.0, types.proto)."""
    buckets = point.buckets
    counts = buckets.counts.tolist()
    deltas = b"".join(_zigzag(count - before) for before, count in itertools.pairwise([0, *counts]))
    spans = _field(11, _integer(1, _zigzag(buckets.offset + 1)) + _integer(2, _varint(len(counts)))) if counts else b""
    return b"".join(
        (
            _integer(1, _varint(buckets.count)), _double(3, buckets.total), _integer(4, _zigzag(buckets.scale)),
            _double(5, buckets.zero_threshold), _integer(6, _varint(buckets.zero_count)), spans, _field(12, deltas) if counts else b"",
            _integer(15, _varint(at_ms)),
        )
    )  # fmt: skip


def remote_write(url, points):
    """Points of our OTLP to Prometheus, in order of their time."""
    series = []
    for point in sorted(points, key=lambda each: each.unix_ns):
        at_ms = point.unix_ns // 1_000_000
        about = {"job": str(point.resource["service.name"]), "instance": str(point.resource["service.instance.id"])}
        labels = {re.sub(r"\W", "_", key): _text(value) for key, value in point.attributes.items()}
        name = metric_name(point.name, counter=point.kind == "sum")
        body = _field(4, _histogram(point, at_ms)) if point.buckets is not None else _sample(point.value, at_ms)
        series.append((at_ms, {"__name__": name, **labels, **about}, body))
        if point.name == semconv.REQUESTS:
            info = {
                re.sub(r"\W", "_", key): _text(value) for key, value in point.resource.items() if not key.startswith("service.instance")
            }
            series.append((at_ms, {"__name__": "target_info", **info, **about}, _sample(1.0, at_ms)))
    seen, payload = set(), []
    for at_ms, labels, body in series:
        key = (at_ms, tuple(sorted(labels.items())))
        if key not in seen:  # several points of one resource, one target_info
            seen.add(key)
            payload.append(_field(1, b"".join(_label(*pair) for pair in sorted(labels.items())) + body))
    headers = {"content-encoding": "snappy", "content-type": "application/x-protobuf", "x-prometheus-remote-write-version": "0.1.0"}
    post(f"{url}/api/v1/write", _snappy(b"".join(payload)), headers)


def _sample(value, at_ms):
    return _field(2, _double(1, float(value)) + _integer(2, _varint(at_ms)))


def clickhouse_rows(url, points):
    """Points of our OTLP as rows of the exporter's tables."""
    tables = {"sum": [], "gauge": [], "exponential_histogram": []}
    for point in points:
        row = {
            "ResourceAttributes": {key: _text(value) for key, value in point.resource.items()},
            "ScopeName": semconv.SCOPE,
            "ServiceName": str(point.resource["service.name"]),
            "MetricName": point.name,
            "MetricUnit": point.unit,
            "Attributes": {key: _text(value) for key, value in point.attributes.items()},
            "StartTimeUnix": point.start_unix_ns // 1_000_000_000,
            "TimeUnix": point.unix_ns // 1_000_000_000,
        }
        if point.buckets is None:
            row["Value"] = point.value
        else:
            held = point.buckets
            row |= {
                "Count": held.count,
                "Sum": held.total,
                "Scale": held.scale,
                "ZeroCount": held.zero_count,
                "PositiveOffset": held.offset,
            }
            row |= {"PositiveBucketCounts": held.counts.tolist(), "Min": held.low or 0.0, "Max": held.high or 0.0}
        if point.kind != "gauge":
            row["AggregationTemporality"] = point.temporality
        tables[point.kind].append(row)
    for kind, rows in tables.items():
        if rows:
            lines = "\n".join(map(json.dumps, rows))
            post(url, f"INSERT INTO otel_metrics_{kind} FORMAT JSONEachRow\n{lines}".encode())


def wait(until, seconds=20.0):
    """Ask until it is true."""
    deadline = time.monotonic() + seconds
    while not (found := until()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not in {seconds:g} s")
        time.sleep(0.1)
    return found
