"""Requests are checked field by field; nothing that arrives can hurt."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inferscope.control.desk import TICKET_LIMIT, Desk
from inferscope.control.http import HttpClient
from inferscope.control.protocol import LINE_BYTES, Actor, RequestError, encode, parse, plain
from inferscope.control.socket import UnixClient

ACTOR = Actor("socket", 0, 1)


def message(**fields):
    return json.dumps({"schema": 1, "id": "a1", "op": "status", **fields}).encode()


def test_a_good_request():
    request = parse(message(op="capture", args={"reason": "  why is it slow  ", "requests": 3}))
    assert (request.id, request.op, request.args) == ("a1", "capture", {"reason": "why is it slow", "requests": 3})


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[1, 2]", "object"),
        (b"[" * 9000, "not JSON"),
        (b'{"schema": 1, "schema": 1}', "twice"),
        (b'{"schema": NaN}', "not JSON"),
        (b'{"schema": ' + b"9" * 9000 + b"}", ""),
        (b"x" * (LINE_BYTES + 1), "16384"),
        (message(schema=2), "schema: expected 1 to 1"),
        (message(schema=True), "schema"),
        (message(id=""), "id"),
        (message(id="../../etc"), "id"),
        (message(id="a" * 65), "id"),
        (message(id=7), "id"),
        (message(op="eval"), "op: expected one of status, snapshot"),
        (message(op=["status"]), "op"),
        (message(extra=1), "unknown field"),
        (message(args=[]), "args: expected an object"),
        (message(args={"x": 1}), "args.x: unknown"),
        (message(op="capture"), "args.reason: missing"),
        (message(op="capture", args={"reason": ""}), "printable"),
        (message(op="capture", args={"reason": "a\nb"}), "printable"),
        (message(op="capture", args={"reason": "a", "requests": 65}), "integer from 1 to 64"),
        (message(op="capture", args={"reason": "a", "requests": True}), "integer"),
        (message(op="capture", args={"reason": "a", "requests": 2.5}), "integer"),
        (message(op="enable", args={"part": "everything"}), "recording, capture, export"),
        (message(op="enable", args={"part": ["capture"]}), "recording, capture, export"),
        (message(op="set_slo", args={"name": "score", "p99_ms": "20"}), "a number"),
        (b'{"schema":1,"id":"a","op":"set_slo","args":{"name":"score","p99_ms":1e999}}', "a number"),
        (message(op="set_slo", args={"name": "score", "p99_ms": 10**400}), "a number"),
        (message(op="set_slo", args={"name": "score", "__class__": 1}), "unknown"),
    ],
)
def test_a_wrong_request_is_told_what_is_accepted(line, words):
    with pytest.raises(RequestError) as caught:
        parse(line)
    assert words in caught.value.why
    assert "\n" not in caught.value.why
    assert len(caught.value.why) < 400


def test_a_denial_names_the_request_where_it_could_be_read():
    with pytest.raises(RequestError) as caught:
        parse(message(op="capture", args={}))
    assert (caught.value.id, caught.value.op) == ("a1", "capture")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=30),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)
near_requests = st.fixed_dictionaries(
    {},
    optional={
        "schema": st.just(1) | json_values,
        "id": st.from_regex(r"[a-z0-9]{1,8}", fullmatch=True) | json_values,
        "op": st.sampled_from(["status", "capture", "enable", "disable", "set_slo", "ticket", "snapshot"]) | json_values,
        "args": st.dictionaries(
            st.sampled_from(
                [
                    "reason",
                    "requests",
                    "window_ms",
                    "tier",
                    "shapes",
                    "allow_stall_ms",
                    "expires_unix_s",
                    "part",
                    "name",
                    "p99_ms",
                    "size",
                    "until",
                    "id",
                    "x",
                ]
            ),
            json_values,
            max_size=4,
        )
        | json_values,
        "x": json_values,
    },
)
few = settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@few
@given(
    st.binary(max_size=300)
    | near_requests.map(lambda value: json.dumps(value).encode())
    | json_values.map(lambda value: json.dumps(value).encode())
)
def test_parsing_anything_gives_a_request_or_its_own_error(data):
    with contextlib.suppress(RequestError):
        request = parse(data)
        assert request.op
        json.dumps(dict(request.args), allow_nan=False)


@few
@given(
    st.lists(st.binary(max_size=200) | near_requests.map(lambda value: json.dumps(value).encode() + b"\n"), max_size=12), st.integers(1, 50)
)
def test_a_unix_client_survives_anything(service, pieces, size):
    desk = Desk(service.operations())
    client = UnixClient(desk, ACTOR, None)
    data = b"".join(pieces)
    answers = []
    for begin in range(0, len(data), size):
        client.receive(data[begin : begin + size])
        while (answer := client.answer()) is not None:
            answers.append(json.loads(answer))
        desk.run_one()
    assert len(answers) == data.count(b"\n")
    assert {answer["state"] for answer in answers} <= {"queued", "done", "denied"}
    assert client.pending is (not data.endswith(b"\n") and bool(data))


head_lines = st.sampled_from(
    [b"GET /v1/status HTTP/1.1", b"POST /v1/capture HTTP/1.1", b"POST /v1/enable HTTP/1.0", b"Host: localhost", b"Authorization: Bearer " + b"t" * 20,
     b"Content-Length: 12", b"Content-Length: -1", b"Transfer-Encoding: chunked", b"Idempotency-Key: a b", b": x", b"Origin: http://x"]
) | st.binary(max_size=40)  # fmt: skip


@few
@given(st.lists(head_lines, max_size=8), st.binary(max_size=80), st.integers(1, 60))
def test_an_http_client_survives_anything(service, head, body, size):
    from inferscope.control.desk import Allowance

    client = HttpClient(Desk(service.operations()), b"t" * 20, Allowance(10, 1.0), "127.0.0.1:1")
    data = b"\r\n".join(head) + b"\r\n\r\n" + body
    answer = None
    for begin in range(0, len(data), size):
        client.receive(data[begin : begin + size])
        answer = client.answer()
        if answer is not None:
            break
    if answer is not None:
        head, _, rest = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 ")
        assert f"Content-Length: {len(rest)}".encode() in head
        assert json.loads(rest)["state"] in {"queued", "done", "denied"}
        assert client.closing


@given(json_values)
def test_whatever_is_answered_is_json_on_one_line(value):
    line = encode({"result": value})
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    json.loads(line, parse_constant=lambda name: pytest.fail(name))


def test_plain_values_of_odd_things(tmp_path):
    loop: list = []
    loop.append(loop)
    assert plain({1: (1, {2.5}), "p": tmp_path, "nan": float("nan")}) == {"1": [1, [2.5]], "p": str(tmp_path), "nan": None}
    encode({"loop": loop})


def test_tickets_are_bounded_and_the_oldest_goes_first(service):
    desk = Desk(service.operations(), clock=lambda: float(len(service.calls) * 100))
    for number in range(TICKET_LIMIT + 10):
        desk.submit(parse(message(id=f"t{number}", op="disable", args={"part": "export"})), ACTOR)
        desk.run_one()
    first = desk.submit(parse(message(op="ticket", args={"id": "t0"})), ACTOR)
    assert (first["state"], "too old" in first["why"]) == ("denied", True)
    last = desk.submit(parse(message(op="ticket", args={"id": f"t{TICKET_LIMIT + 9}"})), ACTOR)
    assert last["result"]["state"] == "done"
