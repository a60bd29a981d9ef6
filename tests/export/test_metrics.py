"""Which series leave, deltas and the encodings."""

from __future__ import annotations

import json

import numpy as np
import pytest

from inferscope import semconv
from inferscope.aggregate.window import ClassTotals
from inferscope.export import Event, Objective, Total, request_totals
from inferscope.export.otlp import decode, jsonlines, protobuf
from inferscope.export.otlp.metrics import DeltaTracker, SeriesBuilder, encode
from inferscope.export.otlp.series import CUMULATIVE, DELTA, Slices
from inferscope.pace import PAUSE_S
from inferscope.types import ClassKey


def one(points, name, **attributes):
    wanted = {key.replace("__", "."): value for key, value in attributes.items()}
    (found,) = [point for point in points if point.name == name and wanted.items() <= point.attributes.items()]
    return found


def test_every_kind_has_its_conventional_name_and_attributes(make):
    source = make.batch(
        make.distribution([9_000_000], labels=("score", "v2", "gold")),
        make.distribution([1_000], "stage", ("forward",)),
        make.distribution([1_000], "lock.wait", ("rules",)),
        make.distribution([1_000], "lock.hold", ("rules",)),
        make.distribution([1_000], "copy", ("h2d",)),
        make.distribution([1_000], "queue", ("backlog",)),
        make.distribution([1_000], "gc", ("gen2",)),
        make.distribution([], "stage", ("never",)),
    )
    points = decode.metric_points(encode(SeriesBuilder().build(source), source.resource))
    assert {(point.name, tuple(point.attributes.items())) for point in points} == {
        ("inferscope.request.duration", (("inferscope.request", "score"), ("inferscope.model", "v2"), ("inferscope.class", "gold"))),
        ("inferscope.stage.duration", (("inferscope.stage", "forward"), ("inferscope.clock", "host"))),
        ("inferscope.lock.wait.duration", (("inferscope.lock", "rules"),)),
        ("inferscope.lock.hold.duration", (("inferscope.lock", "rules"),)),
        ("inferscope.copy.duration", (("direction", "h2d"),)),
        ("inferscope.queue.duration", (("inferscope.queue", "backlog"),)),
        ("inferscope.gc.pause", (("cpython.gc.generation", 2),)),
    }
    assert {point.unit for point in points} == {"s"}
    assert {point.resource["service.name"] for point in points} == {"scoring"}


def test_the_protobuf_says_what_the_series_say(make):
    rng = np.random.default_rng(1)
    request = make.distribution(rng.lognormal(16, 0.5, 5000))
    totals = (Total(semconv.REQUESTS, 5000, ((semconv.ATTR_REQUEST, "score"),)), Total(semconv.SLO_TARGET, 0.02, monotonic=False))
    source = make.batch(request, totals=totals)
    series = SeriesBuilder().build(source)
    points = decode.metric_points(encode(series, source.resource, DELTA))
    point = one(points, semconv.REQUEST_DURATION)
    mine = next(item for item in series if item.name == semconv.REQUEST_DURATION).buckets
    assert point.buckets.counts.tolist() == mine.counts.tolist()
    assert (point.buckets.offset, point.buckets.scale, point.buckets.count) == (mine.offset, 5, 5000)
    assert (point.buckets.low, point.buckets.high, point.buckets.total) == (mine.low, mine.high, mine.total)
    assert (point.temporality, point.start_unix_ns, point.unix_ns) == (DELTA, source.start_unix_ns, source.now_unix_ns)
    assert one(points, semconv.REQUESTS).value == 5000
    assert one(points, semconv.REQUESTS).kind == "sum"
    assert (one(points, semconv.SLO_TARGET).kind, one(points, semconv.SLO_TARGET).value) == ("gauge", 0.02)


def test_cached_attributes_stay_with_their_series(make):
    source = make.batch(make.distribution([1_000], "stage", ("a",)), make.distribution([2_000_000], "stage", ("b",)))
    cache = {}
    builder = SeriesBuilder()
    encode(builder.build(source), source.resource, cache=cache)
    turned = make.batch(*reversed(source.distributions))
    points = decode.metric_points(encode(builder.build(turned), source.resource, cache=cache))
    assert one(points, semconv.STAGE_DURATION, inferscope__stage="b").buckets.high > 1e-3
    assert len(cache) == 2


def test_series_beyond_the_limit_add_up_in_one(make):
    builder = SeriesBuilder(limit=10)
    stages = [make.distribution([1_000_000] * (i + 1), "stage", (f"s{i}",)) for i in range(12)]
    source = make.batch(*stages, make.distribution([5_000_000]), totals=[Total(semconv.REQUESTS, 1)])
    points = decode.metric_points(encode(builder.build(source), source.resource))
    overflow = one(points, semconv.STAGE_DURATION, otel__metric__overflow=True)
    kept = [point for point in points if point.name == semconv.STAGE_DURATION and point is not overflow]
    assert sum(point.buckets.count for point in kept) + overflow.buckets.count == sum(range(1, 13))
    assert len(kept) == 6
    assert builder.overflowed == 6
    assert one(points, semconv.REQUEST_DURATION).buckets.count == 1


def test_requests_and_counters_have_room_that_stages_cannot_take(make):
    builder = SeriesBuilder(limit=10)
    builder.build(make.batch(*[make.distribution([1_000], "stage", (f"s{i}",)) for i in range(30)]))
    late = builder.build(make.batch(make.distribution([5_000_000], labels=("late", "", "")), totals=[Total(semconv.REQUESTS, 1)]))
    assert [(item.name, item.attributes) for item in late] == [
        (semconv.REQUEST_DURATION, ((semconv.ATTR_REQUEST, "late"),)),
        (semconv.REQUESTS, ()),
    ]


def test_overflow_counters_add_and_gauges_do_not(make):
    builder = SeriesBuilder(limit=1)
    totals = [Total(semconv.ITEMS, 1, (("k", i),)) for i in range(4)] + [
        Total(semconv.SLO_TARGET, 0.1, (("k", i),), monotonic=False) for i in range(2)
    ]
    found = builder.build(make.batch(totals=totals))
    assert [(item.name, item.value) for item in found] == [(semconv.ITEMS, 1), (semconv.ITEMS, 3)]


@pytest.mark.parametrize("scale", [2, 9])
def test_scales_that_backends_do_not_take_are_refused(scale):
    with pytest.raises(ValueError, match="from 3 to 8"):
        SeriesBuilder(scale)


def test_explicit_buckets_are_an_option(make):
    source = make.batch(make.distribution([10_000_000, 30_000_000]), make.distribution([1_000], "stage", ("a",)))
    points = decode.metric_points(encode(SeriesBuilder(bounds={"score": 20_000_000}).build(source), source.resource))
    request = one(points, semconv.REQUEST_DURATION)
    assert request.kind == "histogram"
    assert request.buckets.counts[request.buckets.bounds.index(0.02) + 1 :].sum() == 1
    assert one(points, semconv.STAGE_DURATION).kind == "histogram"


def test_explicit_overflow_has_one_set_of_bounds(make):
    builder = SeriesBuilder(limit=1, bounds={"a": 20_000_000, "b": 5_000_000, "c": 1_000_000})
    found = builder.build(make.batch(*[make.distribution([9_000_000], labels=(name, "", "")) for name in "abc"]))
    assert [(item.attributes[0][0], item.buckets.count) for item in found] == [(semconv.ATTR_REQUEST, 1), (semconv.ATTR_OVERFLOW, 2)]


def test_kinds_of_later_versions_and_richer_labels_have_a_name(make):
    source = make.batch(
        make.distribution([1_000], "device", ("forward",)),
        make.distribution([1_000], "io", ("disk",)),
        make.distribution([1_000], "copy", ("d2h", "sync", "pageable")),
    )
    assert [(item.name, item.attributes) for item in SeriesBuilder().build(source)] == [
        ("inferscope.stage.duration", (("inferscope.stage", "forward"), ("inferscope.clock", "device"))),
        ("inferscope.io.duration", (("inferscope.name", "disk"),)),
        ("inferscope.copy.duration", (("direction", "d2h"), ("inferscope.copy.sync", True), ("inferscope.copy.pinned", False))),
    ]


def test_slices_yield_by_length_and_by_time(monkeypatch):
    pauses = []
    slices = Slices(4, 10**12, pauses.append)
    for _ in range(9):
        slices.step()
    assert pauses == [PAUSE_S, PAUSE_S]
    timed = Slices(1000, 0, pauses.append)
    timed.step()
    assert len(pauses) == 3


class TestDelta:
    def series(self, make, builder, values, tick, start=None):
        source = make.batch(
            make.distribution(values),
            totals=[Total(semconv.REQUESTS, len(values)), Total(semconv.SLO_TARGET, 0.02, monotonic=False)],
            tick=tick,
            start=start or make.START,
        )
        return builder.build(source)

    def test_a_failed_window_is_part_of_the_next(self, make):
        builder, tracker = SeriesBuilder(), DeltaTracker()
        first = self.series(make, builder, [5_000_000] * 3, 1)
        assert tracker.delta(first)[0].buckets.count == 3
        tracker.acknowledge(first)
        second = self.series(make, builder, [5_000_000] * 5, 2)
        assert tracker.delta(second)[0].buckets.count == 2
        tracker.failed(second)
        third = tracker.delta(self.series(make, builder, [5_000_000] * 5 + [50_000_000] * 4, 3))
        assert third[0].buckets.count == 6
        assert third[0].start_unix_ns == first[0].now_unix_ns
        assert [item.value for item in third[1:]] == [6, 0.02]

    def test_folding_ends_after_five_minutes_and_is_counted(self, make):
        builder, tracker = SeriesBuilder(), DeltaTracker()
        tracker.acknowledge(self.series(make, builder, [5_000_000], 0))
        for tick in range(1, 33):
            tracker.failed(self.series(make, builder, [5_000_000] * (tick + 1), tick))
        assert tracker.dropped == 32
        assert tracker.delta(self.series(make, builder, [5_000_000] * 34, 33))[0].buckets.count == 1

    def test_nothing_new_says_nothing(self, make):
        builder, tracker = SeriesBuilder(), DeltaTracker()
        series = self.series(make, builder, [5_000_000], 1)
        tracker.acknowledge(series)
        assert [item.name for item in tracker.delta(self.series(make, builder, [5_000_000], 2))] == [semconv.SLO_TARGET]

    def test_a_new_start_begins_from_zero(self, make):
        builder, tracker = SeriesBuilder(), DeltaTracker()
        tracker.acknowledge(self.series(make, builder, [5_000_000] * 9, 1))
        again = tracker.delta(self.series(make, builder, [5_000_000] * 2, 1, start=make.START + 77))
        assert (again[0].buckets.count, again[0].start_unix_ns) == (2, make.START + 77)


def test_request_totals_are_exact_and_leave_out_what_has_no_edge():
    key = ClassKey("score", "v2", None)
    totals = ClassTotals(key, (20_000_000, 50_000_000), 100, 3, 800, 2, 0, 0, (7, 1), 0, 0, 0, 0)
    objectives = [
        Objective("score-p99", "score", 20_000_000, 0.99),
        Objective("score-p999", "score", 30_000_000, 0.999),
        Objective("other", "rank", 20_000_000, 0.99),
        Objective("model", "score", 50_000_000, 0.99, model="v1"),
    ]
    found = [(item.name, item.value, dict(item.attributes)) for item in request_totals([totals], objectives) if item.monotonic]
    base = {"inferscope.request": "score", "inferscope.model": "v2"}
    assert found == [
        ("inferscope.requests", 97, base),
        ("inferscope.requests", 3, {**base, "error.type": "_OTHER"}),
        ("inferscope.items", 800, base),
        ("inferscope.profiled", 2, base),
        ("inferscope.slo.violations", 7, {**base, "inferscope.slo": "score-p99"}),
    ]
    targets = [item.value for item in request_totals([], objectives)]
    assert targets == [0.02, 0.03, 0.02, 0.05]


class TestJson:
    """Google's own JSON reader accepts the lines and gives the same message as the protobuf."""

    def read(self, line, kind):
        json_format = pytest.importorskip("google.protobuf.json_format")
        return json_format.Parse(line, kind())

    def test_metrics(self, make):
        source = make.batch(
            make.distribution([0, 9_000_000, 11_000_000]),
            totals=[
                Total(semconv.REQUESTS, 2**53 + 1),
                Total(semconv.SLO_TARGET, 0.02, monotonic=False),
                Total(semconv.CAPTURE_STALL, 0.5),
            ],
        )
        for builder in (SeriesBuilder(), SeriesBuilder(bounds={})):
            series = builder.build(source)
            line = jsonlines.metrics_line(series, source.resource, CUMULATIVE)
            assert "\n" not in line
            assert f'"{2**53 + 1}"' in line
            read = self.read(line, protobuf.ExportMetricsServiceRequest)
            assert read == protobuf.ExportMetricsServiceRequest.FromString(encode(series, source.resource))

    def test_logs(self, make):
        event = Event(
            "inferscope.slo.breach",
            5,
            'a "quoted"\nline',
            {"n": 2**60, "ok": True, "x": 0.5, "deep": [{"share": float("inf")}, None]},
            13,
            ("ab" * 16, "cd" * 8),
        )
        line = jsonlines.logs_line([event], {"service.name": "scoring", "absent": None})
        assert "\n" not in line
        assert json.loads(line)["resourceLogs"][0]["scopeLogs"][0]["logRecords"][0]["eventName"] == "inferscope.slo.breach"
        read = self.read(line, protobuf.ExportLogsServiceRequest)
        # JSON ids are hex in OTLP, base64 in plain protobuf JSON: compare everything else.
        mine = protobuf.ExportLogsServiceRequest.FromString(protobuf.logs_request([event], {"service.name": "scoring"}))
        for request in (read, mine):
            record = request.resource_logs[0].scope_logs[0].log_records[0]
            record.ClearField("trace_id")
            record.ClearField("span_id")
        assert read == mine
        assert '"traceId": "' + "ab" * 16 in json.dumps(json.loads(line))
