"""Runs an application while one part of inferscope after the other fails; prints what the application saw and what `status()` says."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import json
import sys
import threading
import time
from typing import Any
from unittest import mock

from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

import inferscope as scope
from inferscope import api
from inferscope.clock import now_ns
from inferscope.record import core

SITES: dict[str, tuple[str, str]] = {
    "Aggregator.tick": ("inferscope.aggregate.window:Aggregator.tick", "aggregate"),
    "Aggregator.cumulative": ("inferscope.aggregate.window:Aggregator.cumulative", "export"),
    "Aggregator.totals": ("inferscope.aggregate.window:Aggregator.totals", "export"),
    "Aggregator.lock_sites": ("inferscope.aggregate.window:Aggregator.lock_sites", "horizon"),
    "Horizon.add": ("inferscope.aggregate.horizon:Horizon.add", "horizon"),
    "Horizon.evidence": ("inferscope.aggregate.horizon:Horizon.evidence", "incident"),
    "Trigger.update": ("inferscope.detect.trigger:Trigger.update", "detect"),
    "Trigger.take_closed": ("inferscope.detect.trigger:Trigger.take_closed", "incident"),
    "Trigger.state": ("inferscope.detect.trigger:Trigger.state", "status"),
    "Pod.publish": ("inferscope.pod:Pod.publish", "pod"),
    "Pod.leads": ("inferscope.pod:Pod.leads", "pod"),
    "Pod.collect": ("inferscope.pod:Pod.collect", "pod"),
    "Pod.announcement": ("inferscope.pod:Pod.announcement", "incident"),
    "IncidentKeeper.step": ("inferscope.capture.incident:IncidentKeeper.step", "incident"),
    "IncidentKeeper.run_once": ("inferscope.capture.incident:IncidentKeeper.run_once", "capture"),
    "IncidentKeeper.collect": ("inferscope.capture.incident:IncidentKeeper._collect", "incident"),
    "Bundle.create": ("inferscope.capture.bundle:Bundle.create", "incident"),
    "Bundle.publish": ("inferscope.capture.bundle:Bundle.publish", "incident"),
    "DiagnosisChild": ("inferscope.capture.child:DiagnosisChild.__init__", "incident"),
    "RequestScopedCapture.on_start": ("inferscope.capture.request_scoped:RequestScopedCapture.on_start", "capture.hooks"),
    "RequestScopedCapture.on_enter": ("inferscope.capture.request_scoped:RequestScopedCapture.on_enter", "capture.hooks"),
    "RequestScopedCapture.on_exit": ("inferscope.capture.request_scoped:RequestScopedCapture.on_exit", "capture.hooks"),
    "RequestScopedCapture.on_finish": ("inferscope.capture.request_scoped:RequestScopedCapture.on_finish", "capture.hooks"),
    "RequestScopedCapture.run_once": ("inferscope.capture.request_scoped:RequestScopedCapture.run_once", "capture"),
    "RequestScopedCapture.attach_records": ("inferscope.capture.request_scoped:RequestScopedCapture.attach_records", "incident"),
    "RequestScopedCapture.arm": ("inferscope.capture.request_scoped:RequestScopedCapture.arm", "incident"),
    "Exporter.offer": ("inferscope.export.exporter:Exporter.offer", "export"),
    "Exporter.run_once": ("inferscope.export.exporter:Exporter.run_once", "export"),
    "Exporter.keep": ("inferscope.export.exporter:Exporter._keep", "export.keep"),
    "GcPauses": ("inferscope.host.gc:GcPauses._note", "gc"),
    "asgi.route": ("inferscope_integrations.asgi:_route_name", ""),
    "record_copy.slot": ("inferscope.slots:slots.on_copy", "copies"),
}
"""What is made to raise, and the component that `status()` names for it (empty: nothing is lost)."""

rules = scope.lock("rules", threading.Lock())


@scope.request("call")
def call(number):
    with scope.stage("half"), rules:
        if number < 0:
            raise KeyError(number)
        return number * 2


@scope.stage("numbers")
def numbers(top):
    for number in range(top):
        yield number


def endpoint(request):
    with scope.stage("work"):
        if "fail" in request.query_params:
            raise RuntimeError("theirs")
        return JSONResponse({"answer": call(int(request.query_params.get("n", "1")))})


async def later(request):
    with scope.stage("wait"):
        await asyncio.sleep(0)
    return JSONResponse({"later": True}, status_code=202)


app = Starlette(routes=[Route("/call", endpoint), Route("/later", later)])


async def ask(path: str, query: str = "") -> Any:
    said: list[Any] = []

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        said.append(message)

    about = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET", "scheme": "http", "path": path,
        "raw_path": path.encode(), "query_string": query.encode(), "headers": [], "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
    }  # fmt: skip
    try:
        await app(about, receive, send)
    except RuntimeError as error:
        said.append({"raised": repr(error)})
    return [row.get("status", row.get("raised", bytes(row.get("body", b"")).decode())) for row in said]


def work() -> list[Any]:
    """Everything that an application does, with its results."""
    from inferscope import integration

    seen: list[Any] = [call(21), list(numbers(3))]
    try:
        call(-1)
    except KeyError as error:
        seen.append(repr(error))

    async def all_() -> list[Any]:
        return [await ask("/call", "n=4"), await ask("/later"), await ask("/call", "fail=1"), await ask("/nowhere")]

    seen.append(asyncio.run(all_()))
    with contextlib.suppress(AttributeError):
        integration.record_copy("h2d", 4, now_ns(), now_ns(), sync=True, pageable=True)
    gc.collect()
    return seen


def start(tick_s: float = 0.05) -> None:
    scope.configure(service="faults", slo=scope.SLO("call", p99_ms=1000), tick_s=tick_s, export_interval_s=0.1, warmup_requests=1)


def broken(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("ours")


def fail(name: str) -> dict[str, Any]:
    where, component = SITES[name]
    module, _, path = where.partition(":")
    owner: Any = importlib.import_module(module)
    *parents, leaf = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    from inferscope import guard
    from inferscope.capture import incident
    from inferscope.capture.request_scoped import RequestScopedCapture

    guard.reset()
    incident.CAPTURE_S = incident.SETTLE_S = 0.0
    value: Any = property(broken) if isinstance(getattr(owner, leaf, None), property) else broken
    seen: list[Any] = []
    with contextlib.ExitStack() as patches:
        late = leaf in {"offer", "announcement"} or owner.__class__.__name__ == "Slots"
        if component == "capture.hooks" and leaf != "on_start":
            patches.enter_context(mock.patch.object(RequestScopedCapture, "on_start", return_value=True))
        if not late:
            patches.enter_context(mock.patch.object(owner, leaf, value))
        start()
        if late:
            patches.enter_context(mock.patch.object(owner, leaf, value))
        deadline = time.monotonic() + 15
        while time.monotonic() < deadline:
            runtime = api._runtime
            assert runtime is not None
            if component == "capture.hooks":
                core.default.armed = True
            keeper = runtime.rooms.keeper
            if component in {"incident", "capture"} and keeper is not None and keeper.current is None:
                keeper.open(runtime.rooms.trigger.manual(now_ns()), now_ns())
            seen.append(work())
            status = scope.status()
            if not component or component in status["switched_off"]:
                break
            time.sleep(0.05)
        begun = time.monotonic()
        scope.flush()
        scope.snapshot()
        scope.ready(warm=True)
        scope.shutdown()
        took = time.monotonic() - begun
    return {
        "results": [each for position, each in enumerate(seen) if position == 0 or each != seen[0]],
        "failures": status["failures"],
        "off": status["switched_off"],
        "ending": took,
    }


if __name__ == "__main__":
    plain = work()
    scope.instrument("asgi", "anyio", "copies")
    start()
    healthy = {"results": [work()], "failures": scope.status()["failures"]}
    scope.shutdown()
    sys.stdout.write(json.dumps({"plain": plain, "healthy": healthy, **{name: fail(name) for name in sys.argv[1:] or SITES}}))
