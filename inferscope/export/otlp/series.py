"""One point of one series, on its way from counts to an encoding, and the pace at which such points are worked on."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from inferscope.pace import PAUSE_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferscope.export.otlp.buckets import Buckets

    Scalar = str | bool | int | float
    Attributes = tuple[tuple[str, Scalar], ...]

__all__ = ["CUMULATIVE", "DELTA", "Exemplar", "Series", "Slices", "Total"]

CUMULATIVE: Final = 2
"""OTLP's AGGREGATION_TEMPORALITY_CUMULATIVE."""
DELTA: Final = 1
"""OTLP's AGGREGATION_TEMPORALITY_DELTA."""


@dataclass(frozen=True, slots=True)
class Total:
    """An exact number: a running total, or the current value of a gauge."""

    name: str
    value: int | float
    attributes: Attributes = ()
    monotonic: bool = True
    """False for a gauge."""


@dataclass(frozen=True, slots=True)
class Exemplar:
    """One request that stands in a histogram."""

    value: float
    """Seconds."""
    time_unix_ns: int
    trace: tuple[str, str] | None = None
    """Trace and span id in hex of a span that was sampled; None where there is none to look at."""


@dataclass(frozen=True, slots=True)
class Series:
    """One point of one series: `buckets` for a histogram, else `value`."""

    name: str
    attributes: Attributes
    start_unix_ns: int
    now_unix_ns: int
    buckets: Buckets | None = None
    value: int | float = 0
    monotonic: bool = True
    exemplars: tuple[Exemplar, ...] = ()
    """Of the time since the last export, whatever the temporality of the numbers."""

    @property
    def key(self) -> tuple[str, Attributes]:
        """What makes the series one series."""
        return self.name, self.attributes


class Slices:
    """Yields the interpreter between slices of work: after `length` steps or 0.1 ms, whichever comes first."""

    def __init__(self, length: int = 16, nanoseconds: int = 100_000, pause: Callable[[float], object] = time.sleep) -> None:
        self._length = length
        self._nanoseconds = nanoseconds
        self._pause = pause
        self._steps = 0
        self._since = time.perf_counter_ns()

    def step(self) -> None:
        """Count one piece of work and yield when the slice is full."""
        self._steps += 1
        if self._steps >= self._length or time.perf_counter_ns() - self._since >= self._nanoseconds:
            self.rest()

    def rest(self) -> None:
        """Yield now, between two stages of work."""
        self._pause(PAUSE_S)
        self._steps = 0
        self._since = time.perf_counter_ns()
