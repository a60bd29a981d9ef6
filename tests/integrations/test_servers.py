"""ASGI requests and the pools behind them, through the real Starlette and FastAPI."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import anyio.to_thread
import httpx
import pytest
from fastapi import APIRouter, FastAPI
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route

from inferscope.record import core


def ask(app, *paths: str) -> list[httpx.Response]:
    async def run() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
            return [await client.get(path) for path in paths]

    return asyncio.run(run())


def starlette_app(**endpoints) -> Starlette:
    return Starlette(routes=[Route(f"/{name}", endpoint) for name, endpoint in endpoints.items()])


def test_names_come_from_the_route_and_unknown_paths_share_one(seen, instrument) -> None:
    instrument("asgi")

    async def item(request):
        return JSONResponse({"id": request.path_params["id"]})

    app = Starlette(routes=[Route("/items/{id:int}", item), Route("/healthz", item)])
    ask(app, "/items/7", "/items/8", "/wp-admin", "/robots.txt", "/healthz")
    assert sorted(record.key.request for record in seen.requests()) == ["items/{id}", "items/{id}", "unmatched", "unmatched"]


def test_server_errors_and_exceptions_are_errors_client_errors_are_not(seen, instrument) -> None:
    instrument("asgi")

    async def broken(_request):
        raise ValueError("private")

    async def unavailable(_request):
        return JSONResponse({}, status_code=503)

    async def wrong(_request):
        return JSONResponse({}, status_code=404)

    answers = ask(starlette_app(broken=broken, unavailable=unavailable, wrong=wrong), "/broken", "/unavailable", "/wrong")
    assert [answer.status_code for answer in answers] == [500, 503, 404]
    errors = {record.key.request: record.error for record in seen.requests()}
    assert errors["unavailable"] == "503"
    assert errors["wrong"] is None
    assert errors["broken"] in {"500", "ValueError"}


def test_a_request_ends_with_its_last_byte_and_not_with_its_background_task(seen, instrument) -> None:
    instrument("asgi")

    async def later() -> None:
        await asyncio.sleep(0.2)

    async def quick(_request):
        return JSONResponse({}, background=BackgroundTask(later))

    async def stream(_request):
        async def parts():
            for _ in range(3):
                await asyncio.sleep(0.03)
                yield b"x"

        return StreamingResponse(parts())

    ask(starlette_app(quick=quick, stream=stream), "/quick", "/stream")
    walls = {record.key.request: record.wall_ns / 1e9 for record in seen.requests()}
    assert walls["quick"] < 0.15
    assert walls["stream"] > 0.08


def test_the_wait_for_a_worker_thread_is_a_queue_and_its_work_a_stage(seen, instrument) -> None:
    instrument("asgi", "anyio")

    def blocking(_request):
        time.sleep(0.05)
        return JSONResponse({})

    async def run() -> None:
        anyio.to_thread.current_default_thread_limiter().total_tokens = 1
        transport = httpx.ASGITransport(app=starlette_app(blocking=blocking))
        async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
            await asyncio.gather(*(client.get("/blocking") for _ in range(3)))

    asyncio.run(run())
    records = sorted(seen.requests(), key=lambda record: record.wall_ns)
    assert len(records) == 3
    columns = seen.columns(records[-1])
    assert columns["queue:threadpool"] > 80e6
    assert 45e6 < columns["handler"] < 90e6
    assert all(sum(record.vector) == record.wall_ns for record in records)


def test_fastapi_and_mounted_applications_count_once(seen, instrument) -> None:
    instrument("asgi", "anyio")
    inner = FastAPI()

    @inner.get("/score/{model}")
    def score(model: str) -> dict[str, str]:
        with core.default.stage("rules"):
            return {"model": model}

    assert ask(inner, "/score/a")[0].json() == {"model": "a"}
    outer = Starlette(routes=[Mount("/v1", app=inner)])
    assert ask(outer, "/v1/score/b")[0].json() == {"model": "b"}
    records = seen.requests()
    assert [record.key.request for record in records] == ["score/{model}", "v1/score/{model}"]
    assert all("rules" in seen.columns(record) for record in records)


def test_routers_that_fastapi_includes_keep_their_templates(seen, instrument) -> None:
    instrument("asgi")
    app, outer, inner = FastAPI(), APIRouter(prefix="/v1"), APIRouter(prefix="/models")

    @inner.get("/{model}:predict")
    async def predict(model: str) -> str:
        return model

    @outer.get("/")
    async def listed() -> list[str]:
        return []

    outer.include_router(inner)
    app.include_router(outer, prefix="/api")
    app.mount("/static", Starlette(routes=[Route("/{name}", lambda _: Response())]))
    paths = ("/api/v1/models/a:predict", "/api/v1/models/b:predict", "/api/v1/", "/api/v1/none", "/static/c")
    for path in paths:
        ask(app, path)
    names = [record.key.request for record in seen.requests()]
    assert names == ["api/v1/models/{model}:predict"] * 2 + ["api/v1", "unmatched", "static/{name}"]


def test_an_executor_carries_the_request_and_measures_its_queue(seen, instrument) -> None:
    instrument("executor")

    def work() -> int:
        with core.default.stage("work"):
            time.sleep(0.02)
        return 7

    with ThreadPoolExecutor(1) as pool, core.default.request("batch"):
        first, second = pool.submit(work), pool.submit(work)
        assert (first.result(), second.result()) == (7, 7)
    (record,) = seen.requests()
    columns = seen.columns(record)
    assert columns["work"] + columns["queue:executor"] > 35e6  # the second waits in the queue for the first
    assert sum(record.vector) == record.wall_ns
    assert ThreadPoolExecutor.submit.__name__ == "submit"


def test_an_exception_in_an_executor_is_the_users_own(instrument) -> None:
    instrument("executor")

    def fail() -> None:
        raise LookupError("mine")

    with ThreadPoolExecutor(1) as pool, core.default.request("batch"), pytest.raises(LookupError, match="mine"):
        pool.submit(fail).result()
