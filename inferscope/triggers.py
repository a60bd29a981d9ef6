"""What each trigger saw, in words: for logs, reports and verdicts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from inferscope.types import Breach

__all__ = ["LATENCY", "told"]

LATENCY: Final = frozenset({"e_detector", "burn_rate", "severe"})
"""Triggers that say that requests took too long."""


def told(breach: Breach) -> str:
    """What was seen when a breach was detected."""
    seconds = f"{breach.exceeding} of {breach.requests} seconds"
    of = f"{breach.exceeding} of {breach.requests} requests"
    value = breach.statistic
    words = {
        "error_rate": f"{of} failed",
        "jitter": f"{of} too far above the median",
        "throughput": f"{value:.4g} items a second while requests waited",
        "throughput_drop": f"down to {value:.4g} items a second while requests waited",
        "gpu_memory": f"device memory at {100 * value:.3g} %" if value <= 1 else f"{value:.4g} bytes of device memory in use",
        "lock_wait": f"waits for a lock of up to {value:.4g} ms in {seconds}",
        "gc_pause": f"garbage collections of up to {value:.4g} ms in {seconds}",
        "device_idle": f"the device busy {100 * value:.3g} % of the time while requests waited",
        "memory_headroom": f"{100 * value:.3g} % of the memory free",
        "predicate": f"the service's own predicate true in {seconds}",
        "manual": "asked for",
    }
    return words.get(breach.trigger, f"{of} above {breach.threshold_ms:g} ms")
