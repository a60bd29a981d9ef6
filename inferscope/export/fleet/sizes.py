"""The same mix of sizes for two versions, by weighting each latency band by the sizes that its requests had.

Of each version the exact number of requests of a band is known, and from a sample the part of each size in it. A size that is a third of one
version's requests and half of both together counts one and a half times in that version (post-stratification); a band's weight is the mean of
its requests' weights. The histogram, which is eight times finer, is weighted along the line between the middles of the bands, so that each
band keeps the sum that it has. Sizes are told apart by octaves; those that only one version had are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from inferscope.export.otlp.sizes import UNKNOWN

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from inferscope.types import FloatArray

__all__ = ["Banded", "Weights", "balance", "banded", "draw"]


@dataclass(frozen=True, slots=True)
class Banded:
    """One class of one version."""

    uppers: FloatArray
    """Upper bounds of its bands, seconds, ascending; shape (bands,)."""
    requests: FloatArray
    """Requests of each band; shape (bands,)."""
    parts: FloatArray
    """Part of each size in each band; shape (bands, sizes)."""
    effective: FloatArray
    """Effective size of each band's sample; shape (bands,)."""
    sizes: tuple[str, ...]

    @property
    def totals(self) -> FloatArray:
        """Requests of each size."""
        found: FloatArray = self.requests @ self.parts
        return found


@dataclass(frozen=True, slots=True)
class Weights:
    """How much a request of each latency counts."""

    uppers: FloatArray
    bands: FloatArray

    def along(self, middles: FloatArray, counts: FloatArray) -> FloatArray:
        """The weight of each bucket of a histogram, by its middle in seconds.

        Args:
            middles: Ascending, positive.
            counts: Requests of each bucket.
        """
        place = np.searchsorted(self.uppers, middles).clip(0, len(self.uppers) - 1)
        logs = np.log(middles)
        inside = np.bincount(place, counts, len(self.uppers))
        centre = np.bincount(place, counts * logs, len(self.uppers)) / np.maximum(inside, 1e-300)
        held = np.flatnonzero(inside > 0)
        line = np.interp(logs, centre[held], self.bands[held])
        mean = np.bincount(place, counts * line, len(self.uppers)) / np.maximum(inside, 1e-300)
        scaled: FloatArray = line * (self.bands[place] / np.maximum(mean[place], 1e-300))
        return np.where(mean[place] > 0, scaled, 0.0)


def banded(counts: Mapping[str, float], cells: Mapping[tuple[str, str], float], squares: Mapping[str, float]) -> Banded | None:
    """What a backend knows of one class; None where no sizes are exported.

    Args:
        counts: Requests by the band's upper bound.
        cells: Estimated requests by upper bound and size.
        squares: Sum of squared weights by upper bound.
    """
    names = sorted({size for (_, size), number in cells.items() if number > 0 and size != UNKNOWN}, key=_order)
    if not names:
        return None
    names += [UNKNOWN] if any(size == UNKNOWN and number > 0 for (_, size), number in cells.items()) else []
    bands = sorted((each for each in counts if counts[each] > 0), key=float)
    held: FloatArray = np.array([[max(cells.get((band, name), 0.0), 0.0) for name in names] for band in bands])
    sums = held.sum(axis=1)
    # A band whose sizes were not sampled in this time has those of all of them: its requests are few.
    parts: FloatArray = held / np.maximum(sums, 1e-300)[:, None]
    parts[sums <= 0] = held.sum(axis=0) / held.sum()
    squared = np.array([max(squares.get(band, 0.0), 0.0) for band in bands])
    effective = np.where(squared > 0, sums**2 / np.maximum(squared, 1e-300), 1.0)
    return Banded(
        np.array([float(band) for band in bands]),
        np.array([counts[band] for band in bands]),
        parts,
        np.maximum(effective, 1.0),
        tuple(names),
    )


def _order(size: str) -> tuple[bool, float]:
    try:
        return False, float(size)
    except ValueError:
        return True, 0.0


def balance(pair: Sequence[Banded]) -> tuple[tuple[Weights, Weights], tuple[str, ...]]:
    """Weights that give both versions the mix of sizes of both together, and the sizes that both had.

    The weighted requests of each version add to the requests of these sizes in both together.
    """
    totals = [dict(zip(each.sizes, each.totals.tolist(), strict=True)) for each in pair]
    common = tuple(size for size in pair[0].sizes if totals[0][size] > 0 and totals[1].get(size, 0.0) > 0)
    found: list[Weights] = []
    for each, mine in zip(pair, totals, strict=True):
        each_size = np.array([(totals[0][size] + totals[1][size]) / mine[size] if size in common else 0.0 for size in each.sizes])
        found.append(Weights(each.uppers, each.parts @ each_size))
    return (found[0], found[1]), common


def draw(held: Banded, rng: np.random.Generator) -> Banded:
    """Another sample of the same: requests of a band vary as a Poisson number does, sizes in it as a sample of its effective size."""
    gamma = rng.standard_gamma(np.maximum(held.parts * held.effective[:, None], 0.0))
    sums = gamma.sum(axis=1, keepdims=True)
    parts = np.where(sums > 0, gamma / np.maximum(sums, 1e-300), held.parts)
    return Banded(held.uppers, rng.poisson(held.requests).astype(np.float64), parts, held.effective, held.sizes)
