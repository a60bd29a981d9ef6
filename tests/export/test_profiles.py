"""Profiles: folded from an incident, as pprof beside it, and as OTLP where both are wanted."""

from __future__ import annotations

import gzip
import importlib.metadata
import json

import pytest

from inferscope.diagnose import profiles
from inferscope.export import Exporter
from inferscope.export.otlp.profiles import FLAG, wanted
from inferscope.testing.receiver import OtlpReceiver

APP = ["0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"]
EVENTS = [
    {"ph": "X", "cat": "cpu_op", "name": "aten::linear", "tid": 7, "ts": 0.0, "dur": 100.0},
    {"ph": "X", "cat": "cpu_op", "name": "aten::addmm", "tid": 7, "ts": 10.0, "dur": 60.0},
    {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "tid": 7, "ts": 20.0, "dur": 5.0, "args": {"correlation": 3}},
    {"ph": "X", "cat": "cpu_op", "name": "aten::relu", "tid": 7, "ts": 120.0, "dur": 30.0},
    {"ph": "X", "cat": "kernel", "name": "gemm", "tid": 99, "ts": 30.0, "dur": 200.0, "args": {"correlation": 3}},
]


@pytest.fixture
def incident(tmp_path):
    """Evidence with a slow traced request, its capture, a lock's holder and stacks of a late thread."""
    directory = tmp_path / "score" / "0" / "incidents" / "20240101T000000Z-score-abcd"
    (directory / "captures").mkdir(parents=True)
    slowest = [{"id": 5, "start_ns": 10, "wall_ns": 300, "trace": APP, "spans": []}]
    evidence = {
        "schema": 1, "unix_offset_ns": 1_000, "from_ns": 0, "to_ns": 500,
        "classes": [{"request": "score", "slowest": slowest}],
        "locks": [{"lock": "rules", "site_id": 1, "site": "apply (rules.py:12)", "stage": "rules", "waits": 2, "wait_ns": 900, "longest_hold_ns": 1}],
    }  # fmt: skip
    (directory / "evidence-0-1.json").write_text(json.dumps(evidence))
    side = {"id": "s0-1", "request_id": 5, "trace": "captures/s0-1.trace.json", "unix_offset_ns": 1_000, "start_ns": 10}
    side["region"] = {"name": "forward", "start_ns": 20, "end_ns": 320}
    (directory / "captures" / "s0-1.json").write_text(json.dumps(side))
    (directory / "captures" / "s0-1.trace.json").write_text(json.dumps({"traceEvents": EVENTS}))
    frames = [["apply", "rules.py", 12], ["handle", "app.py", 40]]
    stacks = {"schema": 1, "slot": 0, "period_s": 0.02, "from_ns": 1, "to_ns": 400, "dropped": 0}
    stacks["stacks"] = [{"stage": "rules", "samples": 3, "requests": [5], "frames": frames}]
    (directory / "stacks-0-1.json").write_text(json.dumps(stacks))
    return directory


def test_self_time_goes_to_the_innermost_and_kernels_to_who_launched_them(incident):
    found = {each.kind: each for each in profiles.fold(incident)}
    assert set(found) == {"lock_wait", "wall", "torch_self_cpu", "torch_self_device"}
    cpu = {tuple(name for name, _, _ in stack): value for stack, value in found["torch_self_cpu"].values.items()}
    assert cpu == {
        ("aten::linear",): 40_000,
        ("aten::addmm", "aten::linear"): 55_000,
        ("cudaLaunchKernel", "aten::addmm", "aten::linear"): 5_000,
        ("aten::relu",): 30_000,
    }
    (stack,) = found["torch_self_device"].values
    assert [name for name, _, _ in stack] == ["gemm", "cudaLaunchKernel", "aten::addmm", "aten::linear"]
    assert found["torch_self_cpu"].trace == tuple(APP), "of the request that was captured"
    assert found["wall"].values == {(("apply", "rules.py", 12), ("handle", "app.py", 40), ("stage rules", "", 0)): 60_000_000}
    assert found["lock_wait"].values == {(("lock:rules", "", 0), ("apply", "rules.py", 12), ("rules", "", 0)): 900}


def test_few_captures_are_folded_slow_ones_first_and_a_damaged_one_costs_itself(incident):
    captures = incident / "captures"
    for number in range(2, 9):
        side = {"id": f"s0-{number}", "request_id": 5, "trace": f"captures/s0-{number}.trace.json", "slow": number > 4}
        (captures / f"s0-{number}.json").write_text(json.dumps(side))
        (captures / f"s0-{number}.trace.json").write_text(json.dumps({"traceEvents": EVENTS}) if number != 5 else "{broken")
    folded = {each.capture for each in profiles.fold(incident) if each.kind == "torch_self_cpu"}
    assert folded == {"s0-6", "s0-7", "s0-8"}


def test_pprof_files_lie_in_the_incident_and_are_what_pprof_reads(incident):
    written = profiles.write(incident)
    assert {path.name for path in written} >= {"torch_self_cpu-s0-1.pb.gz", "folded.json"}
    assert all(path.stat().st_mode & 0o077 == 0 for path in written)
    raw = gzip.decompress(next(path for path in written if path.name.startswith("torch_self_cpu")).read_bytes())
    strings, samples, fields = [], 0, parse(raw)
    for number, value in fields:
        if number == 6:
            strings.append(value.decode())
        samples += number == 2
    assert strings[0] == ""
    assert {"torch_self_cpu", "nanoseconds", "aten::addmm"} <= set(strings)
    assert samples == 4
    assert profiles.write(incident) == written, "again is the same"


def parse(raw):
    """Fields of one protobuf message."""
    at, found = 0, []

    def varint():
        nonlocal at
        value = shift = 0
        while True:
            byte = raw[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if not byte & 0x80:
                return value

    while at < len(raw):
        key = varint()
        if key & 7 == 2:
            size = varint()
            found.append((key >> 3, raw[at : at + size]))
            at += size
        else:
            assert key & 7 == 0
            found.append((key >> 3, varint()))
    return found


def test_an_incident_without_anything_has_no_profiles(tmp_path):
    (tmp_path / "captures").mkdir()
    assert profiles.write(tmp_path) == ()
    assert profiles.read(tmp_path) == []


@pytest.mark.skipif(not importlib.metadata.version("opentelemetry-proto").startswith("1.45."), reason="profiles are pinned to 1.45")
def test_they_leave_as_otlp_when_asked_for_linked_to_the_breaching_trace(incident):
    profiles.write(incident)
    folded = profiles.read(incident)
    with OtlpReceiver() as receiver:
        exporter = Exporter(endpoint=receiver.url, environ={FLAG: "1"}, resource={"service.name": "scoring"})
        exporter.profile(folded, "20240101T000000Z-score-abcd", "e_detector")
        exporter.run_once()
        exporter.shutdown()
        (request,) = receiver.profiles()
    dictionary, table = request.dictionary, list(request.dictionary.string_table)
    (resource,) = request.resource_profiles
    held = {table[each.sample_type.type_strindex]: each for each in resource.scope_profiles[0].profiles}
    assert set(held) == {"lock_wait", "wall", "torch_self_cpu", "torch_self_device"}
    assert table[0] == ""
    for name in ("mapping", "location", "function", "link", "attribute", "stack"):
        first = getattr(dictionary, f"{name}_table")[0]
        assert first.ByteSize() == 0 or name == "link", f"index 0 of the {name} table stands for nothing"

    def names(sample):
        places = dictionary.stack_table[sample.stack_index].location_indices
        functions = [dictionary.function_table[dictionary.location_table[place].lines[0].function_index] for place in places]
        return [table[function.name_strindex] for function in functions]

    (device,) = held["torch_self_device"].samples
    assert names(device) == ["gemm", "cudaLaunchKernel", "aten::addmm", "aten::linear"]
    assert device.values == [200_000]
    link = dictionary.link_table[device.link_index]
    assert [link.trace_id.hex(), link.span_id.hex()] == APP
    assert held["wall"].samples[0].link_index == 0, "stacks of many requests belong to no single trace"
    about = {table[dictionary.attribute_table[i].key_strindex] for i in held["torch_self_cpu"].attribute_indices}
    assert {"inferscope.incident.id", "inferscope.capture.id", "inferscope.capture.reason"} <= about
    assert held["wall"].period == 20_000_000


def test_without_the_flag_or_with_another_version_nothing_is_sent_and_it_is_said(incident, monkeypatch, lines):
    assert not wanted({})
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "1.60.0")
    assert not wanted({FLAG: "1"})
    assert any("1.60.0" in line and "pprof" in line for line in lines())
    profiles.write(incident)
    with OtlpReceiver() as receiver:
        exporter = Exporter(endpoint=receiver.url, environ={FLAG: "1"})
        exporter.profile(profiles.read(incident), "x", "manual")
        exporter.run_once()
        exporter.shutdown()
        assert receiver.attempts == 0
