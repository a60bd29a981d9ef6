"""A cache for the example's weights, trained once a session, and the service as a process."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from examples.risk_scoring import model

    folder = tmp_path_factory.mktemp("risk-scoring")
    assert model.load_or_train(folder).fresh
    return folder


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def ask() -> Callable[..., tuple[int, bytes]]:
    """`ask(port, method, path, body=None) -> (status, body)`."""
    return _ask


def _ask(port: int, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


class Services:
    """Call it with a command: starts a service, waits until it answers, returns its port. `folder / "truth"` holds its accounts."""

    def __init__(self, cache: Path, folder: Path) -> None:
        self.folder = folder
        self._environment = {
            "RISK_SCORING_CACHE": str(cache),
            "RISK_SCORING_DEVICE": "cpu",
            "RISK_SCORING_TRUTH": str(folder / "truth"),
            "INFERSCOPE_STATE_DIR": str(folder / "state"),
        }
        self._running: list[subprocess.Popen[bytes]] = []

    def __call__(self, *command: str) -> int:
        port = free_port()
        log = self.folder / f"{port}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, *command, "--port", str(port)],
                cwd=ROOT,
                env=os.environ | self._environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._running.append(process)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and process.poll() is None:
            with contextlib.suppress(OSError):
                if _ask(port, "GET", "/healthz")[0] == 200:
                    return port
            time.sleep(0.1)
        raise AssertionError(f"the service did not come up: {log.read_text()[-3000:]}")

    def stop(self) -> None:
        """Ends all, in the way that lets them write their account."""
        while self._running:
            stop(self._running.pop())


@pytest.fixture
def serve(cache: Path, tmp_path: Path) -> Iterator[Services]:
    services = Services(cache, tmp_path)
    yield services
    services.stop()


@pytest.fixture(scope="session")
def ports(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, int]]:
    """Both versions, running; coming up takes seconds, so all tests share them."""
    services = Services(cache, tmp_path_factory.mktemp("versions"))
    yield {name: services("-m", f"examples.risk_scoring.{name}") for name in ("slow", "fixed")}
    services.stop()


def stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
