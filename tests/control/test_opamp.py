"""Captures by remote configuration, against a small OpAMP server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from inferscope.control import Control, Options
from inferscope.control.opamp import INTERVAL_S, OpampAgent
from inferscope.errors import InferscopeError

pb = pytest.importorskip("opentelemetry._opamp.proto.opamp_pb2")


class Server:
    """Answers each poll with the configuration in force and keeps what agents said."""

    def __init__(self) -> None:
        self.heard = []
        self.config = None
        self.hash = b""
        self.flags = 0
        self.raw = None
        self.status = 200
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                message = pb.AgentToServer()
                message.ParseFromString(self.rfile.read(int(self.headers["Content-Length"])))
                outer.heard.append(message)
                body = outer.answer(message)
                self.send_response(outer.status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        self.http = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1/opamp"
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def answer(self, message):
        answer = pb.ServerToAgent(instance_uid=message.instance_uid, flags=self.flags)
        if self.config is not None or self.raw is not None:
            file = answer.remote_config.config.config_map["inferscope.json"]
            file.body = self.raw if self.raw is not None else json.dumps(self.config).encode()
            file.content_type = "application/json"
            answer.remote_config.config_hash = self.hash
        return answer.SerializeToString()

    def wish(self, hash_=b"h1", **capture):
        self.hash = hash_
        self.config = {"inferscope": {"capture": {"expires_unix_s": time.time() + 60, **capture}}}

    def statuses(self):
        said = [message.remote_config_status for message in self.heard if message.HasField("remote_config_status")]
        return [(bytes(each.last_remote_config_hash), each.status, each.error_message) for each in said]


@pytest.fixture
def server():
    server = Server()
    yield server
    server.http.shutdown()
    server.thread.join()
    server.http.server_close()


class Rig:
    """An agent over a control room, both driven by the test."""

    def __init__(self, service, server, instance="instance-1", fleet_size=1) -> None:
        self.now = 100.0
        self.control = Control(service.operations(), Options(), environ={})
        self.agent = OpampAgent(server.url, "scoring", instance, self.control.ask, fleet_size=fleet_size, clock=lambda: self.now)

    def go(self, polls):
        for _ in range(polls):
            self.agent.run_once()
            self.control.desk.run_one()
            self.now += INTERVAL_S * 1.3


@pytest.fixture
def rig(service, server):
    rig = Rig(service, server)
    yield rig
    rig.agent._client._transport.session.close()


def test_it_introduces_itself_and_beats(rig, server):
    rig.go(3)
    assert rig.agent.state == "connected"
    first = {pair.key: pair.value.string_value for pair in server.heard[0].agent_description.identifying_attributes}
    assert first == {"service.name": "scoring", "service.instance.id": "instance-1"}
    assert [message.HasField("agent_description") for message in server.heard] == [True, False, False]
    assert [message.sequence_num for message in server.heard] == [0, 1, 2]


def test_a_wish_is_one_capture_however_often_it_is_delivered(rig, server, service):
    server.wish(id="inc-42", reason="the fleet is slow", requests=5)
    rig.go(6)
    assert service.calls == [("capture", "the fleet is slow", 5, "opamp")]
    assert service.events[0]["actor"]["peer"] == server.url
    assert [status for _, status, _ in server.statuses()] == [pb.RemoteConfigStatuses_APPLIED]  # told once, as it changed once


def test_a_capture_under_way_is_told(rig, server, service):
    server.wish(id="inc-42", reason="slow")
    for _ in range(2):
        rig.agent.run_once()  # nobody does what is queued
    assert [status for _, status, _ in server.statuses()] == [pb.RemoteConfigStatuses_APPLYING]
    rig.go(2)
    assert server.statuses()[-1][1] == pb.RemoteConfigStatuses_APPLIED


def test_the_same_id_in_another_configuration_is_the_same_capture(rig, server, service):
    server.wish(b"h1", id="inc-42", reason="slow")
    rig.go(4)
    server.wish(b"h2", id="inc-42", reason="slow")
    rig.go(4)
    assert len(service.calls) == 1
    assert server.statuses()[-1][:2] == (b"h2", pb.RemoteConfigStatuses_APPLIED)
    server.wish(b"h3", id="inc-43", reason="slow again")
    rig.go(4)
    assert len(service.calls) == 2


def test_a_denied_capture_is_reported_with_its_reason(rig, server, service):
    service.refusal = "an incident is open"
    server.wish(id="inc-42", reason="slow")
    rig.go(4)
    assert server.statuses()[-1] == (b"h1", pb.RemoteConfigStatuses_FAILED, "an incident is open")


@pytest.mark.parametrize(
    ("capture", "words"),
    [
        ({"id": "a", "reason": "slow", "expires_unix_s": 1}, "expired"),
        ({"id": "a", "reason": "slow", "expires_unix_s": "soon"}, "expires_unix_s"),
        ({"id": "a/b", "reason": "slow"}, "id:"),
        ({"id": "a"}, "args.reason"),
        ({"id": "a", "reason": "slow", "requests": 1000}, "integer from 1 to 64"),
        ({"id": "a", "reason": "slow", "command": "rm"}, "unknown"),
    ],
)
def test_a_wrong_wish_is_refused_with_the_reason(rig, server, service, capture, words):
    server.wish(**capture)
    rig.go(3)
    (hash_, status, why) = server.statuses()[-1]
    assert (hash_, status) == (b"h1", pb.RemoteConfigStatuses_FAILED)
    assert words in why
    assert service.calls == []


@pytest.mark.parametrize("body", [b"receivers:\n  otlp: {}\n", b"{}", b'{"inferscope": 1}', b"\xff" * 50, b"[" * 5000])
def test_configuration_of_others_is_none_of_our_business(rig, server, service, body):
    server.raw, server.hash = body, b"other"
    rig.go(3)
    assert service.calls == []
    assert server.statuses()[-1][1] == pb.RemoteConfigStatuses_APPLIED


def test_a_server_that_fails_is_left_in_peace_for_longer_and_longer(rig, server, service):
    server.status = 503
    pauses = []
    for _ in range(6):
        pauses.append(rig.agent.run_once())
        rig.now += pauses[-1] + 0.01
    assert "does not answer" in rig.agent.state
    assert pauses[-1] > 4 * pauses[0]
    assert max(pauses) <= 360
    server.status = 200
    server.wish(id="inc-42", reason="slow")
    rig.go(5)
    assert rig.agent.state == "connected"
    assert len(service.calls) == 1


def test_nobody_there_costs_nothing_but_a_word(service):
    agent = OpampAgent("http://127.0.0.1:9/v1/opamp", "scoring", "i", lambda request, actor: {})
    begun = time.monotonic()
    assert agent.run_once() > 1.0
    assert time.monotonic() - begun < 3.0
    assert "does not answer" in agent.state
    agent._client._transport.session.close()


def test_full_state_again_when_the_server_forgot_us(rig, server):
    rig.go(2)
    server.flags = pb.ServerToAgentFlags_ReportFullState
    rig.go(1)
    server.flags = 0
    rig.go(1)
    assert server.heard[-1].HasField("agent_description")


def test_it_says_goodbye(rig, server):
    rig.go(1)
    rig.agent.close()
    assert server.heard[-1].HasField("agent_disconnect")


@pytest.mark.parametrize("url", ["", "localhost:4320", "file:///etc/passwd"])
def test_a_wrong_address_is_said(url):
    with pytest.raises(InferscopeError, match="http://"):
        OpampAgent(url, "scoring", "i", lambda request, actor: {})


def test_the_room_makes_the_agent_where_a_server_is_named(service, server, caplog):
    def made(options):
        control = Control(service.operations(), options, environ={})
        return control.opamp("scoring", "i"), control.status().get("opamp")

    assert made(Options()) == (None, None)
    assert made(Options(socket=False, opamp=server.url)) == (None, None)
    agent, note = made(Options(opamp=server.url))
    assert note == server.url
    agent._client._transport.session.close()
    none, note = made(Options(opamp="localhost:4320"))
    assert none is None
    assert "http://" in note
    assert sum("control by opamp is off" in record.getMessage() for record in caplog.records) == 1


def test_of_a_fleet_a_few_capture_and_not_at_once(service, server):
    delays, idle = [], 0
    for number in range(400):
        agent = OpampAgent(server.url, "scoring", f"instance-{number}", lambda request, actor: {}, fleet_size=400)
        agent._replicas = 4.0
        delay = agent._draw("inc-42")
        assert delay == agent._draw("inc-42"), "a repeated delivery draws the same"
        agent._client._transport.session.close()
        if delay is None:
            idle += 1
        else:
            delays.append(delay)
    assert 1 <= len(delays) <= 12
    assert max(delays) - min(delays) > 0.5 or len(delays) == 1
    assert idle + len(delays) == 400


def test_a_replica_that_was_not_drawn_says_so_and_one_that_was_waits_its_turn(service, server):
    drawn = {}
    server.wish(id="inc-42", reason="slow", replicas=100)
    for number in range(20):
        rig = Rig(service, server, f"i{number}", fleet_size=200)
        before = len(service.calls)
        rig.go(6)
        rig.agent._client._transport.session.close()
        drawn[number] = len(service.calls) - before
        assert server.statuses()[-1][:2] == (b"h1", pb.RemoteConfigStatuses_APPLIED)
        assert (server.statuses()[-1][2] == "other replicas were drawn") == (not drawn[number])
    assert set(drawn.values()) == {0, 1}


@pytest.mark.parametrize("replicas", [0, -1, "all", True])
def test_a_wrong_number_of_replicas(rig, server, service, replicas):
    server.wish(id="a", reason="slow", replicas=replicas)
    rig.go(3)
    assert "replicas" in server.statuses()[-1][2]
    assert service.calls == []


def test_a_wish_may_ask_for_a_window(rig, server, service):
    server.wish(id="a", reason="slow", tier=2, window_ms=50)
    rig.go(3)
    assert (service.wanted.tier, service.wanted.window_ms) == (2, 50.0)


SERVICE = """
import json, sys, threading, time
import inferscope as scope
scope.configure(service="asked", slo=scope.SLO("score", p99_ms=500), tick_s=0.1, export=False, {keywords})
with scope.request("score"):
    pass
deadline = time.monotonic() + 20
while "connected" not in scope.status()["control"].get("opamp", "") and time.monotonic() < deadline:
    time.sleep(0.05)
time.sleep(0.5)
print(json.dumps([scope.status()["control"]["opamp"], "opamp" in str(sorted(scope.status()["threads"])), scope.status()["control"]["requests"]]))
scope.shutdown()
"""


@pytest.mark.parametrize("source", ["file"])  # where options come from is shown elsewhere
def test_a_service_polls_the_server_that_it_was_told_of(server, tmp_path, source):
    server.wish(id="inc-42", reason="the fleet is slow")
    keywords = f'control_opamp="{server.url}"' if source == "keyword" else ""
    environ = {**os.environ, "INFERSCOPE_STRICT": "0", "INFERSCOPE_STATE_DIR": str(tmp_path / "state")}
    if source == "environment":
        environ["INFERSCOPE_CONTROL_OPAMP"] = server.url
    if source == "file":
        (tmp_path / "inferscope.toml").write_text(f'control_opamp = "{server.url}"')
    script = [sys.executable, "-c", SERVICE.replace("{keywords}", keywords)]
    done = subprocess.run(script, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False, timeout=40)
    assert done.returncode == 0, done.stderr
    note, thread, requests = json.loads(done.stdout)
    assert (note, thread) == (f"{server.url}: connected", True)
    assert requests["denied"] == 1, "this service has no torch"
    assert any(status == pb.RemoteConfigStatuses_FAILED and "torch" in why for _, status, why in server.statuses())
    assert server.heard[-1].HasField("agent_disconnect")
