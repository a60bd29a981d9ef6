"""LitServe: a real server, real worker processes, and their work in the requests that waited for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.servers, pytest.mark.timeout(120)]

SERVICE = """
import asyncio, json, os, sys, threading, time
import httpx
import inferscope as scope
import litserve
from inferscope.record import core

class Api(litserve.LitAPI):
    def setup(self, device):
        pass
    def decode_request(self, request):
        return request["value"]
    def batch(self, inputs):
        return inputs
    def unbatch(self, outputs):
        return outputs
    def predict(self, x):
        time.sleep(0.03)
        with scope.stage("inner"):
            time.sleep(0.01)
        if x == 13 or (isinstance(x, list) and 13 in x):
            raise ValueError("private")
        return [2 * value for value in x] if isinstance(x, list) else 2 * x
    def encode_response(self, output):
        return {"answer": output}

class Waiting(Api):
    async def predict(self, x):
        await asyncio.sleep(0.03 * x)
        with scope.stage("inner"):
            time.sleep(0.01)
        if x == 3:
            raise ValueError("private")
        return 2 * x

class Stream(Api):
    def predict(self, x):
        for number in range(3):
            with scope.stage("inner"):
                time.sleep(0.01)
            yield [value + number for value in x] if isinstance(x, list) else x + number
    def unbatch(self, outputs):
        yield from outputs
    def encode_response(self, outputs):
        for output in outputs:
            yield [f"{value};" for value in output] if isinstance(output, list) else f"{output};"

class WaitingStream(Stream):
    async def predict(self, x):
        for number in range(3):
            await asyncio.sleep(0.01 * x)
            with scope.stage("inner"):
                time.sleep(0.01)
            yield x + number
    async def encode_response(self, outputs):
        async for output in outputs:
            yield f"{output};"

KINDS = {"single": Api, "batch": Api, "async": Waiting, "stream": Stream, "async stream": WaitingStream, "batch stream": Stream}

scope.instrument("litserve", "asgi")  # the worker imports this module too

def main(port, kind):
    from inferscope.aggregate.window import decode
    from inferscope.types import ClassKey, Column
    core.default.begin_epoch()
    options = {"max_batch_size": 4, "batch_timeout": 2.0} if "batch" in kind else {}
    api = KINDS[kind](stream="stream" in kind, enable_async="async" in kind, **options)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1)
    threading.Thread(target=server.run, kwargs=dict(port=port, api_server_worker_type="thread", generate_client_file=False,
                                                    log_level="error"), daemon=True).start()
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 60
    while True:
        try:
            if httpx.get(url + "/health").status_code == 200:
                break
        except httpx.TransportError:
            pass
        assert time.monotonic() < deadline
        time.sleep(0.1)
    core.default.drain()
    answers = {}
    def ask(value):
        answer = httpx.post(url + "/predict", json={"value": value}, timeout=20)
        answers[value] = [answer.status_code, answer.text if "stream" in kind else answer.json()]
    values = [1, 13] if kind == "single" else [1, 2, 3, 4]
    threads = [threading.Thread(target=ask, args=(value,)) for value in values]
    for thread in threads:
        thread.start()
        if kind == "single":
            thread.join()
    for thread in threads:
        thread.join()
    time.sleep(0.2)
    keys = {entry[0]: ClassKey(*entry[1:4]) for entry in core.default.classes()}
    labels = [Column(*column).label for column in core.default.columns()]
    rows = []
    for kept in core.default.drain():
        record = decode(kept, keys[kept[1]])
        rows.append({"request": record.key.request, "wall": record.wall_ns, "sum": sum(record.vector), "error": record.error,
                     "columns": {labels[i]: value for i, value in enumerate(record.vector) if value}})
    print(json.dumps({"answers": answers, "rows": rows}), flush=True)
    sys.stdout.flush()
    server._shutdown_event.set() if hasattr(server, "_shutdown_event") else None
    time.sleep(1.0)
    os._exit(0)

if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
"""


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def served(tmp_path: Path, kind: str) -> dict:
    pytest.importorskip("litserve")
    (tmp_path / "service.py").write_text(SERVICE)
    environ = {**os.environ, "INFERSCOPE_STRICT": "1", "INFERSCOPE_STATE_DIR": str(tmp_path / "state")}
    done = subprocess.run(
        [sys.executable, "service.py", str(free_port()), kind],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, done.stderr[-3000:]
    return json.loads(lines[-1])


def test_a_workers_stages_and_its_queue_are_in_the_request_that_waited(tmp_path: Path) -> None:
    told = served(tmp_path, "single")
    assert told["answers"]["1"] == [200, {"answer": 2}]
    assert told["answers"]["13"][0] == 500
    rows = [row for row in told["rows"] if row["request"] == "predict"]
    assert len(rows) == 2
    for row in rows:
        assert row["sum"] == row["wall"]
        assert row["columns"]["predict"] > 25e6
        assert row["columns"]["inner"] > 8e6
        assert 0 < row["columns"]["queue:litserve"] < row["wall"]
    assert [row["error"] for row in rows] == [None, "500"]


def test_a_batch_is_in_each_of_its_requests_and_its_forming_is_a_queue(tmp_path: Path) -> None:
    told = served(tmp_path, "batch")
    assert {value: answer[1]["answer"] for value, answer in told["answers"].items()} == {"1": 2, "2": 4, "3": 6, "4": 8}
    rows = [row for row in told["rows"] if row["request"] == "predict"]
    assert len(rows) == 4
    assert all(row["sum"] == row["wall"] and row["columns"]["predict"] > 25e6 for row in rows)
    assert any(row["columns"].get("queue:batch", 0) > 0 for row in rows)


def test_on_asyncio_each_request_has_the_work_of_its_own_task(tmp_path: Path) -> None:
    told = served(tmp_path, "async")
    assert {value: answer[0] for value, answer in told["answers"].items()} == {"1": 200, "2": 200, "3": 500, "4": 200}
    assert told["answers"]["4"] == [200, {"answer": 8}]
    rows = [row for row in told["rows"] if row["request"] == "predict"]
    assert len(rows) == 4
    assert all(row["sum"] == row["wall"] and row["columns"]["queue:litserve"] > 0 for row in rows)
    assert all(8e6 < row["columns"]["inner"] < row["wall"] for row in rows)
    awaited = sorted(row["columns"]["predict"] for row in rows)  # each slept longer than the one before
    assert all(spent > 0.028e9 * number for number, spent in enumerate(awaited, 1))
    assert sum(row["error"] == "500" for row in rows) == 1


@pytest.mark.parametrize("kind", ["stream", "async stream", "batch stream"])
def test_a_streams_work_is_in_its_request_until_the_last_part(tmp_path: Path, kind: str) -> None:
    told = served(tmp_path, kind)
    assert told["answers"] == {str(n): [200, f"{n};{n + 1};{n + 2};"] for n in (1, 2, 3, 4)}
    rows = [row for row in told["rows"] if row["request"] == "predict"]
    assert len(rows) == 4
    for row in rows:
        columns = row["columns"]
        assert row["sum"] == row["wall"]
        if kind != "batch stream":  # what came while the batch was forming did not wait to be taken
            assert 0 < columns["queue:litserve"] < row["wall"]
        assert columns["inner"] > 25e6  # all three parts
        assert columns["stream"] > 0
        assert columns.get("predict", 0) < 20e6  # made the generator, no more
        assert "encode" not in columns
    if kind == "batch stream":
        assert any(row["columns"].get("queue:batch", 0) > 0 for row in rows)
    if kind == "async stream":
        assert max(row["columns"]["stream"] for row in rows) > 0.1e9  # three sleeps of 40 ms
