"""Deployments: one that batches, one that takes one request at a time, and one in front of the first.

Ray pickles a deployment's class by value and does not import its module in the replica: each instruments in its constructor.
"""

from __future__ import annotations

import asyncio
import os
import time

import told
from ray import serve

import inferscope as scope


def instrument() -> None:
    scope.instrument("ray_serve", "asgi", "anyio")
    told.begin()


@serve.deployment(max_ongoing_requests=20)
class Scorer:
    def __init__(self):
        instrument()

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

    def __init__(self):
        instrument()

    def __call__(self, value):
        with scope.stage("alone"):
            time.sleep(0.05)
        return value + 1

    def told(self):
        return told.rows()


@serve.deployment
class Front:
    def __init__(self, scorer):
        instrument()
        self.scorer = scorer

    async def __call__(self, request):
        value = int(request.query_params["value"])
        if value == 13:
            raise ValueError("private")
        with scope.stage("ask"):
            return {"answer": await self.scorer.remote(value)}

    async def told(self):
        return told.rows()
