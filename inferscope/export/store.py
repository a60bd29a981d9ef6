"""The SQLite index of what happened: windows of each series, breaches and incidents; every command-line verb reads it.

A window is the difference since the previous one, as exponential buckets. Windows older than an hour are added up to minutes, and the
oldest go when the file outgrows its cap; breaches and incidents stay. A file that cannot be written, is damaged or comes from a newer
version costs one line, and the index lives in memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from inferscope import guard, semconv
from inferscope.export.otlp.buckets import Buckets, combine
from inferscope.export.otlp.series import Slices

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from inferscope.export.otlp.logs import Event
    from inferscope.export.otlp.series import Series

__all__ = ["SCHEMA", "STORE_BYTES", "Store", "StoredEvent", "StoredWindow", "read_store"]

SCHEMA: Final = 1
STORE_BYTES: Final = 64 * 1024 * 1024
FINE_NS: Final = 3600 * 1_000_000_000
"""Age up to which windows stay as they came."""
MINUTE_NS: Final = 60 * 1_000_000_000

_MEMORY_BYTES: Final = 8 * 1024 * 1024
_TABLES: Final = """
CREATE TABLE IF NOT EXISTS series(id INTEGER PRIMARY KEY, name TEXT NOT NULL, attributes TEXT NOT NULL, UNIQUE(name, attributes));
CREATE TABLE IF NOT EXISTS windows(
  series INTEGER NOT NULL, start_ns INTEGER NOT NULL, end_ns INTEGER NOT NULL, count INTEGER NOT NULL, total REAL NOT NULL,
  scale INTEGER, offset INTEGER NOT NULL, zero INTEGER NOT NULL, buckets BLOB, bounds TEXT, coarse INTEGER NOT NULL DEFAULT 0);
CREATE INDEX IF NOT EXISTS windows_by_time ON windows(end_ns);
CREATE TABLE IF NOT EXISTS events(id INTEGER PRIMARY KEY, name TEXT NOT NULL, incident TEXT, time_ns INTEGER NOT NULL,
  body TEXT NOT NULL, attributes TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS events_by_time ON events(name, time_ns);
"""


@dataclass(frozen=True, slots=True)
class StoredWindow:
    """One series in one window."""

    name: str
    attributes: dict[str, Any]
    start_unix_ns: int
    end_unix_ns: int
    count: int
    total: float
    """Sum in seconds, or a counter's gain."""
    buckets: Buckets | None


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """A breach, capture or incident."""

    name: str
    incident: str | None
    time_unix_ns: int
    body: str
    attributes: dict[str, Any]


class Store:
    """The writer; used by the export thread alone.

    Args:
        path: The file; None keeps the index in memory.
        max_bytes: Cap of the file; in memory 8 MiB count.
    """

    def __init__(self, path: Path | None, *, max_bytes: int = STORE_BYTES) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._connection: sqlite3.Connection | None = None
        self._pid = os.getpid()
        self._ids: dict[tuple[str, Any], int] = {}
        self._rolled_ns = 0
        self.lost = 0
        self.problem: str | None = None
        """Why the index is in memory."""

    def add(self, windows: Iterable[Series], events: Iterable[Event] = (), slices: Slices | None = None) -> None:
        """Insert one tick's windows (differences, see `DeltaTracker`) and events in one transaction; never raises for the disk's reasons."""
        if self._pid != os.getpid():
            return
        windows, events, slices = list(windows), list(events), slices or Slices()
        for _ in range(2):
            try:
                connection = self._open()
                with connection:
                    self._insert(connection, windows, events, slices)
                self._maintain(connection, max((item.now_unix_ns for item in windows), default=0))
            except (sqlite3.Error, OSError) as error:
                if "locked" in str(error):
                    break  # another process has the file for a moment: this tick is lost, the file is not
                self._fall_back(error)
            else:
                return
        self.lost += len(windows) + len(events)

    def _insert(self, connection: sqlite3.Connection, windows: list[Series], events: list[Event], slices: Slices) -> None:
        for item in windows:  # one by one: executemany would hold the interpreter for all of them
            connection.execute("INSERT INTO windows VALUES(?,?,?,?,?,?,?,?,?,?,0)", (self._series(connection, item), *_row(item)))
            slices.step()
        connection.executemany(
            "INSERT INTO events(name, incident, time_ns, body, attributes) VALUES(?,?,?,?,?)",
            [
                (
                    event.name,
                    event.attributes.get("inferscope.incident.id"),
                    event.time_unix_ns,
                    event.body,
                    json.dumps(event.attributes, default=str),
                )
                for event in events
            ],
        )

    def _series(self, connection: sqlite3.Connection, item: Series) -> int:
        known = self._ids.get(item.key)
        if known is None:
            identity = (item.name, json.dumps(dict(item.attributes), sort_keys=True))
            connection.execute("INSERT OR IGNORE INTO series(name, attributes) VALUES(?,?)", identity)
            known = int(connection.execute("SELECT id FROM series WHERE name=? AND attributes=?", identity).fetchone()[0])
            self._ids[item.key] = known
        return known

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            self._connection = _connect(self._path)
            self._ids.clear()
        return self._connection

    def _fall_back(self, error: Exception) -> None:
        if self._path is not None:
            self.problem = f"index {self._path} cannot be used ({error})"
            guard.log_once("store", f"{self.problem}; it is kept in memory until the process ends")
            self._path = None
        self._ids.clear()
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):
                connection.close()

    def _maintain(self, connection: sqlite3.Connection, now_ns: int) -> None:
        """Once a minute: roll up, and make room."""
        if now_ns - self._rolled_ns < MINUTE_NS:
            return
        self._rolled_ns = now_ns
        with connection:
            _roll_up(connection, (now_ns - FINE_NS) // MINUTE_NS * MINUTE_NS)
        limit = self._max_bytes if self._path is not None else min(self._max_bytes, _MEMORY_BYTES)
        _shrink(connection, limit)

    def windows(self, since_unix_ns: int = 0, until_unix_ns: int = 1 << 62, name: str | None = None) -> list[StoredWindow]:
        """What `read_store` would read, from this process's own connection."""
        return [] if self._connection is None else list(_windows(self._connection, since_unix_ns, until_unix_ns, name))

    def events(self, name: str | None = None) -> list[StoredEvent]:
        """Events so far, oldest first."""
        return [] if self._connection is None else list(_events(self._connection, name))

    def close(self) -> None:
        """Close the file. In a forked child the parent's connection is kept and never used: closing it would disturb the parent's log."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        if self._pid != os.getpid():
            _LEFT_ALONE.append(connection)
            return
        with contextlib.suppress(sqlite3.Error):
            connection.close()


_LEFT_ALONE: Final[list[sqlite3.Connection]] = []


def _connect(path: Path | None) -> sqlite3.Connection:
    if path is not None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # SQLite makes its side files with the database's own mode.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
    # The export thread writes; shutdown() may come from another one, never at the same time.
    connection = sqlite3.connect(":memory:" if path is None else path, timeout=1.0, check_same_thread=False)
    try:
        version = int(connection.execute("PRAGMA user_version").fetchone()[0])
        if version > SCHEMA:
            raise sqlite3.DatabaseError(f"it has schema {version}, this version reads up to {SCHEMA}")
        if version == 0:
            connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.execute("PRAGMA journal_size_limit=4194304")
        connection.executescript(_TABLES)
        connection.execute(f"PRAGMA user_version={SCHEMA}")
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def _row(item: Series) -> tuple[Any, ...]:
    buckets = item.buckets
    if buckets is None:
        return item.start_unix_ns, item.now_unix_ns, 0, float(item.value), None, 0, 0, None, None
    bounds = json.dumps(buckets.bounds) if buckets.bounds else None
    return (
        item.start_unix_ns,
        item.now_unix_ns,
        buckets.count,
        buckets.total,
        buckets.scale,
        buckets.offset,
        buckets.zero_count,
        _pack(buckets),
        bounds,
    )


def _pack(buckets: Buckets) -> bytes:
    return zlib.compress(buckets.counts.astype("<i8").tobytes(), 1)


def _unpack(row: tuple[Any, ...]) -> Buckets | None:
    count, total, scale, offset, zero, blob, bounds = row
    if blob is None:
        return None
    counts = np.frombuffer(zlib.decompress(blob), dtype="<i8").astype(np.int64)
    limits = tuple(float(bound) for bound in json.loads(bounds)) if bounds else ()
    return Buckets(count=count, total=total, offset=offset, counts=counts, zero_count=zero, scale=scale, bounds=limits)


def _roll_up(connection: sqlite3.Connection, before_ns: int) -> None:
    """Add up the windows before `before_ns` by series and minute."""
    fine = connection.execute(
        "SELECT rowid, series, start_ns, end_ns, count, total, scale, offset, zero, buckets, bounds FROM windows"
        " WHERE coarse=0 AND end_ns<? ORDER BY end_ns LIMIT 1000",
        (before_ns,),
    ).fetchall()
    gauges = {row[0] for row in connection.execute("SELECT id FROM series WHERE name=?", (semconv.SLO_TARGET,))}
    groups: dict[tuple[Any, ...], list[tuple[Any, ...]]] = {}
    slices = Slices()
    for row in fine:
        groups.setdefault((row[1], row[3] // MINUTE_NS, row[6], row[10]), []).append(row)
    for (series, _, scale, bounds), rows in groups.items():
        merged: Buckets | None = None
        for row in rows:
            slices.step()
            found = _unpack(row[4:])
            merged = found if merged is None or found is None else combine(merged, found)
        total = merged.total if merged else rows[-1][5] if series in gauges else sum(row[5] for row in rows)
        count, offset, zero = (merged.count, merged.offset, merged.zero_count) if merged else (0, 0, 0)
        connection.execute(
            "INSERT INTO windows VALUES(?,?,?,?,?,?,?,?,?,?,1)",
            (
                series,
                min(row[2] for row in rows),
                max(row[3] for row in rows),
                count,
                total,
                scale,
                offset,
                zero,
                _pack(merged) if merged else None,
                bounds,
            ),
        )
    connection.executemany("DELETE FROM windows WHERE rowid=?", [(row[0],) for row in fine])


def _shrink(connection: sqlite3.Connection, limit: int) -> None:
    page = int(connection.execute("PRAGMA page_size").fetchone()[0])
    for _ in range(8):
        used = (
            int(connection.execute("PRAGMA page_count").fetchone()[0]) - int(connection.execute("PRAGMA freelist_count").fetchone()[0])
        ) * page
        rows = int(connection.execute("SELECT count(*) FROM windows").fetchone()[0])
        if used <= limit or not rows:
            break
        with connection:
            connection.execute(
                "DELETE FROM windows WHERE rowid IN (SELECT rowid FROM windows ORDER BY end_ns LIMIT ?)", (max(rows // 8, 1),)
            )
    connection.execute("PRAGMA incremental_vacuum").fetchall()


def _windows(connection: sqlite3.Connection, since: int, until: int, name: str | None) -> Iterator[StoredWindow]:
    query = (
        "SELECT name, attributes, start_ns, end_ns, count, total, scale, offset, zero, buckets, bounds FROM windows JOIN series ON series.id=series"
        " WHERE end_ns>? AND start_ns<? AND (? IS NULL OR name=?) ORDER BY end_ns, windows.rowid"
    )
    for row in connection.execute(query, (since, until, name, name)):
        yield StoredWindow(row[0], json.loads(row[1]), row[2], row[3], row[4], row[5], _unpack(row[4:]))


def _events(connection: sqlite3.Connection, name: str | None) -> Iterator[StoredEvent]:
    query = "SELECT name, incident, time_ns, body, attributes FROM events WHERE (? IS NULL OR name=?) ORDER BY time_ns, id"
    for row in connection.execute(query, (name, name)):
        yield StoredEvent(row[0], row[1], row[2], row[3], json.loads(row[4]))


def read_store(
    path: Path, *, since_unix_ns: int = 0, until_unix_ns: int = 1 << 62, name: str | None = None
) -> tuple[list[StoredWindow], list[StoredEvent]]:
    """Windows that overlap the time range, and all events of `name` (None: any), from another process's index.

    A file that is absent, damaged or newer gives two empty lists: reading is for reports, and the incidents on disk stand by themselves.
    """
    try:
        connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=1.0)
        try:
            if int(connection.execute("PRAGMA user_version").fetchone()[0]) > SCHEMA:
                return [], []
            return list(_windows(connection, since_unix_ns, until_unix_ns, name)), list(_events(connection, name))
        finally:
            connection.close()
    except (sqlite3.Error, ValueError, zlib.error):
        return [], []
