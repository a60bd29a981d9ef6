"""The device room on a real card: what the simulator can only claim."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time

import pytest
import torch

from inferscope.device.backends import captures, cuda_query, relax_cuda_thread
from inferscope.device.events import timer
from inferscope.device.monitor import identity_of, monitor_for
from inferscope.device.room import DeviceRoom
from inferscope.integration import Registry, forget_copies
from inferscope.record import core
from inferscope.types import SpanFlag

pytestmark = pytest.mark.gpu


@pytest.fixture
def serving():
    registry = Registry()
    registry.instrument(["torch", "copies"])
    room = DeviceRoom(core.default)
    spans = []
    room.harvester.sinks.append(spans.append)
    room.start()
    yield room, spans
    room.stop()
    registry.uninstrument()
    forget_copies()


def drain(room, spans, count: int, seconds: float = 10.0):
    """Harvest until so many spans came; the harvester never waits for the device, so the test does."""
    until = time.monotonic() + seconds
    while len(spans) < count and time.monotonic() < until:
        room.harvest()
        time.sleep(0.005)
    return spans


def test_execution_agrees_with_events_of_our_own(serving) -> None:
    room, spans = serving
    net = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(8)]).cuda()
    value = torch.randn(2048, 2048, device="cuda")
    net(value)
    torch.cuda.synchronize()
    drain(room, spans, 1)
    spans.clear()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    with core.default.request("predict"):
        net(value)
    last.record()
    last.synchronize()
    (span,) = drain(room, spans, 1)
    assert span.name == "forward"
    assert span.exec_ns <= first.elapsed_time(last) * 1e6 + 2_000
    assert span.exec_ns >= 0.5 * first.elapsed_time(last) * 1e6
    assert span.start_ns is not None
    assert span.error_ns < 100_000


def test_a_pageable_copy_blocks_and_a_pinned_one_does_not(serving) -> None:
    room, spans = serving
    pageable = torch.ones(1 << 24)
    pinned = pageable.pin_memory()
    pageable.to("cuda")
    torch.cuda.synchronize()
    drain(room, spans, 1)
    spans.clear()
    pageable.to("cuda", non_blocking=True)
    pinned.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    blocking, free = drain(room, spans, 2)
    assert blocking.flags == SpanFlag.SYNC | SpanFlag.PAGEABLE
    assert free.flags == 0
    assert free.host_ns < blocking.host_ns
    assert free.exec_ns < blocking.exec_ns
    assert free.nbytes == 1 << 26


def test_captures_survive_a_harvester_that_never_rests(serving) -> None:
    room, _ = serving
    net = torch.nn.Linear(256, 256).cuda()
    value = torch.randn(64, 256, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            net(value)
    torch.cuda.synchronize()
    stop = threading.Event()

    def harvest() -> None:
        while not stop.is_set():
            room.harvest()

    thread = threading.Thread(target=harvest)
    thread.start()
    try:
        for _ in range(50):
            net(value)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=side):
                assert captures.open == 1
                output = net(value)
            graph.replay()
    finally:
        stop.set()
        thread.join()
    torch.cuda.synchronize()
    assert torch.isfinite(output).all()
    channel = timer.channel(torch.device("cuda", torch.cuda.current_device()))
    assert channel.off == ""
    assert channel.counts().errors == 0


def test_this_threads_capture_mode_can_be_relaxed() -> None:
    torch.ones(1, device="cuda")
    assert relax_cuda_thread()


def test_the_driver_knows_the_card_that_torch_uses() -> None:
    held = torch.ones(1 << 28, device="cuda")
    pytest.importorskip("pynvml")
    device = torch.device("cuda", torch.cuda.current_device())
    monitor = monitor_for(device)
    cards = {card.uuid: card for card in monitor.run_once()}
    uuid = monitor.find(identity_of(device))
    assert uuid in cards
    # The same figures as nvidia-smi's, which counts in MiB.
    asked = ["nvidia-smi", f"--id={uuid}", "--query-gpu=memory.used,memory.total", "--format=csv,noheader,nounits"]
    smi = shutil.which("nvidia-smi")
    if smi is not None and uuid.startswith("GPU-"):
        used, total = (int(part) for part in subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split(","))
        assert cards[uuid].memory_total_bytes == pytest.approx(total << 20, abs=64 << 20)
        assert cards[uuid].memory_used_bytes == pytest.approx(used << 20, rel=0.05, abs=64 << 20)
    assert cards[uuid].memory_used_bytes >= held.nbytes
    monitor.close()


def test_memory_by_stage_is_torchs_own_peak(serving) -> None:
    room, spans = serving
    timer.memory.reset()
    torch.cuda.reset_peak_memory_stats()
    net = torch.nn.Linear(4096, 4096).cuda()
    for rows in (16, 4096):
        with core.default.request("predict"):
            net(torch.randn(rows, 4096, device="cuda"))
    drain(room, spans, 2)
    room.monitor()
    (row,) = [row for row in room.evidence(0, 2**62)["memory_by_stage"] if row["stage"] == "forward"]
    assert row["peak_bytes"] == torch.cuda.max_memory_allocated()
    assert row["batch"] == 4096
    assert row["largest_batch"] > 4096


def test_a_question_without_the_interpreters_lock_has_torchs_answer() -> None:
    ask = cuda_query()
    assert ask is not None
    event = torch.Event("cuda", enable_timing=True)
    torch.cuda._sleep(200_000_000)
    event.record()
    assert ask(event) is False
    assert event.query() is False
    torch.cuda.synchronize()
    assert ask(event) is True


def test_captures_of_a_compiled_model_survive(serving) -> None:
    room, _ = serving
    net = torch.compile(torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU()).cuda(), mode="reduce-overhead")
    value = torch.randn(64, 256, device="cuda")
    stop = threading.Event()

    def harvest() -> None:
        while not stop.is_set():
            room.harvest()

    thread = threading.Thread(target=harvest)
    thread.start()
    try:
        with torch.inference_mode():
            for _ in range(10):  # the first calls compile, warm up and capture, the others replay
                result = net(value)
        torch.cuda.synchronize()
        assert torch.isfinite(result).all()
    finally:
        stop.set()
        thread.join()
    channel = timer.channel(torch.device("cuda", torch.cuda.current_device()))
    assert channel.off == ""
    assert channel.counts().errors == 0


@pytest.mark.parametrize(("pinned", "non_blocking"), [(False, False), (False, True), (True, False), (True, True)])
def test_copies_are_what_the_profiler_says(serving, pinned, non_blocking) -> None:
    room, spans = serving
    host = torch.ones(1 << 22)
    host = host.pin_memory() if pinned else host
    host.to("cuda")
    torch.cuda.synchronize()
    drain(room, spans, 1)
    spans.clear()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        host.to("cuda", non_blocking=non_blocking)
        torch.cuda.synchronize()
    (span,) = drain(room, spans, 1)
    names = {event.name() for event in profile.profiler.kineto_results.events() if event.name().startswith("Memcpy HtoD")}
    assert len(names) == 1
    assert ("Pageable" in names.pop()) is not pinned
    assert bool(span.flags & SpanFlag.PAGEABLE) is not pinned
    assert bool(span.flags & SpanFlag.SYNC) is not (pinned and non_blocking)


def test_the_demo_on_the_card(tmp_path) -> None:
    environ = {**os.environ, "INFERSCOPE_STATE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "inferscope", "demo", "--device", "cuda", "--variant", "slow", "--seconds", "40", "--json", "-"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=300)
    found = json.loads(done.stdout)
    truth = {row["name"]: row["share"] for row in found["truth"]["attribution"]}
    said = {row["name"]: row["share"] for row in found["attribution"]}
    for cause in ("copy:h2d", "lock:rules"):
        assert said[cause] == pytest.approx(truth[cause], abs=0.1)
    assert found["device_busy"] is not None  # from NVML, for all processes on the card
    assert 0.0 < found["device_busy"] <= 1.0
