"""The device room on a real card: what the simulator can only claim.

`pytest tests/gpu --device simulated` runs the same code on the simulated accelerator, so that it is known to work before a card is at hand; what
asks CUDA's own runtime, profiler or driver is skipped there.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time

import pytest
import torch

from inferscope.copied import NON_BLOCKING
from inferscope.device.backends import captures, cuda_query, relax_cuda_thread
from inferscope.device.events import timer
from inferscope.device.monitor import identity_of, monitor_for
from inferscope.device.room import DeviceRoom
from inferscope.integration import Registry, forget_copies
from inferscope.record import core
from inferscope.types import SpanFlag

pytestmark = pytest.mark.gpu


@pytest.fixture
def card(request) -> torch.device:
    """What the tests run on."""
    if request.config.getoption("device") != "simulated":
        return torch.device("cuda", torch.cuda.current_device())
    if request.node.get_closest_marker("cuda") is not None:
        pytest.skip("asks CUDA itself")
    from inferscope.testing import accelerator

    sim = accelerator.load()
    sim.reset()
    sim.configure(pageable_gb_s=0.3)  # the simulator moves the bytes on the host, within every call
    sim.operator_cost("aten::addmm", 300.0)
    return torch.device("sim", 0)


def captured(card, side):
    """A graph, and the block that captures into it, in the mode that everybody's queries end."""
    if card.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        return graph, torch.cuda.graph(graph, stream=side)
    graph = torch.accelerator.Graph(capture_error_mode="global")
    block = contextlib.ExitStack()
    block.enter_context(side)
    block.enter_context(graph)
    return graph, block


def stream_of(card):
    return torch.cuda.Stream() if card.type == "cuda" else torch.Stream(card)


@pytest.fixture
def serving(card):
    registry = Registry()
    registry.instrument(["torch", "copies"])
    room = DeviceRoom(core.default)
    spans = []
    room.harvester.sinks.append(spans.append)
    room.start()
    yield room, spans
    room.stop()
    registry.uninstrument()
    room.after_fork()  # drops the channels
    forget_copies()


def drain(room, spans, count: int, seconds: float = 10.0):
    """Harvest until so many spans came; the harvester never waits for the device, so the test does."""
    until = time.monotonic() + seconds
    while len(spans) < count and time.monotonic() < until:
        room.harvest()
        time.sleep(0.005)
    return spans


def test_execution_agrees_with_events_of_our_own(serving, card) -> None:
    room, spans = serving
    net = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(8)]).to(card)
    value = torch.randn(2048, 2048, device=card)
    net(value)
    torch.accelerator.synchronize()
    drain(room, spans, 1)
    spans.clear()
    first, last = (torch.Event(card, enable_timing=True) for _ in range(2))
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


def test_a_pageable_copy_blocks_and_a_pinned_one_does_not(serving, card) -> None:
    room, spans = serving
    pageable = torch.ones(1 << 24)
    pinned = pageable.pin_memory()
    pageable.to(card)
    torch.accelerator.synchronize()
    drain(room, spans, 1)
    spans.clear()
    pageable.to(card, non_blocking=True)
    pinned.to(card, non_blocking=True)
    torch.accelerator.synchronize()
    blocking, free = drain(room, spans, 2)
    assert blocking.flags == SpanFlag.SYNC | SpanFlag.PAGEABLE | NON_BLOCKING  # asked not to, and it blocks
    assert free.flags == NON_BLOCKING
    assert free.host_ns < blocking.host_ns
    assert free.exec_ns < blocking.exec_ns
    assert free.nbytes == 1 << 26


def test_captures_survive_a_harvester_that_never_rests(serving, card) -> None:
    room, _ = serving
    net = torch.nn.Linear(256, 256).to(card)
    value = torch.randn(64, 256, device=card)
    side = stream_of(card)
    with side:
        for _ in range(3):
            net(value)
    torch.accelerator.synchronize()
    stop = threading.Event()

    def harvest() -> None:
        while not stop.is_set():
            room.harvest()

    thread = threading.Thread(target=harvest)
    thread.start()
    try:
        for _ in range(50):
            net(value)
            graph, capturing = captured(card, side)
            with capturing:
                assert captures.open == 1
                output = net(value)
            graph.replay()
    finally:
        stop.set()
        thread.join()
    torch.accelerator.synchronize()
    assert torch.isfinite(output).all()
    channel = timer.channel(card)
    assert channel.off == ""
    assert channel.counts().errors == 0


@pytest.mark.cuda
def test_a_threads_capture_mode_can_be_relaxed(card) -> None:
    torch.ones(1, device=card)
    relaxed: list[bool] = []
    thread = threading.Thread(target=lambda: relaxed.append(relax_cuda_thread()))  # its own mode, not that of the other tests
    thread.start()
    thread.join()
    assert relaxed == [True]


@pytest.mark.cuda
def test_the_driver_knows_the_card_that_torch_uses(card) -> None:
    held = torch.ones(1 << 28, device=card)
    pytest.importorskip("pynvml")
    monitor = monitor_for(card)
    cards = {each.uuid: each for each in monitor.run_once()}
    uuid = monitor.find(identity_of(card))
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


def test_memory_by_stage_is_torchs_own_peak(serving, card) -> None:
    room, spans = serving
    timer.memory.reset()
    torch.accelerator.reset_peak_memory_stats()
    net = torch.nn.Linear(4096, 4096).to(card)
    for rows in (16, 4096):
        with core.default.request("predict"):
            net(torch.randn(rows, 4096, device=card))
    drain(room, spans, 2)
    room.monitor()
    (row,) = [row for row in room.evidence(0, 2**62)["memory_by_stage"] if row["stage"] == "forward"]
    assert row["peak_bytes"] == torch.accelerator.max_memory_allocated()
    assert row["batch"] == 4096
    assert row["largest_batch"] > 4096


@pytest.mark.cuda
def test_a_question_without_the_interpreters_lock_has_torchs_answer(card) -> None:
    ask = cuda_query()
    assert ask is not None
    event = torch.Event(card, enable_timing=True)
    torch.cuda._sleep(200_000_000)
    event.record()
    assert ask(event) is False
    assert event.query() is False
    torch.accelerator.synchronize()
    assert ask(event) is True


@pytest.mark.cuda
def test_captures_of_a_compiled_model_survive(serving, card) -> None:
    room, _ = serving
    net = torch.compile(torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU()).to(card), mode="reduce-overhead")
    value = torch.randn(64, 256, device=card)
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
        torch.accelerator.synchronize()
        assert torch.isfinite(result).all()
    finally:
        stop.set()
        thread.join()
    channel = timer.channel(card)
    assert channel.off == ""
    assert channel.counts().errors == 0


@pytest.mark.cuda
@pytest.mark.parametrize(("pinned", "non_blocking"), [(False, False), (False, True), (True, False), (True, True)])
def test_copies_are_what_the_profiler_says(serving, card, pinned, non_blocking) -> None:
    room, spans = serving
    host = torch.ones(1 << 22)
    host = host.pin_memory() if pinned else host
    host.to(card)
    torch.accelerator.synchronize()
    drain(room, spans, 1)
    spans.clear()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        host.to(card, non_blocking=non_blocking)
        torch.accelerator.synchronize()
    (span,) = drain(room, spans, 1)
    names = {event.name() for event in profile.profiler.kineto_results.events() if event.name().startswith("Memcpy HtoD")}
    assert len(names) == 1
    assert ("Pageable" in names.pop()) is not pinned
    assert bool(span.flags & SpanFlag.PAGEABLE) is not pinned
    assert bool(span.flags & SpanFlag.SYNC) is not (pinned and non_blocking)


@pytest.mark.cuda
def test_the_demo_on_the_card(card, tmp_path) -> None:
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
