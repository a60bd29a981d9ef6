"""pytriton's own inference handler and decorators, from its wheel; Triton itself is stood in for by a connector that answers at once."""

from __future__ import annotations

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
