"""What a fleet's numbers are worth once a backend has merged them: three replicas of different shape in every store that can be had.

Each replica is recorded by a real recorder and exported twice, a minute apart, as its own process would; the answers are those of
`inferscope report --from`. The truth is that of the single requests. Stores come from build/backends (`make test-backends` unpacks them) or are
fetched; one that cannot be had is reported as not run.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import _backends
import _collector
import _harness
import _replicas

from inferscope import semconv
from inferscope.export.fleet import Scope, connect, summarise
from inferscope.export.otlp.buckets import quantile
from inferscope.testing.receiver import OtlpReceiver

STORES = ("Prometheus", "VictoriaMetrics", "ClickHouse", "rings")
STAGE = (semconv.SERVICE_NAME, semconv.ATTR_STAGE)


@contextlib.contextmanager
def store(name, *, fetch):
    """(send(replicas, service), what `--from` takes)."""

    def relayed(write):
        def send(parts, service):
            with OtlpReceiver() as receiver:
                _replicas.export(parts, receiver.url, service=service)
                write(receiver.metrics())

        return send

    if name == "Prometheus":
        with _backends.serve_prometheus(_backends.program("prometheus", fetch=fetch)) as backend:
            yield relayed(lambda points: _collector.remote_write(backend.url, points)), f"prometheus={backend.url}"
    elif name == "VictoriaMetrics":
        with _backends.serve_victoria_metrics(_backends.program("victoria-metrics", fetch=fetch)) as backend:

            def send(parts, service):
                _replicas.export(parts, backend.otlp, service=service)
                backend.settle()

            yield send, f"victoriametrics={backend.url}"
    elif name == "ClickHouse":
        with _backends.serve_clickhouse(_backends.chdb(fetch=fetch)) as url:
            yield relayed(lambda points: _collector.clickhouse_rows(url, points)), f"clickhouse={url}"
    else:
        with tempfile.TemporaryDirectory() as directory:
            yield lambda parts, service: _replicas.export(parts, None, service=service, directory=Path(directory)), f"ring={directory}"


def worst(found, exact):
    return max(abs(found[q] / (exact[q] * 1e3) - 1) * 100 for q in exact)


def ask(origin, service):
    end = time.time() + 1
    source, scope = connect(origin), Scope(end - 3600, end, {semconv.SERVICE_NAME: service})
    (row,) = summarise(source, scope)
    return row, source.distributions(semconv.STAGE_DURATION, STAGE, scope)


def stages_off(buckets, service, parts):
    """Worst error of a stage's P50 to P99.9, %; two-digit series."""
    import numpy as np

    columns, off = np.concatenate([each.columns for each in parts]), 0.0
    for place, name in enumerate(_replicas.STAGES):
        values = columns[:, place]
        for q in (0.5, 0.95, 0.99, 0.999):
            exact = float(np.quantile(values, q)) / 1e9
            if exact > 1e-4:  # a stage that most requests do not have is 0 there
                off = max(off, abs(quantile(buckets[service, name], q) / exact - 1) * 100)
    return off


def limit(name, value, unit, target, bound, **more):
    return _harness.row(name, value, unit, target, holds=value <= bound, **more)


def measure(name, parts, *, fetch):
    whole, single = _replicas.truth(parts), _replicas.truth(parts[:1])
    try:
        with store(name, fetch=fetch) as (send, origin):
            send(parts[:1], "one")
            send(parts, "three")
            send([replace(each, scale=scale) for each, scale in zip(parts, (5, 5, 3), strict=True)], "scales")
            (one, stages), (three, _), (scales, _) = (ask(origin, service) for service in ("one", "three", "scales"))
    except _backends.BackendAbsentError as error:
        return [_harness.row(f"{name}: not run", 0.0, "%", "reported", note=str(error), ran=False)]
    shares = {each.name: each.share for each in three.tail.shares}
    points = max(abs(shares.get(each, 0.0) - exact) * 100 for each, exact in whole["shares"].items())
    (objective,) = three.objectives
    exactly = objective.violations == whole["violations"] and three.requests == whole["requests"]
    p99 = abs(three.latency_ms[0.99] / (whole["quantiles"][0.99] * 1e3) - 1) * 100
    mixed = worst(scales.latency_ms, whole["quantiles"])
    kept = scales.requests == whole["requests"]
    return [
        limit(f"{name}: P50-P99.9 of one replica's requests", worst(one.latency_ms, single["quantiles"]), "%", "<= 1.2 %", 1.2),
        limit(f"{name}: P50-P99.9 of its stages (two digits)", stages_off(stages, "one", parts[:1]), "%", "<= 1.5 %", 1.5),
        limit(f"{name}: P99 of three replicas merged", p99, "%", "<= 0.5 %", 0.5),
        limit(f"{name}: attribution of the fleet", points, "pt", "<= 1 point", 1.0, note="worst of the stages, beside all single requests"),
        _harness.row(
            f"{name}: share above the objective", 100 * objective.share, "%", "exact", holds=exactly,
            note=f"{objective.violations} of {three.requests}, truth {whole['violations']} of {whole['requests']}",
        ),
        _harness.row(
            f"{name}: two versions, scales 5, 5 and 3", mixed, "%", "merged (<= 4.4 %) or refused", holds=mixed <= 4.43 and kept,
            note=f"± {100 * scales.bucket_error:.2g} % said, every request kept: {kept}",
        ),
    ]  # fmt: skip


def main():
    arguments = _harness.arguments(__doc__, lambda parser: parser.add_argument("--no-fetch", action="store_true", help="download nothing"))
    parts = _replicas.shapes(100_000 if arguments.quick else 500_000)
    rows = [each for name in STORES for each in measure(name, parts, fetch=not arguments.no_fetch)]
    return _harness.finish(rows, arguments.json, distributions=("opentelemetry-proto",))


if __name__ == "__main__":
    sys.exit(main())
