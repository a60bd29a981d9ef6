"""Device spans in traces, from the simulated device through the integrations and the exporter to a receiver."""

from __future__ import annotations

import pytest
import torch

from inferscope import semconv
from inferscope.aggregate.window import Aggregator
from inferscope.clock import unix_offset_ns
from inferscope.export import ExportBatch, Exporter
from inferscope.export.otlp.device_spans import ALIGNMENT_ERROR, DEVICE, device_spans
from inferscope.export.otlp.traces import Identity
from inferscope.testing.receiver import OtlpReceiver

MS = 1_000_000
CLOSE_NS = 100_000


def test_what_the_device_did_leaves_with_its_own_times_and_how_well_they_are_known(serving) -> None:
    net, value = torch.nn.Linear(4, 4).to("sim"), torch.ones(2, 4, device="sim")
    aggregator = Aggregator(serving.recorder, clock=serving.sim.now_ns)
    serving.recorder.set_edges("predict", [MS])
    aggregator.tick(serving.sim.now_ns())
    seen = []
    with OtlpReceiver() as receiver:
        exporter = Exporter(endpoint=receiver.url, environ={})
        serving.harvester.sinks += [exporter.device, seen.append]
        with serving.recorder.request("other"):
            net(value)  # 20 ms of the stream, of another request
        with serving.recorder.request("predict"), serving.recorder.stage("serve"):
            net(value).cpu()
        serving.settle()
        window = aggregator.tick(serving.sim.now_ns())
        record = next(each for each in window.records if each.key.request == "predict")
        assert any(each.band == record.band for each in window.records)
        exporter.retain(window.records, window.columns)
        exporter.offer(ExportBatch((), (), 1, 2, {"service.name": "shop"}))
        offset = unix_offset_ns()
        assert exporter.shutdown(5.0)
        spans = {span.span_id: span for span in receiver.spans()}
    truth = next(each for each in seen if each.request is not None and each.request.id == record.id and each.name == "forward")
    mine = [span for span in spans.values() if dict(span.attributes).get(semconv.ATTR_CLOCK) == "device"]
    (found,) = [span for span in mine if span.name.startswith("forward on sim") and abs(span.start_unix_ns - offset - truth.start_ns) < MS]
    about = dict(found.attributes)
    assert (about[semconv.ATTR_STAGE], about[DEVICE]) == ("forward", "sim:0")
    assert found.end_unix_ns - found.start_unix_ns == pytest.approx(20 * MS, abs=CLOSE_NS)
    # It began when the other request's forward was done, 20 ms after it was issued, and was over when the copy was.
    assert about[semconv.DEVICE_QUEUE_DURATION] == pytest.approx(0.020, abs=0.0005)
    assert found.start_unix_ns - offset == pytest.approx(truth.issue_ns + 20 * MS, abs=MS)
    assert 0 < about[ALIGNMENT_ERROR] < 50e-6
    assert about[ALIGNMENT_ERROR] == truth.error_ns / 1e9
    parent = spans[found.parent_id]
    assert parent.name == "stage:forward" or "forward" in parent.name
    assert parent.end_unix_ns <= found.start_unix_ns + CLOSE_NS, "the call came back long before"
    assert found.trace_id == parent.trace_id
    assert record.start_ns <= found.start_unix_ns - offset < found.end_unix_ns - offset <= record.start_ns + record.wall_ns + CLOSE_NS
    assert len(spans) == len({span.span_id for span in spans.values()})
    known = set(spans)
    assert all(span.parent_id in known for span in spans.values() if span.parent_id), "no orphan"


def test_a_span_whose_time_is_not_known_is_left_out_and_bounded_memory(serving) -> None:
    net, value = torch.nn.Linear(4, 4).to("sim"), torch.ones(2, 4, device="sim")
    aggregator, seen = Aggregator(serving.recorder, clock=serving.sim.now_ns), []
    serving.harvester.sinks.append(seen.append)
    with serving.recorder.request("predict"):
        net(value).cpu()
    serving.settle()
    window = aggregator.tick(serving.sim.now_ns())
    record = next(each for each in window.records if each.key.request == "predict")
    work = [each for each in seen if each.request is not None and each.request.id == record.id]
    assert work
    unknown = [each._replace(start_ns=None, error_ns=None) for each in work] + [each._replace(exec_ns=None) for each in work]
    assert device_spans(record, window.columns, Identity(), 0, unknown) == ()
    exporter = Exporter(endpoint="http://127.0.0.1:9", environ={})
    for _ in range(5_000):
        exporter.device(work[0])
    assert len(exporter._samples._device) == 2048
    exporter.shutdown(0.1)
