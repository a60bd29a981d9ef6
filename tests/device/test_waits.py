"""Callers that wait on purpose, for a stream, an event or a device: their time belongs to what the device did meanwhile."""

from __future__ import annotations

import types

import pytest
import torch
import torch._dynamo

from inferscope.device.events import timer
from inferscope.integration import Registry


@pytest.fixture
def net() -> torch.nn.Module:
    """Its forward takes 20 ms on the device of the fixture `serving`."""
    return torch.nn.Linear(4, 4)


@pytest.fixture
def value() -> torch.Tensor:
    return torch.ones(2, 4)


def elsewhere(net, value):
    """A stream on which this request's own forward is under way; the current stream is idle."""
    side = torch.Stream("sim")
    with side:
        net(value)
    return side


def recorded(stream) -> torch.Event:
    event = torch.Event("sim")
    event.record(stream)
    return event


WAYS = {
    "device": lambda _stream: torch.accelerator.synchronize(),
    "device by index": lambda _stream: torch.accelerator.synchronize(0),
    "device of the backend": lambda _stream: torch.sim.synchronize(),
    "stream": lambda stream: stream.synchronize(),
    "event": lambda stream: recorded(stream).synchronize(),
    "stream behind a stream": lambda stream: (torch.accelerator.current_stream().wait_stream(stream), torch.ones(1, device="sim").cpu()),
    "stream behind an event": lambda stream: (recorded(stream).wait(), torch.ones(1, device="sim").cpu()),
    "stream told of an event": lambda stream: (
        torch.accelerator.current_stream().wait_event(recorded(stream)),
        torch.ones(1, device="sim").cpu(),
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_wait_for_another_stream_is_owned_by_what_that_did(serving, net, value, way) -> None:
    net, value = net.to("sim"), value.to("sim")
    with serving.recorder.request("predict"), serving.recorder.stage("respond"):
        WAYS[way](elsewhere(net, value))
    serving.settle()
    (vector,) = serving.vectors()
    assert vector["stage:forward"] == pytest.approx(20.0, abs=0.15)
    assert vector.get("stage:respond", 0.0) + vector.get("copy:d2h", 0.0) < 0.2
    assert vector.get("gpu-queue", 0.0) < 0.05


@pytest.mark.parametrize("way", ["device", "stream"])
def test_another_requests_work_there_is_the_gpu_queue(serving, net, value, way) -> None:
    net, value = net.to("sim"), value.to("sim")
    with serving.recorder.request("other"):
        side = elsewhere(net, value)
    with serving.recorder.request("predict"), serving.recorder.stage("respond"):
        WAYS[way](side)
    serving.settle()
    (vector,) = [vector for vector in serving.vectors() if "gpu-queue" in vector]
    assert vector["gpu-queue"] == pytest.approx(20.0, abs=0.15)
    assert vector["stage:respond"] < 0.2


def test_an_event_waits_for_nothing_that_the_request_has_no_part_in(serving, net, value) -> None:
    net, value = net.to("sim"), value.to("sim")
    with serving.recorder.request("other"):
        elsewhere(net, value)
    with serving.recorder.request("predict"), serving.recorder.stage("respond"):
        net(value)  # on the current stream, beside the other's
        recorded(torch.accelerator.current_stream()).synchronize()
    serving.settle()
    (vector,) = [vector for vector in serving.vectors() if "stage:respond" in vector]
    assert vector["stage:forward"] == pytest.approx(20.0, abs=0.15)
    assert vector.get("gpu-queue", 0.0) < 0.05


def test_a_stream_that_was_free_before_owes_nothing_to_later_work_of_another(serving, net, value) -> None:
    net, value = net.to("sim"), value.to("sim")
    main, side = torch.accelerator.current_stream(), torch.Stream("sim")
    with serving.recorder.request("predict"):
        main.wait_stream(side)  # which holds nothing yet
        serving.sim.kernel(20.0, "not timed")
        with side:
            net(value)
        torch.ones(1, device="sim").cpu()
    serving.settle()
    (vector,) = serving.vectors()
    assert vector["copy:d2h"] == pytest.approx(20.0, abs=0.15)
    assert vector.get("stage:forward", 0.0) < 0.2


def test_a_copy_that_is_waited_for_later_is_a_copy(serving) -> None:
    serving.sim.configure(h2d_gb_s=0.2)
    table = torch.ones(1 << 20).pin_memory()
    with serving.recorder.request("predict"), serving.recorder.stage("respond"):
        table.to("sim", non_blocking=True)
        torch.accelerator.current_stream().synchronize()
    serving.settle()
    (vector,) = serving.vectors()
    assert vector["copy:h2d"] == pytest.approx(21.0, abs=0.15)
    assert vector["stage:respond"] < 0.2


def test_a_wait_outside_of_every_request_is_nobodys(serving, net, value) -> None:
    net, value = net.to("sim"), value.to("sim")
    side = elsewhere(net, value)
    records = serving.sim.counters()["calls:record"]
    side.synchronize()
    torch.accelerator.synchronize()
    assert serving.sim.counters()["calls:record"] == records


def test_a_failing_wait_is_the_applications_own(serving) -> None:
    stream = torch.accelerator.current_stream()
    with serving.recorder.request("predict"):
        serving.sim.fail("synchronize", times=3, message="SIM error: lost")
        for wait in (stream.synchronize, recorded(stream).synchronize, torch.accelerator.synchronize):
            with pytest.raises(RuntimeError, match="SIM error: lost"):
                wait()
        with pytest.raises(TypeError):
            stream.synchronize(1)
        with pytest.raises(TypeError):
            stream.wait_stream()
        with pytest.raises((TypeError, AttributeError)):
            torch.Stream.synchronize()
    assert timer.channel(torch.device("sim", 0)).off == ""


def test_types_of_c_are_as_they_were_afterwards(sim) -> None:
    methods = [(torch.Stream, name) for name in ("synchronize", "wait_stream", "wait_event")]
    methods += [(torch.Event, name) for name in ("synchronize", "wait")]
    before = [vars(owner)[name] for owner, name in methods]
    streams = torch.Stream("sim")
    registry = Registry()
    for _ in range(2):
        registry.instrument(["torch"])
        assert all(vars(owner)[name] is not held for (owner, name), held in zip(methods, before, strict=True))
        assert type(streams) is torch.Stream is type(torch.accelerator.current_stream())
        assert streams.synchronize.__name__ == "synchronize"
        assert torch.Stream.wait_event.__doc__ == before[2].__doc__
        streams.synchronize()
        registry.uninstrument()
        assert [vars(owner)[name] for owner, name in methods] == before
        assert all(type(held) is types.MethodDescriptorType for held in before)
        streams.synchronize()


def test_compiled_code_sees_no_difference(sim) -> None:
    def run(value, stream):
        doubled = value * 2
        stream.synchronize()
        torch.accelerator.synchronize()
        return doubled + 1

    def graphs() -> tuple[int, int, int]:
        torch._dynamo.reset()
        explained = torch._dynamo.explain(run)(torch.ones(3, device="sim"), torch.Stream("sim"))
        return explained.graph_count, explained.graph_break_count, explained.op_count

    before = graphs()
    registry = Registry()
    registry.instrument(["torch"])
    timer.enabled = True
    after = graphs()
    timer.enabled = False
    registry.uninstrument()
    assert after == before


def test_a_backend_that_registers_later_is_watched(sim, monkeypatch) -> None:
    calls: list[object] = []
    module = types.SimpleNamespace(synchronize=lambda *args: calls.append(args))
    monkeypatch.setattr(torch, "_register_device_module", lambda name, found: setattr(found, "named", name))
    registry = Registry()
    registry.instrument(["torch"])
    original = module.synchronize
    torch._register_device_module("npu", module)
    assert module.named == "npu"
    assert module.synchronize is not original
    module.synchronize()
    registry.uninstrument()
    assert module.synchronize is original
    assert calls == [()]
