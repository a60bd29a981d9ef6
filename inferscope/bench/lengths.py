"""How long inputs are: one length, or a distribution from which each request draws its own, by the seed."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from inferscope.errors import ConfigurationError

if TYPE_CHECKING:
    from inferscope.types import IntArray

__all__ = ["FORMS", "Lengths", "parse_lengths"]

FORMS: Final = "N, uniform:LOW-HIGH, or a file with one length a line"
_UNIFORM: Final = re.compile(r"uniform:(\d+)-(\d+)\Z")
_MOST: Final = 10_000_000


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of inputs, at least 1.

    Args:
        text: as it was asked for.
        low: the least.
        high: the greatest.
        recorded: lengths that were seen somewhere, drawn as often as they are in there; empty for a uniform distribution.
    """

    text: str
    low: int
    high: int
    recorded: tuple[int, ...] = ()

    @property
    def fixed(self) -> int | None:
        """The length when there is only one."""
        return self.low if self.low == self.high else None

    @property
    def sha256(self) -> str:
        """Hash of the distribution, so that two runs can be told to have drawn from the same."""
        content = ",".join(map(str, sorted(self.recorded))) if self.recorded else f"{self.low}-{self.high}"
        return hashlib.sha256(content.encode()).hexdigest()

    def draw(self, count: int, seed: int) -> IntArray:
        """So many lengths, shape (count,); the same seed draws the same."""
        rng = np.random.default_rng((seed, 4))
        if self.recorded:
            return rng.choice(np.asarray(self.recorded, dtype=np.int64), count)
        return rng.integers(self.low, self.high + 1, count)


def parse_lengths(text: str) -> Lengths:
    """Lengths from `128`, `uniform:64-256` or the name of a file.

    Raises:
        ConfigurationError: none of them, or a file that holds something else than whole numbers from 1 to 10 000 000.
    """
    found: tuple[int, ...] = ()
    match = _UNIFORM.match(text)
    if match is not None:
        found = (int(match[1]), int(match[2]))
    elif text.isascii() and text.isdigit():
        found = (int(text), int(text))
    else:
        try:
            found = tuple(int(line) for line in Path(text).read_text(encoding="utf-8").split())
        except (OSError, ValueError) as error:
            raise ConfigurationError("input-len", text, FORMS) from error
    if not found or min(found) < 1 or max(found) > _MOST or (match is not None and found[0] > found[1]):
        raise ConfigurationError("input-len", text, f"{FORMS}; lengths from 1 to 10 000 000")
    from_file = match is None and not text.isdigit()
    return Lengths(text, min(found), max(found), found if from_file else ())
