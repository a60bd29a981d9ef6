"""Every copy that Python can see, against the log of what the device truly did; and torch as it is without us."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
import torch._dynamo
import torch.fx

from inferscope import integration
from inferscope.integration import Registry
from inferscope.record import core
from inferscope_integrations.copies import FUNCTIONS, READS, _device_concerned

HERE, THERE = "sim:0", "sim:1"
WAYS = {"h2d": "h2d", "d2h": "d2h", "d2d": "d2d", "scalar": "d2h"}


@pytest.fixture
def values() -> torch.Tensor:
    return torch.arange(8.0, device=HERE)


def told() -> dict[str, tuple[int, int]]:
    """Copies and bytes by direction, as we say."""
    found: dict[str, tuple[int, int]] = {}
    for row in integration.copies():
        count, nbytes = found.get(row["name"], (0, 0))
        found[row["name"]] = count + row["count"], nbytes + row["bytes"]
    return found


def happened(sim) -> dict[str, tuple[int, int]]:
    """The same as the device did."""
    found: dict[str, tuple[int, int]] = {}
    for op in sim.operations():
        if op.kind in WAYS:
            count, nbytes = found.get(WAYS[op.kind], (0, 0))
            found[WAYS[op.kind]] = count + 1, nbytes + op.nbytes
    return found


COPIES = {
    "torch.tensor": lambda _v: torch.tensor([1.0, 2.0], device=HERE),
    "torch.tensor of a number": lambda _v: torch.tensor(3, device="sim"),
    "torch.tensor in a context": lambda _v: in_context(lambda: torch.tensor([1.0])),
    "torch.as_tensor": lambda _v: torch.as_tensor(np.ones(5, np.float32), device=HERE),
    "torch.as_tensor that is one": lambda v: torch.as_tensor(v, device=HERE),
    "torch.asarray": lambda _v: torch.asarray([1.0], device=HERE),
    "torch.from_numpy": lambda _v: torch.from_numpy(np.ones(3)).to("sim"),
    "Tensor.new_tensor": lambda v: v.new_tensor([1.0, 2.0]),
    "Tensor.sim": lambda _v: torch.ones(4).sim(),
    "Tensor.clone": lambda v: v.clone(),
    "torch.clone": lambda v: torch.clone(v),
    "Tensor.to a copy": lambda v: v.to(HERE, copy=True),
    "Tensor.to another": lambda v: v.to(THERE),
    "Tensor.sim of another": lambda v: v.sim(1),
    "Tensor.to where it is": lambda v: v.to(HERE),
    "Tensor.to a number": lambda v: v.to(1),
    "Tensor.cpu": lambda v: v.cpu(),
    "deepcopy": lambda _v: copy.copy(torch.ones(2)).to("sim"),
}


def in_context(make):
    with torch.device("sim"):
        return make()


@pytest.mark.parametrize("name", COPIES)
def test_copies_are_those_of_the_log(serving, values, name) -> None:
    integration.forget_copies()
    serving.sim.clear_log()
    COPIES[name](values)
    assert told() == happened(serving.sim)
    assert all(row["site"].endswith(")") and "test_copies_seen.py:" in row["site"] for row in integration.copies())


READERS = {
    "nonzero": lambda v: torch.nonzero(v),
    "Tensor.nonzero": lambda v: v.nonzero(),
    "argwhere": lambda v: torch.argwhere(v),
    "where": lambda v: torch.where(v),
    "where of three": lambda v: torch.where(v == 0, v, v),
    "unique": lambda v: torch.unique(v),
    "Tensor.unique": lambda v: v.unique(),
    "unique by dimension": lambda v: torch.unique(v.reshape(2, 4), dim=0),
    "unique_consecutive": lambda v: torch.unique_consecutive(v),
    "Tensor.unique_consecutive": lambda v: v.unique_consecutive(),
    "masked_select": lambda v: torch.masked_select(v, v > 3),
    "equal": lambda v: torch.equal(v, v + 1),
    "allclose": lambda v: torch.allclose(v, v),
    "is_nonzero": lambda v: torch.is_nonzero(v[:1]),
    "repeat_interleave": lambda v: torch.repeat_interleave(torch.tensor([2, 1]).to("sim")),
    "repeat_interleave of a known size": lambda v: v.repeat_interleave(torch.ones(8).long().to("sim"), output_size=8),
    "bool": lambda v: bool(v[1]),
    "int": lambda v: int(v[1]),
    "float": lambda v: float(v[1]),
    "complex": lambda v: complex(v[1]),
    "index": lambda v: range(torch.ones(1).long().to("sim")[0]),
    "in": lambda v: 3.0 in v,
    "format": lambda v: f"{v[1]:.1f}",
    "item": lambda v: v[1].item(),
}


@pytest.mark.parametrize("name", READERS)
def test_a_value_or_a_size_that_is_read_waits_and_is_counted(serving, values, name) -> None:
    integration.forget_copies()
    serving.sim.kernel(3.0)
    before = serving.sim.counters().get("implicit_syncs", 0)
    began = serving.sim.now_ns()
    with serving.recorder.request("predict"):
        READERS[name](values)
    syncs = serving.sim.counters().get("implicit_syncs", 0) - before
    rows = [row for row in integration.copies() if row["implicit"]]
    assert sum(row["count"] for row in rows) == syncs
    assert syncs == (0 if name in {"where of three", "repeat_interleave of a known size"} else 1)
    if syncs:
        assert serving.sim.now_ns() - began >= 3_000_000
        assert all("test_copies_seen.py:" in row["site"] for row in rows)
        serving.settle()
        (vector,) = serving.vectors()
        assert sum(vector.values()) >= 3.0


def test_a_mask_reads_a_size_that_is_not_seen(serving, values) -> None:
    # `Tensor.__getitem__` cannot be replaced (docs/device.md): the truth has a wait that we do not tell of.
    integration.forget_copies()
    before = serving.sim.counters().get("implicit_syncs", 0)
    values[values > 3]
    assert serving.sim.counters()["implicit_syncs"] > before
    assert integration.copies() == []


def test_a_module_that_moves_is_one_copy(serving) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    integration.forget_copies()
    serving.sim.clear_log()
    with serving.recorder.request("load"):
        net.to("sim")
    net.to("sim")  # it is there already
    (row,) = integration.copies()
    truth = [op for op in serving.sim.operations() if op.kind == "h2d"]
    assert len(truth) == 4
    assert (row["name"], row["count"], row["bytes"]) == ("h2d", 1, sum(op.nbytes for op in truth))
    assert (row["sync"], row["pageable"], row["non_blocking"]) == (1, 1, 0)
    assert row["wall_ns"] >= sum(op.end_ns - op.start_ns for op in truth)
    assert row["site"].startswith("test_a_module_that_moves_is_one_copy (test_copies_seen.py:")
    serving.settle()
    (vector,) = serving.vectors()
    assert vector["copy:h2d"] == pytest.approx(row["wall_ns"] / 1e6, rel=0.2)
    net.to(torch.float64)
    net.cpu()
    assert {row["name"] for row in integration.copies()} == {"h2d", "d2h"}


def test_what_was_asked_not_to_wait_and_does_is_told_apart(serving) -> None:
    integration.forget_copies()
    host = torch.ones(1024)
    host.to("sim", non_blocking=True)
    (row,) = integration.copies()
    assert (row["non_blocking"], row["pageable"], row["sync"]) == (1, 1, 1)


def test_a_peer_is_the_device_that_a_number_names(sim) -> None:
    held = torch.ones(1, device=HERE)
    host = torch.ones(1)
    assert _device_concerned(torch, "cuda", host, (1,), {}) == torch.device("cuda", 1)
    assert _device_concerned(torch, "cuda", host, (), {"device": "cuda:1"}) == torch.device("cuda", 1)
    assert _device_concerned(torch, "cuda", host, (), {}) == torch.device("cuda")
    assert _device_concerned(torch, "to", held, (1,), {}) == held.device  # the source's stream carries it
    assert _device_concerned(torch, "to", held, (0,), {}) is None
    assert _device_concerned(torch, "to", held, (torch.float64,), {}) is None


# -- torch without us ------------------------------------------------------------------------------------------------------------------

FUNCTIONS_OF_TORCH = sorted({*FUNCTIONS, "clone", "tensor", "as_tensor", "asarray"})


@pytest.fixture
def patched():
    before = {name: getattr(torch, name) for name in FUNCTIONS_OF_TORCH}
    registry = Registry()
    registry.instrument(["copies"])
    yield before
    registry.uninstrument()
    assert all(getattr(torch, name) is held for name, held in before.items())
    assert all(not hasattr(vars(torch.Tensor).get(name), "active") for name in READS)


@pytest.mark.skipif(core.IMPLEMENTATION != "native", reason="the pure twin puts plain functions in place, which are equal to nothing else")
def test_a_replaced_function_passes_for_the_original(sim, patched) -> None:
    for name, original in patched.items():
        ours = getattr(torch, name)
        assert ours is not original
        assert (ours.__name__, ours.__doc__, repr(ours)) == (original.__name__, original.__doc__, repr(original))
        assert ours == original
        assert {original: 1}[ours] == 1
        assert pickle.loads(pickle.dumps(ours)) == original
        assert pickle.loads(pickle.dumps(original)) == original


def scripted():
    @torch.jit.script
    def run(value: torch.Tensor) -> torch.Tensor:
        found = torch.nonzero(value)
        return torch.where(found > 0, found, torch.clone(found)) + torch.unique(value).sum() + torch.tensor([1.0])

    return run


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_scripting_works_before_during_and_after() -> None:
    value = torch.tensor([0.0, 2.0, 2.0])
    results = [scripted()(value)]
    for _ in range(2):
        registry = Registry()
        registry.instrument(["copies"])
        results.append(scripted()(value))
        registry.uninstrument()
        results.append(scripted()(value))
    assert all(torch.equal(results[0], result) for result in results)


class Noting(torch.Tensor):
    """Remembers which functions it was given."""

    seen: list[object] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


def test_subclasses_and_proxies_meet_torchs_own_functions(patched) -> None:
    value = torch.ones(3).as_subclass(Noting)
    Noting.seen.clear()
    torch.nonzero(value)
    assert any(func is patched["nonzero"] for func in Noting.seen)

    def traced(value):
        return torch.clone(torch.where(torch.nonzero(value) > 0, 1, 2))

    graph = torch.fx.symbolic_trace(traced)
    assert next(node.target for node in graph.graph.nodes if node.op == "call_function") is patched["nonzero"]
    assert torch.equal(graph(torch.tensor([0.0, 3.0])), traced(torch.tensor([0.0, 3.0])))


def test_compiled_and_exported_code_sees_no_difference(patched) -> None:
    def run(value, mask):
        picked = torch.where(mask, torch.clone(value), value.clone())
        return picked + torch.tensor([1.0, 2.0]).sum() + torch.as_tensor(3.0) + value.new_tensor([value.shape[0] * 1.0])

    def sized(value):
        return torch.nonzero(value), torch.unique(value), torch.unique(value.reshape(3, 1), dim=0), torch.masked_select(value, value > 0)

    value, mask = torch.ones(3), torch.tensor([True, False, True])
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for function, args in ((run, (value, mask)), (sized, (value,))):
            compiled = torch.compile(function, backend="eager", fullgraph=True)(*args)
            expected = function(*args)
            for one, other in zip(
                [compiled] if torch.is_tensor(compiled) else compiled, [expected] if torch.is_tensor(expected) else expected, strict=True
            ):
                assert torch.equal(one, other)

    class Counting(torch.nn.Module):
        def forward(self, value):
            return value.sum() + torch.tensor([value.shape[0] * 1.0])

    batch = torch.export.Dim("batch", min=2)
    for strict in (True, False):
        program = torch.export.export(Counting(), (torch.ones(4, 2),), dynamic_shapes={"value": {0: batch}}, strict=strict)
        assert program.module()(torch.ones(7, 2)).item() == 21.0
