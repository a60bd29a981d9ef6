"""Is the candidate faster, slower or the same, and how surely?

The unit is a block: some seconds of load on one version. Blocks of both versions are taken in turn (A B B A …) and compared in pairs,
so that what the machine does meanwhile falls on both. The difference is that of the pooled quantile; its interval has the changes that could
not be told from chance if the two blocks of each pair changed places at random (`flips`). Whole blocks, because requests of one block share
stalls and are not independent. Blocks of two separate runs make no pairs and are resampled. Verdicts:

    NO CHANGE      the interval lies within the tolerance
    REGRESSED      the interval excludes "no difference" and the difference is beyond the tolerance; IMPROVED likewise
    INCONCLUSIVE   neither: more blocks are needed
"""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from inferscope.bench import flips
from inferscope.bench.stats import LEAST_BLOCKS, block_weights, needed, observed, resampled_quantiles, student_quantile
from inferscope.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inferscope.bench.result import LoadResult
    from inferscope.types import FloatArray

__all__ = [
    "GATES",
    "QUANTILES",
    "WORDS",
    "Block",
    "Gate",
    "Verdict",
    "blocks_of",
    "exit_code",
    "judge",
    "look_level",
    "parse_gates",
    "sequential",
    "warned",
    "withhold",
]

IMPROVED: Final = "IMPROVED"
REGRESSED: Final = "REGRESSED"
NO_CHANGE: Final = "NO CHANGE"
INCONCLUSIVE: Final = "INCONCLUSIVE"
INCORRECT: Final = "INCORRECT"
INCOMPARABLE: Final = "INCOMPARABLE"
WORDS: Final = (IMPROVED, REGRESSED, NO_CHANGE, INCONCLUSIVE, INCORRECT, INCOMPARABLE)
QUANTILES: Final = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p999": 0.999}
GATES: Final = "p50:3%,p95:5%,p99:10%"
"""Tight where the measurement is sharp, wider where the tail is noisy."""
_MORE_BLOCKS: Final = 60
_STALLS: Final = 2.0
"""A block lasts at least so many times the P99: a stall that reaches into the next block makes neighbours of what should be independent."""
_FAILING: Final = "the candidate fails more requests, so those that it answers prove nothing"
_GATE: Final = re.compile(r"\s*([a-z0-9_]+)\s*:\s*([0-9.]+)\s*%\s*\Z")


@dataclass(frozen=True, slots=True)
class Block:
    """Some seconds of load on one version."""

    latency_ms: FloatArray
    """Of the requests that were answered well, shape (requests,)."""
    failed: int = 0
    """Requests that were not: an error, or no answer."""
    seconds: float = 1.0


@dataclass(frozen=True, slots=True)
class Gate:
    """A metric and how much of a difference does not matter.

    Args:
        metric: `p50`, `p90`, `p95`, `p99`, `p999`, `mean`, `throughput` (relative) or `error_rate` (points).
        tolerance: as a fraction.
    """

    metric: str
    tolerance: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """What can be said about one metric."""

    metric: str
    word: str
    base: float | None
    """ms, requests/s, or a share of requests."""
    candidate: float | None
    change: float | None
    """Relative to base; of `error_rate` the difference of shares."""
    low: float | None
    high: float | None
    level: float
    """Of the interval [low, high]."""
    tolerance: float
    blocks: int
    """Pairs of blocks, or blocks of the shorter run when `kind` is sequential."""
    kind: str
    """`interleaved`, or `sequential`: one run after the other, where a machine that changed meanwhile reads as a difference."""
    why: str = ""
    """Why there is no verdict."""
    warning: str = ""
    """What weakens the verdict."""

    def text(self) -> str:
        """The verdict in one line."""
        unit = "block pairs" if self.kind == "interleaved" else "blocks, sequential"
        if self.change is None or self.low is None or self.high is None:
            return f"{self.metric} {self.word}: {self.why}"
        signed = [f"{100 * value:+.1f}" for value in (self.change, self.low, self.high)]
        because = (f" ({self.why})" if self.why else "") + (f" [warning: {self.warning}]" if self.warning else "")
        return f"{self.metric} {self.word}: Δ {signed[0]} % [{signed[1]}, {signed[2]}], {self.blocks} {unit}{because}"

    def to_json(self) -> dict[str, Any]:
        """The verdict as data."""
        return asdict(self)


def parse_gates(text: str) -> tuple[Gate, ...]:
    """Gates from `p50:3%,p99:10%`.

    Raises:
        ConfigurationError: a part that is not METRIC:PERCENT%, or an unknown metric.
    """
    gates: list[Gate] = []
    known = (*QUANTILES, "mean", "throughput", "error_rate")
    for part in text.split(","):
        match = _GATE.match(part)
        try:
            tolerance = float(match[2]) / 100 if match else math.nan
        except ValueError:
            tolerance = math.nan
        if match is None or match[1] not in known or not 0 < tolerance < 10:
            raise ConfigurationError("gate", part.strip(), f"METRIC:PERCENT% with a metric of {', '.join(known)}, as in {GATES}")
        gates.append(Gate(match[1], tolerance))
    return tuple(gates)


def look_level(look: int, looks: int | None = None) -> float:
    """Level of the intervals at the look-th time (from 0) that a growing measurement is judged.

    Whoever looks until something shows finds something: the 5 % of false verdicts are spent over the looks (2.5 %, 0.5 %, 0.25 %, …),
    which bounds their sum by Bonferroni whatever the number of looks, with one and a half percent to spare: in A B B A two blocks of one
    version are neighbours and can share a stall, which throws of single pairs do not know. A single look may have 4 %: a test that is exact at
    5 % is over it in half of all measurements of its rate.
    """
    if looks == 1:
        return 0.96
    return 0.975 if look == 0 else 1.0 - 0.01 * 0.5**look


def blocks_of(result: LoadResult, count: int | None = None, *, skip: int = 0) -> list[Block]:
    """Cuts a run into equal spans of time.

    Args:
        result: the run.
        count: how many blocks; default one a second, but at least 20 and at most 60.
        skip: requests of the warm-up to leave out.
    """
    intended = result.intended_ns[skip:]
    if intended.size == 0:
        return []
    first, last = int(intended[0]), int(intended[-1])
    number = count or min(max(int((last - first) / 1e9), LEAST_BLOCKS), _MORE_BLOCKS)
    width = max((last - first + 1) / number, 1.0)
    where = np.minimum(((intended - first) / width).astype(np.int64), number - 1)
    fine = result.fine[skip:]
    latency_ms = (result.done_ns[skip:] - intended) / 1e6
    return [
        Block(latency_ms[(where == index) & fine], int(np.count_nonzero((where == index) & ~fine)), width / 1e9) for index in range(number)
    ]


def sequential(
    base: LoadResult, candidate: LoadResult, gates: Sequence[Gate] | None = None, *, skip: tuple[int, int] = (0, 0)
) -> list[Verdict]:
    """Verdicts on two runs that were made one after the other: labelled, because a machine that changed in between reads as a difference.

    Args:
        base: the run before.
        candidate: the run after.
        gates: what to judge; default `GATES`.
        skip: requests of warm-up to leave out of each.
    """
    chosen = parse_gates(GATES) if gates is None else gates
    return judge(blocks_of(base, skip=skip[0]), blocks_of(candidate, skip=skip[1]), chosen, paired=False)


def judge(
    base: Sequence[Block], candidate: Sequence[Block], gates: Sequence[Gate], *, paired: bool = True, level: float = 0.95, seed: int = 0
) -> list[Verdict]:
    """A verdict for each gate, and one for errors whether gated or not (a version that fails is not faster).

    Args:
        base: blocks of the version that is there.
        candidate: blocks of the new one; with `paired`, block i was measured beside block i of `base`.
        gates: metrics and tolerances.
        paired: resample pairs (interleaved blocks) or each version's blocks on their own (sequential runs).
        level: of the intervals.
        seed: of the resampling.

    Raises:
        ValueError: paired blocks of different number.
    """
    if paired and len(base) != len(candidate):
        raise ValueError(f"{len(base)} and {len(candidate)} blocks make no pairs")
    chosen = list(gates) + ([] if any(gate.metric == "error_rate" for gate in gates) else [Gate("error_rate", 0.001)])
    comparison = _Comparison(base, candidate, paired, level, seed)
    found = [comparison.verdict(gate) for gate in chosen]
    failing = next((verdict for verdict in found if verdict.metric == "error_rate" and verdict.word == REGRESSED), None)
    if failing is None:
        return found
    return [withhold(verdict, _FAILING) if verdict.word == IMPROVED and verdict.metric != "error_rate" else verdict for verdict in found]


def withhold(verdict: Verdict, why: str) -> Verdict:
    """The verdict with its numbers but without its word, and why."""
    return replace(verdict, word=INCONCLUSIVE, why=why)


def warned(verdict: Verdict, warning: str) -> Verdict:
    """The verdict with what weakens it."""
    return replace(verdict, warning=warning)


class _Comparison:
    """Two lists of blocks and the resampling that all metrics share."""

    def __init__(self, base: Sequence[Block], candidate: Sequence[Block], paired: bool, level: float, seed: int) -> None:  # noqa: FBT001
        self._arms = (base, candidate)
        self._kind = "interleaved" if paired else "sequential"
        self._count = min(len(base), len(candidate))
        self._level, self._seed = level, seed
        if self._count < LEAST_BLOCKS:
            return
        if paired:
            self._places = flips.places(self._count, level, seed)
        else:
            self._weights = (block_weights(len(base), seed), block_weights(len(candidate), seed + 1))

    def verdict(self, gate: Gate) -> Verdict:
        """Judge one metric."""
        values = [_value(arm, gate.metric) for arm in self._arms]
        refusal = self._refusal(gate.metric, values)
        if refusal:
            return self._make(gate, INCONCLUSIVE, values, why=refusal)
        base, candidate = (float(value) for value in values if value is not None)
        absolute = gate.metric == "error_rate"
        centre = candidate - base if absolute else math.log(candidate / base)
        reach = self._places_change(gate.metric, centre) if self._kind == "interleaved" else self._resampled(gate.metric)
        ends = (centre, centre - reach, centre + reach)
        change, low, high = ends if absolute else (math.expm1(end) for end in ends)
        word = _word(change, low, high, gate, worse_is_more=gate.metric != "throughput")
        doubt = self._doubt() if word in {IMPROVED, REGRESSED} and self._kind == "interleaved" else ""
        return self._make(gate, INCONCLUSIVE if doubt else word, values, change, low, high, why=doubt)

    def _resampled(self, metric: str) -> float:
        """Half the width of the interval from resampled blocks of each version on its own."""
        first, second = (_replicates(arm, metric, weights) for arm, weights in zip(self._arms, self._weights, strict=True))
        spread = float(np.std(_difference(first, second, metric), ddof=1))
        # Student's factor and n/(n-1): a bootstrap of few blocks is too narrow otherwise (Hesterberg, 2015, "expanded" intervals).
        return student_quantile(0.5 + self._level / 2, self._count - 1) * spread * math.sqrt(self._count / (self._count - 1))

    def _places_change(self, metric: str, centre: float) -> float:
        """Half the width of the interval from pairs that change places."""
        base, candidate = self._arms

        def thrown(taken_off: float) -> FloatArray:
            both = [*base, *(_without(block, taken_off) for block in candidate)]
            found = _replicates(both, metric, self._places)
            return _difference(found[: found.size // 2], found[found.size // 2 :], metric)

        reach, chance = flips.reach(thrown, self._level, shifts=metric != "error_rate")
        # The throws are read off a grid, so the measured difference is known to them a little less exactly than to us.
        return reach if chance <= 1.0 - self._level else max(reach, abs(centre) * (1.0 + 1e-9))

    def _doubt(self) -> str:
        """Why a difference that its interval shows may still be chance; empty when it may not."""
        tails = [_value(arm, "p99") or 0.0 for arm in self._arms]
        seconds = float(np.median([block.seconds for arm in self._arms for block in arm]))
        if max(tails) * _STALLS > seconds * 1e3:
            return f"blocks of {seconds:.2g} s are too short beside a P99 of {max(tails):.0f} ms: a stall reaches into the next"
        return ""

    def _refusal(self, metric: str, values: list[float | None]) -> str:
        if self._count < LEAST_BLOCKS:
            return f"needs {LEAST_BLOCKS} {'pairs of ' if self._kind == 'interleaved' else ''}blocks, there are {self._count}"
        sizes = [sum(block.latency_ms.size for block in arm) for arm in self._arms]
        if metric in QUANTILES and min(sizes) < needed(QUANTILES[metric]):
            return f"needs ≥ {needed(QUANTILES[metric])} answered requests, there are {min(sizes)}"
        if any(value is None or (value <= 0 and metric != "error_rate") for value in values):
            return "no request was answered well"
        return ""

    def _make(
        self,
        gate: Gate,
        word: str,
        values: list[float | None],
        change: float | None = None,
        low: float | None = None,
        high: float | None = None,
        *,
        why: str = "",
    ) -> Verdict:
        return Verdict(
            gate.metric, word, values[0], values[1], change, low, high, self._level, gate.tolerance, self._count, self._kind, why
        )


def _word(change: float, low: float, high: float, gate: Gate, *, worse_is_more: bool) -> str:
    if -gate.tolerance <= low and high <= gate.tolerance:
        return NO_CHANGE
    if low > 0 and change > gate.tolerance:
        return REGRESSED if worse_is_more else IMPROVED
    if high < 0 and change < -gate.tolerance:
        return IMPROVED if worse_is_more else REGRESSED
    return INCONCLUSIVE


def _value(arm: Sequence[Block], metric: str) -> float | None:
    """The metric over all blocks; None when there is nothing to take it from."""
    answered = sum(block.latency_ms.size for block in arm)
    total = answered + sum(block.failed for block in arm)
    if metric == "error_rate":
        return sum(block.failed for block in arm) / total if total else None
    if metric == "throughput":
        seconds = sum(block.seconds for block in arm)
        return answered / seconds if seconds else None
    if not answered:
        return None
    pooled = np.concatenate([block.latency_ms for block in arm])
    return float(pooled.mean()) if metric == "mean" else observed(np.sort(pooled), QUANTILES[metric])


def _without(block: Block, taken_off: float) -> Block:
    """A block without a change of so much on the log scale."""
    factor = math.exp(-taken_off)
    return replace(block, latency_ms=block.latency_ms * factor, seconds=block.seconds / factor)


def _difference(base: FloatArray, candidate: FloatArray, metric: str) -> FloatArray:
    """Of each replicate: of shares as it is, else on the log scale."""
    return candidate - base if metric == "error_rate" else np.log(np.maximum(candidate, 1e-300)) - np.log(np.maximum(base, 1e-300))


def _replicates(arm: Sequence[Block], metric: str, weights: FloatArray) -> FloatArray:
    """The metric in each resample, shape (replicates,)."""
    if metric in QUANTILES:
        return resampled_quantiles([block.latency_ms for block in arm], QUANTILES[metric], weights)
    answered = np.array([block.latency_ms.size for block in arm], dtype=np.float64)
    failed = np.array([block.failed for block in arm], dtype=np.float64)
    if metric == "error_rate":
        return np.asarray((weights @ failed) / np.maximum(weights @ (answered + failed), 1.0), dtype=np.float64)
    if metric == "throughput":
        return np.asarray((weights @ answered) / (weights @ np.array([block.seconds for block in arm])), dtype=np.float64)
    sums = np.array([block.latency_ms.sum() for block in arm], dtype=np.float64)
    return np.asarray((weights @ sums) / np.maximum(weights @ answered, 1.0), dtype=np.float64)


def exit_code(verdicts: Sequence[Verdict]) -> int:
    """4 for wrong outputs, 5 for what cannot be compared, 1 when something regressed, 3 when something stayed open, else 0."""
    words = {verdict.word for verdict in verdicts}
    for word, code in ((INCORRECT, 4), (INCOMPARABLE, 5), (REGRESSED, 1), (INCONCLUSIVE, 3)):
        if word in words:
            return code
    return 0
