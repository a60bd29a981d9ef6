"""What is measured: a service in a process of its own, started, waited for and stopped."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from inferscope.errors import InferscopeError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

    from typing_extensions import Self

__all__ = ["Service", "ServiceError", "free_port", "get", "post"]


class ServiceError(InferscopeError):
    """The service did not come up, died, or answered something else than expected."""


def free_port() -> int:
    """A port on 127.0.0.1 that nothing listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def get(port: int, path: str, timeout_s: float = 10.0) -> tuple[int, bytes]:
    """Status and body of `GET path` on this machine.

    Raises:
        OSError: Nothing answers.
    """
    return _call(port, "GET", path, None, timeout_s)


def post(port: int, path: str, body: bytes, timeout_s: float = 10.0) -> tuple[int, bytes]:
    """Status and body of `POST path` with a JSON body.

    Raises:
        OSError: Nothing answers.
    """
    return _call(port, "POST", path, body, timeout_s)


def _call(port: int, method: str, path: str, body: bytes | None, timeout_s: float) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"} if body is not None else {})
        answer = connection.getresponse()
        return answer.status, answer.read()
    except http.client.HTTPException as error:
        raise ConnectionError(f"no HTTP answer from port {port}: {type(error).__name__}") from error
    finally:
        connection.close()


@dataclass
class Service:
    """A server process; call `start` inside a with-block.

    Args:
        command: What to run.
        port: Where it will listen on 127.0.0.1.
        environ: Added to this process's environment.
        directory: Its working directory.
        log: File that takes its output; the end of it is shown when it fails.
        start_s: How long it may take to answer `health`.
        health: A path that answers 200 once it serves.
    """

    command: Sequence[str]
    port: int
    environ: Mapping[str, str]
    directory: Path
    log: Path
    start_s: float = 120.0
    health: str = "/healthz"
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False, repr=False)

    def __enter__(self) -> Self:
        """The process ends with the block; `start` begins it."""
        return self

    @property
    def pid(self) -> int:
        """The process that was started; 0 before that."""
        return 0 if self._process is None else self._process.pid

    def start(self) -> None:
        """Start it and wait until it answers.

        Raises:
            ServiceError: It ended, or did not answer in time.
        """
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                list(self.command), env={**os.environ, **self.environ}, cwd=self.directory, stdin=subprocess.DEVNULL,
                stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise

    def _wait(self) -> None:
        deadline = time.monotonic() + self.start_s
        while time.monotonic() < deadline:
            self.check()
            with contextlib.suppress(OSError):
                if get(self.port, self.health, 2.0)[0] == 200:
                    return
            time.sleep(0.05)
        raise ServiceError(
            f"the service did not answer {self.health} on port {self.port} within {self.start_s:g} s; its log: {self.tail()}"
        )

    def check(self) -> None:
        """Raise ServiceError when the process has ended."""
        status = self._process.poll() if self._process is not None else None
        if status is not None:
            raise ServiceError(f"the service ended with status {status}; the end of its log: {self.tail()}")

    def tail(self, lines: int = 3) -> str:
        """The last lines of its log."""
        try:
            found = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        except OSError:
            found = []
        return " | ".join(found[-lines:]) or "empty"

    def wait_for(self, condition: Callable[[], Any], timeout_s: float, step_s: float = 0.2) -> Any:
        """The first true value of `condition()`, or None after `timeout_s`; raises when the service dies meanwhile."""
        deadline = time.monotonic() + timeout_s
        while True:
            found = condition()
            if found:
                return found
            if time.monotonic() >= deadline:
                return None
            self.check()
            time.sleep(step_s)

    def stop(self, timeout_s: float = 10.0) -> int | None:
        """End it in good order (SIGTERM), by force after `timeout_s`; returns its status, None when it was never started."""
        if self._process is None:
            return None
        if self._process.poll() is None:
            self._signal(signal.SIGTERM)
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self._signal(signal.SIGKILL)
                self._process.wait()
        return self._process.returncode

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop it."""
        self.stop()
