"""What the export costs and how true it is: interpreter holds, percentile error, fleet merge, exit under a dead receiver, bytes.

The receiver runs in a process of its own. A heartbeat does a short operation without the interpreter lock and asks for the CPU time that
the exporting thread burnt until it had the lock back, and for the wall time; the smaller one is the hold. Wall time alone would measure
the machine's other work, and CPU time alone is booked late by some kernels (a thread that compresses without the lock shows as 4 ms).
Each export is paired with a model thread that spends the same CPU time in slices of 0.1 ms; the row is the median of the differences
between their longest holds and holds on its upper 95 % bound.
"""

from __future__ import annotations

import gzip
import hashlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import _away
import _harness
import _outages
import numpy as np
from _heartbeat import Heartbeat, meter_row, model

from inferscope.export import ExportBatch, Exporter, Total
from inferscope.export.otlp.buckets import exponential, hdr_bounds
from inferscope.export.otlp.metrics import SeriesBuilder, encode
from inferscope.pace import PAUSE_S
from inferscope.testing.receiver import OtlpReceiver, merge, percentile
from inferscope.types import ClassKey, Column, Distribution, Reason, RequestRecord, SpanRecord

QUANTILES = (0.5, 0.95, 0.99, 0.999)
SAMPLES = {
    "lognormal": lambda rng, n: rng.lognormal(np.log(9e6), 0.35, n),
    "wide": lambda rng, n: rng.lognormal(np.log(9e6), 0.8, n),
    "bimodal": lambda rng, n: np.where(rng.random(n) < 0.015, rng.normal(46e6, 3e6, n), rng.normal(9e6, 1e6, n)),
    "cache": lambda rng, n: np.where(rng.random(n) < 0.7, rng.normal(5e4, 5e3, n), rng.normal(2e7, 2e6, n)),
    "pareto": lambda rng, n: 1e6 * (1 + rng.pareto(1.5, n)),
    "tight": lambda rng, n: rng.normal(17e6, 3e5, n),
}


def sample(name, rng, n):
    return np.clip(SAMPLES[name](rng, n), 2_000, 59e9).astype(np.int64)


def distribution(values, kind="request", labels=("score", "", "")):
    digits, lowest, length = (3, 1000, 18432) if kind == "request" else (2, 1, 3840)
    low, _ = hdr_bounds(digits, lowest, length)
    counts = np.bincount(np.searchsorted(low, values, side="right") - 1, minlength=length).astype(np.int64)
    return Distribution(kind, labels, digits, lowest, counts, len(values), int(values.sum()), 0)


def batch(series, rng, tick):
    """A service with `series` series: one in ten is a request class, the rest stages and locks."""
    names = list(SAMPLES)
    found = []
    for i in range(series - series // 10):
        request = i < series // 10
        kind = "request" if request else ("stage", "lock.wait", "stage")[i % 3]
        labels = (f"request{i}", "", "") if request else (f"name{i}",)
        found.append(distribution(sample(names[i % len(names)], rng, 2000) + tick, kind, labels))
    totals = tuple(Total("inferscope.requests", tick * 1000 + i, (("inferscope.request", f"request{i}"),)) for i in range(series // 10))
    return ExportBatch(tuple(found), totals, 1, 1_700_000_000_000_000_000 + tick * 10**10, {"service.name": "bench"})


COLUMNS = (Column("unattributed", "unattributed"), Column("other", "other"), *(Column("stage", f"stage{i}") for i in range(12)))


def slow_requests(tick):
    """The most that one export sends as spans: 64 requests of 12 stages each."""
    spans = tuple(SpanRecord(2 + i, i * 1000, i * 1000 + 900, i - 1, 7, 0, 0) for i in range(12))
    vector, key = (100, 0, *([2_500_000] * 12)), ClassKey("request0", None, None)
    return [
        RequestRecord(
            tick * 1000 + i,
            key,
            i,
            30_000_100 + i,
            9,
            Reason.BREACH,
            7,
            None,
            1,
            None,
            None,
            None,
            None,
            truncated=False,
            vector=vector,
            spans=spans,
        )
        for i in range(64)
    ]


def upper_bound(values, rng):
    """One-sided 95 % bound of the median, by bootstrap."""
    values = np.asarray(values)
    return float(np.quantile(np.median(rng.choice(values, (2000, len(values))), axis=1), 0.95))


def holds(series, cycles, url, traced=None):
    """Longest hold of each export and of the model thread that ran beside it, in interleaved pairs, and the CPU time of one export."""
    rng = np.random.default_rng(series)
    batches = [batch(series, rng, tick) for tick in range(1, 9)]
    position, cpu = [0], []
    with tempfile.TemporaryDirectory() as directory, Heartbeat() as beat:
        # Compression needs no interpreter lock, but on a busy machine its CPU time cannot be told from a hold: it is left out here.
        exporter = Exporter(Path(directory), endpoint=url, series_limit=500, environ={"OTEL_EXPORTER_OTLP_COMPRESSION": "none"})

        def work():
            begun = time.thread_time_ns()
            position[0] += 1
            chosen = batches[position[0] % len(batches)]
            if traced:
                exporter.retain(traced, COLUMNS)
            exporter.offer(ExportBatch(chosen.distributions, chosen.totals, position[0], chosen.now_unix_ns, chosen.resource))
            exporter.run_once()
            cpu.append((time.thread_time_ns() - begun) / 1e6)

        work()
        work()
        pairs = [(beat.longest_hold(work), beat.longest_hold(lambda: model(cpu[-1]))) for _ in range(cycles)]
        sent = exporter.status()["targets"]["metrics"]["sent"]
        exporter.shutdown()
    assert sent >= 0.8 * (cycles + 2), (
        f"{sent} of {cycles + 2} exports arrived"
    )  # a busy machine may keep the receiver from answering in 2 s
    return pairs, statistics.median(cpu)


def sdk_metrics(series, rng):
    """The same series through OpenTelemetry's own instruments, with its exponential aggregation."""
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.metrics.view import ExponentialBucketHistogramAggregation, View

    reader = InMemoryMetricReader()
    view = View(instrument_name="*", aggregation=ExponentialBucketHistogramAggregation())
    provider = MeterProvider([reader], views=[view], shutdown_on_exit=False)
    histogram = provider.get_meter("bench").create_histogram("inferscope.stage.duration", "s")
    names = list(SAMPLES)
    for i in range(series):
        for value in sample(names[i % len(names)], rng, 500).tolist():
            histogram.record(value / 1e9, {"inferscope.stage": f"name{i}", "inferscope.clock": "host"})
    data = reader.get_metrics_data()
    provider.shutdown()
    return data


def compare_sdk(cycles):
    """Bytes and holds of the SDK's encoding of 100 series beside ours of the same values."""
    from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics

    data = sdk_metrics(100, np.random.default_rng(4))
    theirs = encode_metrics(data).SerializeToString()
    rng, names = np.random.default_rng(4), list(SAMPLES)
    stages = [distribution(sample(names[i % len(names)], rng, 500), "stage", (f"name{i}",)) for i in range(100)]
    source = ExportBatch(tuple(stages), (), 1, 2, {"service.name": "bench"})
    ours = encode(SeriesBuilder(limit=500).build(source), source.resource)
    with Heartbeat() as beat:
        held = [beat.longest_hold(lambda: encode_metrics(data).SerializeToString()) for _ in range(cycles)]
    return len(gzip.compress(ours, 6)) / 100, len(gzip.compress(theirs, 6)) / 100, statistics.median(held)


def percentile_errors(n):
    """Worst relative error over samples and quantiles of one process, and of three replicas merged, read back from a receiver."""
    rng = np.random.default_rng(9)
    single, parts = 0.0, {}
    with OtlpReceiver() as receiver:
        for name in SAMPLES:
            values = parts[name] = sample(name, rng, n)
            exporter = Exporter(endpoint=receiver.url, environ={})
            exporter.offer(ExportBatch((distribution(values),), (), 1, 2, {"service.name": name}))
            assert exporter.shutdown()
            buckets = receiver.metrics("inferscope.request.duration")[-1].buckets
            for quantile in QUANTILES:
                single = max(single, abs(percentile(buckets, quantile) / (np.quantile(values, quantile) / 1e9) - 1))
    chosen = [parts[name] for name in ("lognormal", "bimodal", "wide")]
    merged = merge(exponential(distribution(values), 5) for values in chosen)
    whole = np.concatenate(chosen)
    fleet = max(abs(percentile(merged, q) / (np.quantile(whole, q) / 1e9) - 1) for q in QUANTILES)
    return single * 100, fleet * 100


def slowest_exit(tries):
    """Longest shutdown while receivers are dead in every way, in seconds."""
    worst = 0.0
    for mode in ("black_hole", "drip", "unavailable", "refuse"):
        for _ in range(tries):
            with OtlpReceiver(mode, delay_s=0.05) as receiver:
                exporter = Exporter(endpoint=receiver.url, environ={})
                exporter.offer(batch(20, np.random.default_rng(1), 1))
                hung = threading.Thread(target=exporter.run_once, daemon=True)
                hung.start()
                time.sleep(0.05)
                begun = time.perf_counter()
                exporter.shutdown()
                worst = max(worst, time.perf_counter() - begun)
            hung.join()
    return worst


def delayed_by_exports(pairs, block_s, url):
    """Share of requests at 5 000/s delayed beyond 0.5 ms, per 10 000: beside exports of 500 series less beside the model thread; a value a pair.

    Exports follow each other without a pause, a hundred times as many as a service makes; so does the model thread.
    """
    from inferscope.record.core import Recorder

    rng = np.random.default_rng(11)
    batches = [batch(500, rng, tick) for tick in range(1, 5)]
    recorder = Recorder()
    found = []
    with tempfile.TemporaryDirectory() as directory:
        exporter = Exporter(Path(directory), endpoint=url, series_limit=500, environ={})

        def export(stop):
            position = 0
            while not stop.is_set():
                chosen = batches[position % len(batches)]
                position += 1
                exporter.offer(ExportBatch(chosen.distributions, chosen.totals, position, chosen.now_unix_ns, chosen.resource))
                exporter.run_once()

        def behave(stop):
            while not stop.is_set():
                until = time.thread_time_ns() + 100_000
                while time.thread_time_ns() < until:
                    pass
                time.sleep(PAUSE_S)

        for _ in range(pairs):
            shares = []
            for work in (behave, export):
                stop = threading.Event()
                thread = threading.Thread(target=work, args=(stop,))
                thread.start()
                late, number, next_ns = 0, 0, time.perf_counter_ns()
                until = next_ns + round(block_s * 1e9)
                while next_ns < until:
                    next_ns += 200_000
                    while (left := next_ns - time.perf_counter_ns()) > 0:
                        time.sleep(left / 1e9 if left > 80_000 else 0)
                    begun = time.perf_counter_ns()
                    with recorder.request("busy"):
                        hashlib.sha256(_outages.BLOCK)  # gives the interpreter away and wants it back: a hold is seen here
                    late += time.perf_counter_ns() - begun > _outages.DELAY_NS
                    number += 1
                stop.set()
                thread.join()
                shares.append(1e4 * late / number)
            found.append(shares[1] - shares[0])
        exporter.shutdown()
    return found


def hold_rows(quick, url):
    yield meter_row()
    for series, cycles, traced in (
        (100, 10 if quick else 200, None),
        (500, 10 if quick else 80, None),
        (100, 8 if quick else 80, slow_requests(1)),
    ):
        pairs, cpu = holds(series, cycles, url, traced)
        excess = [export - model for export, model in pairs]
        bound = upper_bound(excess, np.random.default_rng(2))
        limit = 1.0 if traced else 0.5
        yield _harness.row(
            f"longest interpreter hold, {series} series" + (", 64 traces" if traced else ""),
            statistics.median(excess), "ms", f"<= {limit:g} ms", holds=bound <= limit,
            note=f"beyond 0.1 ms slices; 95 % bound {bound:.2f}; export {statistics.median(e for e, _ in pairs):.2f}, model thread"
            f" {statistics.median(m for _, m in pairs):.2f}, CPU of one export {cpu:.0f} ms",
        )  # fmt: skip


def delay_row(name, differences, **more):
    """Holds unless the pairs show that more requests are delayed than without."""
    low, mean, high = _outages.bounds(differences)
    note = f"per 10 000 requests beyond 0.5 ms, less those without; 95 % [{low:.1f}, {high:.1f}] over {len(differences)} pairs"
    return _harness.row(name, mean, "1e-4", "0 more delayed", holds=low <= 0, note=note, **more)


def outage_rows(quick):
    found, grown, served, total = _outages.alone(0.3 if quick else 3.0, 2 if quick else 5)
    for mode, differences in found.items():
        yield delay_row(f"requests delayed while the collector is away: {mode}", differences)
    note = "the most at the end of any block, beyond the end of the first, whose receiver is there"
    yield _harness.row("memory over all outages", grown / 1024, "MB", "flat (<= 8 MB)", holds=grown <= 8192, note=note)
    yield _harness.row("totals once it is back", served - total, "req", "exact", holds=served == total, note=f"{total} of {served}")


def life_rows(quick):
    """Workers and kills, which the soak tests assert."""
    for name, path in (("workers, recycles and a killed one: totals and ids", "tests/service/test_totals.py"),
                       ("kill -9 at 200 points: readable", "tests/export/test_kill.py")):  # fmt: skip
        if quick:
            yield _harness.row(name, 0, "", "reported", note=f"full run only: pytest -m soak {path}", ran=False)
            continue
        command = [sys.executable, "-m", "pytest", "-q", "-m", "soak", "--timeout", "600", path]
        done = subprocess.run(command, cwd=_harness.ROOT, capture_output=True, text=True, check=False)
        said = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else "nothing"
        yield _harness.row(name, done.returncode, "", "exact", holds=done.returncode == 0, note=said, ran=True)


def long_rows(quick):
    """What takes minutes and measures no time of ours in between runs beside the ten minutes without a collector."""
    if quick:
        names = [f"{what}, {_away.AWAY}" for what in ("requests delayed", "memory", "totals once it is back", "exit")]
        return [*life_rows(quick), *(_harness.row(name, 0, "", "reported", note="full run only", ran=False) for name in names)]
    children = _away.side_by_side()
    lives = list(life_rows(quick))
    return [*lives, *_away.rows(_away.gather(children))]


def measure(quick):
    with _outages.Receiver() as receiver:
        rows = list(hold_rows(quick, receiver.url))
        pairs, block_s = (6, 0.3) if quick else (40, 1.0)
        rows.append(delay_row("requests delayed by exports of 500 series at 5 000/s", delayed_by_exports(pairs, block_s, receiver.url)))
    single, fleet = percentile_errors(100_000 if quick else 1_000_000)
    rows.append(_harness.row("percentile error, P50-P99.9 over six shapes", single, "%", "<= 1.2 %", holds=single <= 1.2))
    rows.append(_harness.row("percentile error, three replicas merged", fleet, "%", "<= 0.5 %", holds=fleet <= 0.5))
    rows += outage_rows(quick)
    slowest = slowest_exit(1 if quick else 3)
    rows.append(_harness.row("exit while it is away", slowest, "s", "<= 1 s", holds=slowest <= 1.0, note="black hole, drip, 503, refused"))
    rows += long_rows(quick)
    ours, theirs, sdk_hold = compare_sdk(6 if quick else 40)
    note = f"an export of 100 series every 10 s; the SDK's {6 * theirs:.0f} By, its encoder holds the interpreter for {sdk_hold:.1f} ms"
    rows.append(_harness.row("gzip bytes a series and minute", 6 * ours, "By", "reported beside the SDK's", note=note))
    return rows


def main():
    arguments = _harness.arguments(__doc__)
    return _harness.finish(measure(arguments.quick), arguments.json, distributions=("opentelemetry-sdk", "opentelemetry-proto"))


if __name__ == "__main__":
    sys.exit(main())
