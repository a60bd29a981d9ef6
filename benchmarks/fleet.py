"""What a fleet's percentiles are worth after merging: three replicas of different shape, at one scale and at two.

The exact percentiles are those of all samples together. Each replica exports what its recorder counted; the points are merged here, as a
receiver would, and read back from VictoriaMetrics where it can be had within a minute (`--no-fetch` takes only one that is here already).
"""

from __future__ import annotations

import sys
import time

import _backends
import _harness
import numpy as np

from inferscope import semconv
from inferscope.export import ExportBatch, Exporter, Total
from inferscope.export.otlp.buckets import exponential, hdr_bounds, merge, quantile
from inferscope.testing.receiver import OtlpReceiver
from inferscope.types import Distribution

QUANTILES = (0.5, 0.95, 0.99, 0.999)
OBJECTIVE_NS = 40_000_000
METRIC = "inferscope_request_duration_seconds_bucket"


def replicas(n):
    """A fast one, one with a second mode, and a slow wide one: what averaging percentiles gets wrong."""
    rng = np.random.default_rng(31)
    second = np.where(rng.random(n) < 0.02, rng.normal(46e6, 3e6, n), rng.normal(9e6, 1e6, n))
    parts = (rng.lognormal(np.log(8e6), 0.25, n), second, rng.lognormal(np.log(14e6), 0.6, n))
    return [np.clip(part, 2_000, 59e9).astype(np.int64) for part in parts]


def distribution(values):
    low, _ = hdr_bounds(3, 1000, 18432)
    counts = np.bincount(np.searchsorted(low, values, side="right") - 1, minlength=18432).astype(np.int64)
    return Distribution("request", ("score", "", ""), 3, 1000, counts, len(values), int(values.sum()), 0)


def export(parts, scales, endpoint, *, service):
    """Each replica through an exporter of its own."""
    now = time.time_ns()
    attributes = ((semconv.ATTR_REQUEST, "score"),)
    for index, (values, scale) in enumerate(zip(parts, scales, strict=True)):
        resource = {"service.name": service, "service.instance.id": f"replica-{index}"}
        totals = (
            Total(semconv.REQUESTS, len(values), attributes),
            Total(semconv.SLO_VIOLATIONS, int((values > OBJECTIVE_NS).sum()), (*attributes, (semconv.ATTR_SLO, "score-p99"))),
        )
        exporter = Exporter(endpoint=endpoint, scale=scale, environ={})
        exporter.offer(ExportBatch((distribution(values),), totals, now - 10**10, now, resource))
        if not exporter.shutdown(2.0):
            raise RuntimeError(f"replica {index} was not delivered: {exporter.status()['targets']}")


def off(measured, exact):
    return abs(measured / exact - 1) * 100


def errors(point, exact):
    return {q: off(quantile(point, q), exact[q]) for q in QUANTILES}


def spread(found):
    return "P50 {:.2f}, P95 {:.2f}, P99.9 {:.2f} %".format(*(found[q] for q in QUANTILES if q != 0.99))


def limit(name, value, target, bound, **more):
    return _harness.row(name, value, "%", target, holds=value <= bound, **more)


def ours(parts, exact):
    """Through a receiver, merged as Prometheus would."""
    rows = []
    with OtlpReceiver() as receiver:
        export(parts, (5, 5, 5), receiver.url, service="one-scale")
        one = errors(merge(point.buckets for point in receiver.metrics(semconv.REQUEST_DURATION)), exact)
        above = sum(point.value for point in receiver.metrics(semconv.SLO_VIOLATIONS))
        receiver.clear()
        export(parts, (5, 5, 3), receiver.url, service="two-scales")
        points = [point.buckets for point in receiver.metrics(semconv.REQUEST_DURATION)]
        mixed = merge(points)
        two = errors(mixed, exact)
    rows.append(limit("P99 of three replicas merged, scale 5", one[0.99], "<= 0.5 %", 0.5, note=spread(one)))
    exactly = sum(int((part > OBJECTIVE_NS).sum()) for part in parts)
    rows.append(limit("violations of three replicas added", off(above, exactly), "= 0 %", 0.0, note=f"{above} of {exactly}"))
    note = f"merged at scale {mixed.scale}, every request kept: {mixed.count == sum(map(len, parts))}; {spread(two)}"
    held = two[0.99] <= 4.4 and mixed.count == sum(map(len, parts))
    rows.append(_harness.row("P99 of a fleet with scales 5, 5 and 3", two[0.99], "%", "<= 4.4 % (scale 3)", holds=held, note=note))
    means = np.mean([quantile(exponential(distribution(part), 5), 0.99) for part in parts])
    rows.append(
        _harness.row(
            "mean of the replicas' P99s, for comparison", off(means, exact[0.99]), "%", "reported", note="percentiles do not average"
        )
    )
    return rows


def arrived(backend, service, parts):
    """Wait until every replica's requests are found."""
    until, wanted = time.monotonic() + 15, sum(map(len, parts))
    while (found := sum(value for _, value in backend.query(f'inferscope_requests_total{{service_name="{service}"}}'))) != wanted:
        if time.monotonic() > until:
            raise RuntimeError(f"{found:.0f} of {wanted} requests are found")
        time.sleep(0.1)


def ask(backend, service, exact):
    found = {}
    for q in QUANTILES:
        ((_, value),) = backend.query(f'histogram_quantile({q}, sum({METRIC}{{service_name="{service}"}}) by (vmrange))')
        found[q] = off(value, exact[q])
    return found


def victoria_metrics(parts, exact, *, fetch):
    begun = time.monotonic()
    try:
        program = _backends.victoria_metrics(fetch=fetch, timeout_s=30)
        took = time.monotonic() - begun
        with _backends.serve_victoria_metrics(program) as backend:
            export(parts, (5, 5, 5), backend.otlp, service="one-scale")
            arrived(backend, "one-scale", parts)
            one = ask(backend, "one-scale", exact)
            series = backend.series(METRIC)
            export(parts, (5, 5, 3), backend.otlp, service="two-scales")
            arrived(backend, "two-scales", parts)
            two = ask(backend, "two-scales", exact)
    except _backends.BackendAbsentError as error:
        return [_harness.row("P99 read back from VictoriaMetrics", 0.0, "%", "reported", note=f"not run: {error}", ran=False)]
    note = f"{spread(one)}; {series} series for 3 replicas; had in {took:.1f} s"
    return [
        limit("P99 read back from VictoriaMetrics, scale 5", one[0.99], "<= 1.2 %", 1.2, note=note, ran=True),
        _harness.row("the same with scales 5, 5 and 3", two[0.99], "%", "reported", note=f"it never rescales: {spread(two)}"),
    ]


def main():
    arguments = _harness.arguments(__doc__, lambda parser: parser.add_argument("--no-fetch", action="store_true", help="download nothing"))
    parts = replicas(100_000 if arguments.quick else 1_000_000)
    whole = np.concatenate(parts)
    exact = {q: float(np.quantile(whole, q)) / 1e9 for q in QUANTILES}
    rows = ours(parts, exact) + victoria_metrics(parts, exact, fetch=not arguments.no_fetch)
    return _harness.finish(rows, arguments.json, distributions=("opentelemetry-proto",))


if __name__ == "__main__":
    sys.exit(main())
