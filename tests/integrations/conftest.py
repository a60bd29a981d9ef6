"""What the process's own recorder saw, read back as values."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import threading
from array import array
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from inferscope.aggregate.window import decode
from inferscope.integration import Registry, forget_copies
from inferscope.record import core
from inferscope.types import ClassKey, Column, RequestRecord


class Seen:
    """Retained requests of the default recorder since the test began."""

    def requests(self) -> list[RequestRecord]:
        keys = {entry[0]: ClassKey(*entry[1:4]) for entry in core.default.classes()}
        return [decode(retained, keys[retained[1]]) for retained in core.default.drain()]

    def columns(self, record: RequestRecord) -> dict[str, int]:
        """Nanoseconds by column label, without the empty ones."""
        labels = [Column(*column).label for column in core.default.columns()]
        return {labels[index]: value for index, value in enumerate(record.vector) if value}

    def series(self, kind: str) -> dict[str, int]:
        """Counts by label of one kind of series."""
        found = {}
        for index, kind_, labels, _, _, size in core.default.series():
            if kind_ == kind:
                found[labels[0]] = core.default.read_counts(index, array("q", bytes(8 * size)))[0]
        return found


@pytest.fixture
def seen() -> Seen:
    core.default.drain()
    core.default.begin_epoch()
    return Seen()


@pytest.fixture
def first_bytes() -> Callable[[], dict[str, tuple[int, int]]]:
    """Gives how many streams of each name told their first byte since the test began, and the time until then, ns."""

    def read() -> dict[str, tuple[int, int]]:
        rows = [(index, labels[0], size) for index, kind, labels, _, _, size in core.default.series() if kind == "first_byte"]
        return {name: core.default.read_counts(index, array("q", bytes(8 * size)))[:2] for index, name, size in rows}

    before = read()
    return lambda: {
        name: (count - before.get(name, (0, 0))[0], total - before.get(name, (0, 0))[1])
        for name, (count, total) in read().items()
        if count > before.get(name, (0, 0))[0]
    }


@pytest.fixture
def instrument() -> Iterator[Callable[..., dict[str, str]]]:
    """Switches integrations on for one test and proves that switching them off leaves nothing behind."""
    registry = Registry()
    yield lambda *names: registry.instrument(names)
    states = registry.uninstrument()
    assert all(state == "off" for state in states.values()), states
    forget_copies()


def _load_servers():
    """`benchmarks/_servers.py`, by path: benchmarks are scripts, not a package."""
    name = "inferscope_benchmark_servers"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[2] / "benchmarks" / "_servers.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


servers = _load_servers()


@pytest.fixture(scope="session")
def counterparts():
    """The module `benchmarks/_servers.py`."""
    return servers


class Collector:
    """Takes OTLP/JSON over HTTP, as Triton sends it; `spans()` are the resource spans' spans, ids in hex."""

    def __init__(self) -> None:
        self.bodies: list[dict] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.bodies.append(json.loads(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def spans(self) -> list[dict]:
        return [
            span
            for body in list(self.bodies)
            for resource in body.get("resourceSpans", [])
            for scope in resource.get("scopeSpans", [])
            for span in scope.get("spans", [])
        ]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)


@pytest.fixture(scope="session")
def triton(tmp_path_factory):
    """A real Triton server with torch models behind it: `risk` (2 ms) and `busy` (20 ms, one instance); `traces` takes its spans."""
    folder = tmp_path_factory.mktemp("models")
    servers.repository(folder)
    servers.repository(folder, name="busy", delay_s=0.02, queue_us=100)
    collector = Collector()
    try:
        with servers.serving(folder, fetch=os.environ.get("SERVERS_FETCH") == "1", traces=collector.url) as server:
            server.traces = collector
            yield server
    except servers.ServerAbsentError as error:
        pytest.skip(str(error))
    finally:
        collector.close()


@pytest.fixture(scope="session")
def framework_of():
    """The interpreter that has a framework by its name; skips where it cannot be had."""

    def find(name: str) -> Path:
        try:
            return servers.framework(name, fetch=os.environ.get("SERVERS_FETCH") == "1")
        except servers.ServerAbsentError as error:
            pytest.skip(str(error))

    return find
