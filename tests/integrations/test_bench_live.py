"""Searches for the knee and the highest rate on a real server whose capacity is known: uvicorn, four places, a fixed time in each."""

from __future__ import annotations

import json
import sys

import pytest

from inferscope.bench import metrics, targets
from inferscope.bench.targets import Service, free_port
from inferscope.cli import main

pytest.importorskip("uvicorn")
pytestmark = [pytest.mark.servers, pytest.mark.slow, pytest.mark.timeout(300)]
PLACES, HOLD_S, WORK_S = 4, 0.08, 0.003
"""The work is what makes the processor time of a rung more than one tick of its clock."""
SERVICE = f"""
import asyncio, json, sys, time
import uvicorn
places, held = asyncio.Semaphore({PLACES}), [0, 0.0]
async def app(scope, receive, send):
    if scope["type"] != "http":
        return
    body = b"ok"
    if scope["path"] == "/held":
        body = json.dumps(held).encode()
    elif scope["path"] != "/healthz":
        async with places:
            began = time.perf_counter()
            await asyncio.sleep({HOLD_S})
            held[0] += 1
            held[1] += time.perf_counter() - began
        spent = time.thread_time() + {WORK_S}
        while time.thread_time() < spent:
            pass
    await send({{"type": "http.response.start", "status": 200, "headers": [(b"content-length", str(len(body)).encode())]}})
    await send({{"type": "http.response.body", "body": body}})
uvicorn.run(app, port=int(sys.argv[1]), log_level="error", lifespan="off")
"""


@pytest.fixture
def served(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # What is tested is the search; on a busy machine every generator is late, and every rung would be invalid.
    monkeypatch.setattr(metrics, "LAG_SHARE", 1e9)
    (tmp_path / "service.py").write_text(SERVICE)
    port = free_port()
    with Service([sys.executable, str(tmp_path / "service.py"), str(port)], port, {}, tmp_path, tmp_path / "log") as service:
        service.start()
        yield port


def capacity(port, before=(0, 0.0)):
    """Requests a second that the places can serve: their number over the time that they are really held, and both so far."""
    count, seconds = json.loads(targets.get(port, "/held")[1])
    return PLACES * (count - before[0]) / max(seconds - before[1], 1e-9), (count, seconds)


def test_the_knee_is_where_the_places_are_used_up(served, tmp_path):
    words = [
        "bench",
        f"http://127.0.0.1:{served}/",
        "--find-knee",
        "--duration",
        "2s",
        "--warmup",
        "0",
        "--html",
        "k.html",
        "--json",
        "k.json",
    ]
    assert main(words) == 0
    value = json.loads((tmp_path / "k.json").read_text())
    assert value["knee"] == PLACES
    rates = {row["rung"]: row["metrics"]["throughput"]["requests_per_s"] for row in value["ladder"]}
    most, _ = capacity(served)
    assert rates[PLACES] == pytest.approx(most, rel=0.2)
    assert rates[1] == pytest.approx(rates[PLACES] / PLACES, rel=0.25)
    assert max(rates) == 2 * PLACES, "the first rung that was not worth taking ends the search"
    for row in value["ladder"]:
        assert row["metrics"]["little"]["holds"]
        assert row["process"]["memory"]["peak_bytes"] > 1e6
        assert len(row["curve"]) > 3
        assert any(point["cpu_cores"] is not None for point in row["curve"])
    by_rung = {row["rung"]: row["process"]["cpu_cores"] for row in value["ladder"]}
    assert by_rung[PLACES] > 2 * by_rung[1], "four times the requests take more CPU"
    page = (tmp_path / "k.html").read_text()
    assert page.count("<svg") >= 2 + len(value["ladder"])


@pytest.mark.soak  # it needs a machine whose speed stays the same for the whole search
def test_the_highest_rate_is_what_the_places_can_serve(served, tmp_path):
    url = f"http://127.0.0.1:{served}/"
    words = ["bench", url, "--find-max-rate", "--rate", "15", "--slo", "p90<=300ms", "--duration", "4s", "--warmup", "0", "--max-lag", "1s"]
    assert main([*words, "--json", "m.json"]) == 0
    value = json.loads((tmp_path / "m.json").read_text())
    most, _ = capacity(served)
    assert value["limited_by"] == "the service"
    assert 0.7 * most <= value["max_rate"] <= 1.1 * most
    assert value["beyond"] > value["max_rate"]
    held = {row["rung"]: {each["word"] for each in row["acceptance"]} for row in value["ladder"]}
    assert held[value["max_rate"]] == {"HOLDS"}
    assert all(row["curve"] for row in value["ladder"])


def test_a_rate_that_is_twice_the_capacity_is_seen_as_a_growing_queue(served, tmp_path):
    words = [
        "bench",
        f"http://127.0.0.1:{served}/",
        "--rate",
        "100",
        "--duration",
        "2s",
        "--warmup",
        "0",
        "--slo",
        "p50<=100ms",
        "--max-lag",
        "1s",
    ]
    assert main([*words, "--timeout", "10s", "--json", "r.json"]) == 2
    value = json.loads((tmp_path / "r.json").read_text())
    assert not value["metrics"]["little"]["holds"]
    most, _ = capacity(served)
    assert value["metrics"]["throughput"]["requests_per_s"] == pytest.approx(most, rel=0.25)
