"""A service's operations as doubles, and the thread that the runtime would start."""

from __future__ import annotations

import http.client
import json
import shutil
import tempfile
import threading
from pathlib import Path

import pytest

from inferscope.control import Control, Operations, Options
from inferscope.control.socket import Call
from inferscope.errors import CaptureRefusedError


class Service:
    """Remembers what was asked of it."""

    def __init__(self) -> None:
        self.calls = []
        self.events = []
        self.refusal = None
        self.failure = None
        self.release = threading.Event()
        self.release.set()

    def capture(self, wanted, actor):
        self.release.wait(10)
        if self.failure:
            raise self.failure
        if self.refusal:
            raise CaptureRefusedError(self.refusal)
        self.wanted = wanted
        self.calls.append(("capture", wanted.reason, wanted.requests, actor.channel))
        return f"incident-{len(self.calls)}"

    def operations(self) -> Operations:
        return Operations(
            status=lambda: {"service": "score", "calls": len(self.calls)},
            snapshot=lambda: {"requests": {"score": {"count": 3}}, "odd": float("nan")},
            capture=self.capture,
            enable=lambda part: self.calls.append(("enable", part)),
            disable=lambda part: self.calls.append(("disable", part)),
            set_slo=lambda name, keywords: self.calls.append(("set_slo", name, dict(keywords))),
            audit=lambda event: self.events.append(event),
        )


@pytest.fixture
def service():
    return Service()


@pytest.fixture
def directory():
    """Short enough for a socket's address, whatever the test's name is."""
    path = Path(tempfile.mkdtemp(prefix="ctl"))
    yield path
    shutil.rmtree(path)


class Running:
    """A control room with its thread."""

    def __init__(self, service, directory, options=None, environ=None, **keywords) -> None:
        self.service, self.directory = service, directory
        self.control = Control(service.operations(), options or Options(), environ=environ or {}, **keywords)
        self.control.open(directory)
        self.path = directory / "control.sock"
        self._stop = threading.Event()
        self.errors = []
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def _loop(self) -> None:
        try:
            while not self._stop.is_set():
                self.control.serve_once(0.5)
        except Exception as error:
            self.errors.append(error)
            raise

    def call(self, op, key="a1", /, **args):
        call = Call(self.path)
        try:
            return call.ask({"schema": 1, "id": key, "op": op, "args": args})
        finally:
            call.close()

    def ticket(self, key):
        """The ticket, once it is no longer queued."""

        def ended():
            found = self.call("ticket", "t", id=key)["result"]
            return found if found["state"] != "queued" else None

        return until(ended)

    def http(self, method, path, body=None, token="a-token-of-enough-letters", **headers):
        port = int(self.control.status()["http"].rpartition(":")[2])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            fields = {"Authorization": f"Bearer {token}", **headers} if token else headers
            connection.request(method, path, json.dumps(body) if isinstance(body, dict) else body, fields)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    def end(self) -> None:
        if self._stop.is_set():
            return
        self._stop.set()
        self.service.release.set()
        self.control.wake()
        self._thread.join(5)
        assert not self._thread.is_alive()
        self.control.stop()
        assert not self.errors


@pytest.fixture
def run(service, directory):
    started = []

    def start(options=None, at=None, **keywords):
        running = Running(service, at or directory, options, **keywords)
        started.append(running)
        return running

    yield start
    for running in started:
        running.end()


@pytest.fixture
def running(run):
    return run()


def until(condition, seconds=5.0):
    """Waits for another thread to have done something."""
    import time

    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return found


@pytest.fixture(name="until")
def until_fixture():
    return until
