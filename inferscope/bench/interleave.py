"""Blocks of two versions in turn, A B B A A B B A …, until the verdicts are in or the time is over.

What the machine does in between (another job, a warmer processor) falls on both versions alike; a drift that is steady over four blocks
cancels. Pairs share their arrivals and inputs, so that chance in the load cancels too.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from inferscope.bench.compare import INCONCLUSIVE, Block, judge, look_level
from inferscope.bench.metrics import generator_bound

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from inferscope.bench.compare import Gate, Verdict
    from inferscope.bench.result import LoadPlan, LoadResult

__all__ = [
    "LEAST_PAIRS",
    "Arm",
    "Outcome",
    "block_of",
    "kept",
    "measure_block",
    "order",
    "rejudged",
    "restored",
    "summary",
    "until_decided",
]

Arm = Literal["a", "b"]
LEAST_PAIRS: Final = 20


@dataclass(slots=True)
class Outcome:
    """What the blocks say."""

    verdicts: list[Verdict]
    pairs: int
    looks: list[int]
    """Numbers of pairs at which it was judged."""
    blocks: dict[Arm, list[Block]] = field(default_factory=dict[Arm, list[Block]])


def order(pair: int) -> tuple[Arm, Arm]:
    """Which version goes first in the pair-th pair (from 0): A B, then B A."""
    return ("a", "b") if pair % 2 == 0 else ("b", "a")


def until_decided(
    measured: Callable[[Arm, int], Block],
    gates: Sequence[Gate],
    *,
    pairs: int = LEAST_PAIRS,
    extend: bool = True,
    max_s: float,
    clock: Callable[[], float] = time.monotonic,
    seed: int = 0,
) -> Outcome:
    """Measure pairs of blocks; judge at `pairs` pairs, then each time their number has doubled, until every metric is decided.

    A metric's verdict stands from the look at which it was decided. The 5 % of false verdicts are spent over the looks (`look_level`).

    Args:
        measured: measures one block: of which version, in which pair.
        gates: what to judge.
        pairs: before the first look, at least 20.
        extend: go on while a metric is undecided; without, the one look may spend more.
        max_s: no pair starts later than this.
        clock: seconds.
        seed: of the resampling.
    """
    began = clock()
    blocks: dict[Arm, list[Block]] = {"a": [], "b": []}
    decided: dict[str, Verdict] = {}
    found: list[Verdict] = []
    looks: list[int] = []
    target, late = max(pairs, LEAST_PAIRS), False
    while not late:
        while len(blocks["a"]) < target and not late:
            for arm in order(len(blocks["a"]) if len(blocks["a"]) == len(blocks["b"]) else 0):
                blocks[arm].append(measured(arm, len(blocks[arm])))
            late = clock() - began >= max_s
        looks.append(len(blocks["a"]))
        found = _look(blocks, gates, len(looks) - 1, decided, extend=extend, seed=seed)
        if len(decided) == len(found) or not extend:
            break
        target *= 2
    return Outcome(found, len(blocks["a"]), looks, blocks)


def _look(
    blocks: dict[Arm, list[Block]], gates: Sequence[Gate], number: int, decided: dict[str, Verdict], *, extend: bool, seed: int
) -> list[Verdict]:
    """Judge what is there at the number-th look (from 0); what was decided before stands, what is decided now is added to it."""
    level = look_level(number, None if extend else 1)
    found = [decided.get(each.metric, each) for each in judge(blocks["a"], blocks["b"], gates, level=level, seed=seed)]
    decided |= {each.metric: each for each in found if each.word != INCONCLUSIVE}
    return found


def rejudged(blocks: dict[Arm, list[Block]], looks: Sequence[int], gates: Sequence[Gate], *, extend: bool, seed: int) -> list[Verdict]:
    """The verdicts again, from the blocks of a comparison that is over: what an auditor recomputes.

    Args:
        blocks: all of them.
        looks: numbers of pairs at which it was judged.
        gates: what was judged.
        extend: as it was measured.
        seed: of the resampling.
    """
    decided: dict[str, Verdict] = {}
    found: list[Verdict] = []
    for number, pairs in enumerate(looks):
        there: dict[Arm, list[Block]] = {"a": blocks["a"][:pairs], "b": blocks["b"][:pairs]}
        found = _look(there, gates, number, decided, extend=extend, seed=seed)
    return found


def kept(block: Block) -> dict[str, Any]:
    """A block as data that `restored` reads back to the nanosecond."""
    return {"latency_ns": np.rint(block.latency_ms * 1e6).astype(np.int64).tolist(), "failed": block.failed, "seconds": block.seconds}


def restored(row: dict[str, Any]) -> Block:
    """A block that `kept` wrote.

    Raises:
        KeyError, TypeError, ValueError: it is damaged.
    """
    return Block(np.asarray(row["latency_ns"], dtype=np.int64) / 1e6, int(row["failed"]), float(row["seconds"]))


def block_of(result: LoadResult, settle_s: float) -> Block:
    """A block of one load, without its first `settle_s` seconds, in which connections open and caches fill."""
    if not result.status.size:
        return Block(np.empty(0))
    kept = result.intended_ns >= result.intended_ns[0] + int(settle_s * 1e9)
    fine = result.fine & kept
    seconds = max(result.plan.seconds - settle_s, 1e-9)
    return Block((result.done_ns - result.intended_ns)[fine] / 1e6, int(np.count_nonzero(kept & ~result.fine)), seconds)


def measure_block(
    measure: Callable[[LoadPlan, Sequence[bytes]], LoadResult],
    plan: LoadPlan,
    bodies: Sequence[bytes],
    pair: int,
    settle_s: float,
    *,
    limit_ms: float,
) -> tuple[Block, str | None]:
    """One block, with the arrivals and inputs of its pair; and why it says more about the generator, if it does.

    Args:
        measure: runs a plan, as `Generators.measure` does.
        plan: the load of every block; its seed and the pair's number make the block's.
        bodies: JSON bodies; none means GET.
        pair: the pair's number.
        settle_s: what to leave out at its beginning.
        limit_ms: see `metrics.generator_bound`.

    Raises:
        ServiceError: the generator failed.
    """
    result = measure(replace(plan, seed=plan.seed * 100_003 + pair), bodies)
    return block_of(result, settle_s), generator_bound(result, limit_ms=limit_ms)


def summary(block: Block) -> dict[str, Any]:
    """A block in a few numbers."""
    size = int(block.latency_ms.size)
    quantiles = {f"p{round(100 * q)}_ms": float(np.quantile(block.latency_ms, q)) if size else None for q in (0.5, 0.95, 0.99)}
    return {"answered": size, "failed": block.failed, "seconds": block.seconds, **quantiles}
