"""HTTP on loopback: a token, a limit on guesses, no web pages."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct

import pytest

from inferscope.control import Control, Options
from inferscope.control import http as room
from inferscope.errors import InferscopeError

TOKEN = "a-token-of-enough-letters"
ENVIRON = {"INFERSCOPE_CONTROL_TOKEN": TOKEN}
WANTED = Options(http_port=0)


@pytest.fixture
def served(run):
    return run(WANTED, environ=ENVIRON)


def test_off_unless_asked_for(running):
    assert running.control.status()["http"] == "off"


def test_reads_and_changes(served, service, until):
    assert served.http("GET", "/v1/status")[1]["result"] == {"service": "score", "calls": 0}
    status, ticket = served.http("POST", "/v1/capture", {"reason": "slow", "requests": 2}, **{"Idempotency-Key": "k1"})
    assert (status, ticket["id"], ticket["state"]) == (202, "k1", "queued")
    found = until(lambda: (answer := served.http("GET", "/v1/tickets/k1")[1]["result"])["state"] == "done" and answer)
    assert found["result"] == {"incident": "incident-1"}
    assert served.http("POST", "/v1/capture", {"reason": "slow", "requests": 2}, **{"Idempotency-Key": "k1"})[0] == 200
    assert service.calls == [("capture", "slow", 2, "http")]
    assert service.events[0]["actor"]["peer"].startswith("127.0.0.1:")


def test_a_change_without_a_key_gets_one(served):
    first = served.http("POST", "/v1/disable", {"part": "export"})[1]["id"]
    assert first.startswith("http-")
    assert served.http("POST", "/v1/disable", {"part": "export"})[1]["id"] != first


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/", None, 404),
        ("GET", "/v1/secrets", None, 404),
        ("GET", "/v1/status/x", None, 404),
        ("GET", "/v1/tickets/unknown", None, 404),
        ("POST", "/v1/status", {}, 405),
        ("GET", "/v1/capture", None, 405),
        ("DELETE", "/v1/status", "", 405),
        ("POST", "/v1/capture", {}, 400),
        ("POST", "/v1/capture", "[1]", 400),
        ("POST", "/v1/capture", "{", 400),
        ("POST", "/v1/capture", '{"reason": "a"}, "op": "disable", "x": {}', 400),
        ("POST", "/v1/capture", "x" * 20_000, 413),
    ],
)
def test_what_is_wrong_is_said(served, service, method, path, body, status):
    found, answer = served.http(method, path, body)
    assert (found, answer["state"]) == (status, "denied")
    assert answer["why"]
    assert service.calls == []


@pytest.mark.parametrize("token", [None, "", "wrong", TOKEN[:-1], TOKEN + "x"])
def test_no_token_no_answer(served, service, token):
    status, answer = served.http("POST", "/v1/disable", {"part": "capture"}, token=token)
    assert (status, answer["result"]) == (401, None)
    assert service.calls == []


def test_guesses_are_limited(run):
    moment = [0.0]
    served = run(WANTED, environ=ENVIRON, clock=lambda: moment[0])
    codes = [served.http("GET", "/v1/status", token="guess")[0] for _ in range(14)]
    assert codes == [401] * 10 + [429] * 4
    assert served.http("GET", "/v1/status")[0] == 429
    moment[0] += 1.5
    assert served.http("GET", "/v1/status")[0] == 200
    assert served.call("status")["state"] == "done"


def test_pages_in_a_browser_are_refused(served):
    assert served.http("GET", "/v1/status", Origin="http://evil.example")[0] == 403
    assert served.http("GET", "/v1/status", Host="evil.example")[0] == 403
    assert served.http("GET", "/v1/status", Host="localhost:80")[0] == 200


def test_a_request_in_pieces_and_one_without_end(served):
    port = int(served.control.status()["http"].rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
        text = f"GET /v1/status HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()
        for begin in range(0, len(text), 7):
            sock.sendall(text[begin : begin + 7])
        assert sock.recv(64).startswith(b"HTTP/1.1 200 OK")
    with socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
        sock.sendall(b"GET /v1/status HTTP/1.1\r\n" + b"A: b\r\n" * 2000)
        assert sock.recv(64).startswith(b"HTTP/1.1 431")


def test_a_crowd_of_broken_callers_hurts_nobody(served, service):
    chance = random.Random(11)
    port = int(served.control.status()["http"].rpartition(":")[2])
    head = f"POST /v1/disable HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: ".encode()
    for number in range(200):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
            kind = number % 6
            if kind == 0:
                sock.sendall(chance.randbytes(chance.randrange(1, 3000)))
            elif kind == 1:
                sock.sendall(head[: chance.randrange(1, len(head))])
            elif kind == 2:
                sock.sendall(head + b"100\r\n\r\n" + b'{"part"')  # and no more
            elif kind == 3:
                sock.sendall(head + b"5\r\n\r\n" + b"[" * 5)
            elif kind == 4:
                sock.sendall(b"A" * 20_000)
            else:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if number % 50 == 0:
            assert served.call("status")["state"] == "done"
    assert served.http("GET", "/v1/status")[0] == 200
    assert service.calls == []


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "example.org", "::"])
def test_loopback_only(host):
    with pytest.raises(InferscopeError, match="loopback"):
        room.listen(host, 0)


def test_a_taken_port_costs_a_line(service, directory, caplog):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        control = Control(service.operations(), Options(http_port=taken.getsockname()[1]), environ=ENVIRON)
        control.open(directory)
        assert "cannot be used" in control.status()["http"]
        assert control.status()["socket"] == str(directory / "control.sock")
        assert sum("control by http is off" in record.getMessage() for record in caplog.records) == 1
        control.stop()


def test_workers_of_a_pod_have_ports_of_their_own(service, directory):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    control = Control(service.operations(), Options(http_port=port - 3), environ=ENVIRON)
    control.open(directory, slot=3)
    assert control.status()["http"] == f"http://127.0.0.1:{port}"
    control.stop()


def test_a_token_is_made_once_for_the_owner_alone(directory):
    first = room.read_token({}, directory)
    path = directory / "control.token"
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(first) >= 32
    assert room.read_token({}, directory) == first


def test_a_token_file_that_others_can_read_is_refused(directory):
    path = directory / "token"
    path.write_text(TOKEN)
    path.chmod(0o644)
    with pytest.raises(InferscopeError, match="chmod 600"):
        room.read_token({}, None, path)
    path.chmod(0o600)
    assert room.read_token({}, None, path) == TOKEN.encode()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of others")
def test_anothers_token_file_is_refused(directory):
    path = directory / "control.token"
    path.write_text(TOKEN)
    path.chmod(0o600)
    os.chown(path, 4321, 4321)
    with pytest.raises(InferscopeError, match="belongs to user 4321"):
        room.read_token({}, directory)


@pytest.mark.parametrize("token", ["short", "with spaces in between it", "täken-with-ümlauts-in-it"])
def test_a_weak_token_is_refused(token):
    with pytest.raises(InferscopeError, match="at least 16"):
        room.read_token({"INFERSCOPE_CONTROL_TOKEN": token}, None)


def test_a_link_in_place_of_our_token_is_not_followed(directory):
    (directory / "elsewhere").write_text(TOKEN)
    (directory / "control.token").symlink_to(directory / "elsewhere")
    with pytest.raises(InferscopeError, match="cannot be read"):
        room.read_token({}, directory)


def test_nowhere_to_keep_a_token_is_said():
    with pytest.raises(InferscopeError, match="INFERSCOPE_CONTROL_TOKEN"):
        room.read_token({}, None)
