"""The verbs that ask one worker: snapshot, enable, disable, slo, and what capture can ask for."""

from __future__ import annotations

import json

import pytest

from inferscope import cli


@pytest.fixture
def ask(capsys, run, directory):
    """Runs a verb against a worker of `scoring`: exit status, standard output, standard error."""
    place = directory / "scoring" / "0"
    place.mkdir(parents=True, mode=0o700)
    run(at=place)

    def call(verb, *words):
        try:
            status = cli.main([verb, "--state-dir", str(directory), *map(str, words)])
        except SystemExit as end:
            status = end.code
        said = capsys.readouterr()
        return status, said.out, said.err

    return call


@pytest.mark.parametrize("verb", ["enable", "disable"])
def test_parts_are_switched(ask, service, verb):
    assert ask(verb, "export")[:2] == (0, f"scoring/0: export is {'on' if verb == 'enable' else 'off'}\n")
    assert service.calls == [(verb, "export")]
    assert service.events[0]["actor"]["channel"] == "socket"
    assert ask(verb, "everything")[0] == 64


def test_an_objective_is_set(ask, service):
    status, out, _ = ask("slo", "set", "score", "p99_ms=25", "min_requests=50", "max_error_rate=none", "size=0-512", "--json")
    assert (status, json.loads(out)["state"]) == (0, "done")
    assert service.calls == [("set_slo", "score", {"p99_ms": 25.0, "min_requests": 50, "max_error_rate": None, "size": "0-512"})]


@pytest.mark.parametrize("words", [("set", "score", "p98_ms=3"), ("set", "score", "p99_ms=soon"), ("drop", "score")])
def test_an_objective_set_wrongly(ask, service, words):
    status, _, err = ask("slo", *words)
    assert (status, err.count("\n")) == (64, 1)
    assert service.calls == []


def test_an_objective_without_a_change_is_said(ask):
    status, _, err = ask("slo", "set", "score")
    assert status == 1
    assert "p99_ms=25" in err


def test_objectives_are_shown(ask, service, monkeypatch):
    told = {"objectives": {"score": {"phase": "armed", "promise": "99 % of score within 20 ms", "requests": 500, "exceeding": 3}}}
    monkeypatch.setattr(type(service), "status", lambda self: told, raising=False)
    out = ask("slo", "show")[1]
    assert out.startswith("scoring/0")


def test_a_snapshot_is_a_table_or_data(ask):
    status, out, _ = ask("snapshot", "--json")
    assert (status, json.loads(out)["snapshot"]["requests"]) == (0, {"score": {"count": 3}})
    assert "P99 ms" in ask("snapshot")[1]


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ((), {"tier": 1, "window_ms": None, "requests": 8}),
        (("--window", "50ms"), {"tier": 2, "window_ms": 50.0}),
        (("--window", "0.1s", "--tier", "3", "--allow-stall", "200ms"), {"tier": 3, "window_ms": 100.0, "allow_stall_ms": 200.0}),
        (("--shapes", "--allow-stall", "20"), {"tier": 3, "shapes": True, "stacks": False, "allow_stall_ms": 20.0}),
    ],
)
def test_what_a_capture_can_ask_for(ask, service, words, wanted):
    assert ask("capture", *words)[0] == 0
    assert {key: getattr(service.wanted, key) for key in wanted} == wanted


@pytest.mark.parametrize("words", [("--window", "soon"), ("--tier", "4"), ("--allow-stall", "x")])
def test_a_capture_asked_for_wrongly(ask, service, words):
    assert ask("capture", *words)[0] == 64
    assert service.calls == []


def test_one_id_is_one_capture(ask, service):
    first = json.loads(ask("capture", "--id", "inc-42", "--json")[1])
    again = json.loads(ask("capture", "--id", "inc-42", "--json")[1])
    assert first["incident"] == again["incident"]
    assert len(service.calls) == 1
    status, out, _ = ask("capture", "--id", "inc-42", "--reason", "another")
    assert status == 1
    assert "take a new one" in out
