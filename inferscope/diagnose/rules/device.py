"""What traces and the device's driver say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from inferscope.diagnose.findings import grade, model_label
from inferscope.types import Evidence, Finding

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from inferscope.diagnose.findings import Context
    from inferscope.diagnose.trace import Operator, TraceSummary
    from inferscope.types import CaptureSummary

__all__ = ["capture_under_overload", "dynamic_shapes", "implicit_syncs", "launch_bound", "low_utilisation"]

_SHORT_US: Final = 10.0
_MANY: Final = 200
_IDLE: Final = 0.5
_READS: Final = ("aten::item", "aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero")
_BUILDS: Final = ("dynamo", "inductor", "autotune", "graphinstantiate", "cudamalloc", "hipmalloc", "compile")
_BUILT: Final = 0.10
_WAITING: Final = 0.20


def implicit_syncs(context: Context) -> Iterable[Finding]:
    """IMPLICIT_SYNC: Python reads values off the device, and each read waits for it."""
    rows = [
        (summary, sum(op.calls for op in trace.operators if op.name == "aten::item" or op.name in _READS[2:]), trace)
        for summary, trace in context.captures
        if trace.device_events
    ]
    counts = sorted(count for _, count, _ in rows)
    if not rows or counts[len(counts) // 2] < 2:
        return
    summary, count, trace = max(rows, key=lambda row: row[1])
    waited = sum(op.self_ms for op in trace.synchronisations)
    yield Finding(
        id="IMPLICIT_SYNC",
        class_="communication",
        severity="medium" if context.objective_broken and waited >= 0.1 * trace.window_ms else "low",
        confidence="high",
        where="reads of device values (.item(), bool(), nonzero)",
        claim=f"A captured request reads values off the device {count} times and waits for it {waited:.2f} ms.",
        evidence=(
            Evidence("reads in a captured request, median", counts[len(counts) // 2], "reads"),
            Evidence("time in synchronising calls", round(waited, 3), "ms", None, summary.trace),
        ),
        share=None,
        what_if_p99_ms=None,
        refute_by="Run one replica under torch.cuda.set_sync_debug_mode('warn'): without warnings on this path the claim is wrong.",
        fix="Keep the decision on the device, or collect the values and read them once after the loop.",
        rollback="Return to the separate reads.",
    )


def launch_bound(context: Context) -> Iterable[Finding]:
    """LAUNCH_BOUND: many short kernels with gaps between them: the host cannot feed the device."""
    for summary, trace in context.captures:
        busy, kernels = trace.device_busy, trace.device_events
        if busy is None or kernels < _MANY or busy >= _IDLE:
            continue
        each = 1e3 * trace.device_ms / kernels
        if each >= _SHORT_US:
            continue
        yield Finding(
            id="LAUNCH_BOUND",
            class_="scheduling",
            severity="medium" if context.objective_broken and _model_owns(context) else "low",
            confidence="medium",
            where="kernel launches",
            claim=f"{kernels} pieces of device work of {each:.1f} us each leave this process's part of the device idle {100 * (1 - busy):.0f} % of their span.",
            evidence=(
                Evidence("device work in a captured request", kernels, "pieces", None, summary.trace),
                Evidence("mean length", round(each, 2), "us", None, summary.trace),
                Evidence("busy between first and last", round(100 * busy, 1), "%", None, summary.trace),
                Evidence("launches", trace.launches, "calls", None, summary.trace),
            ),
            share=None,
            what_if_p99_ms=None,
            refute_by="Capture the same request with a batch four times as large: if its time grows as much, launches are not the limit.",
            fix="CUDA graphs or torch.compile(mode='reduce-overhead') for fixed shapes, and fused operators.",
            rollback="Return to eager execution.",
        )
        return


def _model_owns(context: Context) -> bool:
    label = model_label(context.horizon.labels, context.attribution.shares)
    share = context.attribution.share(label) if label else None
    return share is not None and grade(context, share)[0] != "low"


def _building(operators: Sequence[Operator]) -> list[Operator]:
    return [op for op in operators if any(word in op.name.lower() for word in _BUILDS)]


def dynamic_shapes(context: Context) -> Iterable[Finding]:
    """DYNAMIC_SHAPES: slow requests compile, tune, build graphs or allocate, healthy ones do not."""
    slow = [(summary, trace) for summary, trace in context.captures if summary.slow]
    if not slow:
        return
    found = [(sum(op.self_ms for op in _building(trace.operators)), summary, trace) for summary, trace in slow]
    healthy = max(
        (sum(op.self_ms for op in _building(trace.operators)) for summary, trace in context.captures if not summary.slow), default=0.0
    )
    worst, summary, trace = max(found, key=lambda row: row[0])
    if trace.window_ms <= 0 or worst < _BUILT * trace.window_ms or worst < 2 * healthy:
        return
    top = _building(trace.operators)[0]
    yield Finding(
        id="DYNAMIC_SHAPES",
        class_="compute",
        severity="medium" if context.objective_broken else "low",
        confidence="medium",
        where=top.name,
        claim=f"A slow request spends {worst:.1f} ms compiling, tuning, building graphs or allocating, a healthy one at most {healthy:.1f} ms: it met a shape for the first time.",
        evidence=(
            Evidence("time in it in a slow request", round(worst, 2), "ms", None, summary.trace),
            Evidence("most in a healthy request", round(healthy, 2), "ms"),
            Evidence("slow requests with any", sum(ms > 0 for ms, _, _ in found), f"of {len(found)} captures"),
        ),
        share=None,
        what_if_p99_ms=None,
        refute_by="Send the slow request's shape twice: if the second is as slow, the shape is not new to the process.",
        fix="Pad inputs to a few buckets, warm every bucket before readiness, and mark dimensions that vary as dynamic.",
        rollback="Return to exact shapes.",
    )


def low_utilisation(context: Context) -> Iterable[Finding]:
    """LOW_DEVICE_UTIL: the driver says that the whole device idles while the objective is broken."""
    busy = context.horizon.device_busy
    if busy is None or busy >= _IDLE or not context.objective_broken:
        return
    yield Finding(
        id="LOW_DEVICE_UTIL",
        class_="scheduling",
        severity="info",
        confidence="high",
        where="device",
        claim=f"The device as a whole is busy {100 * busy:.0f} % of the time: a larger one would not lower this tail.",
        evidence=(Evidence("device busy, from its driver", round(100 * busy, 1), "%"),),
        share=None,
        what_if_p99_ms=None,
        refute_by="Serve from a faster device on one replica: if P99 falls in proportion, this is wrong.",
        fix="Work on the columns that own the excess; what the device waits for is among them.",
        rollback="Nothing to roll back.",
    )


def capture_under_overload(context: Context) -> Iterable[Finding]:
    """CAPTURE_UNDER_OVERLOAD: profiles were taken while threads waited for CPUs, so their durations hold waiting."""
    seconds = context.horizon.host.seconds
    used, waited = float(seconds[:, 2].sum()), float(seconds[:, 3].sum())
    kept: list[tuple[CaptureSummary, TraceSummary]] = list(context.captures)
    if not kept or used + waited <= 0 or waited / (used + waited) < _WAITING:
        return
    yield Finding(
        id="CAPTURE_UNDER_OVERLOAD",
        class_="scheduling",
        severity="info",
        confidence="high",
        where=f"{len(kept)} captures",
        claim=f"While profiles were taken, threads of this process waited for a CPU {100 * waited / (used + waited):.0f} % of the time they wanted one: operator durations in them hold that waiting.",
        evidence=(
            Evidence("run-queue delay of all threads", round(waited / 1e9, 2), "s"),
            Evidence("CPU time of all threads", round(used / 1e9, 2), "s"),
        ),
        share=None,
        what_if_p99_ms=None,
        refute_by="Capture again on an idle replica: if the operators take as long there, the durations were right.",
        fix="Compare slow with healthy captures of the same time instead of reading durations as costs.",
        rollback="Nothing to roll back.",
    )
