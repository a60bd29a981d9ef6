"""How each peer times a request and a stage, in the fewest and fastest statements that its documentation gives.

A recipe holds text: `root` around a request and `stage` around a stage, with `{body}` for what is timed and `{i}` for the stage's number.
A peer that times functions gives `wrap` instead of `stage`. What is needed between slices of a measurement and costs nothing in it (flush
a queue, clear a buffer) is `after`; what must run while it is measured and is no cost of one call (start a tracer) is `before`.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

STAGES = 8
NAMES = ("pre", "embed", "attend", "mix", "expand", "contract", "head", "post")


@dataclass
class Recipe:
    """One way to time; `buys` says what its numbers can be used for."""

    name: str
    buys: str
    root: str = "{body}"
    stage: str = "{body}"
    env: dict[str, Any] = field(default_factory=dict)
    wrap: Callable[[Callable[..., Any], int], Callable[..., Any]] | None = None
    before: Callable[[], object] = lambda: None
    after: Callable[[], object] = lambda: None


def _after_ours(recorder: Any) -> Callable[[], object]:
    """What the worker thread does for the recorder: drain kept requests, a new epoch every 10 s."""
    begun = [time.monotonic()]

    def after() -> None:
        recorder.drain()
        if time.monotonic() - begun[0] >= 10:
            begun[0] = time.monotonic()
            recorder.begin_epoch()

    return after


def _ours(name: str, recorder: Any, *, decorator: bool = False) -> Recipe:
    recorder.set_edges("score", [20_000_000])  # an objective, as a service has one
    return Recipe(
        name,
        "100 % of calls: histograms, exclusive time of each stage by latency band, breach, slowest requests",
        "with request('score'):\n    {body}",
        "{body}" if decorator else "with stage(N{i}):\n    {body}",
        {"request": recorder.request, "stage": recorder.stage},
        (lambda function, index: recorder.stage(NAMES[index])(function)) if decorator else None,
        after=_after_ours(recorder),
    )


def ours() -> list[Recipe]:
    from inferscope.record.core import default

    return [_ours("inferscope, with", default), _ours("inferscope, decorator", default, decorator=True)]


def twin() -> list[Recipe]:
    from inferscope.record.fallback import Recorder

    return [_ours("inferscope without its C core", Recorder())]


def clocks() -> list[Recipe]:
    timed = "t{i} = clock()\n{body}\nt{i} = clock() - t{i}"
    return [
        Recipe(
            "two perf_counter_ns()", "a number and nothing that keeps it", timed.replace("{i}", "r"), timed, {"clock": time.perf_counter_ns}
        )
    ]


def otel_spans() -> list[Recipe]:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
    from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

    class Null(SpanExporter):
        def export(self, spans: Any) -> SpanExportResult:
            return SpanExportResult.SUCCESS

    batch = BatchSpanProcessor(Null())
    on, off = TracerProvider(shutdown_on_exit=False), TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False)
    on.add_span_processor(batch)
    off.add_span_processor(BatchSpanProcessor(Null()))
    root, stage = "with tracer.start_as_current_span('score'):\n    {body}", "with tracer.start_as_current_span(N{i}):\n    {body}"
    return [
        Recipe(
            OTEL,
            "each request as a trace, across services; no percentiles, no cause",
            root,
            stage,
            {"tracer": on.get_tracer("peers")},
            after=batch.force_flush,
        ),
        Recipe("OpenTelemetry span, sampled off", "context for other services, no times", root, stage, {"tracer": off.get_tracer("peers")}),
    ]


OTEL = "OpenTelemetry span, batch processor"


def otel_histograms() -> list[Recipe]:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.metrics.view import ExponentialBucketHistogramAggregation, View

    timed = "t{i} = clock()\n{body}\nrecord((clock() - t{i}) / 1e9, A{i})"
    found = []
    for kind, views in (
        ("explicit", []),
        ("exponential", [View(instrument_name="*", aggregation=ExponentialBucketHistogramAggregation())]),
    ):
        provider = MeterProvider([InMemoryMetricReader()], views=views, shutdown_on_exit=False)
        env: dict[str, Any] = {
            "clock": time.perf_counter_ns,
            "record": provider.get_meter("peers").create_histogram("duration", "s").record,
        }
        env |= {f"A{index}": {"stage": name} for index, name in enumerate(NAMES)} | {"Ar": {"stage": "request"}}
        buys = "percentiles of each stage" + ("" if kind == "exponential" else " as fine as the buckets")
        found.append(Recipe(f"OpenTelemetry histogram, {kind}", buys, timed.replace("{i}", "r"), timed, env))
    return found


def ddtrace() -> list[Recipe]:
    os.environ.update(
        DD_TRACE_AGENT_URL="http://127.0.0.1:9", DD_INSTRUMENTATION_TELEMETRY_ENABLED="false", DD_REMOTE_CONFIGURATION_ENABLED="false"
    )
    from ddtrace.trace import TraceFilter, tracer

    class Drop(TraceFilter):  # type: ignore[misc]  # Any where it is not installed
        def process_trace(self, trace: Any) -> None:
            return None

    tracer.configure(trace_processors=[Drop()])
    env = {"trace": tracer.trace}
    return [
        Recipe(
            "ddtrace span",
            "each request as a trace, for one vendor",
            "with trace('score'):\n    {body}",
            "with trace(N{i}):\n    {body}",
            env,
        )
    ]


def sentry() -> list[Recipe]:
    import sentry_sdk
    from sentry_sdk.transport import Transport

    class Null(Transport):  # type: ignore[misc]  # Any where it is not installed
        def capture_envelope(self, envelope: Any) -> None:
            pass

    sentry_sdk.init(
        dsn="http://a@127.0.0.1:1/1", traces_sample_rate=1.0, transport=Null, default_integrations=False, auto_enabling_integrations=False
    )
    env = {"transaction": sentry_sdk.start_transaction, "span": sentry_sdk.start_span}
    root, stage = "with transaction(name='score'):\n    {body}", "with span(op='stage', name=N{i}):\n    {body}"
    return [Recipe("sentry span", "each request as a trace beside its errors, for one vendor", root, stage, env)]


def logfire() -> list[Recipe]:
    import logfire

    logfire.configure(send_to_logfire=False, console=False, inspect_arguments=False)
    root, stage = "with span('score'):\n    {body}", "with span(N{i}):\n    {body}"
    return [Recipe("logfire span", "each request as a trace with structured text", root, stage, {"span": logfire.span})]


def prometheus() -> list[Recipe]:
    from prometheus_client import CollectorRegistry, Histogram

    histogram = Histogram("duration", "s", ["stage"], registry=CollectorRegistry())
    env = {f"P{index}": histogram.labels(name) for index, name in enumerate(NAMES)} | {"Pr": histogram.labels("request")}
    timed = "with P{i}.time():\n    {body}"
    return [Recipe("prometheus_client", "percentiles as fine as the buckets, scraped", timed.replace("{i}", "r"), timed, env)]


def viztracer() -> list[Recipe]:
    from viztracer import VizTracer

    tracer = VizTracer(verbose=0, tracer_entries=1_000_000)

    def after() -> None:
        tracer.stop()
        tracer.clear()

    root, stage = "with event('score'):\n    {body}", "with event(N{i}):\n    {body}"
    buys = "every Python call on a timeline, for minutes at most"
    return [Recipe("viztracer, tracing", buys, root, stage, {"event": tracer.log_event}, before=tracer.start, after=after)]


def nvtx() -> list[Recipe]:
    import nvtx

    domain = nvtx.get_domain("peers")
    env = {"push": domain.push_range, "pop": domain.pop_range, "Ar": domain.get_event_attributes(message="score")}
    env |= {f"A{index}": domain.get_event_attributes(message=name) for index, name in enumerate(NAMES)}
    timed = "push(A{i})\n{body}\npop()"
    buys = "nothing until an NVIDIA profiler is attached"
    return [
        Recipe("nvtx domain push and pop", buys, timed.replace("{i}", "r"), timed, env),
        Recipe(
            "nvtx.annotate", buys, "with annotate('score'):\n    {body}", "with annotate(N{i}):\n    {body}", {"annotate": nvtx.annotate}
        ),
    ]


def torch_records() -> list[Recipe]:
    import torch
    from torch._C._profiler import _RecordFunctionFast

    env = {f"R{index}": _RecordFunctionFast(name) for index, name in enumerate(NAMES)} | {"Rr": _RecordFunctionFast("score")}
    buys = "nothing until torch.profiler runs"
    named = {"record": torch.profiler.record_function}
    return [
        Recipe("torch record_function", buys, "with record('score'):\n    {body}", "with record(N{i}):\n    {body}", named),
        Recipe("torch _RecordFunctionFast (private)", buys, "with Rr:\n    {body}", "with R{i}:\n    {body}", env),
    ]


def wrapt_and_hdr() -> list[Recipe]:
    import wrapt
    from hdrh.histogram import HdrHistogram

    clock, whole = time.perf_counter_ns, HdrHistogram(1, 60_000_000_000, 3)

    def wrap(function: Callable[..., Any], index: int) -> Any:
        histogram = HdrHistogram(1, 60_000_000_000, 3)

        def timed(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
            begun = clock()
            try:
                return wrapped(*args, **kwargs)
            finally:
                histogram.record_value(clock() - begun)

        return wrapt.FunctionWrapper(function, timed)

    root = "tr = clock()\n{body}\nwhole(clock() - tr)"
    return [
        Recipe("wrapt and hdrhistogram", "percentiles of each function", root, env={"clock": clock, "whole": whole.record_value}, wrap=wrap)
    ]


SOURCES: dict[str, Callable[[], list[Recipe]]] = {
    "inferscope": ours,
    "inferscope, pure Python": twin,
    "clocks": clocks,
    "opentelemetry-sdk spans": otel_spans,
    "opentelemetry-sdk metrics": otel_histograms,
    "ddtrace": ddtrace,
    "sentry-sdk": sentry,
    "logfire": logfire,
    "prometheus-client": prometheus,
    "viztracer": viztracer,
    "nvtx": nvtx,
    "torch": torch_records,
    "wrapt, hdrhistogram": wrapt_and_hdr,
}
DISTRIBUTIONS = ("ddtrace", "sentry-sdk", "logfire", "prometheus-client", "viztracer", "nvtx", "wrapt", "hdrhistogram")
