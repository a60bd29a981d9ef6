"""What captured requests say of the device: slow captures against healthy ones, or one trace by itself.

A property that slow and healthy captures share makes every request dearer, not the tail longer: it is said, and graded low.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Final

from inferscope.diagnose.findings import MINIMUM_SHARE, Texts, grade, model_label, plain, share_evidence
from inferscope.types import Evidence, Finding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from inferscope.diagnose.findings import Context
    from inferscope.diagnose.traces.values import SyncSite, TraceSummary
    from inferscope.types import Share

__all__ = [
    "Contrast",
    "bounds",
    "contrast",
    "copies_alone",
    "launch_bound",
    "matrix_units",
    "owner",
    "pageable_copies",
    "said",
    "shape_churn",
    "waits",
]

_SHORT: Final = 0.5
"""Part of the kernels that are shorter than 10 us, from which launching them is the work."""
_MANY: Final = 50
_SHORT_US: Final = 10.0
_IDLE: Final = 0.5
_BOUND: Final = 0.6
"""Of a card's peak, from which it is the limit (diagnosis of roofline models)."""
_EXPLAINS: Final = 0.5
"""Part of the model's excess that the difference between slow and healthy captures has to reach."""
_HIDES: Final = 0.25
"""The same for what overlap could hide, which is half of the time at best."""
_OF_WINDOW: Final = 0.1
_LOUD: Final = 0.3
_MOST: Final = 0.5
_FEW: Final = 2
_READS: Final = frozenset({"aten::item", "aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero"})


@dataclass(frozen=True, slots=True)
class Contrast:
    """One measure of captures, ms."""

    slow: float
    healthy: float | None
    """None without a healthy capture."""
    artefact: str | None
    trace: TraceSummary
    """Of the slow capture that has most of it."""
    explains: bool
    """Whether the difference makes up at least half of what the model takes longer in slow requests."""
    part: float
    """Of that trace's window."""
    alone: bool
    """There is a trace and nothing else: no request that it belongs to."""

    def evidence(self, name: str) -> tuple[Evidence, ...]:
        """The measure in slow and in healthy captures."""
        if self.alone:
            return (Evidence(name, round(self.slow, 3), "ms"),)
        rows = (Evidence(f"{name}, captured slow request", round(self.slow, 3), "ms", None, self.artefact),)
        return rows if self.healthy is None else (*rows, Evidence(f"{name}, captured healthy request", round(self.healthy, 3), "ms"))


def owner(context: Context) -> Share | None:
    """The model's stage, when it owns a tenth of the excess."""
    label = model_label(context.horizon.labels, context.attribution.shares)
    share = context.attribution.share(label) if label else None
    return share if share is not None and share.share >= MINIMUM_SHARE else None


def contrast(context: Context, measure: Callable[[TraceSummary], float | None], explains: float = _EXPLAINS) -> Contrast | None:
    """Compare a measure (ms) of slow captures with that of healthy ones; None when no slow capture has it.

    Args:
        context: The evidence.
        measure: Of one trace.
        explains: Part of the model's excess that the difference has to reach.
    """
    rows = [(summary, trace, value) for summary, trace in context.captures if (value := measure(trace)) is not None]
    slow = [row for row in rows if row[0].slow]
    if not slow:
        return None
    worst = max(slow, key=lambda row: row[2])
    healthy = [value for summary, _, value in rows if not summary.slow]
    usual = median(healthy) if healthy else None
    typical = median(value for _, _, value in slow)
    share = owner(context)
    longer = 0.0 if share is None else share.tail_ms - share.body_ms
    return Contrast(
        slow=typical,
        healthy=usual,
        artefact=worst[0].trace or None,
        trace=worst[1],
        explains=longer > 0 and typical - (usual or 0.0) >= explains * longer,
        part=worst[2] / worst[1].window_ms if worst[1].window_ms > 0 else 0.0,
        alone=not context.horizon.timed,
    )


def said(context: Context, id_: str, class_: str, texts: Texts, found: Contrast, evidence: Sequence[Evidence], *, sure: str) -> Finding:
    """Graded by the model's share when the captures explain it; by its part of the window when there is nothing but a trace."""
    share = owner(context)
    if share is not None and found.explains:
        severity, confidence = grade(context, share, confidence=sure)
        return plain(
            id_, class_, texts, (share_evidence(share), *evidence), severity=severity, confidence=confidence, share=share.share,
            what_if_p99_ms=context.plan.p99_ms(share.name),
        )  # fmt: skip
    loud = found.alone and found.part >= _LOUD
    return plain(id_, class_, texts, evidence, severity="medium" if loud else "low", confidence=sure)


def launch_bound(context: Context) -> Iterable[Finding]:
    """LAUNCH_BOUND: many short kernels with gaps between them: the host cannot feed the device."""
    found = contrast(context, lambda trace: trace.idle.total_ms - trace.idle.sync_ms if trace.idle is not None else None)
    if found is None or found.trace.idle is None or found.trace.device_busy is None:
        return
    trace, idle = found.trace, found.trace.idle
    each = 1e3 * trace.device_ms / trace.device_events
    if trace.device_events < _MANY or each >= _SHORT_US or (trace.small_kernels or 0.0) < _SHORT or found.trace.device_busy >= _IDLE:
        return
    if idle.host_ms < _IDLE * idle.total_ms:
        return
    texts = Texts(
        where="kernel launches",
        claim=f"{trace.device_events} pieces of device work of {each:.1f} us each leave this process's part of the device idle {100 * (1 - found.trace.device_busy):.0f} % of their span: launching them takes longer than running them.",
        refute_by="Capture the same request with a batch four times as large: if its time grows as much, launches are not the limit.",
        fix="CUDA graphs or torch.compile(mode='reduce-overhead') for fixed shapes, and fused operators.",
        rollback="Return to eager execution.",
    )
    evidence = (
        Evidence("device work in a captured request", trace.device_events, "pieces", None, found.artefact),
        Evidence("kernels shorter than 10 us", round(100 * (trace.small_kernels or 0.0), 1), "%", None, found.artefact),
        Evidence("busy between first and last", round(100 * found.trace.device_busy, 1), "%", None, found.artefact),
        Evidence("idle before a launch was called", round(idle.host_ms, 3), "ms", None, found.artefact),
        Evidence("idle between launch and start", round(idle.launch_ms, 3), "ms", None, found.artefact),
        Evidence("median gap", round(idle.median_us, 1), "us", None, found.artefact),
        *found.evidence("device idle for want of launches"),
    )
    yield said(context, "LAUNCH_BOUND", "scheduling", texts, found, evidence, sure="medium")


def matrix_units(context: Context) -> Iterable[Finding]:
    """NON_TENSOR_CORE: matrix products run on the card's ordinary units."""
    found = contrast(context, lambda trace: trace.matrix.plain_ms if trace.matrix is not None else None)
    if found is None or found.trace.matrix is None or found.part < _OF_WINDOW:
        return
    matrix = found.trace.matrix
    if matrix.plain_ms <= matrix.tensor_ms:
        return
    texts = Texts(
        where=matrix.plain_kernel,
        claim=f"Matrix kernels spend {matrix.plain_ms:.2f} ms on ordinary units and {matrix.tensor_ms:.2f} ms on tensor cores: {matrix.plain_kernel} uses none.",
        refute_by="Run this request once under torch.set_float32_matmul_precision('high') or autocast: if the kernel's time stays, it is limited by something else.",
        fix="Use fp16, bf16 or TF32 (torch.set_float32_matmul_precision('high')) where the accuracy gate passes, and pad dimensions to multiples of 8.",
        rollback="Return to float32 precision 'highest'.",
    )
    evidence = (
        Evidence("matrix kernels on ordinary units", round(matrix.plain_ms, 3), "ms", None, found.artefact),
        Evidence("matrix kernels on tensor cores", round(matrix.tensor_ms, 3), "ms", None, found.artefact),
        Evidence("matrix kernels whose name does not say", round(matrix.unknown_ms, 3), "ms", None, found.artefact),
        *found.evidence("time on ordinary units"),
    )
    yield said(context, "NON_TENSOR_CORE", "compute", texts, found, evidence, sure="high")


def bounds(context: Context) -> Iterable[Finding]:
    """COMPUTE_BOUND and BANDWIDTH_BOUND: the card's arithmetic or its memory is the limit; from shapes, so an estimate."""
    found = contrast(context, lambda trace: trace.roofline.ms if trace.roofline is not None else None)
    line = found.trace.roofline if found is not None else None
    if found is None or line is None or line.intensity is None or line.ridge is None:
        return
    computes, moves = line.of_flops or 0.0, line.of_bandwidth or 0.0
    compute = line.intensity >= line.ridge
    if (computes if compute else moves) < _BOUND:
        return
    limit = "arithmetic" if compute else "memory bandwidth"
    texts = Texts(
        where=found.trace.kernels[0].name if found.trace.kernels else "kernels",
        claim=f"Kernels reach {100 * (computes if compute else moves):.0f} % of the card's peak {limit} at {line.intensity:.0f} operations a byte (estimated from shapes): the card is the limit.",
        refute_by="Read the card's counters for the same request (Nsight Compute, DCGM): below 60 % of that peak this is wrong.",
        fix=(
            "Do less arithmetic: a lower precision, a smaller or distilled model, pruning; or a faster card."
            if compute
            else "Move fewer bytes: fuse element-wise work (torch.compile), quantise weights, reuse buffers, use the layout that the kernels read, cache what repeats."
        ),
        rollback="Return to the earlier precision or kernels.",
    )
    evidence = (
        Evidence("operations a byte, estimate", round(line.intensity, 1), "FLOP/B", None, found.artefact),
        Evidence("ridge of this card", round(line.ridge, 1), "FLOP/B"),
        Evidence("of peak arithmetic, estimate", round(100 * computes, 1), "%", None, found.artefact),
        Evidence("of peak bandwidth, estimate", round(100 * moves, 1), "%", None, found.artefact),
        Evidence("kernel time with known shapes", round(100 * line.covered, 1), "%", None, found.artefact),
    )
    yield said(
        context,
        "COMPUTE_BOUND" if compute else "BANDWIDTH_BOUND",
        "compute" if compute else "memory",
        texts,
        found,
        evidence,
        sure="medium",
    )


def copies_alone(context: Context) -> Iterable[Finding]:
    """COPY_COMPUTE_NO_OVERLAP: copies and kernels follow each other on one queue, though each takes a tenth of the time."""
    found = contrast(context, _serial, _HIDES)
    if found is None or found.trace.overlap is None or found.trace.window_ms <= 0:
        return
    over, window = found.trace.overlap, found.trace.window_ms
    if min(over.copy_ms, over.kernel_ms) < _OF_WINDOW * window or over.both_ms >= _OF_WINDOW * min(over.copy_ms, over.kernel_ms):
        return
    texts = Texts(
        where=f"copies and kernels on {over.streams} stream{'' if over.streams == 1 else 's'}",
        claim=f"Copies take {over.copy_ms:.2f} ms and kernels {over.kernel_ms:.2f} ms of a captured request, and only {over.both_ms:.2f} ms of it at the same time.",
        refute_by="Split the input in two and copy the second half on a side stream while the first computes, on one replica: if the time stays, one depends on all of the other.",
        fix="Copy in pieces from pinned memory on a second stream, one piece ahead of the kernels (double buffering).",
        rollback="Return to one stream.",
    )
    evidence = (
        Evidence("copies on the device", round(over.copy_ms, 3), "ms", None, found.artefact),
        Evidence("kernels on the device", round(over.kernel_ms, 3), "ms", None, found.artefact),
        Evidence("both at once", round(over.both_ms, 3), "ms", None, found.artefact),
        Evidence("queues used", over.streams, "streams", None, found.artefact),
        *found.evidence("time that overlap could hide"),
    )
    yield said(context, "COPY_COMPUTE_NO_OVERLAP", "communication", texts, found, evidence, sure="high")


def pageable_copies(context: Context) -> Iterable[Finding]:
    """H2D_SYNC_PAGEABLE and D2H_SYNC_PAGEABLE of a trace by itself; with requests, their own copies say it better."""
    for summary, trace in context.captures:
        for row in trace.transfers:
            if row.memory != "pageable" or row.direction not in {"HtoD", "DtoH"} or row.synchronous < _MOST * row.copies:
                continue
            waited = sum(site.ms for site in trace.sync_sites if not site.where or "aten::copy_" in site.where)
            part = max(row.ms, waited) / trace.window_ms if trace.window_ms > 0 else 0.0
            texts = Texts(
                where=next((part for site in trace.sync_sites for part in site.where if ".py(" in part), f"{row.direction} copies"),
                claim=f"{row.synchronous} of {row.copies} {row.direction} copies come from or go to pageable memory, and the host waits for each; waits of copies in both directions: {waited:.2f} ms.",
                refute_by="Pin the host's buffers and record again: if the time in synchronising calls stays, they wait for kernels and not for the transfer.",
                fix="Allocate the staging buffer once with pin_memory=True and copy with non_blocking=True on a side stream; wait for an event where the data is read.",
                rollback="Return to the pageable buffer.",
            )
            evidence = (
                Evidence("copies that the host waited for", row.synchronous, f"of {row.copies}", None, summary.trace or None),
                Evidence("bytes", row.bytes, "B", None, summary.trace or None),
                Evidence("time on the device", round(row.ms, 3), "ms", None, summary.trace or None),
                Evidence("waits of copies in both directions", round(waited, 3), "ms", None, summary.trace or None),
            )
            severity = "medium" if part >= _LOUD else "low"
            id_ = "H2D_SYNC_PAGEABLE" if row.direction == "HtoD" else "D2H_SYNC_PAGEABLE"
            yield plain(id_, "communication", texts, evidence, severity=severity, confidence="high")


def _serial(trace: TraceSummary) -> float | None:
    over = trace.overlap
    return min(over.copy_ms, over.kernel_ms) - over.both_ms if over is not None and over.copy_ms > 0 else None


def waits(context: Context) -> Iterable[Finding]:
    """IMPLICIT_SYNC: a captured request reads values off the device (`item`, `bool`, `nonzero`), and each read waits for it."""
    found = contrast(context, lambda trace: sum(site.ms for site in _reads(trace)) if trace.device_events else None)
    sites = _reads(found.trace) if found is not None else ()
    reads = sum(site.calls for site in sites)
    top = next(iter(sites), None)
    if found is None or top is None or reads < _FEW:
        return
    place = next((part for part in top.where if ".py(" in part), None)
    texts = Texts(
        where=place or "reads of device values (.item(), bool(), nonzero)",
        claim=f"{'A trace' if found.alone else 'A captured request'} reads values off the device {reads} times and waits {sum(site.ms for site in sites):.2f} ms for them.",
        refute_by="Run one replica under torch.cuda.set_sync_debug_mode('warn'): without warnings on this path the claim is wrong.",
        fix="Keep the decision on the device, or collect the values and read them once after the loop.",
        rollback="Return to the separate reads.",
    )
    evidence = (
        Evidence("reads that waited", reads, "reads", None, found.artefact),
        Evidence(f"{top.call} from the costliest place", top.calls, "calls", None, found.artefact),
        *found.evidence("time in these waits"),
    )
    yield said(context, "IMPLICIT_SYNC", "communication", texts, found, evidence, sure="high")


def _reads(trace: TraceSummary) -> tuple[SyncSite, ...]:
    """Waits inside operators that read a value, by descending time."""
    return tuple(site for site in trace.sync_sites if any(name in _READS for name in site.where))


def shape_churn(context: Context) -> Iterable[Finding]:
    """DYNAMIC_SHAPES: slow captures compile, tune or build graphs, healthy ones do not."""
    found = contrast(context, lambda trace: trace.compile_ms)
    if found is None or found.part < _OF_WINDOW or found.slow < 2 * (found.healthy or 0.0):
        return
    trace = found.trace
    most = trace.shapes[0] if trace.shapes else None
    texts = Texts(
        where=f"{most.operator}, {most.shapes} shapes" if most is not None else "compilation",
        claim=f"A slow captured request spends {found.slow:.1f} ms compiling, tuning or building graphs: it met a shape for the first time.",
        refute_by="Send the slow request's shape twice: if the second is as slow, the shape is not new to the process.",
        fix="Pad inputs to a few buckets, warm every bucket before readiness, and mark dimensions that vary as dynamic.",
        rollback="Return to exact shapes.",
    )
    evidence = (
        *found.evidence("time compiling"),
        Evidence("later versions of a compiled region", trace.recompiles, "versions", None, found.artefact),
    )
    yield said(context, "DYNAMIC_SHAPES", "compute", texts, found, evidence, sure="high")
