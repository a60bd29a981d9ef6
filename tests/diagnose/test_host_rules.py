"""Rules that need host evidence or traces; the services of `tests/faults` plant most of these causes for real."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest

from inferscope.diagnose import diagnose, merge
from inferscope.diagnose.findings import Context, evaluate
from inferscope.diagnose.rules import ALL
from inferscope.diagnose.rules.device import capture_under_overload, low_utilisation
from inferscope.diagnose.trace import Operator, TraceSummary
from inferscope.types import Breach, CaptureSummary, Finding

MS = 1_000_000
S = 1_000_000_000
IN_PREPROCESS = (0, 0, 40 * MS, 0, 5 * MS)


def diagnosed(service, document):
    return {finding.id: finding for finding in diagnose(Breach(**service.breach()), [json.loads(json.dumps(document))]).findings}


def values(finding):
    return {evidence.metric: evidence.value for evidence in finding.evidence}


def host(document, **parts):
    made = copy.deepcopy(document)
    made["host"] = {
        "requests": [], "first_request_ns": 0, "gc": [], "scheduling": {"reason": None, "seconds": []},
        "samples": {"reason": None, "from_ns": None, "to_ns": None, "threads": [], "sites": []},
        "cgroup": {"quota": None, "allowed_cpus": 2, "cpus": 2, "ticks": []}, **parts,
    }  # fmt: skip
    return made


def request(number, wall_ms, *, size=1.0, error=None, start_s=0.0, thread=7, spans=(), vector=(), band=None):
    start = int(start_s * S)
    return {
        "id": number, "start_ns": start, "wall_ns": int(wall_ms * MS), "band": 99 if band is None else band, "slow": wall_ms > 20,
        "thread": thread, "size": size, "items": 1, "error": error, "cpu_ns": None, "voluntary": None, "involuntary": None,
        "vector": list(vector), "spans": [list(span) for span in spans],
    }  # fmt: skip


@pytest.fixture
def starved(document):
    made = copy.deepcopy(document)
    made["columns"][5] = ["cpu", "run-queue"]
    return made


def test_a_quota_that_stops_the_group_is_named_instead_of_preemption(service, starved):
    ticks = [[n * S, 10, 4, 30 * MS, None] for n in range(1, 10)]
    found = diagnosed(service, host(starved, cgroup={"quota": 1.5, "allowed_cpus": 2, "cpus": 2, "ticks": ticks}))
    assert values(found["CGROUP_THROTTLE"])["enforcement periods in which the quota stopped the group"] == 40.0
    assert values(found["CGROUP_THROTTLE"])["CPUs that the quota allows"] == 1.5
    assert "CPU_PREEMPTION" not in found
    seldom = [[n * S, 10, 0, 0, None] for n in range(1, 10)]
    found = diagnosed(service, host(starved, cgroup={"quota": 1.5, "allowed_cpus": 2, "cpus": 2, "ticks": seldom}))
    assert "CGROUP_THROTTLE" not in found
    assert found["CPU_PREEMPTION"].severity == "high"


def test_sizes_explain_a_slow_stage_and_it_steps_down(service):
    requests = service.simulate(60, 200, seed=4, copy_rate=0, lock_rate=0)
    requests.vectors[requests.start % (2 * 10**9) < 10**8, 2] += 40 * MS
    document = service.evidence(requests, [20 * MS], keep=16)
    kept = [request(n, 45, size=30 + n, vector=IN_PREPROCESS) for n in range(20)] + [request(100 + n, 8, size=1 + n % 5) for n in range(40)]
    incident = diagnose(Breach(**service.breach()), [host(document, requests=kept)])
    assert [(f.id, f.severity) for f in incident.findings[:2]] == [("INPUT_SIZE", "high"), ("STAGE_SLOW", "medium")]
    same = [request(n, 45, size=3, vector=IN_PREPROCESS) for n in range(20)] + [request(100 + n, 8, size=1 + n % 5) for n in range(40)]
    assert "INPUT_SIZE" not in diagnosed(service, host(document, requests=same))
    unknown = [request(n, 45, size=None, vector=IN_PREPROCESS) for n in range(60)]
    assert "INPUT_SIZE" not in diagnosed(service, host(document, requests=unknown))


def test_failing_slow_requests_are_told(service, document):
    kept = [request(n, 45, error="TimeoutError" if n % 2 else None) for n in range(20)] + [request(100 + n, 8) for n in range(40)]
    finding = diagnosed(service, host(document, requests=kept))["RETRY_OR_ERROR"]
    assert values(finding)["slow requests that failed"] == 50.0
    assert values(finding)["most frequent error"] == "TimeoutError"
    fine = [request(n, 45) for n in range(20)] + [request(100 + n, 8) for n in range(40)]
    assert "RETRY_OR_ERROR" not in diagnosed(service, host(document, requests=fine))


def test_slow_requests_of_the_first_seconds_are_a_cold_start(service, document):
    kept = [request(n, 45, start_s=n / 10) for n in range(20)] + [request(100 + n, 8, start_s=n * 7) for n in range(40)]
    finding = diagnosed(service, host(document, requests=kept))["COLD_START"]
    assert finding.severity == "high"
    spread = [request(n, 45, start_s=15 * n) for n in range(20)] + [request(100 + n, 8, start_s=n * 7) for n in range(40)]
    assert "COLD_START" not in diagnosed(service, host(document, requests=spread))


@pytest.mark.parametrize(("waits", "name"), [([60.0] * 12, "BATCH_TIMEOUT"), ([5.0 * n for n in range(1, 15)], "BATCH_CAPACITY")])
def test_waits_for_a_batch_are_a_timer_or_a_full_instance(service, document, waits, name):
    made = copy.deepcopy(document)
    made["columns"][5] = ["queue", "batch"]
    kept = [request(n, 80, vector=[0, 0, 0, 0, 0, int(wait * MS), 0]) for n, wait in enumerate(waits)]
    found = diagnosed(service, host(made, requests=kept))
    assert {key for key in found if key.startswith("BATCH")} == {name}


def test_a_holder_that_waits_itself_is_told(service, document):
    site = {"site": "reload (rules.py)", "cpu_us": 1000, "delay_us": 0, "blocked_us": [0, 0, 900_000, 0, 99_000, 0]}
    samples = {"reason": None, "from_ns": 0, "to_ns": S, "threads": [], "sites": [site]}
    finding = diagnosed(service, host(document, samples=samples))["LOCK_HOLDER_SLOW"]
    assert values(finding)["holder's time in input or output"] == 99.0
    site["blocked_us"], site["cpu_us"] = [0, 0, 900_000, 0, 0, 0], 100_000
    assert "LOCK_HOLDER_SLOW" not in diagnosed(service, host(document, samples=samples)), "those in the lock state wait for the holder"


def test_telemetry_threads_that_use_a_cpu_are_mentioned(service, document):
    seconds = [[n * S, S, 300 * MS, 0, 0, 0, 100 * MS, 9, 1, 1] for n in range(1, 5)]
    finding = diagnosed(service, host(document, scheduling={"reason": None, "seconds": seconds}))["TELEMETRY_OVERHEAD"]
    assert (finding.severity, values(finding)["CPU time of telemetry threads"]) == ("low", 10.0)


def test_reads_in_a_loop_are_batched(service, document):
    made = copy.deepcopy(document)
    made["columns"][3] = ["copy", "d2h"]
    n = made["classes"][0]["count"]
    made["copies"] = [
        {"name": "d2h", "site": "loop (serve.py:5)", "count": 6 * n, "bytes": 24 * n, "wall_ns": n * MS, "sync": 6 * n, "pageable": 0}
    ]
    made["series"] = [{"kind": "copy", "labels": ["d2h"], "count": 6 * n, "sum_ns": 1, "p50_ns": 1, "p99_ns": 1, "max_ns": 1}]
    found = diagnosed(service, made)
    assert values(found["D2H_IN_LOOP"])["reads a request"] == 6.0
    assert "MANY_SMALL_COPIES" not in found


@pytest.fixture
def context(service, document):
    horizon = merge([document], "score")
    incident = diagnose(Breach(**service.breach()), [document])
    from inferscope.diagnose import attribute, plan

    attribution = attribute(horizon, 20 * MS)
    return Context(incident.breach, horizon, attribution, plan(horizon, attribution, 20.0), objective_broken=True)


def capture(number, *, slow=True, operators=(), **changes):
    values_ = {"events": 900, "window_ms": 40.0, "launches": 300, "device_events": 300, "device_busy": 0.2, "device_ms": 1.5, **changes}
    trace = TraceSummary(
        threads=(7,), base_unix_ns=0, operators=tuple(operators), transfers=(), synchronisations=(Operator("cudaStreamSynchronize", 5, 12.0),),
        synchronous_copies=0, **values_,
    )  # fmt: skip
    return CaptureSummary(f"c{number}", 1, (number,), slow, 900, 0.1, (7,), f"captures/c{number}.trace.json"), trace


def test_only_the_driver_says_that_a_device_idles(context):
    assert not list(low_utilisation(context))
    (finding,) = low_utilisation(replace(context, horizon=replace(context.horizon, device_busy=0.3)))
    assert (finding.severity, values(finding)["device busy, from its driver"]) == ("info", 30.0)


def test_profiles_of_a_starved_process_are_qualified(service, document, context):
    seconds = [[n * S, S, 300 * MS, 300 * MS, 0, 0, 0, 9, 1, 1] for n in range(1, 5)]
    horizon = merge([host(document, scheduling={"reason": None, "seconds": seconds})], "score")
    assert not list(capture_under_overload(replace(context, horizon=horizon)))
    (finding,) = capture_under_overload(replace(context, horizon=horizon, captures=(capture(1),)))
    assert "50 %" in finding.claim


def test_what_says_why_comes_before_what_says_where(context):
    def made(id_, share, severity="high", where="forward"):
        return Finding(id_, "compute", severity, "high", where, "claim", (), share, None, "refute", "fix", "rollback")

    findings = [made("MODEL_SLOW", 0.8), made("LOCK_CONTENTION", 0.3), made("INPUT_SIZE", 0.8)]
    ranked = evaluate(context, [lambda _: findings])
    assert [(f.id, f.severity) for f in ranked] == [("INPUT_SIZE", "high"), ("LOCK_CONTENTION", "high"), ("MODEL_SLOW", "medium")]
    weak = [made("MODEL_SLOW", 0.8), made("INPUT_SIZE", 0.8, "low")]
    assert [f.id for f in evaluate(context, [lambda _: weak])] == ["MODEL_SLOW", "INPUT_SIZE"]


def test_every_finding_of_a_document_without_host_evidence_stays_measured(service, document):
    for finding in diagnose(Breach(**service.breach()), [document]).findings:
        assert finding.evidence
    assert len(ALL) == len(set(ALL))
