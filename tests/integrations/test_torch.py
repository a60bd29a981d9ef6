"""torch: forwards and copies are seen, and nothing of the user's changes."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from collections.abc import Callable

import pytest

import inferscope
from inferscope import integration
from inferscope.record import core

torch = pytest.importorskip("torch")


def make_net():
    """Of torch's own classes, so that it pickles."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(8, 2)))


class UserNet(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)

    def forward(self, value):
        return self.last(torch.relu(self.first(value)))


class Recursive(torch.nn.Module):
    def forward(self, value, depth: int):
        return value if depth == 0 else self(value + 1, depth - 1)


def test_the_outermost_forward_is_one_stage(seen, instrument) -> None:
    instrument("torch")
    net = make_net()
    with core.default.request("predict"):
        net(torch.ones(2, 4))
    (record,) = seen.requests()
    assert set(seen.columns(record)) == {"forward", "unattributed"}
    assert [span.parent for span in record.spans] == [-1]  # two levels of modules, one span
    assert sum(record.vector) == record.wall_ns


def test_a_watched_model_has_a_stage_of_its_own_and_is_untouched(seen, instrument) -> None:
    instrument("torch")
    net = make_net()
    before = dict(vars(net))
    assert inferscope.watch(net, "risk") is net
    assert vars(net) == before
    with core.default.request("predict"):
        net(torch.ones(2, 4))
    (record,) = seen.requests()
    assert "forward:risk" in seen.columns(record)


def test_recursion_and_exceptions(seen, instrument) -> None:
    instrument("torch")
    counted = seen.series("stage").get("forward", 0)
    Recursive()(torch.ones(1), 3)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        make_net()(torch.ones(2, 5))
    make_net()(torch.ones(2, 4))
    assert seen.series("stage")["forward"] - counted == 3


def test_patching_is_undone_to_the_last_attribute(instrument) -> None:
    before_module, before_tensor = dict(vars(torch.nn.Module)), dict(vars(torch.Tensor))
    registry = integration.Registry()
    registry.instrument(["torch", "copies"])
    assert dict(vars(torch.nn.Module)) != before_module
    assert dict(vars(torch.Tensor)) != before_tensor
    registry.uninstrument()
    assert dict(vars(torch.nn.Module)) == before_module
    assert dict(vars(torch.Tensor)) == before_tensor


def test_pickle_deepcopy_save_signature_and_type_are_as_without_us(instrument) -> None:
    net, value = make_net(), torch.ones(2, 4)
    plain = net(value)
    signature = inspect.signature(torch.nn.Sequential.forward)
    instrument("torch", "copies")
    assert torch.equal(net(value), plain)
    assert type(net) is torch.nn.Sequential
    assert torch.equal(copy.deepcopy(net)(value), plain)
    assert torch.equal(pickle.loads(pickle.dumps(net))(value), plain)
    buffer = io.BytesIO()
    torch.save(net, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=False)(value), plain)
    assert inspect.signature(torch.nn.Sequential.forward) == signature
    assert torch.equal(value.to(torch.float64).cpu(), torch.ones(2, 4, dtype=torch.float64))


def count_graphs(how: str, value):
    """Graphs that one call of a compiled model makes, with the call's output."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    net = UserNet()
    if how == "torch.compile":
        fast: Callable = torch.compile(net, backend=backend, fullgraph=True)
    else:
        net.compile(backend=backend, fullgraph=True)
        fast = net
    return fast(value), len(graphs)


@pytest.mark.parametrize("how", ["torch.compile", "module.compile"])
def test_compiled_models_keep_their_whole_graph_and_their_outputs(seen, instrument, how: str) -> None:
    value = torch.ones(2, 4)
    plain, graphs = count_graphs(how, value)
    instrument("torch", "copies")
    with core.default.request("predict"):
        output, graphs_with_us = count_graphs(how, value)
    assert torch.equal(output, plain)
    assert graphs_with_us == graphs == 1
    (record,) = seen.requests()
    assert "forward" in seen.columns(record)


def test_a_function_that_copies_inside_compiled_code_is_one_graph(instrument) -> None:
    torch._dynamo.reset()
    instrument("torch", "copies")
    graphs = []

    def backend(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=backend, fullgraph=True)
    def convert(value):
        return value.to(torch.float64).cpu() + 1

    assert torch.equal(convert(torch.ones(3)), torch.full((3,), 2.0, dtype=torch.float64))
    assert len(graphs) == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_script_trace_and_export_are_as_without_us(seen, instrument) -> None:
    value = torch.ones(2, 4)
    net = make_net()
    plain = net(value)
    instrument("torch", "copies")
    assert torch.allclose(torch.jit.trace(net, value)(value), plain)
    assert torch.allclose(torch.jit.script(net)(value), plain)
    exported = torch.export.export(net, (value,))
    assert torch.allclose(exported.module()(value), plain)


class Remote(torch.Tensor):
    """Says of itself that it lies on a device; its data do not."""

    @property
    def is_cpu(self) -> bool:
        return False


def test_copies_between_host_and_device_are_told_from_facts(seen, instrument, monkeypatch) -> None:
    instrument("copies")
    remote = torch.ones(8).as_subclass(Remote)
    monkeypatch.setattr(Remote, "to", lambda self, *args, **kwargs: torch.ones(8), raising=False)
    with core.default.request("predict"):
        torch.Tensor.to(torch.ones(4), torch.float64)  # host to host: nothing to record
        torch.ones(8).copy_(remote)
    (record,) = seen.requests()
    columns = seen.columns(record)
    assert "copy:d2h" in columns
    assert "copy:h2d" not in columns
    row = next(row for row in integration.copies() if row["site"].startswith("test_copies"))
    assert (row["name"], row["count"], row["bytes"], row["sync"], row["pageable"]) == ("d2h", 1, 32, 1, 1)
    assert row["site"].startswith("test_copies_between_host_and_device_are_told_from_facts (test_torch.py:")


def test_moving_a_module_is_no_copy_of_a_request(seen, instrument) -> None:
    instrument("copies")
    make_net().to(torch.float64)
    assert integration.copies() == []
