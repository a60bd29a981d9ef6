"""When requests are due: drawn beforehand, so that a slow server cannot change it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from inferscope.types import IntArray

__all__ = ["arrivals"]


def arrivals(rate: float, seconds: float, seed: int, process: str = "poisson") -> IntArray:
    """Arrival times in ns from the start, ascending, all below `seconds`.

    Args:
        rate: mean arrivals a second.
        seconds: length of the schedule.
        seed: same seed, same times.
        process: `poisson` draws exponential gaps (a Poisson process); `constant` spaces them by 1/rate.

    Raises:
        ValueError: a rate or length that is not positive, or an unknown process.
    """
    if not (rate > 0 and seconds > 0):
        raise ValueError(f"rate and seconds must be above 0, not {rate} and {seconds}")
    if process.startswith("trace:"):
        times = _trace(Path(process.removeprefix("trace:")))
        return times[times < seconds * 1e9]
    if process == "constant":
        return (np.arange(int(rate * seconds)) * (1e9 / rate)).astype(np.int64)
    if process != "poisson":
        raise ValueError(f"arrivals are poisson or constant or trace:FILE, not {process!r}")
    generator = np.random.default_rng(seed)
    # Enough gaps to pass the end with near certainty: mean + 8 standard deviations of the count.
    draws = int(rate * seconds + 8 * (rate * seconds) ** 0.5) + 16
    times = np.cumsum(generator.exponential(1e9 / rate, draws))
    return times[times < seconds * 1e9].astype(np.int64)


def _trace(path: Path) -> IntArray:
    """Recorded arrival times, in ns from the first line's zero."""
    try:
        seconds = np.array([float(line) for line in path.read_text(encoding="utf-8").split()], dtype=np.float64)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"arrivals {path}: {error.strerror if isinstance(error, OSError) else 'not one number of seconds a line'}"
        ) from error
    if not seconds.size or not np.isfinite(seconds).all() or seconds[0] < 0 or (np.diff(seconds) < 0).any():
        raise ValueError(f"arrivals {path}: need ascending seconds from 0, one a line")
    return (seconds * 1e9).astype(np.int64)
