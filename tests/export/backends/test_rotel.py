"""Through a collector that is not ours: it understands every signal, over both protocols."""

from __future__ import annotations

import pytest

from inferscope import semconv
from inferscope.export import Event, Exporter, Total
from inferscope.types import ClassKey, Column, Reason, RequestRecord, SpanRecord

MS = 1_000_000
COLUMNS = (Column("unattributed", "unattributed"), Column("other", "other"), Column("stage", "forward"), Column("lock", "rules"))
APP = ("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")


def slow():
    spans = (SpanRecord(2, 6 * MS, 30 * MS, -1, 7, 0, 0), SpanRecord(3, 7 * MS, 9 * MS, 0, 7, 0, 0))
    key, vector = ClassKey("score", None, None), (4 * MS, 0, 24 * MS, 2 * MS)
    return RequestRecord(1, key, 5 * MS, 30 * MS, 9, Reason.BREACH, 7, None, 1, "ValueError", None, None, None, False, vector, spans, APP)


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_metrics_logs_and_traces_come_out_as_they_went_in(behind_rotel, make, protocol):
    grpc, http, receiver = behind_rotel
    if protocol == "grpc":
        pytest.importorskip("grpc")
    exporter = Exporter(endpoint=grpc if protocol == "grpc" else http, protocol=protocol, environ={})
    exporter.retain([slow()], COLUMNS)
    exporter.event(Event("inferscope.slo.breach", make.START, "broken", {"inferscope.slo": "score-p99"}))
    exporter.offer(make.batch(make.distribution([9 * MS] * 990 + [30 * MS] * 10), totals=[Total(semconv.REQUESTS, 1000)]))
    assert exporter.run_once(2.0)
    assert receiver.wait(lambda it: it.metrics(semconv.REQUESTS) and it.logs() and it.spans(), 15)
    exporter.shutdown()
    point = receiver.last(semconv.REQUEST_DURATION)
    assert (point.buckets.count, point.buckets.scale) == (1000, 5)
    assert point.exemplars[0].trace[0] == APP[0]
    assert receiver.last(semconv.REQUESTS).value == 1000
    (record,) = receiver.logs()
    assert record.attributes["inferscope.slo"] == "score-p99"
    root, stage = sorted(receiver.spans(), key=lambda span: span.name, reverse=True)
    assert (root.trace_id, root.parent_id) == APP
    assert root.error
    assert dict(root.attributes)["inferscope.keep"] is True
    assert stage.parent_id == root.span_id
    assert [event.name for event in stage.events] == ["inferscope.lock.wait"]
