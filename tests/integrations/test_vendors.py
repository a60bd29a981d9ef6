"""Beside other vendors: OpenTelemetry's contrib instrumentations and ddtrace, switched on before and after ours, taken away in either order."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.servers, pytest.mark.slow]

SERVICE = """
import asyncio, json, sys
from concurrent.futures import ThreadPoolExecutor

OURS = ["asgi", "anyio", "executor", "grpc"]
order = sys.argv[1].split(",")


def ours_on():
    import inferscope
    inferscope.instrument(*OURS)

def ours_off():
    import inferscope
    inferscope.uninstrument()

THEIRS

def service():
    import grpc
    import httpx
    from fastapi import FastAPI

    app = FastAPI()

    @app.get("/score/{model}")
    def score(model: str):
        return {"model": model}

    async def over_http():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://service") as client:
            return [(await client.get("/score/a")).json(), (await client.get("/none")).status_code]

    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(
        "test.Scoring", {"Score": grpc.unary_unary_rpc_method_handler(lambda message, context: message + b"!")}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        answer = channel.unary_unary("/test.Scoring/Score")(b"x").decode()
    server.stop(None).wait()
    with ThreadPoolExecutor(1) as pool:
        return [*asyncio.run(over_http()), answer, pool.submit(sum, [1, 2]).result()]

answers, counts = [], []
from inferscope.record import core
for step in order:
    globals()[step]()
    before = sum(core.default.read_class(each[0])["count"] for each in core.default.classes())
    answers.append(service())
    counts.append(sum(core.default.read_class(each[0])["count"] for each in core.default.classes()) - before)
print(json.dumps({"answers": answers, "counts": counts}))
"""

THEIRS = {
    "opentelemetry": """
def theirs_on():
    global made
    from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor
    from opentelemetry.instrumentation.grpc import GrpcInstrumentorServer
    from opentelemetry.instrumentation.threading import ThreadingInstrumentor
    made = [FastAPIInstrumentor(), GrpcInstrumentorServer(), ThreadingInstrumentor()]
    for each in made:
        each.instrument()

def theirs_off():
    for each in made:
        each.uninstrument()
""",
    "ddtrace": """
def theirs_on():
    import ddtrace
    ddtrace.patch(fastapi=True, starlette=True, grpc=True, futures=True)

def theirs_off():
    from ddtrace.contrib.internal.fastapi.patch import unpatch as fastapi
    from ddtrace.contrib.internal.futures.patch import unpatch as futures
    from ddtrace.contrib.internal.grpc.patch import unpatch as grpc
    from ddtrace.contrib.internal.starlette.patch import unpatch as starlette
    for each in (fastapi, starlette, grpc, futures):
        each()
""",
}
PLAIN = [{"model": "a"}, 404, "x!", 3]
ORDERS = {
    ("ours_on", "theirs_on", "theirs_off", "ours_off"): [True, True, True, False],
    ("theirs_on", "ours_on", "ours_off", "theirs_off"): [False, True, False, False],
    ("ours_on", "theirs_on", "ours_off", "theirs_off"): [True, True, False, False],
    ("theirs_on", "ours_on", "theirs_off", "ours_off"): [False, True, None, False],
}
"""Whether we count after each step; None where their restoring the attribute takes our wrapper, which lies above theirs, with it."""


@pytest.mark.parametrize("order", ORDERS, ids=",".join)
@pytest.mark.parametrize("vendor", THEIRS)
def test_the_service_answers_as_without_us_in_every_order(tmp_path: Path, vendor: str, order: tuple[str, ...]) -> None:
    name = {"opentelemetry": "opentelemetry.instrumentation.fastapi", "ddtrace": "ddtrace"}[vendor]
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        found = None
    if found is None:
        pytest.skip(f"{name} is not installed; 'make test-integrations' installs it")
    (tmp_path / "service.py").write_text(SERVICE.replace("THEIRS", THEIRS[vendor]))
    done = subprocess.run(
        [sys.executable, "service.py", ",".join(order)],
        cwd=tmp_path, env={**os.environ, "DD_TRACE_ENABLED": "false", "DD_INSTRUMENTATION_TELEMETRY_ENABLED": "false", "DD_REMOTE_CONFIGURATION_ENABLED": "false"},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["answers"] == [PLAIN] * 4
    for counts, count in zip(ORDERS[order], seen["counts"], strict=True):
        assert counts is None or (count == 3 if counts else count == 0), seen["counts"]


def test_opentelemetry_instrument_switches_us_on(tmp_path: Path) -> None:
    program = Path(sys.executable).with_name("opentelemetry-instrument")
    if not program.exists():
        pytest.skip("opentelemetry-instrument is not installed; 'make test-integrations' installs it")
    (tmp_path / "service.py").write_text(
        "import sys\nassert 'torch' not in sys.modules  # contrib imports web frameworks, we import nothing\n"
        "import asyncio, httpx, inferscope\nfrom starlette.applications import Starlette\nfrom starlette.responses import Response\n"
        "from starlette.routing import Route\n"
        "async def score(request):\n    return Response()\n"
        "async def run():\n"
        "    app = Starlette(routes=[Route('/score', score)])\n"
        "    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url='http://s') as client:\n"
        "        await client.get('/score')\n"
        "asyncio.run(run())\n"
        "print(inferscope.status()['integrations']['asgi'], inferscope.snapshot().requests['score']['count'])\n"
    )
    exporters = {f"OTEL_{signal}_EXPORTER": "none" for signal in ("TRACES", "METRICS", "LOGS")}
    done = subprocess.run(
        [str(program), sys.executable, "service.py"],
        cwd=tmp_path, env={**os.environ, **exporters}, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.stdout.strip().endswith("active 1"), (done.stdout, done.stderr[-2000:])
