"""What stages take beside time: CPU, bytes between host and device, and memory of the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inferscope.costs import StageCost

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from inferscope.diagnose.evidence import Horizon
    from inferscope.diagnose.findings import Context
    from inferscope.diagnose.host import HostRequest
    from inferscope.types import FloatArray

__all__ = ["stage_costs"]


def stage_costs(context: Context, original: Horizon) -> tuple[StageCost, ...]:
    """Means over retained requests, by stage; empty without retained requests of both kinds.

    Args:
        context: The evidence.
        original: The horizon as the recorder saw it, before waits inside stages got columns of their own.
    """
    (slow, amounts), (ordinary, others) = context.kept(slow=True), context.kept(slow=False)
    if not len(slow) or not len(ordinary):
        return ()
    moved, usual = _bytes(original, slow, amounts), _bytes(original, ordinary, others)
    found: list[StageCost] = []
    for index, column in enumerate(original.columns):
        if column.kind != "stage":
            continue
        long, short = _mean(slow, amounts, index), _mean(ordinary, others, index)
        if long <= 0 and short <= 0:
            continue
        label = column.label
        found.append(
            StageCost(
                label,
                long,
                short,
                _of(context.waits.slow_cpu, label, long),
                _of(context.waits.ordinary_cpu, label, short),
                moved.get(label),
                usual.get(label),
                context.horizon.device.memory.get(label),
            )
        )
    return tuple(sorted(found, key=lambda cost: -cost.slow_ms))


def _mean(requests: Sequence[HostRequest], amounts: FloatArray, column: int) -> float:
    """Milliseconds."""
    spent = sum(weight * float(r.vector[column]) for r, weight in zip(requests, amounts.tolist(), strict=True) if column < len(r.vector))
    return float(spent) / float(amounts.sum()) / 1e6


def _of(fractions: Mapping[str, float], label: str, ms: float) -> float | None:
    return ms * fractions[label] if label in fractions else None


def _bytes(horizon: Horizon, requests: Sequence[HostRequest], amounts: FloatArray) -> dict[str, float]:
    """Bytes copied a request, by the stage that encloses the copy; only of requests whose positions are known."""
    sums: dict[str, float] = {}
    total = 0.0
    for request, weight in zip(requests, amounts.tolist(), strict=True):
        if not request.spans:
            continue
        total += weight
        for span in request.spans:
            if horizon.columns[span.column].kind != "copy":
                continue
            parent = span.parent
            while 0 <= parent < len(request.spans) and horizon.columns[request.spans[parent].column].kind != "stage":
                parent = request.spans[parent].parent
            if 0 <= parent < len(request.spans):
                label = horizon.columns[request.spans[parent].column].label
                sums[label] = sums.get(label, 0.0) + weight * span.aux
    return {label: value / total for label, value in sums.items()} if total else {}
