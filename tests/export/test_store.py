"""The index of windows and events."""

from __future__ import annotations

import os
import sqlite3

import pytest

from inferscope.export import Event, Total, read_store
from inferscope.export.otlp.metrics import DeltaTracker, SeriesBuilder
from inferscope.export.store import Store
from inferscope.testing.receiver import merge, percentile


@pytest.fixture
def feed(make):
    builder, tracker = SeriesBuilder(), DeltaTracker()

    def tick(store, number, values, events=()):
        source = make.batch(make.distribution(values), totals=[Total("inferscope.requests", len(values))], tick=number)
        series = builder.build(source)
        store.add(tracker.delta(series), events)
        tracker.acknowledge(series)

    return tick


def test_windows_are_differences_and_come_back(tmp_path, feed, make):
    store = Store(tmp_path / "slot" / "index.sqlite")
    feed(store, 1, [9_000_000] * 90 + [50_000_000] * 10)
    feed(store, 2, [9_000_000] * 100 + [50_000_000] * 20)
    windows, events = read_store(tmp_path / "slot" / "index.sqlite", name="inferscope.request.duration")
    assert [window.count for window in windows] == [100, 20]
    assert windows[0].attributes == {"inferscope.request": "score"}
    assert windows[1].start_unix_ns == windows[0].end_unix_ns
    assert percentile(merge(window.buckets for window in windows), 0.99) == pytest.approx(0.05, rel=0.012)
    assert [window.total for window in store.windows(name="inferscope.requests")] == [100.0, 20.0]
    late, _ = read_store(tmp_path / "slot" / "index.sqlite", since_unix_ns=make.START + 15 * make.SECOND, name="inferscope.requests")
    assert len(late) == 1
    assert events == []
    store.close()


def test_events_come_back(tmp_path, feed):
    store = Store(tmp_path / "index.sqlite")
    feed(
        store, 1, [1_000_000], [Event("inferscope.slo.breach", 5, "broken", {"inferscope.incident.id": "i-1", "shares": [{"share": 0.5}]})]
    )
    store.add((), [Event("inferscope.incident", 7, "why", {"inferscope.incident.id": "i-1"})])
    _, events = read_store(tmp_path / "index.sqlite")
    assert [(event.name, event.incident, event.time_unix_ns, event.body) for event in events] == [
        ("inferscope.slo.breach", "i-1", 5, "broken"),
        ("inferscope.incident", "i-1", 7, "why"),
    ]
    assert events[0].attributes["shares"] == [{"share": 0.5}]
    assert [event.body for event in store.events("inferscope.incident")] == ["why"]
    store.close()


def test_windows_older_than_an_hour_become_minutes_and_lose_nothing(tmp_path, feed, make):
    store = Store(tmp_path / "index.sqlite")
    values = []
    for tick in range(1, 500, 1):
        values += [4_000_000 + tick * 10_000]
        feed(store, tick, values)
    windows = store.windows(name="inferscope.request.duration")
    assert sum(window.count for window in windows) == 499
    assert 360 <= len(windows) < 420
    coarse = [window for window in windows if window.count > 1]
    assert coarse[1].end_unix_ns - coarse[1].start_unix_ns == 60 * make.SECOND
    assert percentile(merge(window.buckets for window in windows), 0.5) == pytest.approx(6.5e-3, rel=0.012)
    assert sum(window.total for window in store.windows(name="inferscope.requests")) == 499
    store.close()


def test_the_file_stays_under_its_cap(tmp_path, feed):
    path = tmp_path / "index.sqlite"
    store = Store(path, max_bytes=200_000)
    values = []
    for tick in range(1, 1500, 7):
        values += [1_000_000 * (1 + tick % 900)] * 3
        feed(store, tick, values, [Event("inferscope.slo.breach", tick, "x" * 500, {})])
    assert path.stat().st_size < 500_000
    assert len(store.events()) == 215, "events stay"
    store.close()


@pytest.mark.parametrize("damage", ["garbage", "newer", "directory", "no directory", "truncated"])
def test_an_unusable_file_means_memory_and_one_line(tmp_path, feed, damage, lines):
    path = tmp_path / "index.sqlite"
    if damage == "garbage":
        path.write_bytes(b"no database at all" * 100)
    elif damage == "newer":
        with sqlite3.connect(path) as connection:
            connection.execute("PRAGMA user_version=99")
        connection.close()
    elif damage == "directory":
        path.mkdir()
    elif damage == "truncated":
        other = Store(path)
        for tick in range(1, 200):
            feed(other, tick, [1_000_000] * tick)
        other.close()
        data = path.read_bytes()
        path.write_bytes(data[:4096] + b"\0" * 8192)
    else:
        (tmp_path / "file").write_text("")
        path = tmp_path / "file" / "index.sqlite"
    store = Store(path)
    feed(store, 300, [9_000_000] * 300)
    feed(store, 301, [9_000_000] * 301)
    assert sum(window.count for window in store.windows(name="inferscope.request.duration")) in {102, 301}
    assert len(lines()) == 1
    assert "memory" in lines()[0]
    assert store.problem
    assert store.lost == 0
    store.close()
    if damage in {"garbage", "newer", "directory"}:
        assert read_store(path) == ([], [])


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_file_means_memory(tmp_path, feed, lines):
    path = tmp_path / "index.sqlite"
    path.write_bytes(b"")
    path.chmod(0o400)
    store = Store(path)
    feed(store, 1, [9_000_000])
    assert store.windows()
    assert len(lines()) == 1
    store.close()


def test_a_busy_file_costs_the_tick_not_the_file(tmp_path, feed, lines):
    path = tmp_path / "index.sqlite"
    store = Store(path)
    feed(store, 1, [9_000_000])
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    feed(store, 2, [9_000_000] * 2)
    other.execute("ROLLBACK")
    other.close()
    feed(store, 3, [9_000_000] * 3)
    assert store.problem is None
    assert store.lost == 2
    assert [window.count for window in store.windows(name="inferscope.request.duration")] == [1, 1]
    assert lines() == []
    store.close()


def test_files_are_the_owners_alone(tmp_path, feed):
    store = Store(tmp_path / "new" / "index.sqlite")
    feed(store, 1, [9_000_000])
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "new").iterdir()} == {0o600}
    store.close()


def test_a_forked_child_leaves_the_parents_file_alone(tmp_path, feed):
    store = Store(tmp_path / "index.sqlite")
    feed(store, 1, [9_000_000])
    child = os.fork()
    if child == 0:
        code = 1
        try:
            store.add((), [Event("child", 1, "must not appear", {})])
            store.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    feed(store, 2, [9_000_000] * 2)
    windows, events = read_store(tmp_path / "index.sqlite", name="inferscope.request.duration")
    assert [window.count for window in windows] == [1, 1]
    assert events == []
    store.close()


def test_an_absent_index_reads_as_empty(tmp_path):
    assert read_store(tmp_path / "none.sqlite") == ([], [])
    assert not (tmp_path / "none.sqlite").exists()
