"""The service of `integrations.py`: a model behind Starlette, with no line about inferscope in it, or with its stages written by hand.

`python _service.py auto PORT` is started under `inferscope run`; `python _service.py hand PORT` says the same by itself. `/stages` answers
with the names of requests, stages and queues that were seen.
"""

from __future__ import annotations

import sys

import anyio.to_thread
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

torch.manual_seed(0)
torch.set_num_threads(1)
WIDTH = 256
NET = torch.nn.Sequential(*[layer for _ in range(16) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())]).eval()
ROWS = torch.ones(16, WIDTH)


@torch.inference_mode()
def forward():
    return NET(ROWS.to(torch.float32)).sum().item()


def score(_request):
    return JSONResponse({"score": forward()})


async def stages(_request):
    import inferscope

    snapshot = inferscope.snapshot()
    seen = sorted(f"{series.kind} {series.labels[0]}" for series in snapshot.series if series.count and series.kind != "gc")
    return JSONResponse({"seen": seen, "requests": snapshot.requests.get("score", {})})


async def score_by_hand(request):
    """What Starlette does with `score`, measured by hand: wait for a thread, then the handler, the model inside it."""
    import time

    import inferscope as scope
    from inferscope.integration import record_wait

    with scope.request("score") as measured:
        queued = time.perf_counter_ns()

        def work():
            record_wait("threadpool", queued, time.perf_counter_ns())
            with scope.attach(measured), scope.stage("handler"), scope.stage("forward"):
                return forward()

        return JSONResponse({"score": await anyio.to_thread.run_sync(work)})


def main():
    by_hand, port = sys.argv[1] == "hand", int(sys.argv[2])
    if by_hand:
        import inferscope

        inferscope.configure()

    async def ready(_request):
        return Response()

    app = Starlette(routes=[Route("/score", score_by_hand if by_hand else score), Route("/stages", stages), Route("/healthz", ready)])
    uvicorn.run(app, port=port, log_level="error")


if __name__ == "__main__":
    main()
