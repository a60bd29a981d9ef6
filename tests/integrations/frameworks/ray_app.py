"""Two deployments: one that batches and one in front of it; workers import this module too."""

from __future__ import annotations

import asyncio
import os
import time

import told
from ray import serve

import inferscope as scope

scope.instrument("ray_serve", "asgi", "anyio")
told.begin()


@serve.deployment(max_ongoing_requests=20)
class Scorer:
    @serve.batch(max_batch_size=4, batch_wait_timeout_s=0.1)
    async def forward(self, values):
        await asyncio.sleep(0.02)
        return [2 * value for value in values]

    async def __call__(self, value):
        with scope.stage("inner"):
            return await self.forward(value)

    async def fail(self):
        raise ValueError("private")

    async def told(self):
        return told.rows(), told.batches(), os.getpid()


@serve.deployment(max_ongoing_requests=1)
class Narrow:
    """One request at a time: what comes together waits in the router."""

    def __call__(self, value):
        with scope.stage("alone"):
            time.sleep(0.05)
        return value + 1

    def told(self):
        return told.rows()


@serve.deployment
class Front:
    def __init__(self, scorer):
        self.scorer = scorer

    async def __call__(self, request):
        value = int(request.query_params["value"])
        if value == 13:
            raise ValueError("private")
        with scope.stage("ask"):
            return {"answer": await self.scorer.remote(value)}

    async def told(self):
        return told.rows()
