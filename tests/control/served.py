"""A service whose main thread blocks."""

from __future__ import annotations

import os
import sys
import threading
import time

import inferscope as scope

scope.configure(service="blocked", slo=scope.SLO("score", p99_ms=20), export=False, tick_s=0.1)
forward = lambda: None
if "torch" in sys.argv:
    import torch

    model = torch.nn.Linear(8, 8)
    forward = lambda: model(torch.ones(2, 8))


def traffic() -> None:
    while True:
        with scope.request("score"), scope.stage("forward"):
            forward()
            time.sleep(0.002)
        time.sleep(0.005)


threading.Thread(target=traffic, daemon=True).start()
sys.stdout.write(f"{os.getpid()}\n")
sys.stdout.flush()
while True:
    time.sleep(3600)  # the application's main thread waits for something else
