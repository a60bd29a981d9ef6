"""Real processes: started in a group of their own, ended whatever happens."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


class Server:
    """A server process with its workers, on a port of its own choice."""

    def __init__(self, command: list[str], log: Path, environ: dict[str, str]) -> None:
        self.log = log
        environment = {**os.environ, "INFERSCOPE_STRICT": "0", **environ}
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                command, cwd=HERE, env=environment, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
            )
        self.port = int(self.wait(lambda: re.search(r"127\.0\.0\.1:(\d+)", self.said()), 30)[1])

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, until: Callable[[], Any], seconds: float = 20.0) -> Any:
        deadline = time.monotonic() + seconds
        while True:
            with contextlib.suppress(OSError, http.client.HTTPException):
                found = until()
                if found:
                    return found
            assert self.process.poll() is None, self.said()[-2000:]
            assert time.monotonic() < deadline, f"not in {seconds:g} s: {self.said()[-2000:]}"
            time.sleep(0.05)

    def get(self, path: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def status(self) -> dict[str, Any]:
        return json.loads(self.get("/status")[1])

    def workers(self, wanted: int) -> dict[int, dict[str, Any]]:
        """Status by process id, once `wanted` different workers answered in one round."""

        def round_() -> dict[int, dict[str, Any]] | None:
            found: dict[int, dict[str, Any]] = {}
            for _ in range(12 * wanted):
                answer = self.status()
                found[answer["pid"]] = answer
                if len(found) == wanted:
                    return found
            return None

        return self.wait(round_, 40)

    @contextlib.contextmanager
    def load(self, path: str = "/score", threads: int = 4, pause_s: float = 0.02) -> Iterator[list[int]]:
        """Requests from several threads, each over a new connection, for as long as the block lasts; gives the status codes."""
        codes: list[int] = []
        stop = threading.Event()

        def work() -> None:
            while not stop.wait(pause_s):
                try:
                    codes.append(self.get(path)[0])
                except (OSError, http.client.HTTPException):
                    codes.append(0)

        workers = [threading.Thread(target=work) for _ in range(threads)]
        for worker in workers:
            worker.start()
        try:
            yield codes
        finally:
            stop.set()
            for worker in workers:
                worker.join()

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def serve(tmp_path: Path, state_dir: Path) -> Iterator[Callable[..., Server]]:
    """Starts servers; all their processes end with the test."""
    servers: list[Server] = []

    def start(*command: str, **environ: str) -> Server:
        server = Server([sys.executable, "-m", *command], tmp_path / f"server-{len(servers)}.log", environ)
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.end()


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs Python source in a process of its own and gives what it printed."""

    def run(source: str, *, timeout: float = 30, strict: str = "0", **environ: str) -> subprocess.CompletedProcess[str]:
        path = tmp_path / "script.py"
        path.write_text(source)
        return subprocess.run(
            [sys.executable, str(path)],
            env={**os.environ, "INFERSCOPE_STRICT": strict, **environ},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return run
