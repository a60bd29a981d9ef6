"""WSGI requests, through the real Flask under a real server."""

from __future__ import annotations

import threading
import time
import wsgiref.simple_server
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

flask = pytest.importorskip("flask")
from werkzeug.serving import make_server  # noqa: E402

from inferscope.record import core  # noqa: E402
from inferscope_integrations.wsgi import WsgiMiddleware, arrival_ns  # noqa: E402


class OwnError(Exception):
    """The application's own."""


def application() -> Any:
    app = flask.Flask("scores")

    @app.get("/items/<int:item>")
    def item(item: int) -> dict[str, int]:
        with core.default.stage("work"):
            return {"item": item}

    @app.get("/stream")
    def stream() -> Any:
        def parts() -> Iterator[bytes]:
            for _ in range(3):
                time.sleep(0.03)
                with core.default.stage("part"):
                    yield b"x"

        return flask.Response(parts())

    @app.get("/broken")
    def broken() -> str:
        raise ValueError("private")

    @app.get("/unavailable")
    def unavailable() -> tuple[str, int]:
        return "no", 503

    @app.get("/healthz")
    def healthz() -> str:
        return "well"

    return app


@pytest.fixture
def ask() -> Iterator[Any]:
    """Serves an application on a free port and asks it for paths."""
    servers = []

    def get(app: Any, *paths: str, headers: dict[str, str] | None = None) -> list[httpx.Response]:
        server = make_server("127.0.0.1", 0, app, threaded=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        with httpx.Client(base_url=f"http://127.0.0.1:{server.server_port}") as client:
            return [client.get(path, headers=headers) for path in paths]

    yield get
    for server in servers:
        server.shutdown()
        server.server_close()


def await_requests(seen: Any, count: int) -> list[Any]:
    """The client has its answer a moment before the server closes the body."""
    found: list[Any] = []
    deadline = time.monotonic() + 5
    while len(found) < count and time.monotonic() < deadline:
        found += seen.requests()
        time.sleep(0.01)
    return found


def test_names_come_from_the_rule_and_unknown_paths_share_one(seen, instrument, ask) -> None:
    instrument("flask")
    answers = ask(application(), "/items/7", "/items/8", "/wp-admin", "/robots.txt", "/healthz")
    assert [answer.status_code for answer in answers] == [200, 200, 404, 404, 200]
    assert answers[0].json() == {"item": 7}
    records = await_requests(seen, 4)
    assert sorted(record.key.request for record in records) == ["items/<int:item>", "items/<int:item>", "unmatched", "unmatched"]
    assert all(sum(record.vector) == record.wall_ns for record in records)
    assert sum("work" in seen.columns(record) for record in records) == 2


def test_server_errors_are_errors(seen, instrument, ask) -> None:
    instrument("flask")
    answers = ask(application(), "/broken", "/unavailable", "/items/1")
    assert [answer.status_code for answer in answers] == [500, 503, 200]
    errors = {record.key.request: record.error for record in await_requests(seen, 3)}
    assert errors == {"broken": "500", "unavailable": "503", "items/<int:item>": None}


def test_a_stream_ends_with_its_last_byte_and_its_stages_belong_to_it(seen, instrument, ask) -> None:
    instrument("flask")
    assert ask(application(), "/stream")[0].content == b"xxx"
    (record,) = await_requests(seen, 1)
    assert record.wall_ns > 80e6
    assert "part" in seen.columns(record)


def test_a_stream_tells_its_first_bytes_and_a_complete_body_too(first_bytes, instrument, ask) -> None:
    instrument("flask")
    app = application()

    @app.get("/late")
    def late() -> Any:
        def parts() -> Iterator[bytes]:
            yield b""  # no byte so far
            time.sleep(0.03)
            yield b"a"
            time.sleep(0.05)
            yield b"b"

        return flask.Response(parts())

    @app.get("/empty")
    def empty() -> tuple[str, int]:
        return "", 204

    begun = time.perf_counter_ns()
    answers = ask(app, "/late", "/items/1", "/empty")
    lasted = time.perf_counter_ns() - begun
    assert [answer.content for answer in answers[:1]] == [b"ab"]
    found = first_bytes()
    assert {name: count for name, (count, _) in found.items()} == {"late": 1, "items/<int:item>": 1}
    assert 29e6 < found["late"][1] < lasted - 45e6


def test_complete_bodies_of_any_application_tell_their_first_bytes(first_bytes) -> None:
    bodies: dict[str, Any] = {"list": [b"", b"done"], "tuple": (b"done",), "nothing": [b""], "iterator": iter([b"", b"x"])}
    for name, body in bodies.items():
        served = WsgiMiddleware(lambda environ, start_response, body=body: body, name)({}, lambda *_: None)
        list(served)
        getattr(served, "close", lambda: None)()
    assert {name: count for name, (count, _) in first_bytes().items()} == {"list": 1, "tuple": 1, "iterator": 1}


def test_a_proxy_makes_the_queue_before_the_application_visible(seen, instrument, ask) -> None:
    instrument("flask")
    sent = time.time() - 0.25
    ask(application(), "/items/1", headers={"X-Request-Start": f"t={sent:.6f}"})
    (record,) = await_requests(seen, 1)
    assert 0.25e9 < record.wall_ns < 5e9
    assert seen.columns(record)["queue:backlog"] > 0.24e9


@pytest.mark.parametrize(
    ("text", "age_s"),
    [("t={s:.3f}", 0.5), ("{s:.3f}", 0.5), ("{ms:.0f}", 0.5), ("t={us:.0f}", 0.5), ("{ns:.0f}", 0.5)],
)
def test_every_unit_that_proxies_send_is_understood(text: str, age_s: float) -> None:
    then = time.time() - age_s
    header = text.format(s=then, ms=then * 1e3, us=then * 1e6, ns=then * 1e9)
    found = arrival_ns({"HTTP_X_REQUEST_START": header, "REMOTE_ADDR": "10.1.2.3"})
    assert found is not None
    assert (time.perf_counter_ns() - found) / 1e9 == pytest.approx(age_s, abs=0.1)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"HTTP_X_REQUEST_START": "soon", "REMOTE_ADDR": "127.0.0.1"},
        {"HTTP_X_REQUEST_START": "nan", "REMOTE_ADDR": "127.0.0.1"},
        {"HTTP_X_REQUEST_START": "1e400", "REMOTE_ADDR": "127.0.0.1"},
        {"HTTP_X_REQUEST_START": f"t={time.time() - 3600}", "REMOTE_ADDR": "127.0.0.1"},
        {"HTTP_X_REQUEST_START": f"t={time.time() + 3600}", "REMOTE_ADDR": "127.0.0.1"},
        {"HTTP_X_REQUEST_START": f"t={time.time()}", "REMOTE_ADDR": "8.8.8.8"},
        {"HTTP_X_REQUEST_START": f"t={time.time()}", "REMOTE_ADDR": "who knows"},
    ],
)
def test_a_client_cannot_invent_a_queue(environ: dict[str, str]) -> None:
    assert arrival_ns(environ) is None


def test_any_application_can_be_wrapped_and_complete_bodies_keep_their_type(seen) -> None:
    complete = [b"done"]

    def app(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        start_response("200 OK", [])
        return complete

    statuses: list[str] = []

    def start_response(status: str, headers: list[Any]) -> None:
        statuses.append(status)

    wrapped = WsgiMiddleware(app, "plain")
    assert wrapped({"PATH_INFO": "/"}, start_response) is complete
    assert wrapped({"PATH_INFO": "/metrics"}, start_response) is complete
    assert statuses == ["200 OK", "200 OK"]
    assert [record.key.request for record in seen.requests()] == ["plain"]
    assert core.default.current() is None


def test_exceptions_pass_unchanged_and_leave_no_request_behind(seen) -> None:
    def late(environ: dict[str, Any], start_response: Any) -> Iterator[bytes]:
        yield b"a"
        raise OwnError

    def early(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        raise OwnError

    with pytest.raises(OwnError):
        WsgiMiddleware(early, "early")({}, lambda *_: None)
    body = WsgiMiddleware(late, lambda environ: environ["absent"])({}, lambda *_: None)
    with pytest.raises(OwnError):
        list(body)
    body.close()
    assert {record.key.request: record.error for record in seen.requests()} == {"early": "OwnError", "unmatched": "OwnError"}
    assert core.default.current() is None


def test_the_servers_own_file_wrapper_is_left_to_the_server(seen) -> None:
    wrapper = wsgiref.simple_server.ServerHandler.wsgi_file_wrapper

    def app(environ: dict[str, Any], start_response: Any) -> Any:
        import io

        return wrapper(io.BytesIO(b"file"))

    body = WsgiMiddleware(app, "file")({"wsgi.file_wrapper": wrapper}, lambda *_: None)
    assert type(body) is wrapper
    assert [record.key.request for record in seen.requests()] == ["file"]
