"""Load and CPUs: rules whose evidence is laid out here second by second."""

from __future__ import annotations

import base64
import copy
import json

import numpy as np
import pytest

from inferscope.diagnose import diagnose
from inferscope.types import Breach

MS = 1_000_000
S = 1_000_000_000
EDGE = 20 * MS


def diagnosed(service, document, threshold_ms=20.0):
    incident = diagnose(Breach(**service.breach(threshold_ms)), [json.loads(json.dumps(document))])
    return {finding.id: finding for finding in incident.findings}


def values(finding):
    return {evidence.metric: evidence.value for evidence in finding.evidence}


def thread(number, name, intervals):
    """Intervals of (end ms, length ms, cpu ms, run-queue ms, state)."""
    packed = np.array(
        [[end * 1e3, cpu * 1e3, delay * 1e3, (int(length * 1e3) << 3) | state] for end, length, cpu, delay, state in intervals]
    )
    return {"thread": number, "name": name, "rows": base64.b64encode(packed.astype(np.uint32).tobytes()).decode()}


def host(document, requests, threads=(), **parts):
    made = copy.deepcopy(document)
    made["host"] = {
        "requests": requests, "first_request_ns": 0, "gc": [], "scheduling": {"reason": None, "seconds": []},
        "samples": {"reason": None, "from_ns": 0, "to_ns": 60 * S, "samples": 1, "threads": list(threads), "sites": []},
        "cgroup": {"quota": None, "allowed_cpus": 2, "cpus": 4, "ticks": []}, **parts,
    }  # fmt: skip
    return made


def request(number, start_ms, wall_ms, *, thread_id=7, size=1.0, spans=(), vector=(0, 0, 0, 0, 0, 0, 0), cpu_ms=None):
    return {
        "id": number, "start_ns": int(start_ms * MS), "wall_ns": int(wall_ms * MS), "band": 99, "slow": wall_ms > 20, "thread": thread_id,
        "size": size, "items": 1, "error": None, "cpu_ns": None if cpu_ms is None else int(cpu_ms * MS), "voluntary": None,
        "involuntary": None, "vector": list(vector), "spans": [list(span) for span in spans],
    }  # fmt: skip


@pytest.fixture(scope="module")
def stalled(service):
    """Slow requests have 40 ms more in preprocess (column 2)."""
    requests = service.simulate(60, 200, seed=4, copy_rate=0, lock_rate=0)
    requests.vectors[requests.start % (2 * 10**9) < 10**8, 2] += 40 * MS
    return service.evidence(requests, [EDGE], keep=16)


def slow_requests(count=20, **more):
    """One slow request every 200 ms, all of it in preprocess."""
    return [
        request(
            n,
            200 * n,
            50,
            vector=(0, 0, 50 * MS, 0, 0, 0, 0),
            spans=[(2, 200 * n * MS, (200 * n + 50) * MS, -1, 7)],
            **more,
        )
        for n in range(count)
    ]


def windows(cpu, delay, state, count=20):
    """Five intervals of 10 ms in each of these requests."""
    return [(200 * n + 10 * k, 10, cpu, delay, state) for n in range(count) for k in range(1, 6)]


def test_the_thread_that_computed_is_named(service, stalled):
    threads = [thread(7, "serve-1", windows(1, 0, 1)), thread(8, "encoder", windows(9, 0, 0)), thread(9, "idle", windows(0, 0, 2))]
    found = diagnosed(service, host(stalled, slow_requests(), threads))
    finding = found["GIL_CONTENTION"]
    assert (finding.severity, finding.confidence, finding.where) == ("high", "high", "thread encoder")
    assert values(finding)["Python threads' CPU time used by encoder meanwhile"] == 90.0
    threads[1]["name"] = "OtelBatchSpanRecordProcessor"
    assert diagnosed(service, host(stalled, slow_requests(), threads))["TELEMETRY_OVERHEAD"].severity == "high"
    threads[1:2] = []
    assert diagnosed(service, host(stalled, slow_requests(), threads))["GIL_CONTENTION"].where == "interpreter lock"


def test_own_threads_are_told_from_other_processes(service, stalled):
    waiting = thread(7, "serve-1", windows(1, 9, 0))
    pool = [thread(100 + n, None, windows(9, 1, 0)) for n in range(2)]
    found = diagnosed(service, host(stalled, slow_requests(), [waiting, *pool]))
    assert "CPU_PREEMPTION" not in found
    assert values(found["THREAD_OVERSUB"])["CPUs used by this process while slow requests ran"] == pytest.approx(1.9)
    found = diagnosed(service, host(stalled, slow_requests(), [waiting]))
    assert "THREAD_OVERSUB" not in found
    assert values(found["CPU_PREEMPTION"])["CPUs used by this process while slow requests ran"] == "0.10 of 2"


def test_a_blocked_stage_is_named_and_a_models_is_left_alone(service, stalled):
    blocked = [thread(7, "serve-1", windows(1, 0, 4))]
    found = diagnosed(service, host(stalled, slow_requests(), blocked))
    assert found["IO_IN_REQUEST"].where == "stage preprocess"
    assert found["IO_IN_REQUEST"].severity == "high"
    model = copy.deepcopy(stalled)
    model["columns"][2] = ["stage", "model"]
    found = diagnosed(service, host(model, slow_requests(), blocked))
    assert "IO_IN_REQUEST" not in found
    assert "MODEL_SLOW" in found


def queued(service, share_ms, seconds=60, qps=200):
    requests = service.simulate(seconds, qps, seed=4, copy_rate=0, lock_rate=0)
    requests.vectors[requests.start % (2 * 10**9) < 2 * 10**8, 6] += int(share_ms * MS)
    document = service.evidence(requests, [EDGE], keep=16)
    document["columns"][6] = ["queue", "backlog"]
    return document


def test_arrivals_times_service_time_beyond_the_workers_is_saturation(service):
    document = queued(service, 60)
    few = [request(n, 200 * n, 70, thread_id=n % 2, cpu_ms=1) for n in range(20)]
    finding = diagnosed(service, host(document, few))["SATURATION"]
    assert finding.severity == "high"
    assert values(finding)["workers"] == 2
    assert 70 < values(finding)["utilisation of the workers"] < 100
    many = [request(n, 200 * n, 70, thread_id=n % 10, cpu_ms=1) for n in range(20)]
    found = diagnosed(service, host(document, many))
    assert "SATURATION" not in found
    assert "QUEUEING" in found
    loop = [request(n, 20 * n, 70, thread_id=1, cpu_ms=1) for n in range(20)]
    assert "SATURATION" not in diagnosed(service, host(document, loop)), "an event loop serves many at a time"
    spans = [[(2, 200 * n * MS, (200 * n + 60) * MS, -1, 100 + n % 2)] for n in range(20)]
    pool = [request(n, 200 * n, 70, thread_id=1, spans=spans[n]) for n in range(20)]
    assert values(diagnosed(service, host(document, pool))["SATURATION"])["workers"] == 2


def test_small_requests_behind_a_large_one(service):
    document = queued(service, 60)
    large = [request(n, 500 * n, 80, size=50.0, thread_id=1) for n in range(10)]
    small = [request(100 + n, 500 * n + 5, 70, thread_id=2, spans=[(6, (500 * n + 5) * MS, (500 * n + 70) * MS, -1, 2)]) for n in range(10)]
    ordinary = [request(200 + n, 400 + 500 * n, 8, size=1.0 + n % 3, thread_id=n % 10) for n in range(20)]
    finding = diagnosed(service, host(document, [*large, *small, *ordinary]))["HEAD_OF_LINE"]
    assert values(finding)["waiting behind a large request"] == 100.0
    apart = [request(n, 500 * n + 200, 80, size=50.0, thread_id=1) for n in range(10)]
    assert "HEAD_OF_LINE" not in diagnosed(service, host(document, [*apart, *small, *ordinary]))


def test_repeated_runs_of_a_stage_are_retries(service, stalled):
    document = copy.deepcopy(stalled)
    n = document["classes"][0]["count"]
    document["series"].append(
        {"kind": "stage", "labels": ["preprocess"], "count": int(1.1 * n), "sum_ns": 1, "p50_ns": 1, "p99_ns": 1, "max_ns": 1}
    )
    repeated = slow_requests()
    for row in repeated:
        start = row["start_ns"]
        row["spans"] = [[2, start + k * 15 * MS, start + (k + 1) * 15 * MS, -1, 7] for k in range(3)]
    finding = diagnosed(service, host(document, repeated))["RETRY_OR_ERROR"]
    assert values(finding)["runs of preprocess in a slow request"] == 3.0
    assert "RETRY_OR_ERROR" not in diagnosed(service, host(document, slow_requests()))
