"""Findings about calls to a Triton server, planted in the evidence of a service whose copies are made calls."""

from __future__ import annotations

import copy

import pytest

from inferscope.diagnose import diagnose
from inferscope.types import Breach

MS = 1_000_000
CALLS = {"system": "triton", "method": "grpc.infer", "model": "risk", "server": "127.0.0.1:8001", "count": 1000, "wall_ns": 9000 * MS}
SERVER = {
    "system": "triton", "server": "127.0.0.1:8001", "model": "risk", "state": "watched", "window_ns": 60_000 * MS, "own": 1000, "count": 1000,
    "executions": 500, "inferences": 1000, "total_ns": 8000 * MS, "queue_ns": 6000 * MS, "infer_ns": 2000 * MS, "instances": 2,
}  # fmt: skip


@pytest.fixture
def diagnosed(service, document):
    """Findings by id when clients and servers counted this."""

    def run(calls=(), servers=(), **breach):
        planted = copy.deepcopy(document)
        planted["columns"] = [["io", "triton:risk"] if column == ["copy", "h2d"] else column for column in planted["columns"]]
        planted["copies"] = []
        planted["remote"] = {"calls": list(calls), "servers": list(servers)}
        return {finding.id: finding for finding in diagnose(Breach(**service.breach(**breach)), [planted]).findings}

    return run


def values(finding):
    return {evidence.metric: evidence.value for evidence in finding.evidence}


def test_healthy_calls_say_nothing(diagnosed):
    quiet = {**SERVER, "queue_ns": 100 * MS, "total_ns": 4000 * MS}
    assert not [name for name in diagnosed([CALLS], [quiet]) if name.startswith("TRITON")]


def test_the_sleep_of_async_infer_is_named_with_its_measured_time(diagnosed):
    row = {**CALLS, "method": "http.async_infer", "submitted": 1000, "submit_ns": 10_700 * MS}
    finding = diagnosed([row])["TRITON_ASYNC_SLEEP"]
    assert values(finding)["mean time in async_infer"] == 10.7
    assert (finding.severity, finding.confidence) == ("medium", "high")
    fixed = {**row, "submit_ns": 300 * MS}
    assert "TRITON_ASYNC_SLEEP" not in diagnosed([fixed])


def test_json_tensors_are_named(diagnosed):
    finding = diagnosed([{**CALLS, "json_inputs": 1000, "json_elements": 4_096_000, "serialize_ns": 1250 * MS}])["TRITON_JSON"]
    assert values(finding)["elements sent as JSON in a call"] == 4096.0
    assert values(finding)["mean time to build the message"] == 1.25
    assert finding.severity in {"high", "medium"}


def test_large_tensors_to_a_server_on_this_machine_without_shared_memory(diagnosed):
    row = {**CALLS, "binary_bytes": 1000 * (4 << 20), "largest_bytes": 4 << 20}
    finding = diagnosed([row])["TRITON_NO_SHARED_MEMORY"]
    assert values(finding)["binary inputs in a call"] == 4.0
    assert "TRITON_NO_SHARED_MEMORY" not in diagnosed([{**row, "server": "triton.prod:8001"}])
    assert "TRITON_NO_SHARED_MEMORY" not in diagnosed([{**row, "shared_inputs": 1000}])


def test_a_queue_behind_busy_instances_and_one_behind_idle_ones(diagnosed):
    busy = diagnosed([CALLS], [{**SERVER, "busy_ns": 110_000 * MS}])
    assert "TRITON_QUEUE_BOUND" not in busy
    assert values(busy["TRITON_INSTANCE_BOUND"])["instances busy"] == 91.7
    idle = diagnosed([CALLS], [{**SERVER, "busy_ns": 10_000 * MS, "max_queue_delay_ns": 5 * MS}])
    assert "TRITON_INSTANCE_BOUND" not in idle
    assert "max_queue_delay is 5 ms" in idle["TRITON_QUEUE_BOUND"].claim
    assert "requests that are this process's own" not in values(idle["TRITON_QUEUE_BOUND"])


def test_means_of_other_clients_requests_are_called_that(diagnosed):
    shared = diagnosed([CALLS], [{**SERVER, "own": 200, "busy_ns": 110_000 * MS}])["TRITON_INSTANCE_BOUND"]
    assert values(shared)["requests that are this process's own"] == 20.0


def test_slots_are_merged_calls_added_servers_not(service, document):
    from inferscope.diagnose.merging import merge

    one, two = copy.deepcopy(document), copy.deepcopy(document)
    one["remote"] = {"calls": [CALLS], "servers": [{**SERVER, "own": 300}]}
    two["remote"] = {"calls": [{**CALLS, "read_ns": 5}], "servers": [{**SERVER, "own": 700, "window_ns": 1}]}
    horizon = merge([one, two], "score")
    assert [(row.count, row.read_ns) for row in horizon.calls] == [(2000, 5)]
    assert [(row.count, row.own, row.window_ns) for row in horizon.servers] == [(1000, 1000, 60_000 * MS)]


def test_old_evidence_has_none(service, document):
    from inferscope.diagnose.merging import merge

    assert merge([document], "score").calls == ()
