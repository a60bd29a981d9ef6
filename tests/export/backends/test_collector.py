"""Through the OpenTelemetry Collector's core: metrics, logs, traces, and profiles, which are in development."""

from __future__ import annotations

import importlib.metadata

import pytest

from inferscope import semconv
from inferscope.export import Event, Exporter, Total
from inferscope.export.otlp.profiles import FLAG, PROTO
from inferscope.types import ClassKey, Column, Reason, RequestRecord

MS = 1_000_000
COLUMNS = (Column("unattributed", "unattributed"), Column("other", "other"))
APP = ("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")
FOLDED = [
    {
        "kind": "torch_self_cpu", "unit": "nanoseconds", "time_unix_ns": 1_700_000_000_000_000_000, "duration_ns": 9 * MS, "period_ns": 0,
        "capture": "s0-1", "trace": list(APP), "truncated": False, "frames": [["aten::addmm", "", 0], ["forward", "model.py", 12]],
        "stacks": [[[0, 1], 4_000_000], [[1], 1_000_000]],
    }
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_every_signal_comes_out_as_it_went_in(behind_otelcol, make, protocol):
    if not importlib.metadata.version("opentelemetry-proto").startswith(f"{PROTO}."):
        pytest.skip(f"profiles are pinned to opentelemetry-proto {PROTO}")
    grpc, http, receiver = behind_otelcol
    exporter = Exporter(endpoint=grpc if protocol == "grpc" else http, protocol=protocol, environ={FLAG: "1"})
    key, vector = ClassKey("score", None, None), (30 * MS, 0)
    slow = RequestRecord(1, key, 5 * MS, 30 * MS, 9, Reason.BREACH, 7, None, 1, None, None, None, None, False, vector, (), APP)
    exporter.retain([slow], COLUMNS)
    exporter.event(Event("inferscope.slo.breach", make.START, "broken", {"inferscope.slo": "score-p99"}))
    exporter.profile(FOLDED, "20240101T000000Z-score-abcd", "e_detector")
    exporter.offer(make.batch(make.distribution([9 * MS] * 990 + [30 * MS] * 10), totals=[Total(semconv.REQUESTS, 1000)]))
    assert exporter.run_once(2.0), exporter.status()["targets"]
    assert receiver.wait(lambda it: it.metrics(semconv.REQUESTS) and it.logs() and it.spans() and it.profiles(), 15)
    exporter.shutdown()
    point = receiver.last(semconv.REQUEST_DURATION)
    assert (point.buckets.count, point.buckets.scale) == (1000, 5)
    assert point.exemplars[0].trace[0] == APP[0]
    assert receiver.spans()[0].trace_id == APP[0]
    (request,) = receiver.profiles()
    table = list(request.dictionary.string_table)
    (profile,) = request.resource_profiles[0].scope_profiles[0].profiles
    assert table[profile.sample_type.type_strindex] == "torch_self_cpu"
    assert sorted(sample.values[0] for sample in profile.samples) == [1_000_000, 4_000_000]
    link = request.dictionary.link_table[profile.samples[0].link_index]
    assert (link.trace_id.hex(), link.span_id.hex()) == APP
