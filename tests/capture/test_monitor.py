"""Torch's own CUPTI monitor, where the application runs it: its window stands for the GPU, ours keep away from CUPTI."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from inferscope.capture import CaptureBudget, RequestScopedCapture, Target, monitor
from inferscope.capture.gpu import Gpu
from inferscope.capture.monitor import MODULE, Monitor, monitor_runs, summary
from inferscope.clock import now_ns

EVENTS = [
    {"kind": "kernel", "name": "gemm", "start_ns": 10, "end_ns": 40},
    {"kind": "kernel", "name": "gemm", "start_ns": 50, "end_ns": 60},
    {"kind": "gpu_memcpy", "copy_kind": "HtoD", "start_ns": 0, "end_ns": 5, "bytes": 64},
    {"kind": "cuda_runtime", "name": "cudaLaunchKernel", "start_ns": 0, "end_ns": 1},
    {"kind": "user_annotation", "name": "canary", "start_ns": 0, "end_ns": 9},
    {"kind": "kernel", "name": "broken"},
]


@pytest.fixture
def running(monkeypatch):
    """A stand-in for the module, with a monitor that records."""
    calls = []

    def end():
        calls.append("end")
        return {"events": EVENTS, "start_ns": 1}

    fake = types.SimpleNamespace(
        get_monitor=lambda: object(),
        begin_trace_window=lambda: calls.append("begin"),
        end_trace_window=end,
        monitor_stats=lambda: {"dropped_records": 3},
        calls=calls,
    )
    monkeypatch.setitem(sys.modules, MODULE, fake)
    return fake


def test_without_the_monitor_nothing_happens(monkeypatch):
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    one = Monitor()
    assert not monitor_runs()
    assert not one.begin()
    assert (one.end(), one.why) == (None, None)
    monkeypatch.setitem(sys.modules, MODULE, types.SimpleNamespace())
    assert not monitor_runs()


def test_a_window_from_breach_to_evidence(running):
    one = Monitor(now_ns)
    assert one.begin()
    assert not one.begin(), "one at a time"
    said = one.end()
    assert running.calls == ["begin", "end"]
    assert (said["lost"], said["device_ns"]) == (3, 45)
    assert said["rows"][0] == {"kind": "kernel", "name": "gemm", "count": 2, "sum_ns": 40, "max_ns": 30}
    assert "canary" not in str(said)
    assert one.end() is None


def test_many_kernels_become_one_row(monkeypatch):
    monkeypatch.setattr(monitor, "KERNELS", 2)
    said = summary({"kind": "kernel", "name": str(n), "start_ns": 0, "end_ns": n} for n in range(5))
    assert [row["sum_ns"] for row in said["rows"]] == [4, 3]
    assert said["other"] == {"names": 3, "sum_ns": 3}


def test_the_applications_own_window_is_left_alone(running):
    def taken():
        raise RuntimeError("A trace window is already prepared")

    running.begin_trace_window = taken
    one = Monitor()
    assert not one.begin()
    assert "RuntimeError" in one.why
    assert one.end() is None
    assert running.calls == []


def test_a_monitor_that_ends_meanwhile_costs_its_part_only(running):
    one = Monitor()
    one.begin()
    running.end_trace_window = lambda: 1 / 0
    assert one.end() is None
    assert "ZeroDivisionError" in one.why


def test_sessions_of_ours_record_the_cpu_alone_beside_it(running):
    card = types.SimpleNamespace(
        cuda=types.SimpleNamespace(is_initialized=lambda: True, is_current_stream_capturing=lambda: False),
        version=types.SimpleNamespace(cuda="13.0", hip=None),
    )
    assert Gpu(now_ns).choose(card) == (None, None, "cupti_monitor")


def test_arming_asks_for_the_window(running, tmp_path):
    one = RequestScopedCapture(CaptureBudget(free_memory_mb=0))
    assert one.arm(Target("x", tmp_path, "score", 0)) is None
    one.disable("test over")
    assert running.calls == ["begin"]
    assert one.monitor.end()["source"] == "torch CUPTI monitor"
    assert torch.autograd.profiler.profile._prepare_trace.__name__ == "_prepare_trace"
