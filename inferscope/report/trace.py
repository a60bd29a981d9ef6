"""What one trace says, for a terminal."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final

from inferscope.diagnose.traces.values import head
from inferscope.report import text, words

if TYPE_CHECKING:
    from collections.abc import Iterable

    from inferscope.diagnose.one_trace import OneTrace
    from inferscope.diagnose.traces.values import Idle, Kernel, Operator, Roofline, TraceSummary

__all__ = ["render", "to_json"]

_ROWS: Final = 10
_NAME: Final = 72
_WIDTH: Final = 100


def to_json(trace: OneTrace) -> dict[str, Any]:
    """Summary and findings as JSON types."""
    return {
        "schema": 1,
        "trace": trace.name,
        **dataclasses.asdict(trace.summary),
        "findings": [dataclasses.asdict(finding) for finding in trace.findings],
    }


def render(trace: OneTrace, *, width: int | None = None) -> str:
    """Write it as text that ends in a newline.

    Args:
        trace: A trace that was read.
        width: Columns; default 100.
    """
    lines = [*_lines(trace.name, trace.summary), "", "findings:", *([] if trace.findings else ["  none"])]
    for position, finding in enumerate(trace.findings, 1):
        lines += text.finding_lines(position, finding, width or _WIDTH)
    return "\n".join(lines) + "\n"


def _lines(name: str, trace: TraceSummary) -> Iterable[str]:
    yield f"{name}: {trace.events} events in {trace.window_ms:.2f} ms on {len(trace.threads)} threads{f', {trace.device}' if trace.device else ''}"
    busy = "n/a, no device events" if trace.device_busy is None else words.percent(trace.device_busy)
    yield f"device busy (this process's own work): {busy}"
    if trace.idle is not None:
        yield _idle(trace.idle)
    yield f"synchronous copies (pageable copy, then a stream synchronise): {trace.synchronous_copies}"
    yield from _table("operators and calls by self time, 80 %", head(trace.operators))
    yield from _table("kernels, 80 %", head(trace.kernels))
    for transfer in trace.transfers:
        yield (
            f"  copies {transfer.direction}, {transfer.memory}: {transfer.copies}, {transfer.synchronous} of them waited for, "
            f"{transfer.bytes} bytes, {transfer.ms:.3f} ms"
        )
    if trace.sync_sites:
        yield "waits for the device:"
        for site in trace.sync_sites[:5]:
            yield f"  {site.ms:.3f} ms in {site.calls} calls of {site.call}{' from ' + ' < '.join(site.where[:4]) if site.where else ''}"
    yield from _device(trace)
    if trace.shapes:
        yield "shapes: " + ", ".join(f"{row.operator} {row.shapes} in {row.calls} calls" for row in trace.shapes[:4])
    if trace.graphs:
        yield f"compiled regions run: {trace.graphs}, later versions of one (recompiles): {trace.recompiles}, compiling: {trace.compile_ms:.2f} ms"
    if trace.collectives:
        yield f"collectives: {len(trace.collectives)}, {trace.collective_ms:.2f} ms, of it beyond the fastest of their kind {trace.collective_wait_ms or 0.0:.2f} ms (estimate of waiting for other ranks)"
    if trace.stages_ms:
        yield "stages (self time of operators and calls; device work launched inside):"
        for label, ms in sorted(trace.stages_ms.items(), key=lambda item: -item[1])[:_ROWS]:
            on_device = trace.stages_device_ms.get(label)
            yield f"  {label[:_NAME]}: {ms:.3f} ms{'' if on_device is None else f'; device {on_device:.3f} ms'}"


def _idle(idle: Idle) -> str:
    return (
        f"device idle between its work: {idle.total_ms:.2f} ms in {idle.gaps} gaps (median {idle.median_us:.1f} us): host elsewhere "
        f"{idle.host_ms:.2f}, host waiting for the device {idle.sync_ms:.2f}, launched but not started {idle.launch_ms:.2f}, unknown {idle.unknown_ms:.2f} ms"
    )


def _table(title: str, rows: Iterable[Operator | Kernel]) -> Iterable[str]:
    held = list(rows)
    if held:
        yield f"{title}:"
        yield from (f"  {row.self_ms:.3f} ms in {row.calls} calls: {row.name[:_NAME]}" for row in held[:_ROWS])
        if len(held) > _ROWS:
            yield f"  and {len(held) - _ROWS} more"


def _device(trace: TraceSummary) -> Iterable[str]:
    if trace.small_kernels is not None:
        yield f"kernels shorter than 10 us: {words.percent(trace.small_kernels)}"
    if trace.matrix is not None:
        matrix = trace.matrix
        yield f"matrix kernels: {matrix.tensor_ms:.3f} ms on tensor cores, {matrix.plain_ms:.3f} ms on ordinary units, {matrix.unknown_ms:.3f} ms unknown"
    if trace.overlap is not None and trace.overlap.copy_ms > 0:
        over = trace.overlap
        yield f"copies {over.copy_ms:.3f} ms, kernels {over.kernel_ms:.3f} ms, both at once {over.both_ms:.3f} ms, on {over.streams} streams"
    if trace.roofline is not None:
        yield _roofline(trace.roofline)


def _roofline(line: Roofline) -> str:
    intensity = "n/a" if line.intensity is None else f"{line.intensity:.1f} operations a byte"
    if line.ridge is None or line.of_flops is None or line.of_bandwidth is None:
        return f"roofline (estimate from shapes, {words.percent(line.covered)} of kernel time): {intensity}; the card's peaks are not known here"
    return (
        f"roofline (estimate from shapes, {words.percent(line.covered)} of kernel time): {intensity}, the card's ridge is {line.ridge:.1f}; "
        f"{words.percent(line.of_flops)} of its arithmetic, {words.percent(line.of_bandwidth)} of its bandwidth"
    )
