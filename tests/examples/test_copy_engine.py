"""The stand-in device keeps a card's rules: turns, bandwidth, who waits."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from examples.risk_scoring import copy_engine
from inferscope import InferscopeError
from inferscope.integration import Registry, copies, forget_copies
from inferscope.testing import accelerator

MIB = torch.zeros(1 << 18)  # 1 MiB of float32


def elapsed_ms(call) -> float:
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e3


def test_transfers_take_turns_in_the_order_of_asking():
    lane = copy_engine.Lane()
    turns = [lane.reserve(duration) for duration in (50_000_000, 1_000, 2_000)]
    assert [start for start, _ in turns[1:]] == [end for _, end in turns[:-1]]
    assert [end - start for start, end in turns] == [50_000_000, 1_000, 2_000]


def test_an_idle_lane_starts_at_once():
    lane = copy_engine.Lane()
    lane.reserve(1)
    time.sleep(0.002)
    now = time.perf_counter_ns()
    assert now <= lane.reserve(1)[0] < now + 1_000_000_000


def test_time_is_bytes_over_bandwidth():
    device = copy_engine.StandIn(pageable_bytes_s=1e8, pinned_bytes_s=4e8, call_us=100)
    assert device.duration_ns(1_000_000, pageable=True) == 10_100_000
    assert device.duration_ns(1_000_000, pageable=False) == 2_520_000
    took = elapsed_ms(lambda: device.to_device(MIB))
    assert took >= 10.5
    (copy,) = device.copies
    assert copy.end_ns - copy.start_ns == device.duration_ns(MIB.nbytes, pageable=True)
    assert (copy.pageable, copy.sync, copy.nbytes) == (True, True, 1 << 20)
    assert copy.asked_ns <= copy.start_ns < copy.end_ns <= copy.returned_ns


def test_pageable_copies_queue_behind_a_stall_and_pinned_ones_do_not():
    device = copy_engine.StandIn()
    small, pinned = torch.zeros(256), device.pinned(256)
    stall = threading.Thread(target=device.to_device, args=(device.table(300),))
    stall.start()
    time.sleep(0.02)
    device.to_device(pinned, non_blocking=True)
    returned = time.perf_counter_ns()
    waiters = [threading.Thread(target=device.to_device, args=(small,)) for _ in range(3)]
    for thread in waiters:
        thread.start()
    for thread in [stall, *waiters]:
        thread.join()
    pageable = sorted((copy for copy in device.copies if copy.pageable), key=lambda copy: copy.start_ns)
    assert [copy.start_ns for copy in pageable[1:]] == [copy.end_ns for copy in pageable[:-1]]
    assert pageable[0].nbytes > pageable[1].nbytes
    assert returned < pageable[0].end_ns
    assert all(copy.returned_ns - copy.asked_ns > 50e6 for copy in pageable)


def test_non_blocking_means_something_from_pinned_memory_only():
    device = copy_engine.StandIn(pinned_bytes_s=100)  # a third of a second for 32 bytes
    device.to_device(torch.zeros(8), non_blocking=True)
    device.to_device(device.pinned(8), non_blocking=True)
    device.to_device(device.pinned(8)[:4])
    assert [(copy.pageable, copy.sync) for copy in device.copies] == [(True, True), (False, False), (False, True)]
    assert [copy.returned_ns >= copy.end_ns for copy in device.copies] == [True, False, True]


def test_work_waits_for_the_copies_before_it():
    device = copy_engine.StandIn(call_us=100_000)
    device.to_device(device.pinned(8), non_blocking=True)  # arrives 20 ms from now
    device.kernel(30)
    begin = device.copies[0].asked_ns
    device.synchronize()
    assert time.perf_counter_ns() - begin >= 50_000_000


def test_a_copy_is_a_copy():
    device = copy_engine.StandIn()
    source = device.pinned(4)
    arrived = device.to_device(source, non_blocking=True)
    source.fill_(7)
    assert arrived.tolist() == [0, 0, 0, 0]
    assert device.to_host(arrived).tolist() == [0, 0, 0, 0]
    assert [copy.direction for copy in device.copies] == ["h2d", "d2h"]


def test_inferscope_is_told_of_each_copy(monkeypatch):
    told = []
    monkeypatch.setattr(copy_engine, "record_copy", lambda *args, **kwargs: told.append((args, kwargs)))
    device = copy_engine.StandIn()
    device.to_device(torch.zeros(8))
    ((direction, nbytes, start, end), facts) = told[0]
    (copy,) = device.copies
    assert (direction, nbytes, start, end) == ("h2d", 32, copy.asked_ns, copy.returned_ns)
    assert (facts["sync"], facts["pageable"]) == (True, True)
    assert facts["site"].startswith("test_inferscope_is_told_of_each_copy (test_copy_engine.py:")


def test_a_device_must_exist():
    assert isinstance(copy_engine.choose("cpu"), copy_engine.StandIn)
    with pytest.raises(ValueError, match="auto, cuda, cpu or simulated"):
        copy_engine.choose("tpu")
    if not torch.cuda.is_available():
        assert isinstance(copy_engine.choose("auto"), copy_engine.Simulated)
        with pytest.raises(ValueError, match="no CUDA device"):
            copy_engine.choose("cuda")


def test_without_a_compiler_the_stand_in_takes_its_place(monkeypatch, capsys):
    def no_compiler() -> None:
        raise accelerator.AcceleratorUnavailableError("there is no C++ compiler")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(accelerator, "load", no_compiler)
    assert isinstance(copy_engine.choose("auto"), copy_engine.StandIn)
    assert capsys.readouterr().out == "the stand-in takes the device's place: there is no C++ compiler\n"
    with pytest.raises(InferscopeError, match="no C\\+\\+ compiler"):
        copy_engine.choose("simulated")


def test_the_simulated_accelerator_does_the_same():
    device = copy_engine.choose("simulated")
    with device.own_stream():
        source = device.pinned(4, 8)
        arrived = device.to_device(source, non_blocking=True)
        device.kernel(20)
        assert elapsed_ms(device.synchronize) > 15
        assert device.to_host(arrived).tolist() == source.tolist()
    device.to_device(torch.zeros(8))
    assert [(copy.pageable, copy.sync) for copy in device.copies if copy.direction == "h2d"][-2:] == [(False, False), (True, True)]
    assert elapsed_ms(lambda: device.to_device(device.table(50))) >= 50
    (*_, table) = device.copies
    assert table.asked_ns <= table.start_ns < table.end_ns <= table.returned_ns
    assert table.nbytes == device.table(50).nbytes


def test_the_line_that_asks_for_a_copy_is_the_services_own():
    registry = Registry()
    registry.instrument(["copies"])
    device = copy_engine.choose("simulated")
    forget_copies()
    device.to_device(torch.zeros(8))
    device.to_device(device.pinned(8), non_blocking=True)
    registry.uninstrument()
    rows = [row for row in copies() if row["name"] == "h2d"]
    forget_copies()
    assert [(row["sync"], row["pageable"]) for row in rows] == [(1, 1), (0, 0)]
    assert all("(test_copy_engine.py:" in row["site"] for row in rows)


@pytest.mark.gpu
def test_a_card_does_the_same():
    device = copy_engine.choose("cuda")
    with device.own_stream():
        source = device.pinned(4, 8)
        arrived = device.to_device(source, non_blocking=True)
        device.kernel(20)
        assert elapsed_ms(device.synchronize) > 10
        assert device.to_host(arrived).tolist() == source.tolist()
    device.to_device(torch.zeros(8))
    assert [(copy.pageable, copy.sync) for copy in device.copies if copy.direction == "h2d"] == [(False, False), (True, True)]
    assert elapsed_ms(lambda: device.to_device(device.table(50))) > 15
