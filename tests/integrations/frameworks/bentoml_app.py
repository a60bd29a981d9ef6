"""A BentoML service with a batchable method; `/told` answers what this process recorded."""

from __future__ import annotations

import time

import bentoml
import told

import inferscope as scope

scope.instrument("bentoml", "asgi", "anyio")
told.begin()


@bentoml.service(workers=1, traffic={"timeout": 20})
class Scorer:
    @bentoml.api(batchable=True, max_batch_size=8, max_latency_ms=2000)
    def score(self, values: list[float]) -> list[float]:
        time.sleep(0.03)
        with scope.stage("inner"):
            time.sleep(0.01)
        return [2 * value for value in values]

    @bentoml.api
    def fail(self, value: float) -> float:
        if value < 0:
            raise RuntimeError("private")
        return value

    @bentoml.api
    def told(self) -> dict:
        return {"rows": told.rows(), "batches": told.batches()}
