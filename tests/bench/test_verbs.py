"""The verbs `bench`, `compare`, `history` and `bundle`, from the command line."""

from __future__ import annotations

import csv
import io
import json
import os
import shlex
import shutil
import tarfile
from pathlib import Path

import pytest

from inferscope.bench import runs, text
from inferscope.bench.targets import Service, free_port
from inferscope.capture.bundle import Bundle, verify
from inferscope.cli import main
from inferscope.types import Breach


def status_of(*words):
    try:
        return main(list(map(str, words)))
    except SystemExit as ended:
        return ended.code


@pytest.fixture(scope="module")
def measured(tmp_path_factory, write_functions):
    """A run of a function and its document, measured once."""
    folder = tmp_path_factory.mktemp("measured")
    write_functions(folder)
    before = Path.cwd()
    os.chdir(folder)
    try:
        code = status_of(
            "bench", "functions:score", "--inputs", "inputs.jsonl", "--repeat", 800, "-o", "base.json", "--json", "document.json"
        )
    finally:
        os.chdir(before)
    assert code == 0
    return folder


@pytest.fixture
def run_file(measured, functions):
    """The run, in the working directory of this test."""
    shutil.copy(measured / "document.json", functions)
    return Path(shutil.copy(measured / "base.json", functions))


def test_a_function_is_measured_in_a_process_of_its_own(run_file, functions):
    value = json.loads((functions / "document.json").read_text())
    assert value["metrics"]["requests"] + value["warmup"]["cut"] == 1000
    assert value["metrics"]["failed"] == 0
    assert value["metrics"]["latency"]["p50"]["ms"] > 1.0
    assert value["metrics"]["latency"]["p999"]["ms"] is None
    think = next(stage for stage in value["stages"] if stage["name"] == "think")
    assert think["count"] == 1000
    assert value["process"]["memory"]["static_bytes"] > 1e6
    assert 0 < value["process"]["cpu_cores"] < 2
    assert value["device"] is None
    assert value["fingerprint"]["sha256"]
    shown = "\n".join(text.run_lines(value, ["p999"]))
    assert "closed loop: the tail is optimistic" in shown
    assert "needs ≥ 3688 requests" in shown
    assert runs.read(run_file).load.status.size == 1000


def test_golden_outputs_are_kept_and_checked(functions, capsys):
    common = ["bench", "functions:score", "--inputs", "inputs.jsonl", "--repeat", 20, "--warmup", 0, "--baseline", 0]
    assert status_of(*common, "--save-golden", "golden.json") == 0
    assert status_of(*common, "--golden", "golden.json") == 0
    assert "CORRECT, 20 of 20 outputs agree" in capsys.readouterr().out
    assert status_of(*common, "--golden", "golden.json", "--precision", "fp16") == 4
    assert "INCORRECT, 0 of 20" in capsys.readouterr().out
    (functions / "inputs.jsonl").write_text('{"a": 0.1}\n')
    assert status_of(*common, "--golden", "golden.json") == 4
    assert status_of(*common, "--golden", "missing.json") == 1


def test_batches_are_lists_and_items_are_counted(functions):
    assert (
        status_of(
            "bench",
            "functions:batch",
            "--inputs",
            "inputs.jsonl",
            "--batch-size",
            4,
            "--repeat",
            50,
            "--warmup",
            0,
            "--baseline",
            0,
            "--json",
            "b.json",
        )
        == 0
    )
    rates = json.loads((functions / "b.json").read_text())["metrics"]["throughput"]
    assert rates["items_per_s"] == pytest.approx(4 * rates["requests_per_s"])


def test_errors_are_counted_and_the_run_goes_on(functions):
    assert (
        status_of(
            "bench",
            "functions:sometimes",
            "--inputs",
            "inputs.jsonl",
            "--repeat",
            200,
            "--warmup",
            0,
            "--slo",
            "error_rate<=1%",
            "--json",
            "e.json",
        )
        == 2
    )
    value = json.loads((functions / "e.json").read_text())
    assert 0.3 < value["metrics"]["error_rate"]["share"] < 0.7
    assert value["errors"] == {"RuntimeError": value["metrics"]["failed"]}


def test_an_open_loop_in_process_counts_waiting_for_a_thread(functions):
    words = [
        "--rate",
        50,
        "--duration",
        "1s",
        "--arrival",
        "constant",
        "--warmup",
        0,
        "--concurrency",
        4,
        "--max-lag",
        "10s",
        "--hgrm",
        "o.hgrm",
        "--json",
        "o.json",
    ]
    assert status_of("bench", "functions:score", "--inputs", "inputs.jsonl", *words) in {0, 3}
    value = json.loads((functions / "o.json").read_text())
    assert value["metrics"]["requests"] == 50
    assert "Total count    =           50" in (functions / "o.hgrm").read_text()
    assert value["settings"]["mode"] == "open"
    assert value["metrics"]["lag_p99_ms"] is not None


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["functions:fails", "--repeat", "5"], 1, "no request was answered well (KeyError"),
        (["functions:dies", "--repeat", "5"], 1, "its process ended with status 7"),
        (["functions:crashes", "--repeat", "5"], 1, "its process was ended by SIGSEGV"),
        (["nowhere:nothing"], 1, "cannot be imported: ModuleNotFoundError"),
        (["functions:dies", "--inputs", "inputs.jsonl"], 1, "takes no input"),
        (["functions:score", "--inputs", "functions.py"], 1, "line 1 is no JSON value"),
        (["http://127.0.0.1:9/"], 1, "cannot be reached: Connection refused"),
        (["neither"], 64, "neither module:function nor http(s)"),
        (["functions:score", "--slo", "fast"], 64, "p99<=20ms"),
        (["functions:score", "--rate", "0"], 64, "is no rate"),
        (["functions:score", "--rate", "5", "--mode", "closed"], 64, "a closed loop has no rate"),
        (["functions:score", "--mode", "open"], 64, "an open loop needs --rate"),
        (["functions:score", "--duration", "soon"], 64, "is no time"),
        (["functions:score", "--report", "p50,speed"], 64, "nothing is called speed"),
        (["functions:score", "--ladder", "4,2"], 64, "does not rise"),
    ],
)
def test_what_goes_wrong_is_said_in_one_line(functions, capsys, words, code, said):
    assert status_of("bench", *words) == code
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("inferscope bench: ")
    assert said in last


def test_an_address_is_measured_and_what_it_answers_checked(functions, command, capsys):
    port = free_port()
    with Service(shlex.split(command(0.002).replace("{port}", str(port))), port, {}, functions, functions / "log") as service:
        service.start()
        url = f"http://127.0.0.1:{port}"
        common = ["--inputs", "inputs.jsonl", "--max-lag", "10s", "--warmup", 0, "--baseline", 0]
        pid = service._process.pid
        assert status_of(
            "bench", f"{url}/", *common, "--rate", 60, "--duration", "1s", "--save-golden", "g.json", "--pid", pid, "--json", "h.json"
        ) in {0, 3}
        value = json.loads((functions / "h.json").read_text())
        assert value["metrics"]["failed"] == 0
        assert value["process"]["memory"]["peak_bytes"] > 1e6
        assert json.loads((functions / "g.json").read_text())["outputs"][4] == {"score": 0.2}
        capsys.readouterr()
        assert status_of("bench", f"{url}/garbage", *common, "--repeat", 20, "--golden", "g.json") == 4
        assert "is str, golden is dict" in capsys.readouterr().out
        assert status_of("bench", f"{url}/busy", *common, "--repeat", 20) == 1
        assert "no request was answered well (status 503: 20)" in capsys.readouterr().err
        assert status_of("bench", f"{url}/", *common, "--ladder", "1,2", "--repeat", 60) == 0
        assert "knee: " in capsys.readouterr().out
        assert status_of("bench", f"{url}/die", *common, "--repeat", 20) == 1


def test_a_silent_or_strange_server_is_named(functions, capsys):
    import socket
    import threading

    from inferscope.bench import probe
    from inferscope.bench.targets import ServiceError

    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/"
        with pytest.raises(ServiceError, match=r"did not answer within 0\.2 s"):
            probe.ask(url, None, 0.2)
        server.accept()[0].close()

        def babble():
            connection, _ = server.accept()
            connection.recv(1000)
            connection.sendall(b"SSH-2.0-hello\r\n\r\n")
            connection.close()

        thread = threading.Thread(target=babble)
        thread.start()
        with pytest.raises(ServiceError, match="something that is not HTTP"):
            probe.ask(url, None, 5.0)
        thread.join()


def test_equal_conditions_are_compared_and_labelled(run_file, capsys):
    code = status_of("compare", run_file, run_file, "--md", "verdict.md", "--json", "c.json")
    assert code in {0, 3}
    value = json.loads(Path("c.json").read_text())
    assert value["method"] == "sequential"
    assert [verdict["change"] for verdict in value["verdicts"]] == [0, 0, 0, 0]
    assert value["inputs"][0]["sha256"] == runs.read(run_file).sha256
    assert "sequential" in capsys.readouterr().out
    assert "| p50 |" in Path("verdict.md").read_text()


def test_other_conditions_are_refused_by_name(run_file, capsys):
    document = json.loads(run_file.read_text())
    document["settings"]["precision"] = "fp16"
    document["fingerprint"]["libraries"]["numpy"] = "0.1"
    document["fingerprint"]["settings"]["OMP_NUM_THREADS"] = "abc"
    Path("other.json").write_text(json.dumps(document))
    assert status_of("compare", run_file, "other.json") == 5
    said = capsys.readouterr().err
    assert "precision: fp32 → fp16" in said
    assert "libraries.numpy" in said
    assert "environment variable OMP_NUM_THREADS" in said
    assert status_of("compare", run_file, "other.json", "--vary", "precision") == 5
    assert "precision" not in capsys.readouterr().err
    assert status_of("compare", run_file, "other.json", "--force") in {0, 3}
    assert "forced although" in capsys.readouterr().out


def test_a_wrong_or_invalid_candidate_gets_no_good_verdict(run_file, capsys):
    document = json.loads(run_file.read_text())
    document["problems"] = ["generator-bound: late"]
    Path("invalid.json").write_text(json.dumps(document))
    assert status_of("compare", run_file, "invalid.json") == 3
    document["golden"] = {"correct": False, "text": "INCORRECT, 0 of 3 outputs agree"}
    Path("wrong.json").write_text(json.dumps(document))
    assert status_of("compare", run_file, "wrong.json") == 4
    assert "outputs INCORRECT" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is damaged: not JSON"),
        ("[]", "is no run"),
        ('{"kind": "inferscope.run", "schema": 2}', "schema 2, this version reads 1"),
        ('{"kind": "inferscope.run", "schema": 1}', "is damaged: KeyError at 'load'"),
        ('{"kind": "inferscope.run", "schema": 1, "load": {"schema": 1, "plan": {"speed": 3}}}', "is damaged: TypeError"),
    ],
)
def test_a_damaged_or_newer_run_is_named(tmp_path, capsys, content, said):
    path = tmp_path / "run.json"
    path.write_text(content)
    assert status_of("compare", path, path) == 1
    assert said in capsys.readouterr().err
    assert status_of("compare", tmp_path / "none.json", path) == 1
    assert "cannot be read" in capsys.readouterr().err


def test_a_run_whose_parts_do_not_fit_is_damaged(run_file, capsys):
    document = json.loads(run_file.read_text())
    document["load"]["results"]["status"].pop()
    Path("short.json").write_text(json.dumps(document))
    assert status_of("compare", run_file, "short.json") == 1
    assert "its parts do not fit together" in capsys.readouterr().err


def test_history_lists_runs_and_names_damage(run_file, functions, capsys):
    folder = functions / "runs"
    folder.mkdir()
    document = json.loads(run_file.read_text())
    for number in (2, 1):
        document["written_unix_ns"] = number * 10**18
        (folder / f"{number}.json").write_text(json.dumps(document))
    (folder / "other.json").write_text("{}")
    capsys.readouterr()
    assert status_of("history", folder, "--csv", "-") == 0
    shown = capsys.readouterr()
    rows = list(csv.DictReader(io.StringIO(shown.out)))
    assert [row["time"][:4] for row in rows] == ["2001", "2033"]
    assert float(rows[0]["p50_ms"]) > 1
    assert "p999_ms" not in rows[0], "an empty cell is an error to Otava"
    assert "not every run has a number: p999_ms" in shown.err
    assert status_of("history", folder, "--target", "nothing-like-it") == 0
    assert "no runs" in capsys.readouterr().out
    (folder / "cut.json").write_text(run_file.read_text()[:100])
    assert status_of("history", folder, "--json") == 1
    value = json.loads(capsys.readouterr().out)
    assert len(value["runs"]) == 2
    assert "cut.json is damaged" in value["problems"][0]
    assert status_of("history", functions / "none") == 1


@pytest.fixture
def incident(tmp_path):
    breach = Breach("20260101T000000Z-score-abcd", "score", "score", 20.0, 0.99, 1, 2, 3, 100, 5, "e_detector", 1.0, 1.0)
    bundle = Bundle.create(tmp_path / "state" / "service" / "0", breach, {}, {})
    bundle.add_json("evidence-0-1.json", {"schema": 1})
    bundle.publish("open")
    bundle.add_json("diagnosis-1.json", {"schema": 1})
    bundle.publish("diagnosed")
    return bundle


def test_an_incident_travels_whole_and_still_verifies(incident, tmp_path, capsys):
    target = tmp_path / "out.tar.gz"
    assert status_of("bundle", incident.path, "-o", target, "--expect", incident.root_hash, "--json") == 0
    value = json.loads(capsys.readouterr().out)
    assert value["root_sha256"] == incident.root_hash
    with tarfile.open(target) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    assert verify(tmp_path / "unpacked" / incident.path.name, incident.root_hash) == []
    first = target.read_bytes()
    assert status_of("bundle", incident.path, "-o", target) == 0
    assert target.read_bytes() == first


def test_changed_evidence_is_not_packed(incident, tmp_path, capsys):
    target = tmp_path / "out.tar.gz"
    assert status_of("bundle", incident.path, "-o", target, "--expect", "0" * 64) == 1
    assert status_of("bundle", incident.path, "-o", incident.path / "out.tar.gz") == 1
    assert status_of("bundle", incident.path, "-o", tmp_path / "none" / "out.tar.gz") == 1
    (incident.path / "evidence-0-1.json").write_text("{}")
    assert status_of("bundle", incident.path, "-o", target) == 1
    assert "does not verify, so it was not packed: evidence-0-1.json was changed" in capsys.readouterr().err
    assert not target.exists()


@pytest.mark.parametrize("verb", ["bench", "compare", "ab", "history", "bundle"])
def test_every_verb_explains_itself(verb, capsys):
    assert status_of(verb, "--help") == 0
    assert "--json" in capsys.readouterr().out
