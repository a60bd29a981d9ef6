"""Findings: planted causes are named with their numbers, healthy services stay quiet."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest

from inferscope.diagnose import diagnose
from inferscope.diagnose.rules import ALL
from inferscope.types import Breach

MS = 1_000_000


@pytest.fixture(scope="module")
def findings(service, document):
    incident = diagnose(Breach(**service.breach()), [document])
    return {finding.id: finding for finding in incident.findings}


def values(finding):
    return {evidence.metric: evidence.value for evidence in finding.evidence}


def diagnosed(service, document, **changes):
    return {finding.id: finding for finding in diagnose(Breach(**service.breach(**changes)), [document]).findings}


def test_headline_has_two_causes_and_an_acquittal(findings):
    assert [(f.id, f.severity, f.class_) for f in findings.values()] == [
        ("H2D_SYNC_PAGEABLE", "high", "communication"),
        ("LOCK_CONTENTION", "high", "scheduling"),
        ("MODEL_NOT_THE_CAUSE", "info", "compute"),
    ]


def test_every_finding_has_evidence_and_a_refutation(findings):
    for finding in findings.values():
        assert finding.evidence
        assert any(isinstance(evidence.value, (int, float)) for evidence in finding.evidence)
        assert all(len(text) > 20 for text in (finding.claim, finding.refute_by, finding.fix))
        assert finding.share is not None


def test_copy_finding_says_what_was_measured(findings, requests):
    finding = findings["H2D_SYNC_PAGEABLE"]
    assert finding.where == "score (serve.py:20)"
    found = values(finding)
    n = len(requests.wall)
    assert found["copies that blocked the host"] == found["copies from pageable memory"] == f"{n} of {n}"
    assert found["mean size of a copy"] == 256.0
    assert found["copy time of the slowest requests that blocked on pageable memory"] == 100.0
    assert finding.evidence[0].ci[0] < 100 * finding.share < finding.evidence[0].ci[1]


def test_lock_finding_names_the_root(findings):
    finding = findings["LOCK_CONTENTION"]
    assert finding.where == "reload (rules.py:41)"
    found = values(finding)
    assert found["waiting rooted at this site"] == 90.0
    assert found["longest hold at this site"] == 49.0
    assert "in stage rules" in finding.claim


def test_acquittal_carries_its_interval_and_the_mean_profile(findings):
    finding = findings["MODEL_NOT_THE_CAUSE"]
    assert finding.evidence[0].ci[1] < 10
    assert values(finding)["share of all request time, slow or not"] > 50
    assert finding.what_if_p99_ms > 30


def test_pinned_copies_get_no_pageable_advice(service, document):
    pinned = copy.deepcopy(document)
    pinned["copies"][0]["pageable"] = 0
    found = diagnosed(service, pinned)
    assert "H2D_SYNC_PAGEABLE" not in found
    assert found["COPY_WAIT"].where == "score (serve.py:20)"
    unknown = copy.deepcopy(document)
    unknown["copies"] = []
    assert "H2D_SYNC_PAGEABLE" not in diagnosed(service, unknown)


def test_many_small_copies_are_packed(service, document):
    small = copy.deepcopy(document)
    n = small["classes"][0]["count"]
    small["copies"][0].update(count=900, bytes=900 * 2048, sync=900, pageable=900)
    small["copies"].append({**small["copies"][0], "site": "other (serve.py:9)", "count": 300, "sync": 300, "bytes": 300 << 20})
    small["series"] = [{"kind": "copy", "labels": ["h2d"], "count": 16 * n, "sum_ns": 1, "p50_ns": 1, "p99_ns": 1, "max_ns": 1}]
    finding = diagnosed(service, small)["MANY_SMALL_COPIES"]
    assert values(finding)["copies a request"] == 12.0
    assert values(finding)["mean size of a copy"] == 2.0
    assert finding.severity == "medium"
    assert "MANY_SMALL_COPIES" not in diagnosed(service, document)


def test_waiting_for_the_interpreter_is_told_by_elimination(service, document):
    held = copy.deepcopy(document)
    held["columns"][5] = ["cpu", "gil"]
    finding = diagnosed(service, held)["GIL_CONTENTION"]
    assert (finding.severity, finding.confidence) == ("high", "medium")
    assert values(finding)["Python threads"] == 9


def test_lock_without_a_seen_holder_is_less_certain(service, document):
    blind = copy.deepcopy(document)
    blind["locks"] = []
    finding = diagnosed(service, blind)["LOCK_CONTENTION"]
    assert (finding.where, finding.confidence) == ("lock rules", "medium")


def test_healthy_service_hears_nothing_loud(service):
    for seed in range(6):
        quiet = service.evidence(service.simulate(60, 200, seed=seed, copy_rate=0.02, lock_rate=0.02), [20 * MS], keep=4)
        assert all(f.severity in {"low", "info"} for f in diagnosed(service, quiet).values())


def test_objective_that_holds_keeps_even_clear_causes_low(service, document):
    loose = copy.deepcopy(document)
    found = diagnosed(service, loose, quantile=0.90)
    assert found["LOCK_CONTENTION"].severity == "low"


def test_too_few_episodes_are_low_confidence(service):
    few = service.evidence(service.simulate(8, 200, seed=4), [20 * MS], keep=8)
    found = diagnosed(service, few)
    assert found
    assert {(f.severity, f.confidence) for f in found.values()} == {("low", "low")}


def test_slow_model_is_named_when_it_is_the_cause(service):
    requests = service.simulate(60, 200, seed=4, copy_rate=0, lock_rate=0)
    slow = requests.start % (2 * 10**9) < 10**8
    requests.vectors[slow, 4] *= 6
    found = diagnosed(service, service.evidence(requests, [20 * MS], keep=16))
    assert found["MODEL_SLOW"].severity == "high"
    assert found["MODEL_SLOW"].where == "forward"
    assert "MODEL_NOT_THE_CAUSE" not in found


def test_slow_stage_is_not_the_model(service):
    requests = service.simulate(60, 200, seed=4, copy_rate=0, lock_rate=0)
    requests.vectors[requests.start % (2 * 10**9) < 10**8, 2] += 30 * MS
    found = diagnosed(service, service.evidence(requests, [20 * MS], keep=16))
    assert found["STAGE_SLOW"].where == "preprocess"
    assert "MODEL_NOT_THE_CAUSE" in found


def test_unattributed_excess_says_where_the_gap_lies(service):
    requests = service.simulate(60, 200, seed=4, copy_rate=0, lock_rate=0)
    requests.vectors[requests.start % (2 * 10**9) < 10**8, 0] += 30 * MS
    finding = diagnosed(service, service.evidence(requests, [20 * MS], keep=16))["UNATTRIBUTED_HIGH"]
    assert finding.where == "after rules"
    assert finding.severity == "medium"
    assert finding.confidence == "low"


def queued(service, *, base_ms=0.0, seed=4):
    """Column 6 becomes a queue for the thread pool that fills while copies stall."""
    requests = service.simulate(60, 200, seed=seed, lock_rate=0)
    requests.vectors[:, 6] += int(base_ms * MS)
    stalled = requests.vectors[:, 3] > 15 * MS
    requests.vectors[stalled, 6] += requests.vectors[stalled, 3] // 2
    document = service.evidence(requests, [20 * MS], keep=16)
    document["columns"][6] = ["queue", "threadpool"]
    return document


def test_queueing_behind_stalled_workers_names_what_occupied_them(service):
    document = queued(service)
    records = document["classes"][0]["slowest"]
    start = min(record["start_ns"] for record in records)
    for record in records:  # all slow requests fall into one episode: they queue while the others copy
        shift = start - record["start_ns"]
        record["start_ns"] += shift
        queue = record["spans"].pop()
        queue[1], queue[2] = record["start_ns"], record["start_ns"] + 30 * MS
        record["spans"] = [[span[0], span[1] + shift, span[2] + shift, *span[3:]] for span in record["spans"]] + [queue]
    incident = diagnose(Breach(**service.breach()), [document])
    assert "The wait in queue:threadpool follows from copy:h2d, which occupies the workers." in incident.verdict
    finding = next(finding for finding in incident.findings if finding.id == "QUEUEING")
    assert "mostly by copy:h2d: a consequence" in finding.claim
    assert finding.fix.startswith("Fix copy:h2d first")
    assert [f.id for f in incident.findings][:2] == ["H2D_SYNC_PAGEABLE", "QUEUEING"]
    assert finding.severity == "medium"
    assert values(finding)["workers' time in copy:h2d during these waits"] > 50
    assert finding.share == pytest.approx(0.33, abs=0.05)


def test_queueing_of_ordinary_requests_is_load(service):
    finding = diagnosed(service, queued(service, base_ms=8.0))["QUEUEING"]
    assert "loaded beyond its workers" in finding.claim
    assert "Add workers" in finding.fix


def test_long_collection_is_low_until_it_owns_the_excess(service, document):
    long = copy.deepcopy(document)
    long["series"][0].update(count=4, sum_ns=200 * MS, max_ns=57 * MS)
    finding = diagnosed(service, long)["GC_PAUSE"]
    assert finding.severity == "low"
    assert values(finding)["longest pause"] == 57.0
    owning = copy.deepcopy(long)
    owning["columns"][5] = ["gc", "gen2"]
    assert diagnosed(service, owning)["GC_PAUSE"].severity == "high"
    owning["columns"][5] = ["gc", "gen1"]
    owning["series"].append({**owning["series"][0], "labels": ["gen1"], "count": 7, "max_ns": 9 * MS})
    finding = diagnosed(service, owning)["GC_PAUSE"]
    assert (finding.where, values(finding)["longest pause"]) == ("garbage collector, generation 1", 9.0)


def test_short_collections_are_not_mentioned(service, document):
    assert document["gc"][0]["max_ns"] > 100 * MS, "before the horizon"
    assert "GC_PAUSE" not in diagnosed(service, document)


def test_run_queue_delay_is_preemption(service, document):
    starved = copy.deepcopy(document)
    starved["columns"][5] = ["cpu", "run-queue"]
    finding = diagnosed(service, starved)["CPU_PREEMPTION"]
    assert values(finding)["threads for each CPU"] == 4.5


def test_rules_are_registered_once():
    assert len(set(ALL)) == len(ALL) >= 30


def test_the_documentation_lists_every_finding():
    root = Path(__file__).resolve().parents[2]
    table = (root / "docs" / "diagnosis.md").read_text().partition("## Findings")[2].partition("## A trace")[0]
    said = set(
        re.findall(
            r"`([A-Z0-9]+(?:_[A-Z0-9]+)+|QUEUEING|SATURATION)`", "".join(row for row in table.splitlines(True) if row.startswith("|"))
        )
    )
    sources = "".join(path.read_text() for path in (root / "inferscope" / "diagnose" / "rules").glob("*.py"))
    emitted = set(re.findall(r'"((?:[A-Z0-9]{2,}_)+[A-Z0-9]+|QUEUEING|SATURATION)"', sources))
    emitted |= {f"{way}_SYNC_PAGEABLE" for way in ("H2D", "D2H")}
    assert said == emitted
