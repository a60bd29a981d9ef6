"""ClickHouse's engine behind its HTTP interface, on 127.0.0.1: `python _clickhouse.py PORT DIRECTORY`, with chdb on PYTHONPATH.

It has the tables that the OpenTelemetry Collector's exporter makes, as far as queries can see them.
"""

from __future__ import annotations

import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

_COMMON = """ResourceAttributes Map(LowCardinality(String), String), ScopeName String, ServiceName LowCardinality(String),
MetricName LowCardinality(String), MetricUnit String, Attributes Map(LowCardinality(String), String), StartTimeUnix DateTime, TimeUnix DateTime"""
_ORDER = "ENGINE = MergeTree PARTITION BY toDate(TimeUnix) ORDER BY (ServiceName, MetricName, toStartOfHour(TimeUnix), TimeUnix)"
TABLES = (
    f"CREATE TABLE otel_metrics_gauge ({_COMMON}, Value Float64, Flags UInt32) {_ORDER}",
    f"CREATE TABLE otel_metrics_sum ({_COMMON}, Value Float64, Flags UInt32, AggregationTemporality Int32, IsMonotonic Boolean) {_ORDER}",
    f"""CREATE TABLE otel_metrics_exponential_histogram ({_COMMON}, Count UInt64, Sum Float64, Scale Int32, ZeroCount UInt64,
    PositiveOffset Int32, PositiveBucketCounts Array(UInt64), NegativeOffset Int32, NegativeBucketCounts Array(UInt64),
    Flags UInt32, Min Float64, Max Float64, AggregationTemporality Int32) {_ORDER}""",
)


def main():
    from chdb import session

    port, directory = int(sys.argv[1]), sys.argv[2]
    engine, lock = session.Session(directory), threading.Lock()
    engine.query("CREATE DATABASE IF NOT EXISTS otel")
    engine.query("USE otel")
    for table in TABLES:
        engine.query(table)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_GET(self):
            self.answer(200, b"Ok.\n")

        def do_POST(self):
            text = self.rfile.read(int(self.headers.get("content-length", "0"))).decode()
            try:
                with lock:
                    found = engine.query(text, "JSONCompact").bytes()
                self.answer(200, found)
            except Exception as error:  # noqa: BLE001  (the engine's own errors are plain)
                self.answer(400, str(error).encode())

        def answer(self, status, body):
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    HTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main()
