"""`inferscope replay`: what was kept arrives later, once."""

from __future__ import annotations

import gzip
import json

import pytest

from inferscope import cli, semconv
from inferscope.export import Event, Exporter, Total
from inferscope.export.replay import newest_unix_ns, to_protobuf
from inferscope.export.ring import Ring
from inferscope.testing.receiver import OtlpReceiver
from inferscope.types import ClassKey, Column, Reason, RequestRecord, SpanRecord

MS = 1_000_000
COLUMNS = (Column("unattributed", "unattributed"), Column("other", "other"), Column("stage", "forward"))


def slow(number, trace=None):
    spans = (SpanRecord(2, 6 * MS, 9 * MS, -1, 7, 0, 0),)
    key = ClassKey("score", None, None)
    return RequestRecord(
        number, key, 5 * MS, 30 * MS, 9, Reason.BREACH, 7, None, 1, None, None, None, None, False, (0, 0, 30 * MS), spans, trace
    )


@pytest.fixture
def kept(make, tmp_path):
    """Two workers that ran without a receiver: three windows, an event and a slow request each."""

    def fill(root=tmp_path, ticks=(1, 2, 3), slots=(0, 1)):
        for slot in slots:
            exporter = Exporter(root / "scoring" / str(slot), environ={})
            for tick in ticks:
                exporter.retain([slow(tick, ("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"))], COLUMNS)
                exporter.event(Event("inferscope.slo.breach", make.START + tick * 10 * make.SECOND, "broken", {"tick": tick}))
                exporter.offer(make.batch(make.distribution([9 * MS] * 10 * tick), totals=[Total(semconv.REQUESTS, 10 * tick)], tick=tick))
                assert exporter.run_once()
            exporter.shutdown()
        return root

    fill()
    return fill


@pytest.fixture
def replay(capsys, tmp_path):
    def replay(url, *words):
        status = cli.main(["replay", "--state-dir", str(tmp_path), "--to", url, "--json", *map(str, words)])
        out = capsys.readouterr().out
        return status, {(row["slot"], row["signal"]): row for row in json.loads(out)["rings"]} if out else {}

    return replay


def test_everything_arrives_as_it_was_and_only_once(kept, replay, make, tmp_path):
    with OtlpReceiver() as receiver:
        status, rows = replay(receiver.url)
        assert status == 0
        assert {key: row["sent"] for key, row in rows.items()} == {
            (slot, signal): 3 for slot in (0, 1) for signal in ("metrics", "logs", "traces")
        }
        points = receiver.metrics(semconv.REQUEST_DURATION)
        assert [point.buckets.count for point in points] == [10, 20, 30] * 2
        assert [point.unix_ns for point in points[:3]] == [make.START + tick * 10 * make.SECOND for tick in (1, 2, 3)]
        assert points[0].resource["service.name"] == "scoring"
        assert points[0].exemplars[0].trace[0] == "0af7651916cd43dd8448eb211c80319c"
        assert [record.attributes["tick"] for record in receiver.logs("inferscope.slo.breach")] == [1, 2, 3] * 2
        assert {span.trace_id for span in receiver.spans()} == {"0af7651916cd43dd8448eb211c80319c"}
        count = len(receiver.requests())
        assert replay(receiver.url)[1][0, "metrics"] == {**rows[0, "metrics"], "sent": 0, "skipped": 3}
        assert len(receiver.requests()) == count, "nothing is sent twice"
        kept(ticks=(4,))
        assert replay(receiver.url)[1][0, "metrics"]["sent"] == 1
        assert replay(receiver.url, "--again", "--signal", "logs")[1][0, "logs"]["sent"] == 4
    with OtlpReceiver() as another:
        assert replay(another.url)[1][0, "metrics"]["sent"] == 4, "another receiver has its own account"


def test_times_services_and_signals_can_be_chosen(kept, replay, make):
    since = (make.START + 15 * make.SECOND) / 1e9
    with OtlpReceiver() as receiver:
        _, rows = replay(receiver.url, "--signal", "metrics", "--slot", 1, "--since", f"{since:.0f}", "--until", f"{since + 10:.0f}")
        assert rows == {(1, "metrics"): {**rows[1, "metrics"], "sent": 1, "skipped": 2}}
        assert [point.value for point in receiver.metrics(semconv.REQUESTS)] == [20]
        assert replay(receiver.url, "--service", "other") == (0, {})


def test_a_dead_receiver_is_said_and_the_replay_goes_on_later(kept, replay, monkeypatch):
    monkeypatch.setattr("inferscope.export.replay._TRIES", 1)
    with OtlpReceiver("refuse") as receiver:
        status, rows = replay(receiver.url)
        assert status == 1
        assert rows[0, "metrics"]["why"].startswith("the receiver does not answer")
        assert rows[1, "metrics"]["why"] == rows[0, "metrics"]["why"], "the next worker's ring is not tried"
        receiver.mode = "ok"
        status, rows = replay(receiver.url)
        assert status == 0
        assert rows[1, "traces"]["sent"] == 3


def test_a_receiver_without_a_signal_gets_the_others(kept, replay):
    with OtlpReceiver("reject") as receiver:
        status, rows = replay(receiver.url, "--signal", "traces")
    assert status == 1
    assert rows[0, "traces"]["refused"] == 3
    assert "does not take traces (HTTP 400)" in rows[0, "traces"]["why"]


def test_torn_lines_and_cut_parts_cost_themselves_only(kept, replay, tmp_path):
    directory = tmp_path / "scoring" / "0"
    whole = (directory / "metrics.jsonl").read_bytes()
    lines = whole.splitlines(keepends=True)
    cut = gzip.compress(b"".join(lines[:2]))
    (directory / "metrics-00000000000000000001.jsonl.gz").write_bytes(cut[:-20])
    (directory / "metrics-00000000000000000002.jsonl.gz").write_bytes(gzip.compress(lines[1]))
    (directory / "metrics.jsonl").write_bytes(
        lines[2] + b'{"resourceMetrics":[{"re\n' + b'{"resourceMetrics": 7, "timeUnixNano": "4000000000000000000"}\n'
    )
    with OtlpReceiver() as receiver:
        status, rows = replay(receiver.url, "--signal", "metrics", "--slot", 0)
        assert status == 0
        assert rows[0, "metrics"]["damaged"] == 3
        values = {point.value for point in receiver.metrics(semconv.REQUESTS)}
    assert {20, 30} <= values


def test_rotated_parts_are_read_in_order(replay, tmp_path):
    ring = Ring(tmp_path / "scoring" / "0", "logs", total_bytes=1 << 20, part_bytes=400)
    for tick in range(12):
        record = {"timeUnixNano": str(1000 + tick), "body": {"stringValue": f"{tick} {'x' * 150}"}}
        ring.append(json.dumps({"resourceLogs": [{"scopeLogs": [{"logRecords": [record]}]}]}))
    ring.close()
    with OtlpReceiver() as receiver:
        assert replay(receiver.url)[0] == 0
        assert [record.unix_ns for record in receiver.logs()] == list(range(1000, 1012))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--to", "collector:4318"), "an OTLP endpoint"),
        (("--to", "ftp://x"), "an OTLP endpoint"),
        (("--to", "http://127.0.0.1:1", "--since", "yesterday"), "is no time"),
    ],
)
def test_wrong_usage_is_one_line(words, said, capsys, tmp_path):
    with pytest.raises(SystemExit) as left:
        cli.main(["replay", "--state-dir", str(tmp_path), *words])
    assert left.value.code == 64
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_times_are_read_as_people_write_them():
    from inferscope.cli.replay import moment

    assert moment("1714564800") == moment("2024-05-01T12:00") == moment("2024-05-01T14:00+02:00") == moment("2024-05-01T12:00:00Z")
    assert moment("2h") - moment("1h") == pytest.approx(-3600e9, abs=1e9)


def test_a_request_of_another_kind_is_an_error():
    with pytest.raises(ValueError, match="resourceMetrics"):
        to_protobuf("metrics", {"resourceMetrics": 7})
    with pytest.raises(ValueError, match="hex"):
        to_protobuf("traces", {"resourceSpans": [{"scopeSpans": [{"spans": [{"traceId": "zz"}]}]}]})
    assert newest_unix_ns({"a": [{"timeUnixNano": "5", "startTimeUnixNano": "9"}, {"timeUnixNano": "x"}]}) == 5


def test_an_unwritable_state_directory_replays_without_memory(kept, replay, tmp_path):
    (tmp_path / ".replayed").write_text("in the way")
    with OtlpReceiver() as receiver:
        assert replay(receiver.url)[0] == replay(receiver.url)[0] == 0
        assert len(receiver.metrics(semconv.REQUESTS)) == 12
