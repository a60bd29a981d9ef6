"""The chain from the objective to the comparison: what it holds, what it catches, that it stays."""

from __future__ import annotations

import json
import shutil
import tarfile
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest

from inferscope.bench import compare, evidence, interleave, metrics, runs
from inferscope.bench.compare import Block
from inferscope.bench.evidence import Evidence
from inferscope.bench.load import LoadPlan, LoadResult
from inferscope.capture.bundle import Bundle
from inferscope.capture.retention import prune
from inferscope.cli import main
from inferscope.errors import EvidenceError
from inferscope.types import Breach

GATES = compare.parse_gates("p50:3%,p95:5%")
FINDING = {
    "id": "LOCK_CONTENTION", "class_": "scheduling", "severity": "high", "confidence": "high", "where": "rules (rules.py:7)",
    "claim": "rules is held long", "evidence": [{"metric": "share", "value": 0.6, "unit": "", "ci": None, "artefact": None}],
    "share": 0.6, "what_if_p99_ms": 12.0, "refute_by": "hold it shorter", "fix": "copy on write", "rollback": "revert the commit",
}  # fmt: skip


def status_of(*words):
    try:
        return main(list(map(str, words)))
    except SystemExit as ended:
        return ended.code


def run_of(scale, seed=0, count=3000, rate=100.0):
    rng = np.random.default_rng(seed)
    intended = (np.arange(count) * (1e9 / rate)).astype(np.int64) + 1
    done = intended + (rng.lognormal(np.log(scale), 0.2, count) * 1e6).astype(np.int64)
    return LoadResult(LoadPlan("", rate, count / rate), intended, intended, intended, done, np.full(count, 200))


def save_run(path, scale, seed=0, **settings):
    load = run_of(scale, seed)
    found = metrics.describe(load)
    document = {
        "written_unix_ns": 1, "source": {"commit": "a" * 40, "dirty": False}, "fingerprint": {"sha256": "0" * 64},
        "settings": {"target": "m:f", "mode": "open", "batch_size": None, **settings}, "warmup": {"cut": 0, "method": "none"},
        "metrics": found, "problems": [], "valid": True,
    }  # fmt: skip
    runs.save(path, document, load)
    return path


def incident(folder, identity="20260101T000000Z-score-abcd"):
    breach = Breach(identity, "score", "score", 20.0, 0.99, 1, 2, 3, 100, 5, "e_detector", 1.0, 1.0)
    bundle = Bundle.create(folder / "state" / "service" / "0", breach, {}, {})
    diagnosed = {
        "id": identity, "service": "service", "path": "", "opened_unix_ns": 1, "closed_unix_ns": None, "state": "diagnosed",
        "breach": asdict(breach), "from_ns": 1, "to_ns": 2, "latency_ms": {"p50": 8.0, "p95": 20.0, "p99": 48.0, "p999": None},
        "requests": 100, "errors": 0, "exceeding": 5, "excluded": 0, "throughput_rps": 10.0, "jitter_ms": 40.0, "device_busy": None,
        "verdict": "broken", "attribution": [], "withheld": None, "what_if": [], "findings": [FINDING], "captures": [], "notes": [],
    }  # fmt: skip
    bundle.add_json("diagnosis-1.json", {"schema": 1, **diagnosed})
    bundle.publish("diagnosed")
    return bundle.path


def comparison():
    rng = np.random.default_rng(3)
    blocks = {"a": [Block(rng.lognormal(2.0, 0.2, 200)) for _ in range(20)], "b": [Block(rng.lognormal(1.5, 0.2, 200)) for _ in range(20)]}
    # As `ab` measures them: whole nanoseconds.
    blocks = {arm: [interleave.restored(interleave.kept(each)) for each in rows] for arm, rows in blocks.items()}
    verdicts = interleave.rejudged(blocks, [20], GATES, extend=True, seed=4)
    return {
        "kind": "inferscope.comparison", "method": "interleaved", "a": "slow", "b": "fixed", "looks": [20], "extend": True, "seed": 4,
        "gates": [asdict(gate) for gate in GATES], "verdicts": [each.to_json() for each in verdicts],
        "samples": {arm: [interleave.kept(each) for each in rows] for arm, rows in blocks.items()},
    }  # fmt: skip


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("written")
    found = Evidence(tmp_path / "chain")
    found.objective(["p99<=20ms"])
    found.run(save_run(tmp_path / "run.json", 10.0))
    found.incident(incident(tmp_path))
    assert found.finding("LOCK_CONTENTION")["fix"] == "copy on write"
    found.change("copy on write", "revert the commit")
    found.comparison(comparison())
    found.seal()
    return found


@pytest.fixture
def chain(written, tmp_path):
    shutil.copytree(written.directory, tmp_path / "chain")
    return SimpleNamespace(directory=tmp_path / "chain", root=written.root)


def test_every_link_hashes_what_it_rests_on(chain):
    index = json.loads((chain.directory / "evidence.json").read_text())
    links = {row["step"]: row for row in index["links"]}
    assert list(links) == ["objective", "run", "incident", "finding", "change", "comparison"]
    assert index["missing"] == []
    for step, rests in (("incident", ["objective", "run"]), ("finding", ["incident"]), ("change", ["finding"])):
        assert links[step]["inputs"] == {name: links[name]["sha256"] for name in rests}
    assert json.loads((chain.directory / "change.json").read_text())["rollback"] == "revert the commit"
    assert evidence.verify(chain.directory, chain.root) == []
    assert "the root hash is" in evidence.verify(chain.directory, "0" * 64)[0]


def test_a_byte_anywhere_is_noticed(chain):
    paths = sorted(path for path in chain.directory.rglob("*") if path.is_file())
    assert len(paths) > 7
    for path in paths:
        content = path.read_bytes()
        middle = len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
        assert evidence.verify(chain.directory, chain.root), path.name
        path.write_bytes(content)
    (chain.directory / "more.json").write_text("{}")
    assert evidence.verify(chain.directory) == ["more.json belongs to no link"]


def rewritten(chain, name, change):
    """The chain with one file changed and every hash after it made to fit: only computing it again can tell."""
    path = chain.directory / f"{name}.json"
    value = json.loads(path.read_text())
    change(value)
    path.write_bytes(evidence._encode(value))
    index = json.loads((chain.directory / "evidence.json").read_text())
    links = {row["step"]: row for row in index["links"]}
    for row in index["links"]:
        if row["step"] == name:
            row["sha256"] = evidence._sha256(path.read_bytes())
        row["inputs"] = {each: links[each]["sha256"] for each in evidence._RESTS_ON[row["step"]] if each in links}
    (chain.directory / "evidence.json").write_bytes(evidence._encode(index))
    return evidence.verify(chain.directory)


def test_numbers_that_do_not_come_out_again_are_noticed(chain):
    def better(value):
        value["verdicts"][0] |= {"word": "NO CHANGE"}

    assert rewritten(chain, "comparison", better) == ["comparison: p50 comes out as IMPROVED, it says NO CHANGE"]


def test_a_finding_that_was_never_found_is_noticed(chain):
    found = rewritten(chain, "finding", lambda value: value["finding"].update(claim="the model is slow"))
    assert found == ["finding: it is not in the incident's diagnosis"]


def test_percentiles_of_other_requests_are_noticed(chain):
    found = rewritten(chain, "run", lambda value: value["metrics"]["latency"]["p99"].update(ms=1.0))
    assert found == ["run: its percentiles are not those of its requests"]


def test_a_part_that_cannot_be_used_is_refused(tmp_path):
    with pytest.raises(EvidenceError, match="is not empty"):
        Evidence(incident(tmp_path))
    chain = Evidence(tmp_path / "chain")
    with pytest.raises(EvidenceError, match="needs the incident"):
        chain.finding()
    broken = incident(tmp_path, "20260101T000001Z-score-beef")
    chain.incident(incident(tmp_path, "20260101T000002Z-score-cafe"))
    with pytest.raises(EvidenceError, match="no finding GC_PAUSE; it has LOCK_CONTENTION"):
        chain.finding("GC_PAUSE")
    (broken / "breach.json").write_text("{}")
    with pytest.raises(EvidenceError, match="does not verify, so it is no evidence"):
        Evidence(tmp_path / "other").incident(broken)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is damaged: not JSON"),
        ("[]", "is no index"),
        ('{"kind": "inferscope.evidence", "schema": 9}', "schema 9, this version reads 1"),
    ],
)
def test_a_damaged_or_newer_index_is_named(chain, content, said):
    (chain.directory / "evidence.json").write_text(content)
    assert said in evidence.verify(chain.directory)[0]


def test_two_runs_make_a_chain_that_travels_and_stays(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    base, candidate = save_run(tmp_path / "base.json", 10.0, 1, model="a"), save_run(tmp_path / "cand.json", 7.0, 2, model="b")
    kept = incident(tmp_path)
    state = tmp_path / "state"
    words = [
        "compare",
        base,
        candidate,
        "--slo",
        "p99<=20ms",
        "--incident",
        kept.name,
        "--state-dir",
        state,
        "--evidence",
        "--json",
        "c.json",
    ]
    assert status_of(*words) == 0
    value = json.loads((tmp_path / "c.json").read_text())
    assert value["verdicts"][0]["word"] == "IMPROVED"
    place, root = value["evidence"]["path"], value["evidence"]["root_sha256"]
    assert place.startswith(str(state / "evidence"))
    prune(kept.parent.parent, max_bytes=0, max_count=0)  # incidents come and go; evidence stays until somebody removes it
    assert not kept.exists()
    capsys.readouterr()
    assert status_of("verify", place, "--expect", root) == 0
    assert "intact, root hash" in capsys.readouterr().out
    assert status_of("bundle", place, "-o", "chain.tar.gz", "--expect", root) == 0
    with tarfile.open(tmp_path / "chain.tar.gz") as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    unpacked = next((tmp_path / "unpacked").iterdir())
    assert status_of("verify", unpacked, "--expect", root) == 0
    (unpacked / "change.json").write_text("{}")
    assert status_of("verify", unpacked) == 1
    assert "change.json was changed" in capsys.readouterr().out
    assert status_of("bundle", unpacked) == 1


def test_more_than_one_change_is_a_warning_on_the_verdict(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    base = save_run(tmp_path / "base.json", 10.0, 1, model="a", precision="fp32")
    candidate = save_run(tmp_path / "cand.json", 7.0, 2, model="b", precision="fp16")
    assert status_of("compare", base, candidate, "--vary", "precision", "--json", "c.json", "--md", "-") == 0
    out = capsys.readouterr().out
    value = json.loads((tmp_path / "c.json").read_text())
    assert value["changed"] == ["model", "precision"]
    assert "2 variables changed (model, precision), so it cannot be said which of them did it" in value["verdicts"][0]["warning"]
    assert "2 variables changed" in out
    single = save_run(tmp_path / "single.json", 7.0, 2, model="b", precision="fp32")
    assert status_of("compare", base, single, "--json", "c.json") == 0
    assert json.loads((tmp_path / "c.json").read_text())["verdicts"][0]["warning"] == ""


def test_the_bottleneck_moves_and_that_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, scale, cause, share in (("base", 10.0, "lock:rules", 0.61), ("cand", 7.0, "forward", 0.8)):
        path = save_run(tmp_path / f"{name}.json", scale, 1, model="m")
        document = json.loads(path.read_text())
        rows = [{"name": "other", "share": 0.1, "ci": None}, {"name": cause, "share": share, "ci": [share - 0.05, share + 0.05]}]
        path.write_text(json.dumps({**document, "inside": {"verdict": "", "attribution": rows}}))
    assert status_of("compare", "base.json", "cand.json") == 0
    out = capsys.readouterr().out
    assert "top cause before: lock:rules 61 % [56, 66] of what the tail takes longer" in out
    assert "top cause now: forward 80 % [75, 85]" in out


def test_an_acceptance_record_is_recomputed_from_its_run(tmp_path, monkeypatch, functions, capsys):
    monkeypatch.chdir(functions)
    common = ["bench", "functions:score", "--inputs", "inputs.jsonl", "--repeat", 400, "--warmup", 0, "--baseline", 0]
    assert status_of(*common, "--accept", "p50<=200ms", "--release", "2.1", "--acceptance", "accepted.json", "--junit", "j.xml") == 0
    record = json.loads((functions / "accepted.json").read_text())
    assert (record["accepted"], record["release"], record["objectives"][0]["word"]) == (True, "2.1", "HOLDS")
    assert 'name="p50&lt;=200ms"' in (functions / "j.xml").read_text()
    capsys.readouterr()
    assert status_of("verify", "accepted.json") == 0
    shutil.copytree(functions, tmp_path / "moved")
    assert status_of("verify", tmp_path / "moved" / "accepted.json") == 0
    (functions / "accepted.json").write_text(json.dumps({**record, "accepted": False}))
    assert status_of("verify", "accepted.json") == 1
    assert "it says accepted: False, and it comes out as True" in capsys.readouterr().out
    (functions / "accepted.run.json").write_text("{}")
    assert status_of("verify", "accepted.json") == 1
