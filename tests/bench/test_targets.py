"""gRPC and KServe v2 as targets: what is asked, what is measured, and what is said when they do not answer."""

from __future__ import annotations

import base64
import contextlib
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from inferscope.bench import endpoint, kserve, load, rpc
from inferscope.bench.load import LoadPlan
from inferscope.bench.targets import ServiceError, free_port
from inferscope.cli import main
from inferscope.errors import InferscopeError

grpc = pytest.importorskip("grpc")

METHOD = "/demo.Scorer/Score"


def status_of(*words):
    try:
        return main(list(map(str, words)))
    except SystemExit as ended:
        return ended.code


class Scorer(grpc.GenericRpcHandler):
    """Echoes after 2 ms; the health check; `Fail` aborts, `Hang` never answers."""

    def __init__(self):
        self.seen, self.serving, self.stop = [], True, threading.Event()

    def service(self, details):
        behaviours = {METHOD: self.score, rpc.HEALTH: self.health, "/demo.Scorer/Fail": self.fail, "/demo.Scorer/Hang": self.hang}
        behaviour = behaviours.get(details.method)
        return None if behaviour is None else grpc.unary_unary_rpc_method_handler(behaviour)

    def score(self, request, _):
        self.seen.append(request)
        time.sleep(0.002)
        return b"<" + request + b">"

    def health(self, *_):
        return rpc.SERVING if self.serving else b"\x08\x02"

    def fail(self, _, context):
        context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too much")

    def hang(self, *_):
        self.stop.wait(20)
        return b""


@contextlib.contextmanager
def serving(scorer=None):
    scorer = scorer or Scorer()
    with ThreadPoolExecutor(32) as pool:
        server = grpc.server(pool, options=[("grpc.so_reuseport", 0)])
        server.add_generic_rpc_handlers((scorer,))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"grpc://127.0.0.1:{port}", scorer, server
        finally:
            scorer.stop.set()
            server.stop(0).wait(5)


@pytest.fixture(scope="module")
def served():
    with serving() as found:
        yield found


def test_a_method_is_called_when_it_is_due(served):
    url, scorer, _ = served
    scorer.seen.clear()
    result = load.generate(LoadPlan(url + METHOD, 100.0, 1.0, seed=2, process="constant"), [b"one", b"two"])
    assert result.fine.all()
    assert result.status.size == 100 == len(scorer.seen)
    assert set(scorer.seen) == {b"one", b"two"}
    assert np.diff(result.intended_ns).tolist() == [10_000_000] * 99
    assert result.summary()["latency_ms"]["p50"] >= 2
    for earlier, later in (("intended_ns", "launched_ns"), ("launched_ns", "sent_ns"), ("sent_ns", "done_ns")):
        assert (getattr(result, earlier) <= getattr(result, later)).all()


def test_a_closed_loop_of_calls_keeps_so_many_under_way(served):
    url, _, _ = served
    result = load.generate(LoadPlan(url + METHOD, 1.0, 10.0, mode="closed", connections=3, requests=60))
    assert result.fine.sum() == 60
    events = sorted([(at, 1) for at in result.sent_ns.tolist()] + [(at, -1) for at in result.done_ns.tolist()])
    assert np.cumsum([step for _, step in events]).max() == 3
    timed = load.generate(LoadPlan(url + METHOD, 1.0, 0.2, mode="closed", connections=2))
    assert timed.fine.all()
    assert (timed.intended_ns[-1] - timed.intended_ns[0]) / 1e9 < 0.25


def test_waiting_for_a_free_place_is_latency(served):
    url, _, _ = served
    result = load.generate(LoadPlan(url + METHOD, 1000.0, 0.1, process="constant", connections=1))
    assert result.fine.all()
    assert result.latency_ns[-1] > 100e6
    assert np.median(result.service_ns) < 50e6


def test_without_a_method_the_health_check_is_asked():
    scorer = Scorer()
    with serving(scorer) as (url, _, _):
        assert load.generate(LoadPlan(rpc_url := f"{url}{rpc.HEALTH}", 50.0, 0.2)).fine.all()
        found = endpoint.resolve(url, [])
        assert found.url == rpc_url
        found.check()
        scorer.serving = False
        with pytest.raises(ServiceError, match="says that it is not serving"):
            found.check()
        assert set(load.generate(LoadPlan(rpc_url, 50.0, 0.2)).status.tolist()) == {503}


def test_raw_messages_go_as_they_are_and_answers_come_as_text(served):
    url, _, _ = served
    line = json.dumps({"base64": base64.b64encode(b"\x00\n\xff").decode()}).encode()
    found = endpoint.resolve(url + METHOD, [line])
    assert found.bodies == (b"\x00\n\xff",)
    assert base64.b64decode(found.answers(5)[0]) == b"<\x00\n\xff>"
    assert found.totals() == {}


@pytest.mark.parametrize(
    ("path", "line", "said"),
    [
        ("/demo.Scorer/Fail", None, r"answers RESOURCE_EXHAUSTED \(too much\)"),
        ("/demo.Scorer/None", None, "answers UNIMPLEMENTED"),
        ("/demo.Scorer", None, "is no address; the form is grpc://host:port/package.Service/Method"),
        (METHOD, b'{"base64": "?"}', "base64 is damaged"),
    ],
)
def test_what_a_method_says_is_said(served, path, line, said):
    url, _, _ = served
    with pytest.raises(InferscopeError, match=said):
        endpoint.resolve(url + path, [line] if line else []).check()


def test_error_codes_are_counted_as_statuses(served):
    url, _, _ = served
    result = load.generate(LoadPlan(f"{url}/demo.Scorer/Fail", 50.0, 0.3))
    assert set(result.status.tolist()) == {429}
    assert not result.stopped


def test_a_method_that_hangs_is_given_up(served):
    url, _, _ = served
    result = load.generate(LoadPlan(f"{url}/demo.Scorer/Hang", 20.0, 30.0, drain_s=0.6))
    assert result.stopped.startswith("the target hangs: ")
    assert 0 < result.status.size < 100
    assert not result.answered.any()


def test_nobody_and_somebody_else_are_named(capsys):
    port = free_port()
    assert status_of("bench", f"grpc://127.0.0.1:{port}", "--repeat", 5) == 1
    assert "cannot be reached, or does not speak gRPC" in capsys.readouterr().err
    assert status_of("bench", f"triton://127.0.0.1:{port}/score", "--repeat", 5) == 1
    assert "cannot be reached: Connection refused" in capsys.readouterr().err
    assert status_of("bench", "triton://127.0.0.1:8000", "--repeat", 5) == 1
    assert "is no address; the forms are" in capsys.readouterr().err
    assert status_of("bench", "ftp://127.0.0.1/", "--repeat", 5) == 64


def test_a_verb_measures_a_method(served, tmp_path, monkeypatch, capsys):
    url, _, _ = served
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text(json.dumps({"base64": base64.b64encode(b"x").decode()}))
    common = ["bench", url + METHOD, "--inputs", "in.jsonl", "--repeat", 30, "--warmup", 0, "--baseline", 0]
    assert status_of(*common, "--save-golden", "g.json", "--json", "d.json") == 0
    value = json.loads((tmp_path / "d.json").read_text())
    assert value["metrics"]["requests"] == 30
    assert value["metrics"]["failed"] == 0
    assert value["process"]["cpu_cores"] is not None  # the process that listens here is this one
    assert json.loads((tmp_path / "g.json").read_text())["outputs"] == [base64.b64encode(b"<x>").decode()]
    assert "CPU" in capsys.readouterr().out


METADATA = {
    "name": "score", "versions": ["1"], "platform": "python",
    "inputs": [{"name": "X", "datatype": "FP32", "shape": [-1, 3]}],
    "outputs": [{"name": "Y", "datatype": "FP32", "shape": [-1, 1]}],
}  # fmt: skip


class Kserve(BaseHTTPRequestHandler):
    """The protocol over HTTP, as far as a model that sums its rows needs it."""

    protocol_version = "HTTP/1.1"
    inferences, kinds = 0, {}

    def do_GET(self):
        answers = {
            "/v2/health/ready": b"",
            "/v2/models/score": json.dumps(METADATA).encode(),
            "/v2/models/odd": b"[]",
            "/v2/models/score/stats": json.dumps({"model_stats": [{"inference_stats": {
                "queue": {"count": Kserve.inferences, "ns": 1_000_000 * Kserve.inferences},
                "compute_infer": {"count": Kserve.inferences, "ns": 4_000_000 * Kserve.inferences}}}]}).encode(),
        }  # fmt: skip
        self.say(200 if self.path in answers else 404, answers.get(self.path, b""))

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))["inputs"][0]
        Kserve.inferences += 1
        Kserve.kinds[asked["name"], asked["datatype"], tuple(asked["shape"])] = True
        rows = np.reshape(np.array(asked["data"]), asked["shape"]).sum(axis=1)
        answer = {"outputs": [{"name": "Y", "datatype": "FP32", "shape": [len(rows), 1], "data": rows.tolist()}]}
        self.say(200, json.dumps(answer).encode())

    def say(self, status, content):
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture
def triton():
    with ThreadingHTTPServer(("127.0.0.1", 0), Kserve) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            Kserve.inferences, Kserve.kinds = 0, {}
            yield f"triton://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_a_model_is_measured_through_the_protocol_with_its_own_stages(triton, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text('{"X": [1, 2, 3]}\n[4, 5, 6]\n{"inputs": [{"name": "X", "shape": [1, 3], "data": [7, 8, 9]}]}\n')
    words = ["bench", f"{triton}/score", "--inputs", "in.jsonl", "--repeat", 40, "--warmup", 0, "--baseline", 3]
    assert status_of(*words, "--save-golden", "g.json", "--json", "d.json") == 0
    value = json.loads((tmp_path / "d.json").read_text())
    assert value["metrics"]["failed"] == 0
    stages = {row["name"]: row for row in value["stages"]}
    assert stages["queue"]["count"] == 40
    assert stages["compute_infer"]["mean_ms"] == pytest.approx(4.0)
    assert value["baseline"]["single"]["requests"] == 3
    assert json.loads((tmp_path / "g.json").read_text())["outputs"] == [{"Y": [[6.0]]}, {"Y": [[15.0]]}, {"Y": [[24.0]]}]
    assert set(Kserve.kinds) == {("X", "FP32", (1, 3))}
    assert "stage compute_infer: 40 times, mean 4.00 ms" in capsys.readouterr().out


def test_models_that_do_not_fit_are_named(triton):
    for path, lines, said in (
        ("none", [], "answers 404: there is no such model"),
        ("odd", [], "answered no model metadata"),
        ("score", [b'{"X": [1, 2]}'], r"input X has shape \[1, 2\], the model takes \[-1, 3\]"),
        ("score", [b'{"Z": [1, 2, 3]}'], "has no values for X of score"),
        ("score", [b'{"X": ["a", "b", "c"]}'], "input X is no FP32 tensor"),
    ):
        with pytest.raises(InferscopeError, match=said):
            endpoint.resolve(f"{triton}/{path}", lines)


def test_random_inputs_and_batches_have_the_models_shapes():
    model = kserve.Model.from_json({**METADATA, "inputs": [{"name": "T", "datatype": "INT64", "shape": ["-1", "-1"]}]}, "")
    with pytest.raises(InferscopeError, match="give --input-len for the free dimension"):
        kserve.requests(model, [])
    drawn = kserve.requests(model, [], batch=4, input_len=7, seed=1)
    assert {each["T"].shape for each in drawn} == {(4, 7)}
    assert drawn[0]["T"].dtype == np.int64
    assert not np.array_equal(drawn[0]["T"], drawn[1]["T"])
    assert np.array_equal(drawn[3]["T"], kserve.requests(model, [], batch=4, input_len=7, seed=1)[3]["T"])
    batches = kserve.requests(model, [b"[1, 2]", b"[3, 4]", b"[5, 6]"], batch=2)
    assert [each["T"].tolist() for each in batches] == [[[1, 2], [3, 4]], [[3, 4], [5, 6]], [[5, 6], [1, 2]]]


def test_a_grpc_port_is_not_taken_for_http(served, monkeypatch):
    url, _, _ = served
    asked = []
    monkeypatch.setattr(kserve, "grpc_model", lambda place, name, version: asked.append((place, name, version)) or pytest.fail("asked"))
    with pytest.raises(pytest.fail.Exception):
        endpoint.resolve(f"{url.replace('grpc', 'triton')}/score/2", [])
    assert asked == [(url.removeprefix("grpc://"), "score", "2")]
