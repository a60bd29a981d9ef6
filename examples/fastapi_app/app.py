"""A ranking service on FastAPI, with no line about measuring in it: see README.md for how it is measured."""

from __future__ import annotations

from typing import Final

import torch
from fastapi import FastAPI
from pydantic import BaseModel, Field

FEATURES: Final = 32

model: Final = torch.nn.Sequential(torch.nn.Linear(FEATURES, 128), torch.nn.ReLU(), torch.nn.Linear(128, 1)).eval()
app: Final = FastAPI(title="ranking")


class Candidates(BaseModel):
    """What is to be ranked: one row of `FEATURES` numbers each."""

    rows: list[list[float]] = Field(min_length=1, max_length=1000)


@app.post("/rank")
def rank(candidates: Candidates) -> dict[str, list[int]]:
    """Positions of the candidates, best first. FastAPI runs it on its thread pool."""
    with torch.inference_mode():
        scores = model(torch.tensor(candidates.rows)).squeeze(1)
        return {"order": scores.argsort(descending=True).tolist()}


@app.get("/healthz")
async def healthz() -> dict[str, str]:
    """Alive; appears in no signal."""
    return {"status": "ok"}
