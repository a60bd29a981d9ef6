"""pprof files of incidents that a service left to the command line (`diagnose="deferred"` or `"off"`)."""

from __future__ import annotations

import fcntl
import gzip
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from inferscope import cli
from inferscope.capture.bundle import Bundle, list_incidents, verify
from inferscope.capture.chain import manifest_numbers
from inferscope.types import Breach

STACKS = {
    "schema": 1, "slot": 0, "period_s": 0.02, "from_ns": 1, "to_ns": 400, "dropped": 0, "request": "score", "reason": "slow",
    "stacks": [{"stage": "rules", "samples": 3, "requests": [5], "frames": [["apply", "rules.py", 12], ["handle", "app.py", 40]]}],
}  # fmt: skip

LIVE = """
import contextlib, io, json, sys, time
import torch
import inferscope as scope
from inferscope import cli
from inferscope.capture import incident
incident.CAPTURE_S, incident.SETTLE_S = 2.0, 0.3
torch.set_num_threads(1)
x = torch.ones(32, 32)
scope.configure(service="later", slo=scope.SLO("score", p99_ms=500), tick_s=0.1, diagnose=sys.argv[1])
def serve(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with scope.request("score"), scope.stage("work"):
            (x @ x).sum()
        time.sleep(0.005)
serve(0.3)
scope.capture_now(reason="test", requests=2)
deadline = time.monotonic() + 20
while scope.status()["incident"] and time.monotonic() < deadline:
    serve(0.1)
said = io.StringIO()
with contextlib.redirect_stdout(said):
    cli.main(["explain"])
print(json.dumps({"said": said.getvalue(), "failures": scope.status()["failures"]}))
scope.shutdown()
"""


@pytest.fixture(scope="module")
def planted():
    """What the tests of the diagnosis plant."""
    spec = importlib.util.spec_from_file_location("planted_later", Path(__file__).parents[1] / "diagnose" / "service.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    evidence = json.loads(json.dumps(module.evidence(module.simulate(60, 200, seed=3), [20 * module.MS])))
    return SimpleNamespace(breach=module.breach(), evidence=evidence)


@pytest.fixture
def deferred(state_dir, planted):
    """A closed incident with stacks of the sampler and no diagnosis, as a service leaves it."""
    identity = "20260101T000000Z-score-0001"
    made = Bundle.create(state_dir / "shop" / "0", Breach(**{**planted.breach, "id": identity}), {}, {"name": "score"}, {})
    made.add_json("evidence-0-1.json", planted.evidence)
    made.add_json("stacks-0-1.json", STACKS)
    made.publish("captured")
    made.publish("closed")
    slots = state_dir / "shop" / "slots"
    slots.mkdir()
    (slots / "0.lock").touch()
    return made.path


def pprof(path):
    """Contents of the incident's pprof files."""
    return [gzip.decompress(each.read_bytes()) for each in path.glob("profiles/*.pb.gz")]


def test_explain_adds_them_to_the_chain_once(deferred, capsys):
    before = Bundle.open(deferred).root_hash
    cli.main(["explain", deferred.name])
    assert "profiles/wall-1.pb.gz" in capsys.readouterr().out
    assert any(b"rules.py" in content for content in pprof(deferred))
    assert verify(deferred) == []
    assert manifest_numbers(deferred) == [1, 2, 3]
    added = json.loads((deferred / "manifest-3.json").read_text())
    assert (added["previous_sha256"], added["state"]) == (before, "closed")
    cli.main(["explain", deferred.name])
    assert "pprof" not in capsys.readouterr().out
    assert manifest_numbers(deferred) == [1, 2, 3]


def test_ship_carries_them_and_carries_once(deferred, tmp_path, capsys):
    to = tmp_path / "away"
    assert cli.main(["ship", "--to", str(to)]) == 0
    copy = to / "shop" / "0" / "incidents" / deferred.name
    assert any(b"rules.py" in content for content in pprof(copy))
    assert verify(copy, Bundle.open(deferred).root_hash) == []
    capsys.readouterr()
    assert cli.main(["ship", "--to", str(to)]) == 0
    assert "there already" in capsys.readouterr().out


def test_nothing_is_added_where_somebody_may_still_write(deferred):
    with (deferred.parents[2] / "slots" / "0.lock").open("r+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        cli.main(["explain", deferred.name])
        assert manifest_numbers(deferred) == [1, 2]
        assert not pprof(deferred)
    cli.main(["explain", deferred.name])
    assert pprof(deferred)


def test_an_incident_that_is_not_closed_stays_as_it_is(state_dir, deferred):
    (deferred / "manifest-2.json").unlink()
    cli.main(["explain", deferred.name])
    assert manifest_numbers(deferred) == [1]
    assert not pprof(deferred)


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["deferred", "off"])
def test_beside_a_live_service_that_does_not_diagnose(mode, state_dir, tmp_path):
    pytest.importorskip("torch")
    path = tmp_path / "later.py"
    path.write_text(LIVE)
    done = subprocess.run([sys.executable, str(path), mode], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["failures"] == {}
    assert "torch_self_cpu" in told["said"]
    (found,) = list_incidents(state_dir)
    assert any(b"aten::" in content for content in pprof(found))
    assert verify(found) == []
