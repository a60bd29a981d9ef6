"""Does a run meet its objective, given that it is a sample?

"P99 at most 20 ms" is a statement about a share: at most 1 % of the requests take longer. The share's exact bounds (as in MLPerf
LoadGen's early stopping) decide, with as many independent requests as the bursts leave: n divided by how much more the counts of 1-s
blocks vary than independent requests would.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from inferscope.bench.compare import QUANTILES
from inferscope.bench.stats import LEAST_BLOCKS, proportion_bounds
from inferscope.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from inferscope.bench.result import LoadResult
    from inferscope.types import FloatArray, IntArray

__all__ = ["Acceptance", "Objective", "accept", "design_effect", "exit_code", "parse_objective"]

_FORM: Final = re.compile(r"\s*(p\d+|error_rate)\s*<=\s*([0-9.]+)\s*(us|ms|s|%)\s*\Z")
_UNITS: Final = {"us": 1e-3, "ms": 1.0, "s": 1e3}


@dataclass(frozen=True, slots=True)
class Objective:
    """What a run must meet: a quantile's limit in ms, or the greatest share of failed requests."""

    text: str
    metric: str
    limit: float
    """ms, or a share of requests for `error_rate`."""

    @property
    def allowed(self) -> float:
        """The share of requests that may miss it."""
        return self.limit if self.metric == "error_rate" else 1.0 - QUANTILES[self.metric]


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Whether an objective holds."""

    objective: str
    word: str
    """`HOLDS`, `BROKEN` or `INCONCLUSIVE`."""
    missed: int
    requests: int
    share: float | None
    low: float
    high: float
    """Bounds of the share that misses it."""
    allowed: float
    design_effect: float

    def text(self) -> str:
        """The verdict in one line."""
        bounds = f"[{100 * self.low:.2f}, {100 * self.high:.2f}] %, allowed {100 * self.allowed:g} %"
        return f"{self.objective}: {self.word}, {self.missed} of {self.requests} requests missed it, share {bounds}"

    def to_json(self) -> dict[str, Any]:
        """The verdict as data."""
        return asdict(self)


def parse_objective(text: str) -> Objective:
    """An objective from `p99<=20ms` or `error_rate<=0.1%`.

    Raises:
        ConfigurationError: another form.
    """
    match = _FORM.match(text)
    metric, number, unit = match.groups() if match else ("", "", "")
    try:
        limit = float(number)
    except ValueError:
        limit = 0.0
    good = (metric in QUANTILES and unit in _UNITS) or (metric == "error_rate" and unit == "%" and limit < 100)
    if not good or limit <= 0:
        raise ConfigurationError("slo", text, f"QUANTILE<=TIME as in p99<=20ms with {', '.join(QUANTILES)}, or error_rate<=0.1%")
    return Objective(text.strip(), metric, limit * _UNITS[unit] if unit in _UNITS else limit / 100)


def design_effect(missed: FloatArray, requests: FloatArray) -> float:
    """How many times more the misses of 1-s blocks vary than independent requests' would, at least 1.

    Args:
        missed: misses of each block, shape (blocks,).
        requests: requests of each block, shape (blocks,).
    """
    share = float(missed.sum() / requests.sum()) if requests.sum() else 0.0
    if requests.size < LEAST_BLOCKS or not 0.0 < share < 1.0:
        return 1.0
    # Each block's squared surprise in units of the binomial variance (Pearson's dispersion).
    surprise = (missed - share * requests) ** 2 / np.maximum(share * (1 - share) * requests, 1e-12)
    return max(1.0, float(np.sum(surprise[requests > 0])) / max(int(np.count_nonzero(requests)) - 1, 1))


def accept(objective: Objective, result: LoadResult, *, skip: int = 0, level: float = 0.95) -> Acceptance:
    """Judge a run by an objective; requests that failed or were never answered miss it.

    Args:
        objective: what to meet.
        result: the run.
        skip: requests of the warm-up to leave out.
        level: of the bounds.
    """
    fine = result.fine[skip:]
    missing = np.logical_not(fine)
    if objective.metric != "error_rate":
        missing |= (result.done_ns[skip:] - result.intended_ns[skip:]) > objective.limit * 1e6
    count, missed = int(missing.size), int(np.count_nonzero(missing))
    if not count:
        return Acceptance(objective.text, "INCONCLUSIVE", 0, 0, None, 0.0, 1.0, objective.allowed, 1.0)
    seconds = (result.intended_ns[skip:] - result.intended_ns[skip]) // 1_000_000_000
    effect = design_effect(_counts(seconds, missing), _counts(seconds, np.ones_like(missing)))
    low, high = proportion_bounds(missed / effect, count / effect, level)
    word = "HOLDS" if high <= objective.allowed else "BROKEN" if low > objective.allowed else "INCONCLUSIVE"
    return Acceptance(objective.text, word, missed, count, missed / count, low, high, objective.allowed, effect)


def _counts(seconds: IntArray, what: NDArray[np.bool_]) -> FloatArray:
    """How many of `what` fell into each second, shape (seconds,)."""
    return np.asarray(np.bincount(seconds, weights=what.astype(np.float64)), dtype=np.float64)


def exit_code(found: Sequence[Acceptance]) -> int:
    """2 when an objective is broken, 3 when one stays open, else 0."""
    words = {each.word for each in found}
    return 2 if "BROKEN" in words else 3 if "INCONCLUSIVE" in words else 0
