"""Device time lines of traces, and what the rules make of slow and healthy captures; hand-made, in the shapes that Kineto writes."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from inferscope.diagnose import attribute, diagnose, merge, plan, read_trace
from inferscope.diagnose.findings import Context
from inferscope.diagnose.one_trace import explain_trace
from inferscope.diagnose.rules import ranks
from inferscope.diagnose.rules import traces as rules
from inferscope.diagnose.traces import work
from inferscope.diagnose.traces.values import head
from inferscope.errors import EvidenceError
from inferscope.report import trace as report
from inferscope.types import Breach, CaptureSummary

REAL = Path(__file__).parents[3] / "shared" / "data" / "traces"
MS = 1_000_000
HALF, FLOAT = "c10::Half", "float"


def event(cat, name, ts, dur, tid=7, **args):
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": args}


class Device:
    """Writes a trace call by call; times are microseconds."""

    def __init__(self, **header):
        self.events, self.header, self.next = [], header, 1

    def launch(self, name, called, started, took, *, stream=7, external=0, cat="kernel", call="cudaLaunchKernel", **args):
        self.events.append(event("cuda_runtime", call, called, 3, correlation=self.next))
        ids = {"correlation": self.next, "stream": stream, "device": 0, "External id": external or self.next}
        self.events.append(event(cat, name, started, took, tid=stream, **ids, **args))
        self.next += 1
        return self

    def op(self, name, start, took, **args):
        self.events.append(event("cpu_op", name, start, took, **args))
        return self

    def add(self, cat, name, start, took, **args):
        self.events.append(event(cat, name, start, took, **args))
        return self

    def read(self, tmp_path, name="t.json"):
        path = tmp_path / name
        path.write_text(json.dumps({**self.header, "traceEvents": self.events}))
        return read_trace(path)


def test_idle_time_is_split_by_what_the_next_work_waited_for(tmp_path):
    made = Device().launch("a", 0, 10, 100)
    made.launch("b", 150, 160, 10)  # the device is done at 110, the host calls at 150
    made.add("cuda_runtime", "cudaStreamSynchronize", 180, 40).launch("c", 230, 250, 10)  # 170: 10 host, 40 waits, 10 host, 20 launch
    made.launch("d", 240, 300, 10)  # called before 260
    made.events.append(event("kernel", "orphan", 350, 10, stream=7, device=0, correlation=999))
    found = made.read(tmp_path)
    idle = found.idle
    assert idle.gaps == 4
    assert (idle.host_ms, idle.sync_ms, idle.launch_ms, idle.unknown_ms) == pytest.approx((0.06, 0.04, 0.07, 0.04))
    assert idle.total_ms == pytest.approx((360 - 10 - 140) / 1e3)  # the union of the work is 140 us
    assert found.small_kernels == 0.0


def test_waits_name_their_callers(tmp_path):
    made = Device().add("python_function", "serve.py(12): score", 0, 1000).add("python_function", "torch/_tensor.py(3): item", 5, 900)
    made.op("aten::item", 10, 500).op("aten::_local_scalar_dense", 20, 400)
    made.add("cuda_runtime", "cudaStreamSynchronize", 30, 300).launch("k", 600, 610, 5)
    found = made.read(tmp_path)
    (site,) = found.sync_sites
    assert (site.call, site.calls, site.ms) == ("cudaStreamSynchronize", 1, 0.3)
    assert site.where == ("aten::_local_scalar_dense", "aten::item", "serve.py(12): score")
    own = {row.name: row.self_ms for row in found.operators}
    assert own["aten::item"] == pytest.approx(0.1)
    assert "serve.py(12): score" not in own, "Python functions take no time from operators"


def test_copies_overlap_and_kinds(tmp_path):
    made = Device().launch("Memcpy HtoD (Pinned -> Device)", 0, 10, 100, cat="gpu_memcpy", call="cudaMemcpyAsync", stream=20, bytes=1000)
    made.launch("k", 20, 60, 100).launch("Memcpy DtoH (Device -> Pageable)", 300, 310, 30, cat="gpu_memcpy", call="cudaMemcpy", bytes=10)
    found = made.read(tmp_path)
    assert (found.overlap.copy_ms, found.overlap.kernel_ms, found.overlap.both_ms) == pytest.approx((0.13, 0.1, 0.05))
    assert found.overlap.streams == 2
    assert [(row.direction, row.memory, row.copies, row.synchronous) for row in found.transfers] == [
        ("HtoD", "pinned", 1, 0),
        ("DtoH", "pageable", 1, 1),
    ]


def test_roofline_is_estimated_from_shapes(tmp_path):
    made = Device(deviceProperties=[{"id": 0, "name": "NVIDIA A100-SXM4-80GB"}])
    dims, types = [[1024, 1024], [1024, 1024]], [HALF, HALF]
    made.op("aten::mm", 0, 50, **{"External id": 5, "Input Dims": dims, "Input type": types})
    made.op("aten::mm", 60, 50, **{"External id": 6, "Input Dims": [[8, 8], [8, 8]], "Input type": types})
    made.launch("ampere_fp16_s16816gemm_fp16_128x128", 10, 20, 10, external=5).launch("other", 40, 50, 10, external=77)
    line = made.read(tmp_path).roofline
    assert line.flops == pytest.approx(2 * 1024**3)
    assert line.bytes == pytest.approx(3 * 2 * 1024**2)
    assert (line.ms, line.covered) == pytest.approx((0.01, 0.5))
    assert line.of_flops == pytest.approx(2 * 1024**3 / 1e-5 / 312e12)
    assert line.ridge == pytest.approx(312e12 / 2.039e12)


def test_recompiles_shapes_and_collectives(tmp_path):
    made = Device(distributedInfo={"rank": 3, "world_size": 8})
    made.op("Torch-Compiled Region: 0/0", 0, 10).op("Torch-Compiled Region: 0/1", 20, 10).op("compile_inner (dynamo_timed)", 40, 500)
    for number in range(4):
        made.op("aten::linear", 600 + 10 * number, 5, **{"Input Dims": [[1, number], [8, 8]], "Input type": [FLOAT, FLOAT]})
        made.launch("ncclDevKernel_AllReduce", 700 + 100 * number, 710 + 100 * number, 10 + 20 * number, **{"Collective name": "allreduce", "Process Group Name": "0", "Seq": number})  # fmt: skip
    made.add("user_annotation", "nccl:all_reduce", 700, 20)
    found = made.read(tmp_path)
    assert (found.graphs, found.recompiles, found.compile_ms) == (2, 1, pytest.approx(0.5))
    assert [(row.operator, row.calls, row.shapes) for row in found.shapes] == [("aten::linear", 4, 4)]
    assert (found.rank, found.ranks, len(found.collectives)) == (3, 8, 4), "seen on the device and by the host, counted once"
    assert found.collective_wait_ms == pytest.approx(0.02 + 0.04 + 0.06)


def test_annotations_are_the_stages_of_a_foreign_trace(tmp_path):
    made = Device().add("user_annotation", "preprocess", 0, 100).add("user_annotation", "forward", 100, 100)
    made.op("aten::pad", 10, 30).op("aten::mm", 110, 60).launch("gemm", 120, 150, 40)
    found = made.read(tmp_path)
    assert found.stages_ms == {"preprocess": pytest.approx(0.03), "forward": pytest.approx(0.06)}
    assert found.stages_device_ms == {"forward": pytest.approx(0.04)}


@pytest.mark.parametrize(
    ("name", "units"),
    [
        ("ampere_sgemm_128x64_nn", False),
        ("cutlass_80_simt_sgemm_256x128_8x4_nn_align1", False),
        ("void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_256x64_16x4_tn_align1>", True),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", True),
        ("void pytorch_flash::flash_fwd_kernel<>", True),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NTT", True),
        ("Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x192x64_MI16x16x1", True),
        ("gemm_something_new", None),
    ],
)
def test_kernel_names_say_which_units_they_use(name, units):
    assert work.is_matrix(name)
    assert work.on_matrix_units(name) is units


def test_work_of_operators():
    def of(name, *shapes, kind=FLOAT):
        return work.work_of(name, {"Input Dims": [list(shape) for shape in shapes], "Input type": [kind] * len(shapes)})

    assert of("aten::addmm", (64,), (8, 32), (32, 64)).flops == 2 * 8 * 32 * 64
    assert of("aten::bmm", (4, 8, 16), (4, 16, 2)) == (2 * 4 * 8 * 16 * 2, 4 * (4 * 8 * 16 + 4 * 16 * 2 + 4 * 8 * 2), "float")
    assert of("aten::cudnn_convolution", (1, 3, 10, 10), (8, 3, 3, 3)).flops == 2 * 100 * 8 * 27
    assert of("aten::relu", (10, 10), kind=HALF) == (100, 400, "half")
    assert work.work_of("aten::mm", {}) is None
    assert work.work_of("aten::mm", {"Input Dims": [[]]}) is None


def test_the_cut_keeps_what_makes_four_fifths():
    from inferscope.diagnose.trace import Operator

    rows = [Operator("a", 1, 70.0), Operator("b", 1, 20.0), Operator("c", 1, 10.0)]
    assert [row.name for row in head(rows)] == ["a", "b"]
    assert head([]) == []


# -- rules ------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def slow_model(service):
    """An incident whose excess is the model's: about 35 ms."""
    requests = service.simulate(60, 200, seed=4, copy_rate=0, lock_rate=0)
    requests.vectors[requests.start % (2 * 10**9) < 10**8, 4] += 35 * MS
    document = json.loads(json.dumps(service.evidence(requests, [20 * MS], keep=16)))
    horizon = merge([document], "score")
    attribution = attribute(horizon, 20 * MS)
    breach = diagnose(Breach(**service.breach()), [document]).breach
    return Context(breach, horizon, attribution, plan(horizon, attribution, 20.0), objective_broken=True)


def captured(number, trace, *, slow=True):
    return CaptureSummary(f"c{number}", 1, (number,), slow, trace.events, 0.1, (7,), f"captures/c{number}.trace.json"), trace


def with_captures(context, slow, healthy):
    return replace(context, captures=(captured(1, slow), captured(2, healthy, slow=False)))


def kernels(tmp_path, name, took, *, gap=1.0, number=1, **header):
    made, at = Device(**header), 0.0
    for _ in range(number):
        made.launch(name, at, at + 2, took)
        at += took + gap
    return made.read(tmp_path, f"{name[:8]}{took}{number}.json")


def test_a_slow_path_on_ordinary_units_outranks_where_it_shows(slow_model, tmp_path):
    slow, fast = kernels(tmp_path, "ampere_sgemm_128x64_nn", 36_000), kernels(tmp_path, "ampere_fp16_s16816gemm", 2_000)
    (found,) = rules.matrix_units(with_captures(slow_model, slow, fast))
    assert (found.severity, found.confidence, found.where) == ("high", "high", "ampere_sgemm_128x64_nn")
    assert found.share == slow_model.attribution.share("forward").share
    (throughput,) = rules.matrix_units(with_captures(slow_model, slow, slow))
    assert throughput.severity == "low", "healthy requests do the same: no reason for a tail"
    assert not list(rules.matrix_units(with_captures(slow_model, fast, fast)))


def test_tiny_kernels_are_launch_bound_when_the_host_is_late(slow_model, tmp_path):
    slow, fast = kernels(tmp_path, "tiny", 4, gap=100, number=400), kernels(tmp_path, "tiny", 4, gap=100, number=10)
    (found,) = rules.launch_bound(with_captures(slow_model, slow, fast))
    assert (found.id, found.severity) == ("LAUNCH_BOUND", "high")
    assert not list(rules.launch_bound(with_captures(slow_model, kernels(tmp_path, "long", 40, gap=100, number=400), fast)))


def test_serial_copies_and_kernels(slow_model, tmp_path):
    made = Device()
    for at in range(0, 40_000, 10_000):
        made.launch("Memcpy HtoD (Pinned -> Device)", at, at + 5, 4900, cat="gpu_memcpy", call="cudaMemcpyAsync", bytes=9)
        made.launch("k", at + 10, at + 5000, 4900)
    quick = (
        Device()
        .launch("Memcpy HtoD (Pinned -> Device)", 0, 5, 100, cat="gpu_memcpy", call="cudaMemcpyAsync", bytes=9)
        .launch("k", 10, 120, 200)
    )
    (found,) = rules.copies_alone(with_captures(slow_model, made.read(tmp_path, "a.json"), quick.read(tmp_path, "b.json")))
    assert (found.id, found.where) == ("COPY_COMPUTE_NO_OVERLAP", "copies and kernels on 1 stream")
    assert found.severity == "high", "it could hide half of the model's excess"


def test_reads_that_wait_are_counted_and_reads_of_the_host_are_not(slow_model, tmp_path):
    def trace(name, waits):
        made = Device().add("python_function", "serve.py(12): decide", 0, 80_000).launch("k", 0, 5, 10)
        for number in range(8):
            made.op("aten::item", 100 + 5000 * number, 4500)
            if waits:
                made.add("cuda_runtime", "cudaStreamSynchronize", 200 + 5000 * number, 4300)
        return made.read(tmp_path, name)

    (found,) = rules.waits(with_captures(slow_model, trace("a.json", waits=True), trace("b.json", waits=False)))
    assert (found.id, found.where, found.severity) == ("IMPLICIT_SYNC", "serve.py(12): decide", "high")
    assert not list(rules.waits(with_captures(slow_model, trace("c.json", waits=False), trace("b.json", waits=False))))


def test_cards_at_their_limit(slow_model, tmp_path):
    def trace(name, operator, dims, took):
        made = Device(deviceProperties=[{"id": 0, "name": "NVIDIA A100-SXM4-80GB"}])
        made.op(operator, 0, 50, **{"External id": 5, "Input Dims": dims, "Input type": [HALF] * len(dims)})
        return made.launch("kernel", 10, 20, took, external=5).read(tmp_path, name)

    heavy = trace("a.json", "aten::mm", [[16384, 16384], [16384, 16384]], 2 * 16384**3 / (0.8 * 312e6))
    wide = trace("b.json", "aten::add", [[1 << 34], [1 << 34]], (6 << 34) / (0.9 * 2.039e6))
    small = trace("c.json", "aten::mm", [[64, 64], [64, 64]], 5)
    (compute,) = rules.bounds(with_captures(slow_model, heavy, small))
    (memory,) = rules.bounds(with_captures(slow_model, wide, small))
    assert (compute.id, compute.class_) == ("COMPUTE_BOUND", "compute")
    assert (memory.id, memory.class_) == ("BANDWIDTH_BOUND", "memory")
    assert "quantise" in memory.fix
    assert not list(rules.bounds(with_captures(slow_model, small, small)))


def test_the_rank_that_comes_last_is_named(slow_model, tmp_path):
    def trace(rank, late):
        made = Device(distributedInfo={"rank": rank, "world_size": 2})
        for number in range(10):
            begin = 10_000 * number + (late if number != 3 else 0)
            end = 10_000 * number + 9_000
            made.add("user_annotation", "gloo:all_reduce", begin, end - begin, **{"Process Group Name": "0", "Seq": number, "Collective name": "allreduce"})  # fmt: skip
        return made.read(tmp_path, f"{rank}.json")

    context = replace(slow_model, captures=(captured(1, trace(0, 100)), captured(2, trace(1, 8_000))))
    (found,) = ranks.stragglers(context)
    assert (found.id, found.where) == ("NCCL_STRAGGLER", "rank 1")
    assert "last at 90 % of 10" in found.claim
    alone = replace(slow_model, captures=context.captures[:1])
    assert all(finding.where == "collectives" for finding in ranks.stragglers(alone))


def test_one_trace_alone_is_medium_at_most_and_renders(tmp_path):
    made = Device(deviceProperties=[{"id": 0, "name": "card"}])
    for at in range(0, 20_000, 100):
        made.launch("tiny", at, at + 3, 4)
    made.read(tmp_path)
    found = explain_trace(tmp_path / "t.json")
    assert [(finding.id, finding.severity) for finding in found.findings] == [("LAUNCH_BOUND", "medium")]
    text = report.render(found)
    assert "kernels shorter than 10 us: 100 %" in text
    assert "LAUNCH_BOUND" in text
    assert json.loads(json.dumps(report.to_json(found)))["findings"][0]["id"] == "LAUNCH_BOUND"
    with pytest.raises(EvidenceError):
        explain_trace(tmp_path / "none.json")


REPORTED = {
    "tracelens_h100_gaunernst_bert-small": {"LAUNCH_BOUND"},
    "tracelens_h100_google_owlv2": {"H2D_SYNC_PAGEABLE", "D2H_SYNC_PAGEABLE"},
    "hta_critical_path_alexnet": {"H2D_SYNC_PAGEABLE"},
    "hta_negative_queue_length": {"H2D_SYNC_PAGEABLE", "D2H_SYNC_PAGEABLE", "NCCL_STRAGGLER"},
    "hta_nccl_parser_config": set(),
    "hta_cpu_only": {"NCCL_STRAGGLER"},
    "tracelens_torch_compile_triton": set(),
    "tracelens_inference_vllm_decode_full_graph": set(),
}


@cache
def real(name):
    (path,) = REAL.glob(f"{name}*")
    return explain_trace(path)


@pytest.mark.skipif(not REAL.is_dir(), reason="the real traces are not here")
@pytest.mark.parametrize("name", REPORTED)
def test_real_traces_get_the_findings_that_are_known_of_them(name):
    found = real(name)
    assert {finding.id for finding in found.findings} == REPORTED[name]
    assert report.render(found).startswith(found.name)


@pytest.mark.skipif(not REAL.is_dir(), reason="the real traces are not here")
def test_real_idle_time_sums_to_the_gaps_of_the_device():
    found = real("tracelens_h100_google_owlv2").summary
    assert found.idle.total_ms + 566.75 == pytest.approx(found.idle.total_ms / (1 - found.device_busy), rel=0.01)
    assert found.idle.host_ms > 0.9 * found.idle.total_ms
    assert found.matrix.tensor_ms > 100 * found.matrix.plain_ms
    assert found.overlap.kernel_ms > 500
    assert found.sync_sites[0].where[3] == "transformers/models/owlv2/modeling_owlv2.py(1421): box_predictor"
