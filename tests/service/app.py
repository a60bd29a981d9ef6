"""A tiny service with a planted slow lock, for several workers; settings come from the environment."""

from __future__ import annotations

import os
import threading
import time

from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route

import inferscope as scope
from inferscope.capture import incident
from inferscope.capture.budget import CaptureBudget

incident.CAPTURE_S = float(os.environ.get("SERVICE_CAPTURE_S", "30"))
incident.SETTLE_S = float(os.environ.get("SERVICE_SETTLE_S", "5"))

scope.configure(
    service="pod",
    slo=scope.SLO("score", p99_ms=40, window_s=5, min_requests=10),
    warmup_s=300,
    warmup_requests=60,
    tick_s=0.25,
    budget=CaptureBudget(slow=5, body=0, max_share=1.0, attempts_per_s=100.0, stall_ms_per_s=100.0, free_memory_mb=0),
    export_interval_s=float(os.environ.get("SERVICE_EXPORT_S", "1")),
)
if os.environ.get("SERVICE_TORCH"):
    import torch

    torch.set_num_threads(1)
    matrix = torch.ones(16, 16)
rules = scope.lock("rules", threading.Lock())
counted = 0


def hold(seconds: float) -> None:
    with scope.stage("rules"), rules:
        time.sleep(seconds)


def score(request):
    global counted
    counted += 1
    number = counted
    with scope.request("score"):
        with scope.stage("features"):
            time.sleep(0.0005)
        slow = request.query_params.get("slow") and number % 3 == 0
        if os.environ.get("SERVICE_TORCH"):
            with scope.stage("forward"):
                (matrix @ matrix).sum()
        hold(0.12 if slow else 0.0)
    return PlainTextResponse("ok")


def status(request):
    return JSONResponse({**scope.status(), "now_ready": scope.ready()}, status_code=200)


app = Starlette(routes=[Route("/score", score), Route("/status", status)])
