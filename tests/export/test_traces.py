"""Retained requests as spans and exemplars."""

from __future__ import annotations

import json
import sys

import pytest

from inferscope import semconv
from inferscope.aggregate.window import Aggregator
from inferscope.export import Event, ExportBatch, Exporter, read_ring
from inferscope.export.otlp.context import UNSAMPLED, application_resource, current_span
from inferscope.export.otlp.exemplars import Exemplars
from inferscope.export.otlp.traces import KEEP, Identity, Selection, request_spans, shared_work
from inferscope.export.otlp.wire import Reply
from inferscope.export.samples import WAITING_LIMIT
from inferscope.record.core import Recorder
from inferscope.testing.receiver import OtlpReceiver
from inferscope.types import ClassKey, Column, Reason, RequestRecord, SpanFlag, SpanRecord

COLUMNS = (
    Column("unattributed", "unattributed"),
    Column("other", "other"),
    Column("stage", "forward"),
    Column("copy", "h2d"),
    Column("lock", "rules"),
    Column("gc", "gen2"),
    Column("queue", "backlog"),
)
APP = ("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")
MS = 1_000_000


def record(number=1, wall=30 * MS, reasons=Reason.BREACH, trace=None, spans=(), **more):
    values = {
        "key": ClassKey("score", "v2", None),
        "start_ns": 5 * MS,
        "band": 9,
        "thread_id": 77,
        "size": 128.0,
        "items": 4,
        "error": None,
        "cpu_ns": 2 * MS,
        "voluntary_switches": 0,
        "involuntary_switches": 0,
        "truncated": False,
        "vector": (wall - 20 * MS, 0, 20 * MS),
    }
    return RequestRecord(id=number, wall_ns=wall, reasons=reasons, trace=trace, spans=tuple(spans), **{**values, **more})  # fmt: skip


def span(column, start, end, parent=-1, flags=0, aux=0):
    return SpanRecord(column, start * MS, end * MS, parent, 77, flags, aux)


def attributes(item):
    return dict(item.attributes)


def test_a_request_is_a_root_with_stages_copies_and_queues_below_and_waits_as_events():
    spans = [
        span(6, 5, 7),
        span(2, 7, 30),
        span(3, 8, 9, parent=1, flags=SpanFlag.SYNC | SpanFlag.PAGEABLE, aux=4096),
        span(4, 10, 15, parent=1, flags=SpanFlag.CONTENDED, aux=3),
        span(5, 11, 12, parent=3),
        span(5, 31, 32),
    ]
    root, queue, stage, copy = request_spans(record(spans=spans), COLUMNS, Identity(), 1_000 * MS, {3: "apply (rules.py:12)"})
    assert root.name == "score"
    assert root.parent_id is None
    assert root.links == ()
    assert (root.start_unix_ns, root.end_unix_ns) == (1_005 * MS, 1_035 * MS)
    about = attributes(root)
    assert about[KEEP] is True
    assert about[semconv.ATTR_MODEL] == "v2"
    assert about["inferscope.request.retained"] == "breach"
    assert about["inferscope.request.cpu"] == 0.002
    parts = {name: value for name, value in about.items() if name.startswith("inferscope.exclusive.")}
    assert parts == {"inferscope.exclusive.unattributed": 0.01, "inferscope.exclusive.forward": 0.02}
    assert sum(parts.values()) == pytest.approx(0.03)
    assert [event.name for event in root.events] == [semconv.GC_PAUSE]
    assert (queue.name, stage.name, copy.name) == ("queue:backlog", "forward", "copy:h2d")
    assert queue.parent_id == stage.parent_id == root.span_id
    assert copy.parent_id == stage.span_id
    assert attributes(copy) == {
        "direction": "h2d", "inferscope.copy.sync": True, "inferscope.copy.pinned": False, "inferscope.copy.io": 4096,
        KEEP: True, "thread.id": 77,
    }  # fmt: skip
    wait, pause = stage.events
    assert wait.name == "inferscope.lock.wait"
    assert dict(wait.attributes) == {
        "inferscope.lock": "rules", "inferscope.lock.holder": "apply (rules.py:12)", "inferscope.duration": 0.005,
    }  # fmt: skip
    assert dict(pause.attributes) == {"cpython.gc.generation": 2, "inferscope.duration": 0.001}, "an event below an event goes to the span"


def test_the_trace_of_the_application_is_joined():
    root, child = request_spans(record(trace=APP, spans=[span(2, 6, 7)]), COLUMNS, Identity(), 0)
    assert (root.trace_id, root.parent_id) == APP
    assert child.trace_id == APP[0]
    assert root.links == ()


def test_a_span_that_nobody_keeps_is_linked_and_never_a_parent():
    root, child = request_spans(record(trace=(*APP, UNSAMPLED), spans=[span(2, 6, 7)]), COLUMNS, Identity(), 0)
    assert root.parent_id is None
    assert root.trace_id == child.trace_id != APP[0]
    assert root.links == (APP,)


@pytest.mark.parametrize("broken", [("x" * 32, "y" * 16), ("0" * 32, "0" * 16), ("ab", "cd"), (APP[0], APP[1] + "\n")])
def test_ids_that_are_none_join_nothing(broken):
    (root,) = request_spans(record(trace=broken), COLUMNS, Identity(), 0)
    assert root.parent_id is None
    assert len(bytes.fromhex(root.trace_id)) == 16


def test_ids_are_the_same_for_a_record_and_differ_between_records_and_processes():
    mine, other = Identity(), Identity()
    assert mine.trace(record(1)) == mine.trace(record(1))
    assert len({mine.trace(record(1)), mine.trace(record(2)), other.trace(record(1)), mine.trace(record(1, start_ns=6 * MS))}) == 4
    assert len({mine.span(record(1), i) for i in range(-1, 64)}) == 65


def test_requests_of_one_batch_are_linked_through_its_work():
    columns = (*COLUMNS, Column("batch", "forward"))
    batch = len(columns) - 1
    mates = [record(number, spans=[span(batch, 6, 9), span(2, 6, 7, parent=0)]) for number in (1, 2)]
    alone = record(3, spans=[span(batch, 7, 9)])
    identity = Identity()
    shared = shared_work([*mates, alone], columns, identity)
    first, second, third = ({each.name: each for each in request_spans(r, columns, identity, 0, shared=shared)} for r in (*mates, alone))
    name = columns[batch].label
    assert first[name].links == ((second[name].trace_id, second[name].span_id),)
    assert second[name].links == ((first[name].trace_id, first[name].span_id),)
    assert third[name].links == ()


def test_a_damaged_parent_chain_ends_at_the_request():
    spans = [span(4, 6, 7, parent=1), span(4, 6, 7, parent=0), span(2, 6, 7, parent=0), span(2, 6, 7, parent=99)]
    made = request_spans(record(spans=spans), COLUMNS, Identity(), 0)
    assert [item.parent_id for item in made[1:]] == [made[0].span_id] * 2


def test_selection_is_bounded_and_keeps_the_slowest_profiled_first():
    chosen = Selection(limit=5)
    chosen.offer([record(i, wall=i * MS) for i in range(1, 20)])
    chosen.offer([record(30, wall=MS, reasons=Reason.PROFILED), record(31, reasons=Reason.RESERVOIR)])
    assert [item.id for item in chosen.take()] == [30, 19, 18, 17, 16]
    assert chosen.take() == ()


def test_a_healthy_service_sends_few_traces():
    chosen = Selection()
    chosen.offer([record(i, wall=i * MS, reasons=Reason.SLOWEST) for i in range(1, 33)])
    assert [item.id for item in chosen.take()] == [32, 31, 30, 29, 28, 27, 26, 25]


def test_exemplars_are_the_three_slowest_and_an_ordinary_one_with_ids_only_where_a_span_is():
    held = Exemplars()
    held.offer([record(i, wall=i * MS, reasons=Reason.RESERVOIR) for i in range(1, 9)])
    held.offer([record(50, wall=900 * MS, reasons=Reason.PROFILED | Reason.BREACH), record(9, wall=20 * MS, trace=APP)])
    identity = Identity()
    (found,) = held.take(identity, 7, {8}).values()
    assert [item.value for item in found[:3]] == [0.02, 0.008, 0.007], "a profiled request is in no histogram"
    assert [item.trace for item in found[:3]] == [APP, identity.trace(record(8)), None]
    assert len(found) in {3, 4}
    assert found[0].time_unix_ns == 25 * MS + 7
    assert held.take(identity, 0, ()) == {}


@pytest.fixture
def service():
    """A recorder on a clock of its own that has served 40 fast and 4 slow requests, and its exporter's input."""
    now = [1_000_000_000]
    made = Recorder(clock=lambda: now[0])
    made.set_edges("score", [20 * MS])
    made.begin_epoch()

    def serve(milliseconds, trace=None):
        with made.request("score") as request:
            request.trace = trace
            with made.stage("forward"):
                now[0] += milliseconds * MS

    for _ in range(40):
        serve(5)
    for milliseconds in (30, 31, 32):
        serve(milliseconds)
    serve(40, APP)
    aggregator = Aggregator(made, clock=lambda: 0)
    return aggregator, aggregator.tick(10)


def batch(aggregator, make):
    return ExportBatch(aggregator.cumulative(), (), make.START, make.START + 1, {"service.name": "scoring"})


def test_slow_requests_arrive_as_traces_and_the_histogram_points_at_them(service, make, tmp_path):
    aggregator, window = service
    with OtlpReceiver() as receiver:
        exporter = Exporter(tmp_path, endpoint=receiver.url, environ={})
        exporter.retain(window.records, window.columns)
        exporter.offer(batch(aggregator, make))
        assert exporter.run_once()
        roots = [item for item in receiver.spans("score") if attributes(item)["inferscope.request.retained"].startswith("breach")]
        assert sorted(item.end_unix_ns - item.start_unix_ns for item in roots) == [30 * MS, 31 * MS, 32 * MS, 40 * MS]
        stages = [item for item in receiver.spans("forward") if item.parent_id in {root.span_id for root in roots}]
        assert len(stages) == 4
        assert {item.trace_id for item in stages} == {item.trace_id for item in roots}
        joined = next(item for item in roots if item.parent_id)
        assert (joined.trace_id, joined.parent_id) == APP
        point = receiver.last(semconv.REQUEST_DURATION)
        slowest = {(item.trace_id, item.span_id): item for item in roots}
        for exemplar in point.exemplars[:3]:
            assert exemplar.trace in slowest
            assert exemplar.value == pytest.approx((slowest[exemplar.trace].end_unix_ns - slowest[exemplar.trace].start_unix_ns) / 1e9)
        exporter.shutdown()
    (line,) = read_ring(tmp_path, "traces")
    kept = line["resourceSpans"][0]["scopeSpans"][0]["spans"]
    assert {item["spanId"] for item in kept} == {item.span_id for item in receiver.spans()}
    (metrics,) = read_ring(tmp_path, "metrics")
    assert APP[0] in json.dumps(metrics), "the ring has the exemplars too"


def test_spans_survive_an_outage_and_have_the_same_ids(service, make, tmp_path):
    aggregator, window = service
    with OtlpReceiver("unavailable") as receiver:
        exporter = Exporter(tmp_path, endpoint=receiver.url, environ={})
        exporter.retain(window.records, window.columns)
        exporter.offer(batch(aggregator, make))
        assert not exporter.run_once(0.3)
        assert exporter.status()["traces"]["waiting"] > 0
        receiver.mode = "ok"
        exporter.offer(make.batch(make.distribution([MS]), tick=9))
        assert exporter.flush()
        assert exporter.status()["traces"]["waiting"] == 0
        exporter.shutdown()
        (line,) = read_ring(tmp_path, "traces")
        kept = [item["spanId"] for item in line["resourceSpans"][0]["scopeSpans"][0]["spans"]]
        assert [item.span_id for item in receiver.spans()] == kept


def test_what_waits_is_bounded_and_what_is_dropped_is_counted(make):
    with OtlpReceiver("refuse") as receiver:
        exporter = Exporter(endpoint=receiver.url, environ={})
        for turn in range(4):
            exporter.retain([record(turn * 100 + i, wall=(30 + i) * MS) for i in range(64)], COLUMNS)
            exporter.offer(make.batch(make.distribution([MS]), tick=turn + 1))
            exporter.run_once(0.05)
        assert exporter.status()["traces"]["waiting"] == WAITING_LIMIT
        assert exporter.status()["dropped"]["trace"] == 4 * 64 - WAITING_LIMIT
        receiver.mode = "ok"
        exporter.offer(make.batch(make.distribution([MS]), tick=9))
        assert exporter.flush()
        assert len(receiver.spans("score")) == WAITING_LIMIT
        assert len(receiver.requests("/v1/traces")) == WAITING_LIMIT // 64
        exporter.shutdown()


def test_a_refused_batch_of_traces_is_counted_and_not_repeated(make, lines):
    with OtlpReceiver("reject") as receiver:
        exporter = Exporter(endpoint=receiver.url, environ={})
        exporter.retain([record()], COLUMNS)
        exporter.offer(make.batch(make.distribution([MS])))
        assert not exporter.run_once()
        assert exporter.status()["dropped"]["trace_rejected"] == 1
        assert exporter.status()["traces"]["waiting"] == 0
        exporter.shutdown()


def test_a_receiver_that_takes_metrics_alone_is_asked_no_further(make, lines, tmp_path):
    """As VictoriaMetrics does: 400 for every path that it does not know."""
    with OtlpReceiver() as receiver:
        exporter = Exporter(tmp_path, endpoint=receiver.url, environ={})
        refuse = {"traces": Reply(ok=False, reason="HTTP 400"), "logs": Reply(ok=False, reason="gRPC UNIMPLEMENTED")}
        for signal, reply in refuse.items():
            exporter._senders[signal]._wire.post = lambda payload, timeout_s, reply=reply: reply
        delivered = []
        for tick in range(1, 5):
            exporter.retain([record(tick, key=ClassKey("score", None, None))], COLUMNS)
            exporter.event(Event("inferscope.slo.breach", tick, "broken"))
            exporter.offer(make.batch(make.distribution([MS] * tick), tick=tick))
            delivered.append(exporter.flush())
        assert delivered == [False, False, True, True]
        status = exporter.status()
        assert status["untaken"] == {"traces": "HTTP 400", "logs": "gRPC UNIMPLEMENTED"}
        assert set(status["targets"]) == {"metrics"}
        assert status["dropped"] == {"trace_rejected": 2}
        assert len(receiver.metrics(semconv.REQUEST_DURATION)) == 4
        assert receiver.last(semconv.REQUEST_DURATION).exemplars[0].trace is None, "its span can be looked up nowhere"
        exporter.shutdown()
    assert sum("kept on disk only" in line for line in lines()) == 2
    assert len(list(read_ring(tmp_path, "traces"))) == len(list(read_ring(tmp_path, "logs"))) == 4


def test_a_receiver_that_took_traces_before_is_not_given_up(make):
    with OtlpReceiver() as receiver:
        exporter = Exporter(endpoint=receiver.url, environ={})
        for tick, mode in enumerate(["ok", *["reject"] * 4, "ok"], 1):
            receiver.mode = mode
            exporter.retain([record(tick)], COLUMNS)
            exporter.offer(make.batch(make.distribution([MS] * tick), tick=tick))
            exporter.flush()
        assert len(receiver.spans("score")) == 2
        assert exporter.status()["untaken"] == {}
        exporter.shutdown()


def test_without_a_receiver_of_traces_only_the_application_s_spans_are_named(service, make):
    aggregator, window = service
    with OtlpReceiver() as receiver:
        exporter = Exporter(environ={"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": f"{receiver.url}/v1/metrics"})
        exporter.retain(window.records, window.columns)
        exporter.offer(batch(aggregator, make))
        assert exporter.shutdown()
        assert receiver.requests("/v1/traces") == []
        named = [item.trace for item in receiver.last(semconv.REQUEST_DURATION).exemplars]
    assert [trace for trace in named if trace] == [APP]


def test_delta_points_carry_the_exemplars_of_their_window(make):
    delta = {"OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE": "delta"}
    with OtlpReceiver() as receiver:
        exporter = Exporter(endpoint=receiver.url, environ=delta)
        for tick in (1, 2):
            exporter.retain([record(tick, wall=(30 + tick) * MS, key=ClassKey("score", None, None))], COLUMNS)
            exporter.offer(make.batch(make.distribution([MS] * tick), tick=tick))
            assert exporter.run_once()
        values = [[item.value for item in point.exemplars] for point in receiver.metrics(semconv.REQUEST_DURATION)]
        exporter.shutdown()
    assert values == [[0.031], [0.032]]


def test_a_disabled_sdk_stops_sending_and_keeps_the_ring(service, make, tmp_path):
    aggregator, window = service
    with OtlpReceiver() as receiver:
        exporter = Exporter(tmp_path, endpoint=receiver.url, environ={"OTEL_SDK_DISABLED": "true"})
        exporter.retain(window.records, window.columns)
        exporter.offer(batch(aggregator, make))
        assert exporter.shutdown()
        assert receiver.attempts == 0
    assert len(list(read_ring(tmp_path, "metrics"))) == len(list(read_ring(tmp_path, "traces"))) == 1


def test_a_forked_child_forgets_the_parent_s_requests(make):
    with OtlpReceiver() as receiver:
        exporter = Exporter(endpoint=receiver.url, environ={})
        exporter.retain([record()], COLUMNS)
        exporter.after_fork()
        exporter.offer(make.batch(make.distribution([MS])))
        assert exporter.shutdown()
        assert receiver.spans() == []


def test_the_application_s_span_is_found_while_it_is_open_and_marked_when_nobody_keeps_it():
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

    assert current_span() is None
    with TracerProvider(shutdown_on_exit=False).get_tracer("app").start_as_current_span("handle") as opened:
        context = opened.get_span_context()
        assert current_span() == (trace.format_trace_id(context.trace_id), trace.format_span_id(context.span_id))
    with TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False).get_tracer("app").start_as_current_span("handle"):
        assert current_span()[2:] == (UNSAMPLED,)


def test_the_application_s_resource_is_read_and_no_provider_is_made(monkeypatch):
    from opentelemetry import trace
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider

    assert application_resource() == {}
    assert trace._TRACER_PROVIDER is None
    provider = TracerProvider(resource=Resource({"service.name": "shop", "team": "risk", "list": ("a",)}), shutdown_on_exit=False)
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    assert application_resource() == {"service.name": "shop", "team": "risk"}


def test_a_service_without_opentelemetry_pays_no_import(monkeypatch):
    monkeypatch.delitem(sys.modules, "opentelemetry.trace", raising=False)
    assert current_span() is None
    assert application_resource() == {}
    assert "opentelemetry.trace" not in sys.modules
