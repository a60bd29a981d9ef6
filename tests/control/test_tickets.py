"""Tickets: asked from code, expired, under a clock that jumps; and arguments at their edges."""

from __future__ import annotations

import json
import threading
import time

import pytest

from inferscope.control import Control, Options
from inferscope.control.desk import QUEUE_LIMIT, Allowance, Desk
from inferscope.control.protocol import Actor, RequestError, Wanted, check
from inferscope.errors import CaptureRefusedError, ConfigurationError

ACTOR = Actor("socket", 0, 1)


def request(op="capture", key="a1", **args):
    return check({"schema": 1, "id": key, "op": op, "args": args})


def test_a_capture_from_code_is_done_once_for_an_id(service):
    control = Control(service.operations(), Options(), environ={})
    first = control.capture("inc-1", Wanted("slow", 3))
    assert control.capture("inc-1", Wanted("slow", 3)) == first
    assert service.calls == [("capture", "slow", 3, "code")]
    assert service.events[0]["actor"]["channel"] == "code"
    # a channel that asks under the same id gets the same ticket, and the other way round
    answer = control.desk.submit(request(key="inc-1", reason="slow", requests=3), ACTOR)
    assert (answer["state"], answer["repeat"], answer["result"]) == ("done", True, {"incident": first})
    with pytest.raises(CaptureRefusedError, match="take a new one"):
        control.capture("inc-1", Wanted("another reason"))


def test_a_capture_from_code_that_is_denied_says_why(service):
    control = Control(service.operations(), Options(), environ={})
    service.refusal = "an incident is open"
    with pytest.raises(CaptureRefusedError, match="an incident is open"):
        control.capture("inc-1", Wanted("slow"))
    with pytest.raises(ConfigurationError, match="id"):
        control.capture("../etc", Wanted("slow"))
    with pytest.raises(ConfigurationError, match="printable"):
        control.capture("inc-2", Wanted("a\nb"))


def test_two_threads_that_ask_under_one_id_get_one_capture(service):
    control = Control(service.operations(), Options(), environ={})
    service.release.clear()
    found = []
    threads = [threading.Thread(target=lambda: found.append(control.capture("inc-1", Wanted("slow")))) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    service.release.set()
    for thread in threads:
        thread.join()
    assert found == ["incident-1"] * 4
    assert len(service.calls) == 1


def test_a_request_that_waited_too_long_is_void(service):
    desk = Desk(service.operations())
    desk.submit(request(reason="slow", expires_unix_s=time.time() - 1), ACTOR)
    desk.submit(request(key="a2", reason="slow", expires_unix_s=time.time() + 60), ACTOR)
    while desk.run_one():
        pass
    first = desk.submit(request("ticket", "t", id="a1"), ACTOR)["result"]
    assert (first["state"], first["why"]) == ("denied", "it has expired")
    assert len(service.calls) == 1
    assert [event["state"] for event in service.events] == ["denied", "done"]


def test_expiry_is_no_part_of_what_is_asked(service):
    desk = Desk(service.operations())
    desk.submit(request(reason="slow", expires_unix_s=time.time() + 5), ACTOR)
    assert desk.submit(request(reason="slow", expires_unix_s=time.time() + 50), ACTOR)["repeat"]


@pytest.mark.parametrize("jump", [-1e9, -3600.0, -0.5, 1e9])
def test_a_clock_that_jumps_neither_opens_nor_closes_the_gate(service, jump):
    moment = [1000.0]
    allowance = Allowance(5, 1.0, lambda: moment[0])
    assert [allowance.take() for _ in range(6)] == [True] * 5 + [False]
    moment[0] += jump
    assert [allowance.take() for _ in range(6)].count(True) <= 5
    moment[0] += 3.0
    assert allowance.take(), "time goes on from wherever the clock is"


def test_a_wall_clock_that_jumps_changes_no_ticket(service, monkeypatch):
    desk = Desk(service.operations())
    for number, offset in enumerate((0, -(10**9), 10**9)):
        monkeypatch.setattr(time, "time_ns", lambda offset=offset: (1_800_000_000 + offset) * 10**9)
        desk.submit(request("disable", f"d{number}", part="export"), ACTOR)
        assert desk.run_one()
    assert [event["at_unix_ns"] for event in service.events] == [(1_800_000_000 + offset) * 10**9 for offset in (0, -(10**9), 10**9)]
    assert desk.submit(request("ticket", "t", id="d1"), ACTOR)["result"]["state"] == "done"


def test_denials_are_counted_and_a_full_queue_forgets_nothing(service):
    desk = Desk(service.operations(), clock=lambda: float(len(service.calls)))
    answers = [desk.submit(request("disable", f"n{number}", part="export"), ACTOR) for number in range(QUEUE_LIMIT + 5)]
    assert [answer["state"] for answer in answers] == ["queued"] * QUEUE_LIMIT + ["denied"] * 5
    assert desk.counts["flooded"] == 5
    while desk.run_one():
        pass
    assert desk.submit(request("disable", "n0", part="export"), ACTOR)["state"] == "done"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"window_ms": 0}, "milliseconds from 1"),
        ({"window_ms": 1e9}, "milliseconds from 1"),
        ({"window_ms": True}, "milliseconds"),
        ({"window_ms": "50ms"}, "milliseconds"),
        ({"tier": 4}, "an integer from 1 to 3"),
        ({"tier": 2.0}, "an integer from 1 to 3"),
        ({"shapes": 1}, "true or false"),
        ({"allow_stall_ms": -1}, "milliseconds"),
        ({"expires_unix_s": "soon"}, "a number"),
        ({"expires_unix_s": None}, "a number"),
    ],
)
def test_arguments_of_a_capture_that_cannot_be_used(args, words):
    with pytest.raises(RequestError, match=words):
        request(reason="slow", **args)


def test_promises_are_taken_back_with_null():
    assert dict(request("set_slo", name="score", max_error_rate=None, size=None, jitter_ms=3).args) == {
        "name": "score", "max_error_rate": None, "size": None, "jitter_ms": 3,
    }  # fmt: skip
    with pytest.raises(RequestError, match="a number"):
        request("set_slo", name="score", p99_ms=None)


CHANNELS = """
import json, os, signal, sys, time, types, urllib.request
import inferscope as scope
sys.modules.setdefault("torch", types.ModuleType("torch"))
scope.configure(service="asked", slo=scope.SLO("score", p99_ms=500), tick_s=0.1, export=False, control_http=0, control_signal="SIGUSR2",
                control_token_file="token")
with scope.request("score"):
    pass
control = scope.status()["control"]
ask = lambda token: urllib.request.urlopen(urllib.request.Request(control["http"] + "/v1/status", headers={"Authorization": "Bearer " + token}))
body = json.load(ask("a-token-of-enough-letters"))
try:
    refused = ask("a-wrong-token-of-letters").status
except urllib.error.HTTPError as error:
    refused = error.code
os.kill(os.getpid(), signal.SIGUSR2)
deadline = time.monotonic() + 10
while not scope.status()["control"]["requests"].get("denied") and time.monotonic() < deadline:
    time.sleep(0.02)
print(json.dumps([body["result"]["service"], refused, control["signal"], scope.status()["control"]["requests"]]))
"""


def test_channels_of_keywords_open(tmp_path):
    import os
    import subprocess
    import sys

    (tmp_path / "token").write_text("a-token-of-enough-letters\n")
    (tmp_path / "token").chmod(0o600)
    environ = {**os.environ, "INFERSCOPE_STRICT": "0", "INFERSCOPE_STATE_DIR": str(tmp_path / "state")}
    script = [sys.executable, "-c", CHANNELS]
    done = subprocess.run(script, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False, timeout=40)
    assert done.returncode == 0, done.stderr
    service, refused, signal_, requests = json.loads(done.stdout)
    assert (service, refused, signal_) == ("asked", 401, "SIGUSR2")
    assert requests["denied"] == 1
    assert requests["unauthorised"] == 1
