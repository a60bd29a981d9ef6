"""The verbs that ask running services, and those that read and carry what they left."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from inferscope import cli
from inferscope.capture.bundle import Bundle, verify
from inferscope.types import Breach

VERBS = ("capture", "inspect", "ship", "status")


@pytest.fixture(autouse=True)
def verbs(monkeypatch):
    for verb in VERBS:
        monkeypatch.setitem(cli.VERBS, verb, cli.VERBS.get(verb, verb))


@pytest.fixture
def ask(capsys):
    """Runs a verb: exit status, standard output, standard error."""

    def call(*words):
        try:
            status = cli.main([str(word) for word in words])
        except SystemExit as end:
            status = end.code
        said = capsys.readouterr()
        return status, said.out, said.err

    return call


def one_line(text):
    return text.count("\n") == 1 and text.strip() and "Traceback" not in text


@pytest.fixture
def worker(run, directory):
    """A worker of `scoring` in slot 0 under a state directory."""
    place = directory / "scoring" / "0"
    place.mkdir(parents=True, mode=0o700)
    return run(at=place)


# Asking


def test_capture_tells_the_incident(ask, worker, service, directory):
    status, out, _ = ask("capture", "--state-dir", directory, "--reason", "slow since noon", "--requests", 3, "--json")
    value = json.loads(out)
    assert status == 0
    assert (value["service"], value["slot"], value["pid"], value["incident"]) == ("scoring", 0, os.getpid(), "incident-1")
    assert value["path"] == str(directory / "scoring/0/incidents/incident-1")
    assert service.calls == [("capture", "slow since noon", 3, "socket")]


def test_capture_that_is_denied_says_why(ask, worker, service, directory):
    service.refusal = "an incident is open"
    status, out, _ = ask("capture", "--state-dir", directory, "--pid", os.getpid())
    assert (status, out) == (1, "scoring/0: denied: an incident is open\n")


def test_capture_does_not_wait_for_ever(ask, worker, service, directory):
    service.release.clear()
    status, _, err = ask("capture", "--state-dir", directory, "--timeout", 1)
    assert status == 1
    assert one_line(err)


@pytest.mark.parametrize(
    "words",
    [
        ("--requests", "0"),
        ("--requests", "many"),
        ("--slot", "-1"),
        ("--pid", "x"),
        ("--reason", ""),
        ("--reason", "a\nb"),
        ("--unknown",),
        ("x",),
    ],
)
def test_capture_used_wrongly(ask, directory, words):
    status, out, err = ask("capture", "--state-dir", directory, *words)
    assert (status, out) == (64, "")
    assert one_line(err)


@pytest.mark.parametrize("words", [(), ("--service", "other"), ("--slot", "5"), ("--pid", "1")])
def test_nobody_answers(ask, directory, words, worker):
    if not words:
        worker.end()
    status, out, err = ask("capture", "--state-dir", directory, *words)
    assert (status, out) == (1, "")
    assert one_line(err)
    assert "no worker" in err


def test_several_services_must_be_told_apart(ask, run, worker, directory):
    other = directory / "ranking" / "0"
    other.mkdir(parents=True, mode=0o700)
    run(at=other)
    status, _, err = ask("capture", "--state-dir", directory)
    assert status == 1
    assert "ranking, scoring" in err
    assert ask("capture", "--state-dir", directory, "--service", "ranking")[0] == 0


def test_status_of_all_workers(ask, worker, service, directory):
    dead = directory / "scoring" / "1"
    dead.mkdir(mode=0o700)
    import socket

    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(dead / "control.sock"))
    operations = service.operations
    status, out, _ = ask("status", "--state-dir", directory, "--json")
    rows = json.loads(out)["workers"]
    assert status == 0
    assert [(row["slot"], row["pid"], row["status"]) for row in rows] == [(0, os.getpid(), operations().status()), (1, None, None)]
    assert "nobody answers" in rows[1]["why"]
    assert "does not answer" in ask("status", "--state-dir", directory)[1]


def test_status_tells_a_broken_objective(ask, service, run, directory):
    from inferscope.control import Operations

    held = service.operations()
    told = {
        "ready": True,
        "objectives": {"score": {"phase": "open", "requests": 100, "exceeding": 7}},
        "capture": {"state": "armed"},
        "problems": ["x"],
    }
    service.operations = lambda: Operations(**{**{name: getattr(held, name) for name in held.__slots__}, "status": lambda: told})
    place = directory / "scoring" / "0"
    place.mkdir(parents=True, mode=0o700)
    run(at=place)
    status, out, _ = ask("status", "--state-dir", directory)
    assert status == 2
    assert "score: open, 7 of 100 above the objective" in out
    assert "captures armed" in out


def test_status_where_nobody_runs(ask, directory):
    status, out, _ = ask("status", "--state-dir", directory)
    assert status == 1
    assert "no worker answers" in out


# Reading and carrying


def incident(state_dir, name="20260102T030405Z-score-ab12", state="closed", service="scoring"):
    breach = Breach(name, "score", "score", 20.0, 0.99, 10**9, 2 * 10**9, 1_767_323_045 * 10**9, 100, 9, "e_detector", 9.5, 1.2)
    bundle = Bundle.create(state_dir / service / "0", breach, {"python": "3.11"}, {"name": "score"})
    bundle.publish("open")
    spans = [
        {"column": 1, "start_ns": 1_000, "end_ns": 30_000_000, "parent": -1, "thread_id": 7, "flags": 0, "aux": 0},
        {"column": 2, "start_ns": 5_000_000, "end_ns": 25_000_000, "parent": 0, "thread_id": 7, "flags": 0, "aux": 0},
    ]
    slow = {
        "id": 5, "key": ["score", None, None], "start_ns": 0, "wall_ns": 31_000_000, "band": 100, "reasons": 3, "thread_id": 7, "size": None, "items": 1,
        "error": None, "cpu_ns": None, "voluntary_switches": None, "involuntary_switches": None, "truncated": False, "vector": [1, 2, 3], "spans": spans,
        "trace": None,
    }  # fmt: skip
    klass = {
        "request": "score", "model": None, "cls": None, "edges_ns": [20_000_000], "count": 100, "errors": 0, "excluded": 0, "items": 100,
        "violations": [9], "latency": {"digits": 3, "lowest_ns": 1000, "index": [100], "count": [100]},
        "bands": {"ids": [100], "counts": [100], "sums": [[1, 2, 3]]}, "blocks": [], "reservoir": [], "slowest": [slow],
    }  # fmt: skip
    bundle.add_json(
        "evidence-0-1.json",
        {
            "schema": 1, "slot": 0, "pid": 1, "instance_id": "i", "from_ns": 0, "to_ns": 10**9, "unix_offset_ns": 1_767_323_000 * 10**9,
            "columns": [["unattributed", "unattributed"], ["stage", "rules"], ["lock", "rules"]], "classes": [klass], "series": [], "locks": [],
            "counters": {}, "copies": [], "gc": [], "device": {"busy": None, "source": None}, "process": {}, "status": {},
        },
    )  # fmt: skip
    bundle.add_json("captures/s0-r5.trace.json", {"traceEvents": []})
    bundle.add_json(
        "captures/s0-r5.json",
        {
            "id": "s0-r5", "tier": 1, "slow": True, "request": "score", "request_id": 5, "wall_ns": 31_000_000, "events": 42,
            "stall_ms": {"start": 0.5, "stop": 0.25, "save": 0.25}, "threads": [7], "region": {"name": "forward"}, "trace": "captures/s0-r5.trace.json",
        },
    )  # fmt: skip
    bundle.publish("captured")
    if state != "captured":
        bundle.publish(state)
    return bundle.path


def root_of(path):
    last = max(path.glob("manifest-*.json"), key=lambda manifest: int(manifest.stem.rpartition("-")[2]))
    return hashlib.sha256(last.read_bytes()).hexdigest()


def test_inspect_shows_all_that_lies_there(ask, directory):
    path = incident(directory)
    status, out, _ = ask("inspect", "--state-dir", directory, "--json")
    value = json.loads(out)
    assert (status, value["state"], value["problems"], value["root_sha256"]) == (0, "closed", [], root_of(path))
    assert [(row["n"], row["state"]) for row in value["manifests"]] == [(1, "open"), (2, "captured"), (3, "closed")]
    assert value["manifests"][1]["previous_sha256"] == value["manifests"][0]["sha256"]
    held = {row["path"]: row for row in value["artefacts"]}
    assert sorted(held) == ["breach.json", "captures/s0-r5.json", "captures/s0-r5.trace.json", "evidence-0-1.json"]
    for name, row in held.items():
        content = (path / name).read_bytes()
        assert (row["bytes"], row["sha256"], row["intact"]) == (len(content), hashlib.sha256(content).hexdigest(), True)
    assert (held["breach.json"]["since_manifest"], held["captures/s0-r5.json"]["since_manifest"]) == (1, 2)
    assert value["captures"][0]["events"] == 42
    assert value["slowest"][0]["wall_ms"] == 31.0
    assert [(span["column"], span["parent"], span["duration_ms"]) for span in value["slowest"][0]["spans"]] == [
        ("rules", -1, pytest.approx(29.999)),
        ("lock:rules", 0, 20.0),
    ]
    text = ask("inspect", path)[1]
    for words in (
        "closed, intact",
        root_of(path),
        "9 of 100 requests above 20 ms",
        "s0-r5: slow request 5",
        "stall 1.00 ms",
        "  lock:rules",
    ):
        assert words in text


@pytest.mark.parametrize("name", ["breach.json", "evidence-0-1.json", "captures/s0-r5.json", "manifest-2.json"])
@pytest.mark.parametrize("content", [b"", b"[]", b'{"schema": 1}', b"\xff\x00", None])
def test_inspect_of_what_was_tampered_with(ask, directory, name, content):
    path = incident(directory)
    if content is None:
        (path / name).unlink()
    else:
        (path / name).write_bytes(content)
    status, out, err = ask("inspect", path)
    assert (status, err) == (1, "")
    assert "NOT INTACT" in out
    json.loads(ask("inspect", path, "--json")[1])


def test_inspect_of_nothing(ask, directory):
    status, out, err = ask("inspect", "--state-dir", directory, "20260101")
    assert (status, out) == (1, "")
    assert one_line(err)


def test_offline_verbs_load_no_torch(directory):
    incident(directory)
    code = (
        "import sys, inferscope.cli as cli\n"
        "cli.VERBS.update(dict.fromkeys(('inspect', 'ship', 'status', 'capture'), ''))\n"
        f"cli.main(['inspect', '--state-dir', {str(directory)!r}]); cli.main(['status', '--state-dir', {str(directory)!r}])\n"
        f"cli.main(['ship', '--state-dir', {str(directory)!r}, '--to', {str(directory / 'to')!r}])\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0


def shipped(out):
    return [(row["incident"], row["result"]) for row in json.loads(out)["incidents"]]


def test_ship_to_a_directory_verified_oldest_first_and_once(ask, directory, tmp_path):
    second = incident(directory, "20260203T000000Z-score-0002")
    first = incident(directory, "20260102T000000Z-score-0001")
    incident(directory, "20260304T000000Z-score-0003", state="captured")  # may grow
    to = tmp_path / "away"
    status, out, _ = ask("ship", "--state-dir", directory, "--to", to, "--json")
    assert (status, shipped(out)) == (0, [(first.name, "carried"), (second.name, "carried")])
    copy = to / "scoring/0/incidents" / first.name
    assert verify(copy, root_of(first)) == []
    assert copy.stat().st_mode & 0o777 == 0o700
    assert (copy / "breach.json").stat().st_mode & 0o777 == 0o600
    moment = copy.stat().st_mtime_ns
    assert shipped(ask("ship", "--state-dir", directory, "--to", to, "--json")[1]) == [
        (first.name, "there already"),
        (second.name, "there already"),
    ]
    assert copy.stat().st_mtime_ns == moment
    assert json.loads(ask("inspect", "--state-dir", to, first.name, "--json")[1])["problems"] == []
    assert sorted(path.name for path in copy.parent.iterdir()) == [first.name, second.name]


def test_ship_what_a_dead_process_left(ask, directory, tmp_path):
    path = incident(directory, state="captured")
    (path / "captures" / "late.json").write_text("{}")
    for manifest in path.glob("manifest-*.json"):
        os.utime(manifest, (time.time() - 1000, time.time() - 1000))
    status, out, _ = ask("ship", "--state-dir", directory, "--to", tmp_path / "away")
    assert status == 0
    assert "1 files in no manifest were left behind" in out
    copy = tmp_path / "away/scoring/0/incidents" / path.name
    assert verify(copy) == []
    assert not (copy / "captures" / "late.json").exists()


def test_ship_continues_an_incident_but_never_replaces_its_history(ask, directory, tmp_path):
    path = incident(directory)
    to = tmp_path / "away"
    ask("ship", "--state-dir", directory, "--to", to)
    bundle = Bundle.open(path)
    bundle.add_json("diagnosis-9.json", {})
    bundle.publish("closed")
    assert shipped(ask("ship", "--state-dir", directory, "--to", to, "--json")[1]) == [(path.name, "carried")]
    copy = to / "scoring/0/incidents" / path.name
    assert verify(copy, root_of(path)) == []
    kept = root_of(copy)
    shutil.rmtree(path)
    incident(directory)  # the same id, another history: its manifests carry another time
    status, out, _ = ask("ship", "--state-dir", directory, "--to", to)
    assert status == 1
    assert "another history" in out
    assert root_of(copy) == kept


def test_ship_carries_nothing_that_was_changed_and_goes_on(ask, directory, tmp_path):
    bad = incident(directory, "20260102T000000Z-score-0001")
    good = incident(directory, "20260203T000000Z-score-0002")
    (bad / "breach.json").write_text("{}")
    link = incident(directory, "20260204T000000Z-score-0003")
    (link / "evidence-0-1.json").unlink()
    (link / "evidence-0-1.json").symlink_to("/etc/passwd")
    status, out, _ = ask("ship", "--state-dir", directory, "--to", tmp_path / "away", "--json")
    assert (status, shipped(out)) == (1, [(bad.name, "failed"), (good.name, "carried"), (link.name, "failed")])
    assert [path.name for path in (tmp_path / "away/scoring/0/incidents").iterdir()] == [good.name]


def test_ship_repairs_a_copy_that_was_damaged(ask, directory, tmp_path):
    path = incident(directory)
    to = tmp_path / "away"
    ask("ship", "--state-dir", directory, "--to", to)
    copy = to / "scoring/0/incidents" / path.name
    (copy / "breach.json").write_text("{}")
    assert shipped(ask("ship", "--state-dir", directory, "--to", to, "--json")[1]) == [(path.name, "carried")]
    assert verify(copy, root_of(path)) == []


class Receiver:
    """Takes tars."""

    def __init__(self) -> None:
        self.taken = []
        self.status = 201
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.taken.append((dict(self.headers), body))
                self.send_response(outer.status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_):
                pass

        self.http = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/incidents"
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()


@pytest.fixture
def receiver():
    receiver = Receiver()
    yield receiver
    receiver.http.shutdown()
    receiver.thread.join()
    receiver.http.server_close()


def test_ship_to_an_address(ask, directory, receiver, tmp_path, monkeypatch):
    monkeypatch.setenv("INFERSCOPE_SHIP_TOKEN", "secret")
    path = incident(directory)
    status, out, _ = ask("ship", "--state-dir", directory, "--to", receiver.url, "--json")
    assert (status, shipped(out)) == (0, [(path.name, "carried")])
    headers, body = receiver.taken[0]
    assert headers["X-Inferscope-Incident"] == path.name
    assert headers["X-Inferscope-Root-Sha256"] == root_of(path)
    assert headers["Idempotency-Key"] == f"{path.name}-{root_of(path)}"
    assert headers["Authorization"] == "Bearer secret"
    with tarfile.open(fileobj=io.BytesIO(body)) as tar:
        tar.extractall(tmp_path / "got", filter="data")
        assert {member.uid for member in tar} == {0}
    assert verify(tmp_path / "got" / path.name, root_of(path)) == []
    assert shipped(ask("ship", "--state-dir", directory, "--to", receiver.url, "--json")[1]) == [(path.name, "there already")]
    assert len(receiver.taken) == 1


@pytest.mark.parametrize(("answer", "result"), [(409, "carried"), (500, "failed"), (302, "failed"), (401, "failed")])
def test_ship_to_an_address_that_answers_otherwise(ask, directory, receiver, answer, result):
    path = incident(directory)
    receiver.status = answer
    assert shipped(ask("ship", "--state-dir", directory, "--to", receiver.url, "--json")[1]) == [(path.name, result)]
    receiver.status = 200
    again = "there already" if result == "carried" else "carried"
    assert shipped(ask("ship", "--state-dir", directory, "--to", receiver.url, "--json")[1]) == [(path.name, again)]


def test_ship_where_nobody_listens(ask, directory):
    incident(directory)
    status, out, _ = ask("ship", "--state-dir", directory, "--to", "http://127.0.0.1:9/x")
    assert status == 1
    assert "was not sent" in out


@pytest.mark.parametrize("words", [(), ("--to", "ftp://x/y"), ("--to", ""), ("--to", "x", "--every", "0")])
def test_ship_used_wrongly(ask, directory, words):
    status, out, err = ask("ship", "--state-dir", directory, *words)
    assert (status, out) == (64, "")
    assert one_line(err)


def test_ship_into_itself_is_refused(ask, directory):
    status, _, err = ask("ship", "--state-dir", directory, "--to", directory)
    assert status == 1
    assert one_line(err)


def test_ship_as_a_sidecar_goes_on(directory, tmp_path):
    code = "import inferscope.cli as cli; cli.VERBS.update(ship=''); raise SystemExit(cli.main())"
    command = [sys.executable, "-c", code, "ship", "--state-dir", str(directory), "--to", str(tmp_path / "away"), "--every", "1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        path = incident(directory)
        copy = Path(tmp_path / "away/scoring/0/incidents" / path.name)
        deadline = time.monotonic() + 10
        while not copy.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        process.terminate()
        process.wait()
    assert verify(copy) == []
