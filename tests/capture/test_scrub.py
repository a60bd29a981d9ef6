"""What may stay in a trace, and that what may not is gone, whatever the trace looks like."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inferscope.capture import scrub
from inferscope.capture.scrub import ARGUMENTS, Scrubber

OPERATORS = {"aten::add", "aten::detach", "mylib::fused"}


def run(tmp_path, text: str) -> tuple[Scrubber, bool, dict | None]:
    path = tmp_path / "raw.json"
    path.write_text(text)
    one, out = Scrubber(OPERATORS.__contains__), io.StringIO()
    whole = one.copy(path, out)
    return one, whole, json.loads(out.getvalue()) if out.getvalue() else None


def trace(*events: dict, **head) -> str:
    return json.dumps({**head, "traceEvents": list(events), "traceName": "/srv/alice/x.json"}, indent=2)


@pytest.mark.parametrize(
    ("category", "name", "kept"),
    [
        ("cpu_op", "aten::add", "aten::add"),
        ("cpu_op", "mylib::fused", "mylib::fused"),
        ("cpu_op", "detach", "detach"),
        ("cpu_op", "AddmmBackward0", "AddmmBackward0"),
        ("cpu_op", "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", None),
        ("cpu_op", "TorchDynamo Cache Lookup", "TorchDynamo Cache Lookup"),
        ("cpu_op", "user::alice", "annotation-1"),
        ("cpu_op", "alice@example.org", "annotation-1"),
        ("user_annotation", "aten::add", "annotation-1"),
        ("user_annotation", "ProfilerStep#3", "ProfilerStep#3"),
        ("user_annotation", "inferscope::stage/forward#7", "inferscope::stage/forward#7"),
        ("gpu_user_annotation", "order 4711", "annotation-1"),
        ("kernel", "void gemm<float>(int)", "void gemm<float>(int)"),
        ("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", "Memcpy HtoD (Pageable -> Device)"),
        ("python_function", "/srv/alice/app/serve.py(12): handle", "app/serve.py(12): handle"),
        ("python_function", "<built-in method add of type object at 0x7f00>", "<built-in method add of type object at 0x7f00>"),
        ("python_function", "nn.Module: Linear_0", "nn.Module: Linear_0"),
        ("python_function", "something else", "annotation-1"),
        ("something_new", "text", "annotation-1"),
        ("", "Record Window End", "Record Window End"),
    ],
)
def test_names(tmp_path, category, name, kept):
    _, whole, said = run(tmp_path, trace({"ph": "X", "cat": category, "name": name, "ts": 1, "dur": 1}))
    assert whole
    assert said["traceEvents"][0]["name"] == (name if kept is None else kept)


def test_the_same_text_keeps_the_same_name_and_another_one_does_not(tmp_path):
    events = [{"ph": "X", "cat": "user_annotation", "name": name} for name in ("a", "b", "a")]
    _, _, said = run(tmp_path, trace(*events))
    assert [event["name"] for event in said["traceEvents"]] == ["annotation-1", "annotation-2", "annotation-1"]


def test_arguments_that_are_not_listed_go(tmp_path):
    given_ = {"Input Dims": [[2, 2]], "Concrete Inputs": ["3.5", "secret"], "keyword": "secret", "stream": 7}
    one, _, said = run(tmp_path, trace({"ph": "X", "cat": "cpu_op", "name": "aten::add", "args": given_}))
    assert said["traceEvents"][0]["args"] == {"Input Dims": [[2, 2]], "stream": 7}
    assert one.replaced >= 2


def test_the_head_keeps_the_clock_and_no_host(tmp_path):
    _, _, said = run(
        tmp_path, trace(schemaVersion=1, baseTimeNanoseconds=5, host_name="vm-7", trace_id="x", deviceProperties=[], other={"a": 1})
    )
    assert said == {"schemaVersion": 1, "baseTimeNanoseconds": 5, "deviceProperties": [], "traceEvents": []}


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"traceEvents": [', '{"traceEvents": [{"ph": "X"}', '{"traceEvents": [{"ph": "X"}]', "x" * 300_000]
)
def test_what_is_not_whole_is_said_not_to_be(tmp_path, text):
    _, whole, _ = run(tmp_path, text)
    assert not whole


def test_counts(tmp_path):
    events = [
        {"ph": "X", "cat": "cpu_op", "name": "aten::add", "tid": 7},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "tid": 7},
        {"ph": "X", "cat": "cuda_driver", "name": "cuLaunchKernelEx", "tid": 7},
        {"ph": "X", "cat": "kernel", "name": "add"},
        {"ph": "M", "name": "process_name", "args": {"name": "python"}},
        {"ph": "s", "cat": "ac2g", "name": "ac2g"},
    ]
    one, _, said = run(tmp_path, trace(*events))
    assert (one.events, one.kernels, one.launches, one.threads) == (4, 1, 2, {7})
    assert len(said["traceEvents"]) == 6


def test_pieces_make_no_difference(tmp_path, monkeypatch):
    text = trace(*[{"ph": "X", "cat": "cpu_op", "name": "aten::add", "ts": n, "args": {"Input Dims": [[n]]}} for n in range(50)])
    whole = run(tmp_path, text)[2]
    for chunk in (1, 7, 64):
        monkeypatch.setattr(scrub, "_CHUNK", chunk)
        assert run(tmp_path, text)[2] == whole


SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.just("CANARY"), st.text(max_size=8))
VALUES = st.recursive(
    SCALARS, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)), max_leaves=8
)
EVENTS = st.dictionaries(st.sampled_from(["cat", "name", "args", "ts", "tid"]), VALUES, max_size=5)


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(EVENTS, max_size=6), st.dictionaries(st.text(max_size=8), VALUES, max_size=3))
def test_no_name_and_no_argument_of_any_trace_passes_unlisted(tmp_path, events, head):
    _, _, said = run(tmp_path, json.dumps({**head, "traceEvents": [{**event, "ph": "X"} for event in events], "z": 1}))
    if said is None:
        return
    for event in said["traceEvents"]:
        assert event.get("name") != "CANARY"
        if isinstance(event.get("args"), dict):
            assert set(event["args"]) <= ARGUMENTS


PUBLIC = sorted((Path(__file__).parents[3] / "shared/data/traces").glob("*.gz"))


@pytest.mark.skipif(not PUBLIC, reason="public traces are not here")
@pytest.mark.parametrize("name", ["critical_path_alexnet", "bert-small", "vllm_decode_full"])
def test_public_traces_of_gpus_say_the_same_as_before(tmp_path, name):
    import gzip

    from inferscope.diagnose.trace import read_trace

    source = next(path for path in PUBLIC if name in path.name)
    raw, clean = tmp_path / "raw.json", tmp_path / "clean.json"
    raw.write_bytes(gzip.decompress(source.read_bytes()))
    with clean.open("w") as file:
        assert Scrubber(lambda _: True).copy(raw, file)
    before, after = read_trace(raw), read_trace(clean)
    for key in ("events", "launches", "device_events", "synchronous_copies", "transfers", "synchronisations", "device_busy", "threads"):
        assert getattr(after, key) == getattr(before, key), key
