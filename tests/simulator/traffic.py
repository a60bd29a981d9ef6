"""Counts a second of a service that is healthy, bursty or broken: what a trigger is judged by. Seeded, numpy only.

A stall makes every request of its 30 ms slow: requests above the objective come together, which is what real services do and what makes
naive tests fire. Episodes are longer: seconds during which a share of the requests is slow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.random import Generator

    from inferscope.types import IntArray

__all__ = ["bursty", "episodes", "independent", "joined"]

STALL_S = 0.03


def independent(rng: Generator, rate: float, seconds: int, share: float) -> tuple[IntArray, IntArray]:
    """Requests and slow requests by second, each request slow by itself with probability `share`."""
    n = rng.poisson(rate, seconds)
    return n, rng.binomial(n, share)


def bursty(rng: Generator, rate: float, seconds: int, share: float, stall_s: float = STALL_S) -> tuple[IntArray, IntArray]:
    """Requests and slow requests by second, slow ones in stalls that take `share` of the time."""
    n = rng.poisson(rate, seconds)
    stalls = rng.poisson(share / stall_s, seconds)
    return n, np.minimum(rng.poisson(stalls * rate * stall_s), n)


def episodes(rng: Generator, rate: float, seconds: int, share: float, length_s: float, inside: float) -> tuple[IntArray, IntArray]:
    """Requests and slow requests by second; in episodes of `length_s` on average a share `inside` is slow, overall it is `share`."""
    n = rng.poisson(rate, seconds)
    slow = np.zeros(seconds, bool)
    at = 0
    while at < seconds:
        at += int(rng.exponential(length_s * (inside / share - 1.0))) + 1
        end = at + max(1, int(rng.exponential(length_s)))
        slow[at:end] = True
        at = end
    return n, np.where(slow, rng.binomial(n, inside), 0)


def joined(*parts: tuple[IntArray, IntArray]) -> tuple[IntArray, IntArray]:
    """One stretch of traffic after the other."""
    return np.concatenate([n for n, _ in parts]), np.concatenate([k for _, k in parts])
