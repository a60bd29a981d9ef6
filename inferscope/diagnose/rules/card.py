"""The card under the model: slower clocks, memory that ends, and queues that others fill; seconds of slow requests against the others."""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Final

from inferscope.diagnose.findings import Texts, of_share
from inferscope.diagnose.rules.traces import owner
from inferscope.diagnose.rules.turns import turns
from inferscope.types import Evidence, Finding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from inferscope.diagnose.device import Look
    from inferscope.diagnose.findings import Context
    from inferscope.diagnose.host import HostRequest
    from inferscope.diagnose.rules.turns import Turns
    from inferscope.types import Share

__all__ = ["clock_throttle", "device_queue", "memory_pressure"]

_MOST: Final = 0.5
_ODDS: Final = 3.0
"""How much likelier a slow request saw it, as odds: a condition that holds a third of the time can be at most three times as frequent."""
_FEW: Final = 10
_SLOWER: Final = 0.9
_FRAGMENTED: Final = 0.2
_EXPLAINS: Final = 0.5
_LOOK_NS: Final = 1_500_000_000
_BAD: Final = frozenset({"sw_power_cap", "hw_slowdown", "sw_thermal", "hw_thermal", "hw_power_brake"})


def clock_throttle(context: Context) -> Iterable[Finding]:
    """CLOCK_THROTTLE: slow requests run while the driver slows the card down, ordinary ones do not."""
    highest = max((hz for look in context.horizon.device.looks for hz in look.clock_hz.values()), default=0)

    def slowed(look: Look) -> bool:
        return any(_BAD & set(why) and look.clock_hz.get(card, highest) < _SLOWER * highest for card, why in look.slowed.items())

    seen = _parts(context, slowed, nearest=True)
    share = _share(context)
    if seen is None or share is None or not highest:
        return
    slow, ordinary, count = seen
    reasons = sorted({why for look in context.horizon.device.looks if slowed(look) for held in look.slowed.values() for why in held} & _BAD)
    lowest = min(hz for look in context.horizon.device.looks if slowed(look) for hz in look.clock_hz.values())
    texts = Texts(
        where=f"clocks: {', '.join(reasons)}",
        claim=f"{100 * slow:.0f} % of the slow requests and {100 * ordinary:.0f} % of the others ran while the driver slowed the card ({', '.join(reasons)}), down to {lowest / 1e6:.0f} of {highest / 1e6:.0f} MHz.",
        refute_by="Lock the clocks at the lower value on one replica (nvidia-smi -lgc): if requests do not become slow there, the clocks are not the cause.",
        fix="Cool or re-rack the card, raise its power limit, or serve at locked clocks and size the objective for them.",
        rollback="Return to the earlier power limit or free clocks (nvidia-smi -rgc).",
    )
    evidence = (
        Evidence("slow requests under slowed clocks", round(100 * slow, 1), "%"),
        Evidence("ordinary requests under slowed clocks", round(100 * ordinary, 1), "%"),
        Evidence("lowest clock meanwhile", round(lowest / 1e6), "MHz"),
        Evidence("highest clock seen", round(highest / 1e6), "MHz"),
        Evidence("slow requests with a look at the card", count, "requests"),
    )
    yield of_share(context, share, "CLOCK_THROTTLE", "compute", texts, evidence)


def memory_pressure(context: Context) -> Iterable[Finding]:
    """MEM_FRAGMENTATION and OOM_NEAR: allocations flush the cache and stop the device while slow requests run."""
    retried = {
        id(after)
        for before, after in pairwise(context.horizon.device.looks)
        if before.slot == after.slot and _retries(after) > _retries(before)
    }
    seen = _parts(context, lambda look: id(look) in retried)
    share = _share(context)
    if seen is None or share is None:
        return
    slow, ordinary, _ = seen
    looks = context.horizon.device.looks
    total = max(_retries(look) for look in looks) - min(_retries(look) for look in looks)
    split, full = max(_ratio(look, "inactive_split_bytes", "reserved_bytes") for look in looks), max(map(_used, looks))
    fragmented = split >= _FRAGMENTED
    texts = Texts(
        where="device allocator",
        claim=f"{total} allocations flushed the allocator's cache, which stops the device; {100 * slow:.0f} % of the slow requests ran in such a second, {100 * ordinary:.0f} % of the others.",
        refute_by="Give one replica half the batch: if retries end and slow requests stay, memory is not the cause.",
        fix=(
            "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, and pad inputs to a few buckets so that blocks are used again."
            if fragmented
            else "Lower the peak: a smaller largest batch, fewer copies of activations, a limit for others on the card; or a larger card."
        ),
        rollback="Return to the earlier allocator setting or batch.",
    )
    evidence = (
        Evidence("allocations that flushed the cache", total, "retries"),
        Evidence("slow requests in seconds with a retry", round(100 * slow, 1), "%"),
        Evidence("ordinary requests in seconds with a retry", round(100 * ordinary, 1), "%"),
        Evidence("reserved but split and unused", round(100 * split, 1), "%"),
        Evidence("of the card's memory in use", round(100 * full, 1) if full else "n/a", "%" if full else ""),
    )
    yield of_share(context, share, "MEM_FRAGMENTATION" if fragmented else "OOM_NEAR", "memory", texts, evidence)


def device_queue(context: Context) -> Iterable[Finding]:
    """GPU_QUEUE_CONTENTION: slow requests' work stands in the device's queue, behind other requests' or behind somebody else's."""
    own = next(iter(context.shares("gpu-queue")), None)
    kept = {kind: context.kept(slow=kind)[0] for kind in (True, False)}
    slow, ordinary = (_queued(context, kept[kind]) for kind in (True, False))
    share = own or _share(context, ("copy",))
    if share is None or (own is None and len(slow) < _FEW):
        return
    waited, usual = (median(values) if values else 0.0 for values in (slow, ordinary))
    if own is None and waited - usual < _EXPLAINS * (share.tail_ms - share.body_ms):
        return
    had = turns(context, kept[True], kept[False])
    foreign = own is None or (had is not None and had.foreign)
    texts = Texts(
        where=f"device queue, {'foreign work' if foreign else f'behind {had.behind}' if had is not None and had.behind else 'own work'}",
        claim=f"Slow requests' work stands {waited if own is None else own.tail_ms:.1f} ms in the device's queue before its turn, behind {_whose(own, had)}.",
        refute_by="Give one replica a card of its own: if the wait in the queue stays, it is this process's own work that fills it.",
        fix=(
            "Isolate the card (MIG, another node), or bound the other's share (MPS, stream priorities)."
            if foreign
            else "Bound what runs on the device at a time, give heavy work a stream or a card of its own (stream priorities), or split it."
        ),
        rollback="Return to the shared card." if foreign else "Return to one queue.",
    )
    evidence = [
        Evidence("wait in the device's queue, slow requests, median", round(waited, 3), "ms")
        if slow
        else Evidence("wait in a slow request", round(share.tail_ms, 2), "ms"),
        Evidence("wait in the device's queue, ordinary requests, median", round(usual, 3) if ordinary else "n/a", "ms" if ordinary else ""),
        Evidence("slow requests timed on the device", len(slow), "requests"),
    ]
    if had is not None:
        evidence.append(Evidence("slow requests, no larger than others, whose work lasted long alone on the device", had.alone, "requests"))
    if context.horizon.device_busy is not None:
        evidence.append(Evidence("device busy, from its driver", round(100 * context.horizon.device_busy, 1), "%"))
    yield of_share(context, share, "GPU_QUEUE_CONTENTION", "scheduling", texts, evidence)


def _whose(own: Share | None, had: Turns | None) -> str:
    """Whose work had the device, in words."""
    if own is None:
        return "work that none of this process's spans covers: another process, or streams that are not timed"
    if had is None:
        return "other requests of this process"
    if had.foreign:
        return "somebody else's: work of requests no larger than others lasts many times its usual time while no other request of this process has the device"
    return f"other requests of this process, mostly {had.behind}" if had.behind else "other requests of this process"


def _share(context: Context, also: Sequence[str] = ()) -> Share | None:
    """The column that the card makes slow: the model's, or one of another kind when that owns more."""
    found = [share for share in (owner(context), *(share for kind in also for share in context.shares(kind))) if share is not None]
    return max(found, key=lambda share: share.share, default=None)


def _queued(context: Context, requests: Sequence[HostRequest]) -> list[float]:
    """Longest wait in the device's queue of each request that was timed there, ms."""
    spans = context.horizon.device.spans
    return [max(span.queue_ns for span in rows) / 1e6 for r in requests if (rows := spans.get((r.slot, r.id)))]


def _parts(context: Context, holds: Callable[[Look], bool], *, nearest: bool = False) -> tuple[float, float, int] | None:
    """(part of slow requests, part of ordinary ones, slow ones) whose next or nearest look holds; None unless most slow ones do, and clearly more than ordinary ones."""
    looks = context.horizon.device.looks
    slow, ordinary = (_looked(looks, context.kept(slow=kind)[0], holds, nearest=nearest) for kind in (True, False))
    if len(slow) < _FEW or len(ordinary) < _FEW:
        return None
    high, low = sum(slow) / len(slow), sum(ordinary) / len(ordinary)
    return (high, low, len(slow)) if high >= _MOST and _odds(high) >= _ODDS * _odds(low) else None


def _odds(part: float) -> float:
    return part / max(1.0 - part, 1e-3)


def _looked(looks: Sequence[Look], requests: Sequence[HostRequest], holds: Callable[[Look], bool], *, nearest: bool) -> list[bool]:
    """What the first look after each request's end says, or the nearest to it, for those that have one soon enough."""
    held = {slot: [look for look in looks if look.slot == slot] for slot in {look.slot for look in looks}}
    moments = {slot: [look.at_ns for look in rows] for slot, rows in held.items()}
    found: list[bool] = []
    for request in requests:
        rows, ends, end = held.get(request.slot, []), moments.get(request.slot, []), request.start_ns + request.wall_ns
        place = bisect_left(ends, end)
        if nearest and place and (place == len(rows) or end - ends[place - 1] < ends[place] - end):
            place -= 1
        if place < len(rows) and abs(ends[place] - end) <= _LOOK_NS:
            found.append(holds(rows[place]))
    return found


def _retries(look: Look) -> int:
    return sum(int(row.get("retries") or 0) for row in look.memory.values())


def _ratio(look: Look, part: str, whole: str) -> float:
    return max((row[part] / row[whole] for row in look.memory.values() if row.get(part) is not None and row.get(whole)), default=0.0)


def _used(look: Look) -> float:
    rows = [row for row in look.memory.values() if row.get("total_bytes") and row.get("free_bytes") is not None]
    return max((1.0 - row["free_bytes"] / row["total_bytes"] for row in rows), default=0.0)
