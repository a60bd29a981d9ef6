"""pytriton's own inference handler and decorators, from its wheel, over a connector that answers at once; and once behind its real Triton."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from inferscope.record import core

pytestmark = [pytest.mark.servers, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
SITE = Path(__file__).parents[2] / "build" / "triton" / "site"


@pytest.fixture(scope="module")
def pytriton():
    if not (SITE / "pytriton").is_dir():
        pytest.skip("nvidia-pytriton is not unpacked; 'make test-integrations' does that")
    pytest.importorskip("zmq", reason="pyzmq is not installed; 'make test-integrations' installs it")
    sys.path.append(str(SITE))  # last: its NumPy 1 must not be found
    try:
        from pytriton import decorators
        from pytriton.proxy import inference, types

        yield SimpleNamespace(decorators=decorators, inference=inference, types=types)
    finally:
        sys.path.remove(str(SITE))


class Connector:
    """Takes what the handler sends; `done` counts ended batches."""

    def __init__(self) -> None:
        self.sent: list = []
        self.done = threading.Semaphore(0)

    def register_inference_hook(self, run) -> None:
        self.run = run

    def unregister_inference_hook(self, _run) -> None:
        pass

    def send(self, _scope, flags, responses) -> None:
        self.sent.append((int(flags), responses))
        if int(flags):
            self.done.release()


@pytest.fixture
def serve(pytriton):
    """Runs batches of requests through a handler of pytriton's and returns what was sent to Triton."""
    handlers = []

    def run(callable_, batches: int, *, rows: int = 2):
        connector = Connector()
        validator = SimpleNamespace(
            _model_config=SimpleNamespace(model_name="Scoring"), validate_responses=lambda requests, responses: None
        )
        handler = pytriton.inference.InferenceHandler(callable_, connector, validator)
        handlers.append(handler)
        handler.start()
        for number in range(batches):
            requests = [pytriton.types.Request({"rows": np.full((rows, 4), number, np.float32)}, {}) for _ in range(3)]
            handler.run_inference({"requests_id": bytes([number])}, requests)
        for _ in range(batches):
            assert connector.done.acquire(timeout=10)
        return connector.sent

    yield run
    for handler in handlers:
        handler.stop()
        handler.join(5)


def scoring(pytriton):
    @pytriton.decorators.batch
    def score(rows):
        with core.default.stage("model"):
            time.sleep(0.02)
            return {"score": rows.sum(axis=1, keepdims=True)}

    return score


def scores(sent) -> list[list[float]]:
    return sorted([float(each["score"].sum()) for each in responses] for flags, responses in sent if not flags)


def test_every_run_of_a_callable_is_a_request_with_its_wait(pytriton, seen, instrument, serve) -> None:
    plain = scores(serve(scoring(pytriton), 3))
    assert seen.requests() == []
    instrument("pytriton")
    assert scores(serve(scoring(pytriton), 3)) == plain
    records = [record for record in seen.requests() if record.key.request == "Scoring"]
    assert [record.items for record in records] == [3, 3, 3]
    for record in records:
        assert sum(record.vector) == record.wall_ns
        assert seen.columns(record)["model"] > 19e6
    waits = sorted(seen.columns(record).get("queue:backlog", 0) for record in records)
    assert waits[-1] > 35e6  # two runs of 20 ms before it


def test_an_error_is_the_callables_own(pytriton, seen, instrument, serve) -> None:
    def broken(_requests):
        raise ValueError("private")

    instrument("pytriton")
    ((flags, error),) = serve(broken, 1)
    assert flags
    assert isinstance(error, ValueError)
    (record,) = seen.requests()
    assert record.error == "ValueError"


def test_decoupled_callables_end_with_their_last_answer(pytriton, seen, instrument, serve) -> None:
    def stream(requests):
        for _ in range(3):
            time.sleep(0.01)
            yield [{"score": np.ones((1, 1), np.float32)} for _ in requests]

    instrument("pytriton")
    sent = serve(stream, 1)
    assert len(sent) == 4
    (record,) = seen.requests()
    assert record.wall_ns > 28e6


SERVICE = """
import json, socket, sys, threading, time, urllib.request
import numpy as np
from inferscope.integration import Registry
from inferscope.record import core
from inferscope_integrations.pytriton import PytritonIntegration
from pytriton.decorators import batch
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig
from told import begin, rows

def port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]

@batch
def score(rows):
    with core.default.stage("model"):
        time.sleep(0.02)
        return {"score": rows.sum(axis=1, keepdims=True)}

def main():
    if sys.argv[1] == "with":
        Registry().add(PytritonIntegration())
    begin()
    http, answers = port(), {}
    config = TritonConfig(http_address="127.0.0.1", http_port=http, grpc_port=port(), allow_metrics=False)
    with Triton(config=config) as triton:
        triton.bind(
            model_name="Scoring", infer_func=score, config=ModelConfig(max_batch_size=8),
            inputs=[Tensor(name="rows", dtype=np.float32, shape=(-1,))], outputs=[Tensor(name="score", dtype=np.float32, shape=(-1,))],
        )
        triton.run()
        def ask(value):
            body = {"inputs": [{"name": "rows", "shape": [1, 4], "datatype": "FP32", "data": [value] * 4}]}
            url = f"http://127.0.0.1:{http}/v2/models/Scoring/infer"
            answers[value] = json.load(urllib.request.urlopen(url, json.dumps(body).encode(), timeout=20))["outputs"][0]["data"]
        threads = [threading.Thread(target=ask, args=(value,)) for value in range(1, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    print(json.dumps({"answers": answers, "rows": rows()}), flush=True)

if __name__ == "__main__":
    main()
"""


@pytest.mark.timeout(600)
def test_bound_models_behind_the_real_server_are_requests(counterparts, tmp_path: Path) -> None:
    try:
        python = counterparts.pytriton(fetch=os.environ.get("SERVERS_FETCH") == "1")
    except counterparts.ServerAbsentError as error:
        pytest.skip(str(error))
    (tmp_path / "service.py").write_text(SERVICE)
    root = Path(__file__).parents[2]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("INFERSCOPE_", "PYTEST_"))}
    paths = (root, root / "integrations", Path(__file__).parent / "frameworks")
    own = {"PYTHONPATH": ":".join(map(str, paths)), "INFERSCOPE_STRICT": "1", "INFERSCOPE_STATE_DIR": str(tmp_path / "state")}
    told = {}
    for how in ("without", "with"):
        done = subprocess.run(
            [str(python), "service.py", how], cwd=tmp_path, env={**kept, **own}, capture_output=True, text=True, timeout=120, check=False
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        assert lines, done.stderr[-3000:]
        told[how] = json.loads(lines[-1])
    assert told["without"] == {"answers": {str(value): [4.0 * value] for value in range(1, 5)}, "rows": []}
    assert told["with"]["answers"] == told["without"]["answers"]
    rows = told["with"]["rows"]
    assert 1 <= len(rows) <= 4, "Triton may batch them"
    for row in rows:
        assert (row["request"], row["error"], row["sum"]) == ("Scoring", None, row["wall"])
        assert row["columns"]["model"] > 19e6
        assert row["columns"]["queue:backlog"] > 0
