"""The headline service, simulated request by request: where the time of its slow requests goes is known, because it was planted.

2000 requests a second arrive at random. Each is preprocessed, copied to the device through one first-in first-out path that rarely stalls
for 30 to 52 ms, goes through the model, and waits for one global lock that is rarely held for 28 to 50 ms. Who looks at averages blames the
model, which takes most of an ordinary request; the tail is copies and the lock. Seeded, numpy only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from inferscope.types import FloatArray, IntArray

__all__ = ["COLUMNS", "Traffic", "simulate"]

COLUMNS: Final = (
    ("unattributed", "unattributed"),
    ("other", "other"),
    ("stage", "preprocess"),
    ("copy", "h2d"),
    ("stage", "forward"),
    ("lock", "rules"),
    ("stage", "rules"),
)
STALL_SHARE: Final = 0.00035
HOLD_SHARE: Final = 0.00028


@dataclass(frozen=True, slots=True)
class Traffic:
    """Every request of a run, in the order in which they ended."""

    start_ns: IntArray
    wall_ns: IntArray
    vectors: IntArray
    """Exclusive nanoseconds by column of `COLUMNS`; rows sum to `wall_ns` exactly."""

    @property
    def end_ns(self) -> IntArray:
        return self.start_ns + self.wall_ns

    def quantile_ms(self, q: float) -> float:
        """Exact quantile of the latency."""
        return float(np.quantile(self.wall_ns, q)) / 1e6

    def excess(self, above_ns: int) -> FloatArray:
        """Mean of the requests above a latency minus mean of the middle fifth, by column, ns: the truth that an attribution estimates."""
        low, high = np.quantile(self.wall_ns, (0.4, 0.6))
        body = self.vectors[(self.wall_ns >= low) & (self.wall_ns <= high)].mean(axis=0)
        return self.vectors[self.wall_ns > above_ns].mean(axis=0) - body

    def shares(self, above_ns: int) -> dict[str, float]:
        """`excess` as shares of its sum, by column name (copy and lock waits under their own names)."""
        excess = self.excess(above_ns)
        return {f"{kind}:{name}": float(value / excess.sum()) for (kind, name), value in zip(COLUMNS, excess, strict=True)}


def _serve(arrive: FloatArray, service: FloatArray) -> FloatArray:
    """When each of a first-in first-out queue's customers leaves; `arrive` ascends."""
    done = np.cumsum(service)
    return done + np.maximum.accumulate(arrive - (done - service))


def simulate(seconds: float, seed: int, *, rate: float = 2000.0, copy_stalls: bool = True, lock_holds: bool = True) -> Traffic:
    """One run; with a cause switched off the same seed gives the same traffic otherwise.

    Args:
        seconds: Simulated time.
        seed: Of everything.
        rate: Requests a second.
        copy_stalls: Plant the stalls of the copy path.
        lock_holds: Plant the long holds of the lock.
    """
    rng = np.random.default_rng(seed)
    count = int(rng.poisson(rate * seconds))
    start = np.sort(rng.uniform(0.0, seconds, count)) * 1e3  # ms from here on
    preprocess = rng.gamma(40.0, 1.85 / 40.0, count)
    copy = rng.gamma(30.0, 0.20 / 30.0, count)
    stalls = np.where(rng.random(count) < STALL_SHARE, rng.uniform(30.0, 52.0, count), 0.0)
    forward = rng.gamma(200.0, 5.3 / 200.0, count)
    rules = rng.gamma(30.0, 0.14 / 30.0, count)
    holds = np.where(rng.random(count) < HOLD_SHARE, rng.uniform(28.0, 50.0, count), 0.0)
    gap = 0.7 + rng.exponential(0.25, count) + np.where(rng.random(count) < 0.03, rng.exponential(5.0, count), 0.0)  # preemption

    def through(ready: FloatArray, service: FloatArray) -> FloatArray:
        order = np.argsort(ready, kind="stable")
        left = np.empty_like(ready)
        left[order] = _serve(ready[order], service[order])
        return left

    prepared = start + preprocess
    copied = through(prepared, copy + stalls * copy_stalls)
    computed = copied + forward
    ruled = through(computed, rules + holds * lock_holds)
    own_rules = rules + holds * lock_holds
    parts = np.zeros((count, len(COLUMNS)))
    parts[:, 0] = gap
    parts[:, 2] = preprocess
    parts[:, 3] = copied - prepared
    parts[:, 4] = forward
    parts[:, 5] = ruled - computed - own_rules
    parts[:, 6] = own_rules
    vectors = np.maximum(np.rint(parts * 1e6), 0).astype(np.int64)
    wall = vectors.sum(axis=1)
    start_ns = (start * 1e6).astype(np.int64)
    order = np.argsort(start_ns + wall, kind="stable")
    return Traffic(start_ns[order], wall[order], vectors[order])
