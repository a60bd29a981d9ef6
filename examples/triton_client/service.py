"""A service in front of Triton: it turns a payment into features, asks the model `fraud`, and decides. It knows nothing of inferscope.

pip install 'inferscope-sdk' 'tritonclient[grpc]' starlette uvicorn
tritonserver --model-repository=examples/triton_client/models
inferscope run --service payments --slo "pay:p99_ms=30" -- python -m uvicorn examples.triton_client.service:app --port 8080
curl -d '{"amount": 900, "hour": 3, "country": "NL"}' http://127.0.0.1:8080/pay
"""

from __future__ import annotations

import json
import math
import os
from typing import Any, Final

import numpy as np
import tritonclient.grpc as triton
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request  # noqa: TC002  (Starlette's own way to write an endpoint)
from starlette.responses import JSONResponse
from starlette.routing import Route

LIMIT: Final = 0.5
HOME: Final = "NL"
client: Final = triton.InferenceServerClient(os.environ.get("TRITON", "127.0.0.1:8001"))  # gRPC clients may be shared by threads


def score(payment: dict[str, Any]) -> float:
    """Probability of fraud, from Triton."""
    features = [math.log1p(float(payment["amount"])), float(payment["hour"]) / 24, float(payment["country"] != HOME)]
    given = triton.InferInput("FEATURES", [1, len(features)], "FP32")
    given.set_data_from_numpy(np.array([features], np.float32))
    answer = client.infer("fraud", [given]).as_numpy("FRAUD")
    return float(answer[0, 0])


async def pay(request: Request) -> JSONResponse:
    """Whether a payment goes through."""
    try:
        payment = json.loads(await request.body())
        found = await run_in_threadpool(score, payment)
    except (KeyError, TypeError, ValueError):
        return JSONResponse({"error": "expected amount, hour and country"}, status_code=400)
    return JSONResponse({"fraud": round(found, 4), "accepted": found < LIMIT})


app: Final = Starlette(routes=[Route("/pay", pay, methods=["POST"])])
