"""What both consumers do with a message, and how old it is when they take it."""

from __future__ import annotations

import json
import time
from typing import Final

import inferscope as scope

__all__ = ["published_ns", "score"]

OLDEST_S: Final = 3600.0
"""A message further back was left over from a stop of the service, or another machine's clock differs: its age is not a queue."""


def published_ns(unix_ms: int) -> int | None:
    """When a message was published, on the clock of `time.perf_counter_ns`, which `scope.request` takes; None when that cannot be said.

    Args:
        unix_ms: The publish time that the broker or the producer gave the message. Between two machines it is as good as their clocks.
    """
    age_s = time.time() - unix_ms / 1000
    return time.perf_counter_ns() - int(age_s * 1e9) if 0.0 <= age_s <= OLDEST_S else None


def score(body: bytes, unix_ms: int) -> float:
    """Handle one message as a request that began when it was published: `queue:backlog` is how long it lay in the queue."""
    with scope.request("score", started_ns=published_ns(unix_ms)):
        with scope.stage("decode"):
            values: list[float] = json.loads(body)
        with scope.stage("forward"):
            return sum(value * value for value in values)
