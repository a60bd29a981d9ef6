"""`inferscope run` in front of the servers and launchers that people use: every worker measures, none behaves differently."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.servers, pytest.mark.slow]

FLASK = """
import os
from flask import Flask, jsonify

app = Flask(__name__)

@app.get("/score/<model>")
def score(model):
    return jsonify(model=model, pid=os.getpid())

@app.get("/seen")
def seen():
    import inferscope
    status = inferscope.status()
    return jsonify(pid=os.getpid(), requests={k: dict(v) for k, v in inferscope.snapshot().requests.items()}, flask=status["integrations"]["flask"],
                   failures=status["failures"], mark=MARK)

MARK = "one"
"""

STARLETTE = """
import os
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

MARK = "one"

async def score(request):
    return JSONResponse({"model": request.path_params["model"], "pid": os.getpid()})

async def seen(_request):
    import inferscope
    status = inferscope.status()
    return JSONResponse({"pid": os.getpid(), "requests": {k: dict(v) for k, v in inferscope.snapshot().requests.items()},
                         "failures": status["failures"], "mark": MARK})

app = Starlette(routes=[Route("/score/{model}", score), Route("/seen", seen)])
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("INFERSCOPE_")}
    return {**clean, "INFERSCOPE_STATE_DIR": str(tmp_path / "state"), **more}


def ask(port: int, path: str) -> dict:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()


@contextlib.contextmanager
def serving(tmp_path: Path, *command: str, port: int):
    """The command under `inferscope run` in its own process group, until the block ends."""
    log = (tmp_path / "log").open("w+")
    child = subprocess.Popen(
        [sys.executable, "-m", "inferscope", "run", "--", sys.executable, "-m", *command],
        env=environment(tmp_path), cwd=tmp_path, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
                ask(port, "/score/ready")
                break
            if child.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"it did not start:\n{(tmp_path / 'log').read_text()}")
            time.sleep(0.1)
        yield child
        child.send_signal(signal.SIGTERM)
        assert child.wait(30) in {0, -signal.SIGTERM, 128 + signal.SIGTERM}
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        log.close()


def workers_seen(port: int, want: int, name: str) -> dict[int, dict]:
    """What each worker says after requests went to all of them."""
    served: dict[int, int] = {}
    deadline = time.monotonic() + 30
    while len(served) < want or sum(served.values()) < 20:
        pid = ask(port, "/score/a")["pid"]
        served[pid] = served.get(pid, 0) + 1
        assert time.monotonic() < deadline, served
    found: dict[int, dict] = {}
    while len(found) < want:
        answer = ask(port, "/seen")
        found[answer["pid"]] = answer
        assert time.monotonic() < deadline, found
    for pid, answer in found.items():
        assert answer["failures"] == {}
        assert answer["requests"][name]["count"] >= served[pid]
    return found


@pytest.mark.parametrize(
    "options",
    [("-k", "sync"), ("-k", "gthread", "--threads", "4"), ("-k", "gevent"), ("-k", "sync", "--preload"), ("-k", "gevent", "--preload")],
    ids=" ".join,
)
def test_gunicorn_with_flask(tmp_path: Path, options: tuple[str, ...]) -> None:
    pytest.importorskip("flask")
    pytest.importorskip("gunicorn")
    (tmp_path / "service.py").write_text(FLASK)
    port = free_port()
    with serving(tmp_path, "gunicorn", "-w", "2", *options, "-b", f"127.0.0.1:{port}", "service:app", port=port):
        found = workers_seen(port, 2, "score/<model>")
    assert {answer["flask"] for answer in found.values()} == {"active"}


def test_uvicorn_with_workers(tmp_path: Path) -> None:
    (tmp_path / "service.py").write_text(STARLETTE)
    port = free_port()
    with serving(tmp_path, "uvicorn", "--workers", "2", "--port", str(port), "service:app", port=port):
        workers_seen(port, 2, "score/{model}")


def test_uvicorn_that_reloads(tmp_path: Path) -> None:
    (tmp_path / "service.py").write_text(STARLETTE)
    port = free_port()
    with serving(tmp_path, "uvicorn", "--reload", "--port", str(port), "service:app", port=port):
        assert ask(port, "/seen")["mark"] == "one"
        time.sleep(1.1)  # the reloader looks at modification times
        (tmp_path / "service.py").write_text(STARLETTE.replace('MARK = "one"', 'MARK = "two"'))
        deadline = time.monotonic() + 30
        while True:
            with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
                if ask(port, "/seen")["mark"] == "two":
                    break
            assert time.monotonic() < deadline
            time.sleep(0.2)
        workers_seen(port, 1, "score/{model}")


FORWARD = """
import json, os
import torch

def serve():
    import inferscope
    net = torch.nn.Linear(4, 4)
    for _ in range(3):
        with inferscope.request("score"):
            net(torch.ones(1, 4))
    stages = {series.labels[0]: series.count for series in inferscope.snapshot().series if series.kind == "stage"}
    return {"rank": os.environ.get("RANK"), "forward": stages.get("forward"), "torch": inferscope.status()["integrations"]["torch"]}
"""


def run(tmp_path: Path, *command: str) -> list[dict]:
    done = subprocess.run(
        [sys.executable, "-m", "inferscope", "run", "--", sys.executable, *command],
        env=environment(tmp_path, OMP_NUM_THREADS="1"), cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line[line.index("{") :]) for line in done.stdout.splitlines() if '"forward"' in line]


def test_torchrun(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "job.py").write_text(FORWARD + "\nprint(json.dumps(serve()) + '\\n', end='', flush=True)\n")
    found = run(tmp_path, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()), "job.py")
    assert sorted((each["rank"], each["forward"], each["torch"]) for each in found) == [("0", 3, "active"), ("1", 3, "active")]


def test_spawned_children_of_multiprocessing(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (tmp_path / "job.py").write_text(
        FORWARD
        + """
if __name__ == "__main__":
    import multiprocessing
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        for answer in pool.starmap(serve, [(), ()], chunksize=1):
            print(json.dumps(answer))
"""
    )
    found = run(tmp_path, "job.py")
    assert all(each["torch"] == "active" for each in found)
    assert sum(each["forward"] for each in found) in {6, 9}  # two children, or one that was asked twice and counts on
