"""The simulated accelerator as a service's device: integrations and the device room around it, a driver that can be told what to say, and
captures of single requests in the shape that Kineto writes, taken from what truly ran."""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
import types
from pathlib import Path

from inferscope import integration
from inferscope.clock import unix_offset_ns
from inferscope.device.room import DeviceRoom

UUID = "GPU-5f1e0000-aaaa-bbbb-cccc-000000000001"
KEPT = 4
"""Captures of slow requests, and of ordinary ones."""


class Card:
    """A device with its room, watched while the service runs."""

    def __init__(self, service, *integrations):
        import torch

        from inferscope.testing import accelerator

        self.torch, self.sim = torch, accelerator.load()
        torch.set_num_threads(1)
        if integrations:
            integration.registry.instrument(integrations)
        self.room = DeviceRoom(service.recorder)
        self.room.start()
        self.traced = True
        self.look_s = 1.0
        """As the runtime looks; shorter where what the card does changes more often than in a real room."""
        service.card = self

    def model(self, milliseconds):
        """A small model that takes so long on the device."""
        self.sim.operator_cost("aten::addmm", 1e3 * milliseconds)
        return self.torch.nn.Linear(16, 16).to("sim")

    def harvest(self, stop):
        while not stop.wait(self.room.period_s):
            self.room.harvest()

    def monitor(self, stop):
        from inferscope.device import monitor

        monitor.PERIOD_NS = min(monitor.PERIOD_NS, int(0.9e9 * self.look_s))
        while not stop.wait(self.look_s):
            self.room.monitor()

    def threads(self, stop):
        return [
            threading.Thread(target=loop, args=(stop,), name=f"inferscope-{loop.__name__}", daemon=True)
            for loop in (self.harvest, self.monitor)
        ]

    def evidence(self, begin, end):
        time.sleep(0.25)  # what devices finished last is read and settled
        self.room.harvest()
        return self.room.evidence(begin, end)

    def captures(self, document):
        """Side files and traces of some slow and some ordinary requests."""
        if not self.traced:
            return []
        operations, rows = self.sim.operations(), document["host"]["requests"]
        slow = sorted((row for row in rows if row["slow"]), key=lambda row: -row["wall_ns"])[: 4 * KEPT : 4]
        ordinary = sorted((row for row in rows if not row["slow"]), key=lambda row: row["wall_ns"])
        usual = ordinary[len(ordinary) // 2 :][:KEPT]
        folder = Path(tempfile.mkdtemp(prefix="captures-"))
        return [capture(folder, row, operations, document["columns"]) for row in (*slow, *usual)]


def capture(folder, row, operations, columns):
    """One request as a profiler would have recorded it."""
    end = row["start_ns"] + row["wall_ns"]
    events = []
    for number, op in enumerate(operations, 1):
        if op.thread_id == row["thread"] and row["start_ns"] <= op.issue_ns <= end:
            events += list(events_of(op, number))
    path = folder / f"{row['id']}.trace.json"
    base = unix_offset_ns()
    path.write_text(json.dumps({"schemaVersion": 1, "baseTimeNanoseconds": base, "traceEvents": events}))
    spans = [
        {"column": label(columns[column]), "start_ns": start, "end_ns": stop, "thread": thread}
        for column, start, stop, _, thread, *_ in row["spans"]
    ]
    side = {
        "id": str(row["id"]), "tier": 1, "request_id": row["id"], "slow": row["slow"], "events": len(events), "stall_ms": {},
        "threads": [row["thread"]], "trace": f"captures/{path.name}", "unix_offset_ns": base, "spans": spans,
    }  # fmt: skip
    return side, path


def label(column):
    kind, name = column
    return name if kind == "stage" else f"{kind}:{name}"


def events_of(op, number):
    """The runtime's calls and the device's work of one operation."""

    def host(cat, name, start, end, **args):
        return {
            "ph": "X",
            "cat": cat,
            "name": name,
            "pid": 1,
            "tid": op.thread_id,
            "ts": start / 1e3,
            "dur": max(end - start, 500) / 1e3,
            "args": args,
        }

    def device(cat, name):
        args = {"device": op.device, "stream": op.stream, "correlation": number, "bytes": op.nbytes}
        return {
            "ph": "X",
            "cat": cat,
            "name": name,
            "pid": 0,
            "tid": op.stream,
            "ts": op.start_ns / 1e3,
            "dur": (op.end_ns - op.start_ns) / 1e3,
            "args": args,
        }

    memory = "Pageable" if op.pageable else "Pinned"
    if op.kind == "kernel":
        yield host("cuda_runtime", "cudaLaunchKernel", op.issue_ns, min(op.start_ns, op.issue_ns + 3000), correlation=number)
        yield device("kernel", op.name)
        return
    if op.kind == "scalar":
        yield host("cpu_op", "aten::item", op.issue_ns, op.returned_ns)
        yield host("cpu_op", "aten::_local_scalar_dense", op.issue_ns + 500, op.returned_ns - 500)
    yield host("cuda_runtime", "cudaMemcpyAsync", op.issue_ns + 1000, op.issue_ns + 3000, correlation=number)
    ways = {"h2d": f"Memcpy HtoD ({memory} -> Device)", "d2d": "Memcpy DtoD (Device -> Device)"}
    yield device("gpu_memcpy", ways.get(op.kind, f"Memcpy DtoH (Device -> {memory})"))
    if op.blocking or op.kind == "scalar":
        yield host("cuda_runtime", "cudaStreamSynchronize", op.issue_ns + 4000, op.returned_ns - 1000, correlation=-number)


def driver(**answers):
    """A stand-in for `pynvml` with one card; `answers` may be changed while it is asked."""
    state = {"clock": 1980, "memory_clock": 2619, "reasons": 0, "busy": 35, **answers}
    nvml = types.ModuleType("pynvml")
    names = {
        "nvmlInit": lambda: None, "nvmlShutdown": lambda: None, "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda _: "card", "nvmlDeviceGetUUID": lambda _: UUID,
        "nvmlDeviceGetUtilizationRates": lambda _: types.SimpleNamespace(gpu=state["busy"]),
        "nvmlDeviceGetMemoryInfo": lambda _: types.SimpleNamespace(used=4 << 30, total=80 << 30),
        "nvmlDeviceGetClockInfo": lambda _, kind: state["clock" if kind == 1 else "memory_clock"],
        "nvmlDeviceGetCurrentClocksEventReasons": lambda _: state["reasons"],
        "nvmlDeviceGetPowerUsage": lambda _: 300_000, "nvmlDeviceGetTemperature": lambda _, __: 84,
    }  # fmt: skip
    for name, value in names.items():
        setattr(nvml, name, value)
    nvml.NVML_CLOCK_SM, nvml.NVML_CLOCK_MEM, nvml.NVML_TEMPERATURE_GPU = 1, 2, 0
    sys.modules["pynvml"] = nvml
    return state
