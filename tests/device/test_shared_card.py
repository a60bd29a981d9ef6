"""Four processes on one card: each sees little of it, and only the driver knows whether it idles."""

from __future__ import annotations

import ctypes
import json
import os
import time

import pytest
import torch

from inferscope.device.events import DeviceTimer
from inferscope.device.room import DeviceRoom
from inferscope.record import core

pytest.importorskip("pynvml", reason="needs nvidia-ml-py")

UUID = "00000001-aaaa-bbbb-cccc-dddddddddddd"
PROCESSES = 4
SECONDS = 2.6
KERNEL_MS, PERIOD_S = 4.0, 0.02


def serve(sim, library: ctypes.CDLL, path: str) -> dict[str, object]:
    """What one process finds out about its card while it uses a fifth of it."""
    sim.share(path)
    sim.identify(UUID)
    assert library.fake_follow(path.encode())
    room = DeviceRoom(core.Recorder(), DeviceTimer())
    room.start()
    channel = room._timer.channel(torch.device("sim", 0))
    began, until = time.perf_counter_ns(), time.monotonic() + SECONDS
    while time.monotonic() < until:
        started = channel.begin(None)
        sim.kernel(KERNEL_MS)
        if started is not None:
            channel.end(started, "forward")
        room.harvest()
        room.monitor()
        time.sleep(PERIOD_S)
    ended = time.perf_counter_ns()
    own = sum(op.end_ns - op.start_ns for op in sim.operations() if op.kind == "kernel")
    return {"evidence": room.evidence(began, ended), "own": own / (ended - began), "card": sim.card_busy_ns(), "span": [began, ended]}


def test_idle_is_said_by_the_driver_only(sim, driver_library, tmp_path) -> None:
    path = str(tmp_path / "card")
    readers = []
    for _ in range(PROCESSES):
        reader, writer = os.pipe()
        if os.fork() == 0:
            code = 1
            try:
                with os.fdopen(writer, "w") as out:
                    json.dump(serve(sim, driver_library, path), out)
                code = 0
            finally:
                os._exit(code)
        os.close(writer)
        readers.append(reader)
    found = []
    for reader in readers:
        with os.fdopen(reader) as told:
            found.append(json.load(told))
    for _ in readers:
        assert os.wait()[1] == 0
    begin, end = min(each["span"][0] for each in found), max(each["span"][1] for each in found)
    truth = max(each["card"] for each in found) / (end - begin)
    for each in found:
        evidence = each["evidence"]
        assert evidence["source"] == "nvml"
        assert evidence["busy"] == pytest.approx(truth, abs=0.15)
        assert each["own"] < 0.35 * truth  # its own kernels are a quarter of what the card does
        assert evidence["own_spans"]["sim:0"] != evidence["busy"]
        assert [card["uuid"] for card in evidence["cards"]] == [f"GPU-{UUID}"]
        assert evidence["faults"] == []
