"""The device room on a real card: what the simulator can only claim."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from inferscope.device.backends import captures, relax_cuda_thread
from inferscope.device.events import timer
from inferscope.device.nvml import NvmlMonitor, uuid_of
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


def test_the_driver_knows_the_card_by_torchs_uuid() -> None:
    torch.ones(1, device="cuda")
    pytest.importorskip("pynvml")
    uuid = uuid_of(torch.device("cuda", 0))
    monitor = NvmlMonitor()
    cards = {card.uuid: card for card in monitor.run_once()}
    assert uuid in cards
    assert cards[uuid].memory_total_bytes is not None
    monitor.close()
