"""A directory in, `diagnosis-<n>.json` out; also as the child process that a service starts."""

from __future__ import annotations

import copy
import json
import os
import stat
import subprocess
import sys
from dataclasses import replace

import pytest

from inferscope.diagnose import diagnose, from_dict, load, load_directory, save, to_dict
from inferscope.errors import EvidenceError
from inferscope.types import Breach


@pytest.fixture
def incident(directory):
    return load_directory(directory)


def capture(directory, service, *, id_="c1", trace=True, **changes):
    """A kept capture: side file and a trace whose operator lies in the stage `forward`."""
    side = {
        "id": id_,
        "tier": 1,
        "slow": True,
        "request_id": 77,
        "request": "score",
        "wall_ns": 40_000_000,
        "start_ns": 1_000_000,
        "threads": [7],
        "events": None,
        "stall_ms": {"start": 0.25, "stop": 0.5, "save": 4.0},
        "region": {"name": "forward", "start_ns": 1_000_000, "end_ns": 6_000_000, "thread": 7},
        "trace": f"captures/{id_}.trace.json",
        "unix_offset_ns": service.OFFSET,
        "spans": [],
        "torch": "2.13.0",
        **changes,
    }
    (directory / "captures" / f"{id_}.json").write_text(json.dumps(side))
    if trace:
        events = [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 7, "ts": 2000.0, "dur": 3000.0}]
        document = {"traceEvents": events, "baseTimeNanoseconds": service.OFFSET}
        (directory / "captures" / f"{id_}.trace.json").write_text(json.dumps(document))


def test_numbers_of_the_horizon(incident, requests, service):
    wall = requests.wall
    assert incident.requests == len(wall)
    assert incident.exceeding == (wall > 20 * service.MS).sum()
    assert incident.throughput_rps == pytest.approx(200, rel=0.02)
    assert incident.jitter_ms == incident.latency_ms.p99 - incident.latency_ms.p50
    assert incident.device_busy is None
    assert incident.service == "score"
    assert incident.state == "diagnosed"


def test_verdict_names_causes_order_and_model(incident):
    assert incident.verdict.startswith("P99 4")
    assert "the objective P99 of 20 ms is broken; the tail's excess is copy:h2d " in incident.verdict
    assert "then lock:rules fixed: about" in incident.verdict
    assert "which meets the objective." in incident.verdict
    assert incident.verdict.endswith("The model is not the cause.")


def test_verdict_when_the_objective_holds(service, document):
    found = diagnose(Breach(**service.breach(quantile=0.9)), [document])
    assert found.verdict.endswith("the objective P90 of 20 ms holds over this horizon.")


def test_manual_incident_without_an_objective(service, document):
    found = diagnose(Breach(**service.breach(0.0, trigger="manual", exceeding=0)), [document])
    assert found.verdict.endswith("no objective is set for score.")
    assert found.attribution
    assert all(finding.severity in {"low", "info"} for finding in found.findings)
    assert "GC_PAUSE" not in {finding.id for finding in found.findings}


def test_verdict_of_failing_requests(service, document):
    failing = copy.deepcopy(document)
    failing["classes"][0].update(errors=1200, count=60_000)
    found = diagnose(Breach(**service.breach(trigger="error_rate", quantile=0.9)), [failing])
    assert found.verdict.startswith("1200 of 60000 requests failed (2 %): the objective on errors is broken. P99 ")
    assert found.errors == 1200


def test_verdict_with_too_little_evidence(service):
    few = service.evidence(service.simulate(5, 200, seed=4), [20 * service.MS], keep=8)
    found = diagnose(Breach(**service.breach()), [few])
    assert "is broken; not enough evidence" in found.verdict
    assert found.withheld.startswith("not enough evidence")
    assert found.what_if == ()


def test_notes_say_what_was_compared_and_left_out(service, document):
    profiled = copy.deepcopy(document)
    profiled["classes"][0]["excluded"] = 60
    found = diagnose(Breach(**service.breach()), [profiled])
    assert found.notes[0].startswith("Tail: requests above 20 ms (")
    assert "60 profiled requests (0.1 %) are counted but not in percentiles or shares." in found.notes


def test_captures_are_joined_with_our_stages(directory, service):
    capture(directory, service)
    (found,) = load_directory(directory).captures
    assert (found.id, found.requests, found.slow, found.events, found.threads) == ("c1", (77,), True, 1, (7,))
    assert found.stall_ms == 0.75
    assert found.stages == {"forward": 3.0}


def test_slow_and_healthy_captures_are_compared(directory, service):
    capture(directory, service)
    capture(directory, service, id_="c2", slow=False)
    finding = next(f for f in load_directory(directory).findings if f.id == "MODEL_NOT_THE_CAUSE")
    found = {evidence.metric: evidence.value for evidence in finding.evidence}
    assert found["operator time in 1 captured slow requests, median"] == 3.0
    assert found["operator time in 1 captured healthy requests, median"] == 3.0


def test_spans_of_the_request_go_before_the_region(directory, service):
    capture(directory, service, spans=[{"column": "rules", "start_ns": 1_500_000, "end_ns": 5_500_000, "thread": 7, "flags": 0, "aux": 0}])
    assert load_directory(directory).captures[0].stages == {"rules": 3.0}


def test_damaged_captures_cost_a_note_each(directory, service):
    capture(directory, service)
    capture(directory, service, id_="c2", trace=False)
    (directory / "captures" / "c2.trace.json").write_text('{"traceEvents": [')
    capture(directory, service, id_="c3", spans=[{"column": "rules"}])
    (directory / "captures" / "c4.json").write_text("{")
    found = load_directory(directory)
    assert [held.id for held in found.captures] == ["c1"]
    assert any(note.startswith("Capture left out: c4.json: damaged JSON") for note in found.notes)
    assert "Capture left out: c2.trace.json: truncated." in found.notes
    assert any(note.startswith("Capture c3 left out: damaged side file (KeyError") for note in found.notes)


def test_capture_without_a_trace_keeps_its_own_count(directory, service):
    capture(directory, service, trace=False, events=12)
    side = json.loads((directory / "captures" / "c1.json").read_text())
    (directory / "captures" / "c1.json").write_text(json.dumps({**side, "trace": None}))
    assert load_directory(directory).captures[0].events == 12


def test_pairs_in_a_trace_become_evidence(directory, service):
    capture(directory, service)
    events = [
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaMemcpyAsync", "pid": 1, "tid": 7, "ts": 1, "dur": 1, "args": {"correlation": 5}},
        {
            "ph": "X",
            "cat": "cuda_runtime",
            "name": "cudaStreamSynchronize",
            "pid": 1,
            "tid": 7,
            "ts": 3,
            "dur": 1,
            "args": {"correlation": 6},
        },
        {
            "ph": "X",
            "cat": "gpu_memcpy",
            "name": "Memcpy HtoD (Pageable -> Device)",
            "pid": 0,
            "tid": 7,
            "ts": 2,
            "dur": 1,
            "args": {"correlation": 5},
        },
    ]
    (directory / "captures" / "c1.trace.json").write_text(json.dumps({"traceEvents": events}))
    finding = load_directory(directory).findings[0]
    assert finding.id == "H2D_SYNC_PAGEABLE"
    assert (finding.evidence[-1].value, finding.evidence[-1].artefact) == (1, "captures/c1.trace.json")


def test_round_trip_through_json(incident):
    assert from_dict(json.loads(json.dumps(to_dict(incident)))) == incident


def test_later_keys_are_ignored_and_later_schemas_refused(incident):
    document = to_dict(incident)
    document["mood"] = "new"
    document["findings"][0]["mood"] = "new"
    assert from_dict(document) == incident
    with pytest.raises(EvidenceError, match="schema 2"):
        from_dict({**document, "schema": 2})
    del document["verdict"]
    with pytest.raises(EvidenceError, match="damaged diagnosis: KeyError"):
        from_dict(document)


def test_saved_atomically_numbered_and_private(directory, incident):
    first, second = save(incident, directory), save(replace(incident, verdict="later"), directory)
    assert [path.name for path in (first, second)] == ["diagnosis-1.json", "diagnosis-2.json"]
    assert stat.S_IMODE(first.stat().st_mode) == 0o600
    assert load(directory).verdict == "later"
    assert not list(directory.glob("*.partial"))


def test_not_diagnosed_yet(directory):
    with pytest.raises(EvidenceError, match="not diagnosed yet"):
        load(directory)


def test_healthy_horizon_is_read_from_the_directory(directory, service):
    slow = service.simulate(60, 200, seed=2, slow=6.0)
    (directory / "evidence-0-2.json").write_text(json.dumps(service.evidence(slow, [16 * service.MS], keep=4)))
    (directory / "breach.json").write_text(json.dumps(service.breach(16.0)))
    healthy = service.evidence(service.simulate(60, 200, seed=1), [16 * service.MS], keep=4)
    (directory / "healthy-0-1.json").write_text(json.dumps(healthy))
    found = load_directory(directory)
    assert any("the body is the last healthy horizon" in note for note in found.notes)
    assert found.attribution[0].name == "preprocess"


def run(*arguments, code=""):
    command = (
        [sys.executable, "-c", code, *map(str, arguments)] if code else [sys.executable, "-m", "inferscope.diagnose", *map(str, arguments)]
    )
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_child_is_silent_and_writes(directory):
    done = run(directory)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert load(directory) == load_directory(directory)


def test_child_never_loads_torch_and_limits_itself(directory):
    code = """
import os, resource, sys
from inferscope.diagnose.__main__ import main
assert "numpy" not in sys.modules
code = main(sys.argv[1:])
assert not {"torch", "opentelemetry"} & {name.partition(".")[0] for name in sys.modules}
assert os.nice(0) == 19
assert os.sched_getscheduler(0) == os.SCHED_IDLE
assert resource.getrlimit(resource.RLIMIT_AS)[0] <= 3 << 30
assert resource.getrlimit(resource.RLIMIT_CORE)[0] == 0
assert os.environ["OMP_NUM_THREADS"] == "1"
sys.exit(code)
"""
    if not hasattr(os, "SCHED_IDLE"):
        pytest.skip("needs SCHED_IDLE")
    done = run(directory, code=code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "breach.json").unlink(), "breach.json: cannot be read"),
        (lambda d: (d / "breach.json").write_text("{}"), "breach.json: 'id' is missing"),
        (lambda d: (d / "evidence-0-1.json").unlink(), "no evidence-*.json"),
        (lambda d: (d / "evidence-0-1.json").write_text('{"sch'), "evidence-0-1.json: damaged JSON"),
    ],
)
def test_child_says_one_line_about_what_it_cannot_use(directory, damage, message):
    damage(directory)
    done = run(directory)
    assert (done.returncode, done.stdout) == (1, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(directory.glob("diagnosis-*"))


def test_child_usage(tmp_path):
    assert run().returncode == 64
    assert run("--help").returncode == 64
    missing = run(tmp_path / "none")
    assert (missing.returncode, missing.stderr.count("\n")) == (1, 1)
