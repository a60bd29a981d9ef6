# ruff: noqa: S608  (every value goes through `_text`, names are constants)
"""ClickHouse with the tables of the OpenTelemetry Collector's exporter: exact over restarts, because every point carries its start.

A series is one lifetime: replica, attributes and `StartTimeUnix`. What it gained in an interval is its last point less the last one before the
interval; ClickHouse adds that over all series, and over scales by shifting indexes.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode, urlsplit

import numpy as np

from inferscope import semconv
from inferscope.export.fleet.source import LOOKBACK_S, Key, Scope, ask
from inferscope.export.otlp.buckets import Buckets, merge

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ClickHouse"]

_RESOURCE: Final = frozenset({semconv.SERVICE_NAME, semconv.SERVICE_INSTANCE_ID, semconv.SERVICE_VERSION})
_LIFETIME: Final = "ResourceAttributes['service.instance.id'], mapSort(Attributes), StartTimeUnix"
_CUMULATIVE: Final = 2


def _text(value: str) -> str:
    """A string literal."""
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


class ClickHouse:
    """Over its HTTP interface.

    Args:
        url: Server, with the database as the path (default `default`), and user and password if it asks for them.
    """

    name = "clickhouse"

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._database = parts.path.strip("/") or "default"
        self._url = parts._replace(path="/", query=urlencode({"database": self._database})).geturl()
        self.notes: list[str] = []

    def query(self, text: str) -> list[list[Any]]:
        """Rows of a query.

        Raises:
            InferscopeError: It failed.
        """
        # 64-bit numbers as numbers: as strings they would have to be told from strings.
        answer = ask(self._url, body=f"{text} SETTINGS output_format_json_quote_64bit_integers=0 FORMAT JSONCompact".encode())
        found: list[list[Any]] = json.loads(answer)["data"]
        return found

    @staticmethod
    def _column(attribute: str) -> str:
        held = "ResourceAttributes" if attribute in _RESOURCE else "Attributes"
        return f"{held}[{_text(attribute)}]"

    def _where(self, metric: str, scope: Scope) -> str:
        chosen = [
            f"MetricName = {_text(metric)}",
            f"TimeUnix > {_time(scope.from_unix_s - LOOKBACK_S)}",
            f"TimeUnix <= {_time(scope.to_unix_s)}",
        ]
        return " AND ".join(chosen + [f"{self._column(key)} = {_text(value)}" for key, value in scope.where.items()])

    def _gained(self, table: str, value: str, counted: str, metric: str, by: Sequence[str], scope: Scope) -> str:
        """Rows (group…, value, sign): each lifetime's last value, its value before the interval with -1, and deltas as they are."""
        groups = [f"{self._column(each)} AS g{position}" for position, each in enumerate(by)]
        names = [f"g{position}" for position in range(len(by))]
        begin, chosen = _time(scope.from_unix_s), self._where(metric, scope)
        columns = "".join(f"{name}, " for name in names)
        # Times are whole seconds in newer tables: of two points in one second the one that counted more came later.
        order = f"TimeUnix, {counted}"
        cumulative = (
            f"SELECT {columns}pair.1 AS held, pair.2 AS sign FROM (SELECT {''.join(f'{group}, ' for group in groups)}"
            f"argMax({value}, ({order})) AS last, argMaxIf({value}, ({order}), TimeUnix <= {begin}) AS first,"
            f" countIf(TimeUnix <= {begin}) AS before FROM {table} WHERE {chosen} AND AggregationTemporality = {_CUMULATIVE}"
            f" GROUP BY {columns}{_LIFETIME} HAVING max(TimeUnix) > {begin})"
            " ARRAY JOIN if(before > 0, [(last, toInt64(1)), (first, toInt64(-1))], [(last, toInt64(1))]) AS pair"
        )
        deltas = (
            f"SELECT {''.join(f'{group}, ' for group in groups)}{value} AS held, toInt64(1) AS sign FROM {table}"
            f" WHERE {chosen} AND AggregationTemporality != {_CUMULATIVE} AND TimeUnix > {begin}"
        )
        return f"({cumulative} UNION ALL {deltas})"

    def counters(self, metric: str, by: Sequence[str], scope: Scope) -> dict[Key, float]:
        """See `Source`."""
        names = "".join(f"g{position}, " for position in range(len(by)))
        grouped = f" GROUP BY {names[:-2]}" if by else ""
        rows = self.query(
            f"SELECT {names}sum(held * sign) FROM {self._gained('otel_metrics_sum', 'Value', 'Value', metric, by, scope)}{grouped}"
        )
        return {tuple(map(str, row[:-1])): float(row[-1]) for row in rows}

    def gauges(self, metric: str, by: Sequence[str], scope: Scope) -> dict[Key, float]:
        """See `Source`."""
        names = [f"g{position}" for position in range(len(by))]
        groups = "".join(f"{self._column(each)} AS g{position}, " for position, each in enumerate(by))
        inner = (
            f"SELECT {groups}argMax(Value, TimeUnix) AS last FROM otel_metrics_gauge WHERE {self._where(metric, scope)}"
            f" AND TimeUnix > {_time(scope.from_unix_s)} GROUP BY {''.join(f'{name}, ' for name in names)}{_LIFETIME}"
        )
        rows = self.query(f"SELECT {''.join(f'{name}, ' for name in names)}max(last) FROM ({inner}) GROUP BY {', '.join(names)}")
        return {tuple(map(str, row[:-1])): float(row[-1]) for row in rows}

    def distributions(self, metric: str, by: Sequence[str], scope: Scope) -> dict[Key, Buckets]:
        """See `Source`."""
        held = "tuple(Scale, PositiveOffset, PositiveBucketCounts, ZeroCount, Sum)"
        gained = self._gained("otel_metrics_exponential_histogram", held, "Count", metric, by, scope)
        names = "".join(f"g{position}, " for position in range(len(by)))
        rows = self.query(
            f"SELECT {names}held.1 AS scale, sumMap(arrayMap(i -> toInt32(held.2 + i - 1), arrayEnumerate(held.3)),"
            f" arrayMap(c -> toInt64(c) * sign, held.3)) AS buckets, sum(toInt64(held.4) * sign), sum(held.5 * sign)"
            f" FROM {gained} GROUP BY {names}scale"
        )
        points: dict[Key, list[Buckets]] = {}
        for row in rows:
            scale, (indexes, counts), zero, total = row[len(by) :]
            points.setdefault(tuple(map(str, row[: len(by)])), []).append(_buckets(int(scale), indexes, counts, int(zero), float(total)))
        return {key: merge(held_) for key, held_ in points.items()}


def _time(unix_s: float) -> str:
    return f"fromUnixTimestamp64Nano(toInt64({round(unix_s * 1e9)}))"


def _buckets(scale: int, indexes: Sequence[int], counts: Sequence[int], zero: int, total: float) -> Buckets:
    if not indexes:
        return Buckets(zero, total, 0, np.zeros(0, np.int64), zero, scale=scale)
    dense = np.zeros(max(indexes) - min(indexes) + 1, dtype=np.int64)
    np.add.at(dense, np.asarray(indexes) - min(indexes), np.asarray(counts, dtype=np.int64))
    return Buckets(int(dense.sum()) + zero, total, min(indexes), dense, zero, scale=scale)
