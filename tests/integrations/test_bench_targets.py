"""`inferscope bench` against real servers: Triton over both of its protocols, a gRPC server with reflection, and Locust as the generator."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from inferscope.bench import endpoint, runs
from inferscope.bench.arrivals import arrivals
from inferscope.bench.targets import ServiceError, free_port
from inferscope.cli import main
from inferscope.errors import InferscopeError

pytestmark = [
    pytest.mark.servers,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
ROOT = Path(__file__).parents[2]
LOCUST = ROOT / "build" / "locust-venv"


def status_of(*words):
    try:
        return main(list(map(str, words)))
    except SystemExit as ended:
        return ended.code


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_triton_is_measured_with_its_own_stages(triton, protocol, tmp_path, monkeypatch):
    if protocol == "grpc":
        pytest.importorskip("tritonclient.grpc")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text("\n".join(json.dumps({"ROWS": [[index / 10] * 16]}) for index in range(8)))
    target = f"triton://{getattr(triton, protocol)}/risk"
    common = ["bench", target, "--inputs", "in.jsonl", "--warmup", 0, "--max-lag", "10s"]
    assert status_of(*common, "--repeat", 60, "--save-golden", "g.json", "--json", "closed.json") == 0
    closed = json.loads((tmp_path / "closed.json").read_text())
    assert closed["metrics"]["failed"] == 0
    assert closed["metrics"]["latency"]["p50"]["ms"] > 2  # the model sleeps 2 ms
    stages = {row["name"]: row for row in closed["stages"]}
    assert stages["compute_infer"]["count"] == 60
    assert stages["compute_infer"]["mean_ms"] > 2
    assert closed["process"]["memory"]["peak_bytes"] > 10e6  # found by the port it listens at
    assert status_of(*common, "--rate", 40, "--duration", "2s", "--golden", "g.json", "--json", "open.json") in {0, 3}
    opened = json.loads((tmp_path / "open.json").read_text())
    assert opened["golden"]["correct"]
    assert opened["metrics"]["failed"] == 0
    # Without inputs random ones of the model's shape are drawn, in batches.
    assert status_of("bench", target, "--batch-size", 4, "--repeat", 20, "--warmup", 0, "--baseline", 0, "--json", "batch.json") == 0
    rates = json.loads((tmp_path / "batch.json").read_text())["metrics"]["throughput"]
    assert rates["items_per_s"] == pytest.approx(4 * rates["requests_per_s"])


def test_both_protocols_answer_the_same(triton):
    pytest.importorskip("tritonclient.grpc")
    lines = [json.dumps([[0.5] * 16]).encode()]
    ours = [endpoint.resolve(f"triton://{place}/risk", lines).answers(1) for place in (triton.http, triton.grpc)]
    (over_http,), (over_grpc,) = ours
    assert over_http.keys() == over_grpc.keys()
    for name in over_http:
        assert over_http[name] == [pytest.approx(row, rel=1e-6) for row in over_grpc[name]]


def test_tritons_own_health_check_is_asked_and_a_missing_model_named(triton, capsys):
    assert status_of("bench", f"grpc://{triton.grpc}", "--repeat", 20, "--baseline", 0) == 0
    for place in (triton.http, triton.grpc):
        assert status_of("bench", f"triton://{place}/nothing", "--repeat", 5) == 1
        assert "nothing" in capsys.readouterr().err


def test_json_inputs_are_encoded_by_the_types_that_a_server_tells():
    grpc = pytest.importorskip("grpc")
    health = pytest.importorskip("grpc_health.v1.health")
    messages = pytest.importorskip("grpc_health.v1.health_pb2")
    stubs = pytest.importorskip("grpc_health.v1.health_pb2_grpc")
    reflection = pytest.importorskip("grpc_reflection.v1alpha.reflection")
    with ThreadPoolExecutor(4) as pool:
        server = grpc.server(pool)
        checks = health.HealthServicer()
        checks.set("score", messages.HealthCheckResponse.NOT_SERVING)
        stubs.add_HealthServicer_to_server(checks, server)
        reflection.enable_server_reflection(("grpc.health.v1.Health", reflection.SERVICE_NAME), server)
        url = f"grpc://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}/grpc.health.v1.Health"
        server.start()
        try:
            found = endpoint.resolve(f"{url}/Check", [b'{"service": "score"}', b'{"service": ""}'])
            assert found.bodies == (b"\n\x05score", b"")
            with pytest.raises(ServiceError, match="knows no such method"):
                endpoint.resolve(f"{url}/Nothing", [b"{}"])
            with pytest.raises(InferscopeError, match=r"does not fit grpc\.health\.v1\.HealthCheckRequest"):
                endpoint.resolve(f"{url}/Check", [b'{"speed": 1}'])
        finally:
            server.stop(0).wait(5)


@pytest.fixture(scope="module")
def locust():
    """Locust in an environment of its own: its gevent and its pins stay out of the one that is tested."""
    program = LOCUST / "bin" / "locust"
    if not program.exists():
        if os.environ.get("SERVERS_FETCH") != "1":
            pytest.skip("Locust is not here; 'make test-integrations' installs it")
        subprocess.run([sys.executable, "-m", "venv", str(LOCUST)], check=True, capture_output=True)
        done = subprocess.run([str(LOCUST / "bin" / "pip"), "install", "--quiet", "locust==2.47.0"], check=False, capture_output=True)
        if done.returncode:
            pytest.skip("Locust cannot be installed here")
    return program


class Server:
    """Answers after 2 ms and remembers when it was asked."""

    def __enter__(self):
        self.at, self.ready = [], threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self.serve()))
        self.thread.start()
        assert self.ready.wait(10)
        return self

    def __exit__(self, *_):
        self.loop.call_soon_threadsafe(self.stop.set)
        self.thread.join(10)

    async def serve(self):
        self.loop, self.stop, self.writers = asyncio.get_running_loop(), asyncio.Event(), []
        server = await asyncio.start_server(self.talk, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self.ready.set()
        await self.stop.wait()
        server.close()
        for writer in self.writers:
            writer.transport.abort()

    async def talk(self, reader, writer):
        self.writers.append(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = next((int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")), 0)
                body = await reader.readexactly(size)
                self.at.append((self.loop.time(), body))
                await asyncio.sleep(0.002)
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_locust_sends_the_arrivals_that_were_drawn(locust, workers, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("INFERSCOPE_LOCUST", str(locust))
    (tmp_path / "in.jsonl").write_text('{"a": 1}\n{"a": 2}\n')
    due = arrivals(60, 3, 5)
    port = free_port()
    monkeypatch.setattr("inferscope.cli.via_locust.free_port", lambda: port)
    command = [str(locust), "-f", str(tmp_path / "load.py"), "--worker", "--master-port", str(port)]
    environment = {**os.environ, "INFERSCOPE_WORKERS": str(workers)}
    helpers = []
    with Server() as server:
        words = ["bench", f"http://127.0.0.1:{server.port}/score", "--inputs", "in.jsonl", "--rate", 60, "--duration", "3s", "--seed", 5]
        words += ["--warmup", 0, "--max-lag", "10s", "--locust", "load.py"]
        assert status_of(*words) == 0  # workers need the scenario before they start; it is the same every time
        try:
            for _ in range(workers):
                helpers.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT))
            assert status_of(*words, "--workers", workers, "-o", "run.json", "--json", "d.json") in {0, 3}
        finally:
            for helper in helpers:
                helper.terminate()
                helper.wait(20)
        seen = list(server.at)
    value = json.loads((tmp_path / "d.json").read_text())
    assert value["generator"] == {"name": "locust", "workers": workers}
    assert value["metrics"]["requests"] == len(due) == len(seen)
    assert value["metrics"]["failed"] == 0
    assert {body for _, body in seen} == {b'{"a": 1}', b'{"a": 2}'}
    result = runs.read(tmp_path / "run.json").load
    offsets = result.intended_ns - result.intended_ns[0]
    assert abs(offsets - (due - due[0])).max() < (5e8 if workers else 1e6)  # workers begin within half a second of each other
    assert result.summary()["latency_ms"]["p50"] >= 2
