"""Ray Serve, BentoML and KServe: real servers and real worker processes, each in an environment of its own.

They take minutes to install and to start, so that only `make test-frameworks` runs them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import httpx
import pytest

pytestmark = [pytest.mark.servers, pytest.mark.slow, pytest.mark.timeout(600)]
HERE = Path(__file__).parent / "frameworks"


@pytest.fixture
def interpreter(framework_of):
    """The interpreter of a framework by its name."""
    if os.environ.get("FRAMEWORKS") != "1":
        pytest.skip("takes minutes; 'make test-frameworks' runs it")
    return framework_of


def environment(tmp_path: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("INFERSCOPE_", "PYTEST_"))}
    own = {"PYTHONPATH": str(HERE), "INFERSCOPE_STRICT": "1", "INFERSCOPE_STATE_DIR": str(tmp_path / "state"), "HOME": str(tmp_path)}
    return {
        **kept,
        **own,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_raylet_start_wait_time_s": "150",
        "RAY_agent_register_timeout_ms": "120000",
        "BENTOML_DO_NOT_TRACK": "1",
    }


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Served:
    """A server in a process group of its own."""

    def __init__(self, command: list[str], port: int, tmp_path: Path, alive: str) -> None:
        self.log = (tmp_path / "log").open("w+")
        self.process = subprocess.Popen(
            command, cwd=tmp_path, env=environment(tmp_path), stdout=self.log, stderr=subprocess.STDOUT, start_new_session=True
        )
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)
        deadline = time.monotonic() + 240
        while True:
            try:
                if self.client.get(alive).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.2)

    def said(self) -> str:
        self.log.seek(0)
        return self.log.read()[-3000:]

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.log.close()


def together(ask, values) -> None:
    threads = [threading.Thread(target=ask, args=(value,)) for value in values]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


CHECK = """
import importlib.metadata, json, sys
from inferscope.integration import GROUP
from inferscope.testing.integration_checks import problems
(point,) = importlib.metadata.entry_points(group=GROUP, name=sys.argv[1])
print(json.dumps(problems(point.load()())))
"""


@pytest.mark.parametrize(("framework", "integration"), [("bentoml", "bentoml"), ("kserve", "kserve"), ("ray", "ray_serve")])
def test_the_integration_passes_the_checks_that_any_can_run(interpreter, tmp_path: Path, framework: str, integration: str) -> None:
    done = subprocess.run(
        [str(interpreter(framework)), "-c", CHECK, integration],
        cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == []


def test_bentoml(interpreter, tmp_path: Path) -> None:
    port = free_port()
    command = [str(interpreter("bentoml")), "-m", "bentoml", "serve", "bentoml_app:Scorer", "--port", str(port), "--working-dir", str(HERE)]
    answers: dict[int, list[float]] = {}
    with Served(command, port, tmp_path, "/readyz") as server:

        def score(value: int) -> None:
            answers[value] = server.client.post("/score", json={"values": [value]}).json()

        for value in range(100, 124):  # the dispatcher learns how long a call takes before it batches
            score(value)
        server.client.post("/told", json={})
        together(score, range(12))
        assert server.client.post("/fail", json={"value": 1}).json() == 1
        assert server.client.post("/fail", json={"value": -1}).status_code == 500
        told = server.client.post("/told", json={}).json()
    assert all(answers[value] == [2 * value] for value in range(12))
    scores = [row for row in told["rows"] if row["request"] == "score"]
    assert len(scores) == 12
    for row in scores:
        assert row["sum"] == row["wall"]
        assert row["columns"]["inner"] > 8e6
        assert "api:score" in row["columns"]
    assert any(row["columns"].get("queue:batch", 0) > 5e6 for row in scores)
    assert 0 < told["batches"]["batch"] < 24 + 12, "work that is done for several is counted once"
    assert [row["error"] for row in told["rows"] if row["request"] == "fail"] == [None, "500"]


def test_kserve(interpreter, tmp_path: Path) -> None:
    port = free_port()
    command = [str(interpreter("kserve")), str(HERE / "kserve_app.py"), str(port), str(free_port())]
    with Served(command, port, tmp_path, "/v1/models/scorer") as server:
        answers = [server.client.post("/v1/models/scorer:predict", json={"instances": [value]}) for value in (1, 2, 13)]
        # On a connection of its own: uvicorn closes one on which the application raised.
        told = httpx.post(f"http://127.0.0.1:{port}/v1/models/scorer:predict", json={"instances": [0]}, timeout=60).json()["told"]
    assert [answer.status_code for answer in answers] == [200, 200, 500]
    assert answers[0].json()["predictions"] == [2]
    rows = [row for row in told["rows"] if row["request"] == "v1/models/{model_name}:predict"]
    assert [row["error"] for row in rows] == [None, None, "500"]
    for row in rows:
        assert row["sum"] == row["wall"]
        assert row["columns"]["preprocess"] > 9e6
        assert row["columns"]["inner"] > 18e6
        assert "predict" in row["columns"]
    assert "postprocess" in rows[0]["columns"]
    assert "postprocess" not in rows[2]["columns"]


def test_ray_serve(interpreter, tmp_path: Path) -> None:
    done = subprocess.run(
        [str(interpreter("ray")), str(HERE / "ray_drive.py")],
        cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(next(line for line in reversed(done.stdout.splitlines()) if line.startswith("{")))
    assert told["answers"] == {str(value): 2 * value for value in (1, 2, 3, 4)}
    assert told["raised"] == "RayTaskError(ValueError)"

    # What the replica did is in the driver's requests, whose threads waited for it.
    outer = [row for row in told["driver"] if row["request"] == "outer"]
    assert len(outer) == 4
    for row in outer:
        assert row["sum"] == row["wall"]
        assert row["columns"]["queue:ray"] > 0
        assert "inner" in row["columns"]

    # The replica has requests of its own, and the batch is in each of them.
    scored = [row for row in told["scorer"] if row["request"] == "Scorer"]
    assert len(scored) == 4
    assert all(row["sum"] == row["wall"] for row in scored)
    assert any(row["columns"].get("queue:batch", 0) > 0 for row in scored)
    assert 1 <= told["batches"]["batch"] <= 4
    assert [row["error"] for row in told["scorer"] if row["request"] == "Scorer.fail"] == ["ValueError"]

    # One at a time: who came together waited in the router.
    assert told["alone"] == [1, 2, 3]
    waits = sorted(row["columns"].get("queue:backlog", 0) for row in told["narrow"] if row["request"] == "Narrow")
    assert len(waits) == 3
    assert waits[-1] > 80e6

    assert told["http"] == [[200, {"answer": 42}], [500, None]]
    fronted = [row for row in told["front"] if row["request"] == "Front"]
    assert [row["error"] for row in fronted] == [None, "500"]
    assert "inner" in fronted[0]["columns"], "the scorer's work is in the request of the deployment that called it"
