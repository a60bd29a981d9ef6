"""The model: a small network that says how likely an applicant is to default, trained at the first start and kept."""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import nn

from examples.risk_scoring import data

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = ["RiskModel", "Trained", "auc", "load_or_train", "train"]

WIDTH: Final = 64
EPOCHS: Final = 300
LEARNING_RATE: Final = 0.01
_torch: Any = torch  # for the calls whose types torch leaves open


class RiskModel(nn.Module):
    """Probability of default from raw features."""

    mean: torch.Tensor
    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(len(data.FEATURES)))
        self.register_buffer("scale", torch.ones(len(data.FEATURES)))
        self.layers = nn.Sequential(
            nn.Linear(len(data.FEATURES), WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1)
        )

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """Log odds, shape (rows,), of features of shape (rows, 3)."""
        scores: torch.Tensor = self.layers((features - self.mean) / self.scale)
        return scores.squeeze(-1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Probability of default, shape (rows,)."""
        return torch.sigmoid(self.logits(features))


@dataclass(frozen=True, slots=True)
class Trained:
    """A model and how well it ranks rows it never saw."""

    model: RiskModel
    auc: float
    """Area under the ROC curve on the held-out rows, measured at this start."""
    fresh: bool
    """Whether it was trained now rather than read from the cache."""


def auc(scores: NDArray[np.float32], positive: NDArray[np.bool_]) -> float:
    """Area under the ROC curve: the chance that a positive row scores above a negative one, ties counting half (Mann-Whitney).

    Raises:
        ValueError: rows of one kind only.
    """
    positives = int(np.count_nonzero(positive))
    negatives = len(positive) - positives
    if not positives or not negatives:
        raise ValueError("an AUC needs rows of both kinds")
    _, group, sizes = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(sizes) - (sizes - 1) / 2)[group]
    return float((ranks[positive].sum() - positives * (positives + 1) / 2) / (positives * negatives))


def train(rows: data.Dataset, seed: int) -> RiskModel:
    """Trains on `rows`; the same seed gives the same weights on the same machine. The global random state stays as it was."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the network is too small to share out, and sums then run in one order whatever the cores
    try:
        with _torch.random.fork_rng(devices=[]):
            _torch.manual_seed(seed)
            return _fit(RiskModel(), rows)
    finally:
        torch.set_num_threads(threads)


def _fit(model: RiskModel, rows: data.Dataset) -> RiskModel:
    features, target = torch.as_tensor(rows.features), torch.as_tensor(rows.defaulted.astype(np.float32))
    model.mean.copy_(features.mean(0))
    model.scale.copy_(features.std(0))
    optimizer = _torch.optim.Adam(model.parameters(), LEARNING_RATE, weight_decay=1e-4)
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model.logits(features), target)
        torch.autograd.backward(loss)
        optimizer.step()
    return model.eval()


def load_or_train(cache: Path | None = None, seed: int = 0) -> Trained:
    """Reads the weights of this seed and these rows from `cache`, or trains and keeps them; measures the AUC either way."""
    rows = data.load(cache)
    seen, held = data.split(rows, seed)
    digest = hashlib.sha256(rows.features.tobytes() + rows.defaulted.tobytes()).hexdigest()[:12]
    path = data.cache_dir(cache) / f"weights-{digest}-{WIDTH}-{EPOCHS}-{seed}.pt"
    fresh = not path.exists()
    if fresh:
        model = train(seen, seed)
        buffer = io.BytesIO()
        torch.save(model.state_dict(), buffer)
        data.replace_file(path, buffer.getvalue())
    else:
        model = RiskModel().eval()
        model.load_state_dict(torch.load(path, weights_only=True))
    with torch.inference_mode():
        scores: NDArray[np.float32] = model(torch.as_tensor(held.features)).numpy()
    return Trained(model.requires_grad_(requires_grad=False), auc(scores, held.defaulted), fresh)
