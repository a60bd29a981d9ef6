"""Traces: hand-made ones in the shapes that Kineto writes, and real ones where they lie beside the repository."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path

import pytest

from inferscope.diagnose import read_trace
from inferscope.diagnose.trace import StageSpan
from inferscope.errors import EvidenceError

REAL = Path(__file__).parents[3] / "shared" / "data" / "traces"
BASE = 1_700_000_000_000_000_000


def event(cat, name, ts, dur, tid=7, pid=1, **args):
    return {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}


def copied(ts, correlation, memory="Pageable", sync=True, between=()):
    """One copy as CUPTI shows it: runtime call, device copy, stream synchronise."""
    rows = [
        event("cuda_runtime", "cudaMemcpyAsync", ts, 5, correlation=correlation),
        event("gpu_memcpy", f"Memcpy HtoD ({memory} -> Device)", ts + 6, 20, tid=7, pid=0, correlation=correlation, bytes=4096),
        *between,
    ]
    return rows + ([event("cuda_runtime", "cudaStreamSynchronize", ts + 10, 30, correlation=correlation + 1000)] if sync else [])


def write(path, events, *, header_last=True, compress=False, indent=None):
    header = {"schemaVersion": 1, "baseTimeNanoseconds": BASE, "deviceProperties": [{"id": 0, "name": 'a "card" [0]'}]}
    document = {"traceEvents": events, **header} if header_last else {**header, "traceEvents": events}
    data = json.dumps(document, indent=indent).encode()
    path.write_bytes(gzip.compress(data) if compress else data)
    return path


@pytest.mark.parametrize("header_last", [True, False])
@pytest.mark.parametrize("compress", [True, False])
@pytest.mark.parametrize("indent", [None, 2])
def test_self_time_threads_and_window(tmp_path, header_last, compress, indent):
    events = [
        event("cpu_op", "aten::linear", 100, 50),
        event("cpu_op", "aten::addmm", 110, 30),
        event("cpu_op", "aten::mm", 120, 10),
        event("cpu_op", "aten::mm", 300, 5, tid=8),
        {"ph": "M", "name": "process_name", "pid": 1, "ts": 0, "args": {"name": "python"}},
        {"ph": "s", "id": 1, "pid": 1, "tid": 7, "ts": 100, "cat": "ac2g", "name": "ac2g"},
    ]
    found = read_trace(write(tmp_path / "t.json", events, header_last=header_last, compress=compress, indent=indent))
    assert (found.events, found.threads, found.base_unix_ns) == (4, (7, 8), BASE)
    assert found.window_ms == pytest.approx(0.205)
    assert {(row.name, row.calls, round(row.self_ms, 6)) for row in found.operators} == {
        ("aten::linear", 1, 0.02),
        ("aten::addmm", 1, 0.02),
        ("aten::mm", 2, 0.015),
    }
    assert found.device_busy is None


def test_unordered_events_nest_all_the_same(tmp_path):
    events = [event("cpu_op", "child", 110, 30), event("cpu_op", "parent", 100, 50), event("cpu_op", "twin", 100, 50)]
    found = {row.name: row.self_ms for row in read_trace(write(tmp_path / "t.json", events)).operators}
    assert sum(found.values()) == pytest.approx(0.05)
    assert found["child"] == pytest.approx(0.03)


def test_pageable_copy_then_synchronise_is_a_pair(tmp_path):
    silent = [event("cuda_runtime", "cudaStreamIsCapturing", 1006, 1)]
    events = [
        *copied(100, 1),
        *copied(1000, 2, between=silent),
        *copied(2000, 3, memory="Pinned"),
        *copied(3000, 4, sync=False),
        event("cuda_runtime", "cudaLaunchKernel", 3006, 2),
        event("cuda_runtime", "cudaStreamSynchronize", 3010, 2),
        *copied(4000, 5, sync=False),
        event("cuda_runtime", "cudaStreamSynchronize", 4010, 2, tid=8),
    ]
    found = read_trace(write(tmp_path / "t.json", events))
    assert found.synchronous_copies == 2
    assert [(row.direction, row.memory, row.copies, row.bytes) for row in found.transfers] == [
        ("HtoD", "pageable", 4, 16384),
        ("HtoD", "pinned", 1, 4096),
    ]
    assert [(row.name, row.calls) for row in found.synchronisations] == [("cudaStreamSynchronize", 5)]
    assert found.launches == 1


def test_device_busy_is_the_union(tmp_path):
    events = [
        event("kernel", "k", 0, 40, pid=0),
        event("kernel", "k", 20, 40, pid=0, tid=9),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 90, 10),
    ]
    found = read_trace(write(tmp_path / "t.json", events))
    assert found.device_busy == pytest.approx(0.7)
    assert found.device_events == 3
    assert (found.transfers[0].direction, found.transfers[0].memory) == ("DtoH", "pinned")


def test_operators_join_the_innermost_stage_of_their_thread(tmp_path):
    def at(us):
        return BASE + us * 1000

    events = [
        event("cpu_op", "a", 110, 10),
        event("cpu_op", "b", 210, 30),
        event("cpu_op", "late", 495, 40),
        event("cpu_op", "far", 900, 10),
        event("cpu_op", "elsewhere", 110, 10, tid=8),
    ]
    spans = [StageSpan("request", at(90), at(500), 7), StageSpan("forward", at(200), at(260), 7)]
    found = read_trace(write(tmp_path / "t.json", events), spans)
    assert found.stages_ms == {"request": pytest.approx(0.05), "forward": pytest.approx(0.03)}


def test_bare_array_and_control_characters(tmp_path):
    path = tmp_path / "t.json"
    path.write_text('[{"ph":"X","cat":"cpu_op","name":"a\tb\x01","ts":1,"dur":2,"pid":1,"tid":1}]')
    assert read_trace(path).operators[0].name == "a\tb\x01"


def test_events_larger_than_a_chunk(tmp_path):
    events = [event("cpu_op", "x" * 3_000_000, 1, 1), event("cpu_op", "y", 5, 1)]
    assert read_trace(write(tmp_path / "t.json", events)).events == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty file"),
        (b"   \n ", "empty file"),
        (b"hello", "not a trace: neither a JSON object nor an array"),
        (b"{}", "not a trace: no traceEvents array"),
        (b'{"traceEvents": 3}', "not a trace: no traceEvents array"),
        (b'{"a": [1, 2', "truncated"),
        (b'{"traceEvents": [', "truncated"),
        (b'{"traceEvents": [{"ph": "M"}', "truncated after 1 events"),
        (b'{"traceEvents": [{"ph": "M"}, {"ph": "X", "ca', "truncated after 1 events"),
        (b'{"traceEvents": [{"ph": "M"}]', "truncated after 1 events"),
        (b'{"traceEvents": [{"ph": "M"} {"ph": "M"}]}', "damaged: expected ','"),
        (b'{"traceEvents": [{"ph": "M"}, nonsense, {"ph": "M"}]}', "damaged JSON"),
        (b'{"traceEvents": []}', "a trace without events"),
        (b'{"traceEvents": [{"ph": "M", "name": "process_name"}]}', "a trace without events"),
        (b"[]", "a trace without events"),
        (b'{"traceEvents": [1]}', "not a trace: an event is a int"),
        (b'{"traceEvents": [{"ph": "X", "name": "a"}]}', "damaged event"),
        (b'{"traceEvents": [{"ph": "X", "name": "a", "ts": "soon"}]}', "damaged event"),
        (b"\x1f\x8bnot gzip", "damaged or truncated"),
        (gzip.compress(b'{"traceEvents": [' + b'{"ph": "M"},' * 9000)[:-40], "damaged or truncated"),
    ],
)
def test_damage_is_one_clear_line(tmp_path, content, message):
    path = tmp_path / "bad.trace.json"
    path.write_bytes(content)
    with pytest.raises(EvidenceError) as caught:
        read_trace(path)
    assert str(caught.value).startswith("bad.trace.json: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_file_is_an_evidence_error(tmp_path):
    with pytest.raises(EvidenceError, match=r"none\.json: cannot be read"):
        read_trace(tmp_path / "none.json")


def test_memory_is_far_below_the_file(tmp_path):
    path = tmp_path / "large.json"
    with path.open("w") as file:
        file.write('{"traceEvents": [')
        for i in range(12_000):
            file.write(
                ("," if i else "")
                + json.dumps(event("cpu_op", f"aten::op{i % 50}", 10 * i, 8, **{"Input Dims": [[8, 512]] * 70, "External id": i}))
            )
        file.write("]}")
    tracemalloc.start()
    found = read_trace(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.events == 12_000
    assert peak < 6 << 20
    assert path.stat().st_size > 9_000_000


ORACLES = {
    "hta_critical_path_alexnet": {
        "pairs": 16,
        "busy": 0.5,
        "copy": ("HtoD", "pageable", 16, 244_403_360),
        "wait": ("cudaStreamSynchronize", 16, 0.559),
    },
    "hta_critical_path_cuda_event_sync_event_sync": {
        "pairs": 1,
        "busy": 19.4,
        "copy": ("DtoH", "pageable", 1, 1),
        "wait": ("cudaEventSynchronize", 1, 0.034),
    },
    "hta_negative_queue_length": {
        "pairs": 75,
        "busy": 35.6,
        "copy": ("HtoD", "pinned", 35, 253_534_084),
        "wait": ("cudaStreamSynchronize", 75, 2.799),
    },
    "tracelens_h100_google_owlv2": {
        "pairs": 80,
        "busy": 52.6,
        "copy": ("HtoD", "pageable", 25, 30_897_080),
        "wait": ("cudaStreamSynchronize", 80, 358.790),
    },
    "tracelens_h100_gaunernst_bert-small": {
        "pairs": 0,
        "busy": 7.9,
        "copy": ("DtoH", "pinned", 1, 1),
        "wait": ("cudaDeviceSynchronize", 2, 0.012),
    },
    "tracelens_inference_vllm_decode_full_graph": {
        "pairs": 0,
        "busy": 99.8,
        "copy": ("DtoD", "unknown", 9, 27_556),
        "wait": ("hipEventSynchronize", 1, 0.002),
    },
    "hta_amd_trace_mi250": {"pairs": 0, "busy": 1.7, "copy": ("HtoD", "unknown", 2, 0), "wait": ("hipMemcpyWithStream", 2, 0.096)},
}


@pytest.mark.skipif(not REAL.is_dir(), reason="the real traces are not here")
@pytest.mark.parametrize("name", ORACLES)
def test_real_traces(name):
    (path,) = REAL.glob(f"{name}*")
    found, expected = read_trace(path), ORACLES[name]
    assert found.synchronous_copies == expected["pairs"]
    assert 100 * found.device_busy == pytest.approx(expected["busy"], abs=0.06)
    assert expected["copy"] in [(row.direction, row.memory, row.copies, row.bytes) for row in found.transfers]
    assert (expected["wait"]) in [(row.name, row.calls, round(row.self_ms, 3)) for row in found.synchronisations]


@pytest.mark.skipif(not REAL.is_dir(), reason="the real traces are not here")
@pytest.mark.parametrize(
    ("name", "events", "threads"),
    [("hta_cpu_only", 16, 1), ("hta_mtia_inference", 14_179, 23), ("tracelens_h100_gaunernst", 2_060, 1)],
)
def test_real_event_counts_and_threads(name, events, threads):
    (path,) = REAL.glob(f"{name}*")
    found = read_trace(path)
    assert (found.events, len(found.threads)) == (events, threads)
    assert (found.device_busy is None) is (name == "hta_cpu_only")
