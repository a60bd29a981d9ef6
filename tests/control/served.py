"""A service whose main thread blocks, with a control room on a thread of the harness: what the runtime does for a real one."""

from __future__ import annotations

import os
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import inferscope as scope
from inferscope import api
from inferscope.control import Control, Operations, Options

events: list[object] = []


def unsupported(*_: object) -> None:
    raise scope.InferscopeError("not in this harness")


scope.configure(service="blocked", slo=scope.SLO("score", p99_ms=20), export=False, tick_s=0.1)
control = Control(
    Operations(
        status=api.status,
        snapshot=lambda: asdict(api.snapshot()),
        capture=lambda reason, requests, actor: api.capture_now(reason=f"{reason} ({actor})", requests=requests),
        enable=unsupported,
        disable=unsupported,
        set_slo=unsupported,
        audit=events.append,
    ),
    Options.read(),
)


def serve() -> None:
    while True:
        control.serve_once(0.5)


if "control" not in scope.status():  # where the runtime has no such thread of its own
    control.open(Path(os.environ["INFERSCOPE_STATE_DIR"]) / "blocked" / "0")
    threading.Thread(target=serve, name="inferscope-control", daemon=True).start()


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
