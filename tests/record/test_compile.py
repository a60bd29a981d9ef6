"""Stages and requests inside code that torch turns into a graph: one whole graph, the same results, nothing recorded.

`_torchdynamo_inline` is a private name of torch: this is the test that tells when it stops working.
"""

from __future__ import annotations

import inspect
import os
import pickle
import subprocess
import sys
import types
from typing import Any

import pytest

from inferscope.record import compiled, fallback
from inferscope.record.disabled import Recorder as DisabledRecorder
from inferscope.record.pure.entry import public

torch = pytest.importorskip("torch")

scope: Any = types.ModuleType("scope")


@pytest.fixture(params=["native", "pure", "disabled"], autouse=True)
def recorder(request: pytest.FixtureRequest) -> Any:
    """Fills `scope` as `inferscope` is filled."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    if request.param == "native":
        native = pytest.importorskip("inferscope.record._native", reason="the C core was not built")
        made = native.Recorder()
        scope.stage = made.entry(compiled.stage, compiled.traced_stage)
        scope.request = made.entry(compiled.request, compiled.traced_request)
    else:
        made = fallback.Recorder() if request.param == "pure" else DisabledRecorder()
        scope.stage, scope.request = public(made, silent=request.param == "disabled")
    yield made
    torch._dynamo.reset()


class Backend:
    """Runs graphs as they are and keeps them."""

    def __init__(self) -> None:
        self.graphs: list[Any] = []

    def __call__(self, graph: Any, _inputs: Any) -> Any:
        self.graphs.append(graph)
        return graph.forward

    @property
    def operations(self) -> list[str]:
        return [node.op for graph in self.graphs for node in graph.graph.nodes if node.op not in {"placeholder", "output"}]


def staged(x: torch.Tensor) -> torch.Tensor:
    with scope.stage("outer"):
        x = torch.relu(x)
        with scope.stage("inner"):
            x = x + 1
    return x * 2


def requested(x: torch.Tensor) -> torch.Tensor:
    with scope.request("score", size=3.0, items=2, model="m", cls="gold", started_ns=1) as request:
        request.items = 5
        request.size = 7.0
        with scope.stage("inside"):
            x = torch.relu(x)
        request.error = None
    return x + 1


def early(x: torch.Tensor) -> torch.Tensor:
    with scope.stage("early"):
        return torch.relu(x) + 1


def looped(x: torch.Tensor) -> torch.Tensor:
    for step in range(3):
        with scope.stage(f"step {step}"):
            x = torch.relu(x) + 1
    return x


def caught(x: torch.Tensor) -> torch.Tensor:
    try:
        with scope.stage("raises"):
            raise ValueError("x")
    except ValueError:
        x = x + 1
    return torch.relu(x)


FUNCTIONS = [staged, requested, early, looped, caught]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_compiled_functions_stay_one_graph(function, recorder):
    x = torch.tensor([-1.0, 2.0])
    backend = Backend()
    run = torch.compile(function, backend=backend, fullgraph=True)
    assert run(x).tolist() == run(x).tolist()
    assert len(backend.graphs) == 1
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, "never silently eager"
    assert set(backend.operations) <= {"call_function", "call_method"}
    assert (recorder.classes(), recorder.series()) == ([], [])
    assert run(x).tolist() == function(x).tolist()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_without_fullgraph_there_is_no_break(function):
    explained = torch._dynamo.explain(function)(torch.ones(2))
    assert (explained.graph_count, explained.graph_break_count) == (1, 0)


def make_model() -> Any:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(3, 3)

        @scope.request("score", items=2)
        def forward(self, x: torch.Tensor, times: int = 2, *, plus: int = 1) -> torch.Tensor:
            with scope.stage("layer"):
                x = self.layer(x)
            return self.after(x) * times + plus

        @scope.stage("after")
        def after(self, x: torch.Tensor, by: int = 3) -> torch.Tensor:
            return torch.relu(x) * by

    return Model()


def test_decorated_methods_stay_one_graph(recorder):
    model, x = make_model(), torch.ones(2, 3)
    series = recorder.series()
    backend = Backend()
    run = torch.compile(model, backend=backend, fullgraph=True)
    out = run(x)
    assert len(backend.graphs) == 1
    assert recorder.series() == series
    assert recorder.drain() == []
    assert torch.equal(out, model(x))
    assert bool(recorder.drain()) is not isinstance(recorder, DisabledRecorder)
    explained = torch._dynamo.explain(model)(x)
    assert (explained.graph_count, explained.graph_break_count) == (1, 0)


def test_decorated_functions_stay_one_graph(recorder):
    @scope.stage("scale")
    def scale(x: Any, by: int = 2, *, plus: int = 3) -> Any:
        return torch.relu(x) * by + plus

    backend = Backend()
    x = torch.ones(2)
    out = torch.compile(lambda x: scale(x, plus=4) + scale(x), backend=backend, fullgraph=True)(x)
    assert len(backend.graphs) == 1
    assert out.tolist() == (scale(x, plus=4) + scale(x)).tolist()


@pytest.mark.parametrize("strict", [True, False])
def test_exported_programs_hold_operations_alone(strict):
    model, x = make_model(), torch.ones(2, 3)
    program = torch.export.export(model, (x,), strict=strict)
    assert torch.equal(program.module()(x), model(x))
    assert all(node.target.__module__.startswith("torch") for node in program.graph.nodes if node.op == "call_function")


class Scripted(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with scope.stage("outer"):
            x = torch.relu(x)
        with scope.request("score", size=3.0, items=2, model="m") as request:
            request.items = 4
            return x * 4


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_code_runs_without_recording(recorder, tmp_path):
    x = torch.tensor([-1.0, 2.0])
    model = Scripted()
    script = torch.jit.script(model)
    assert script(x).tolist() == model(x).tolist() == [0, 8]
    recorder.drain()
    torch.jit.save(script, tmp_path / "model.pt")
    assert torch.jit.load(tmp_path / "model.pt")(x).tolist() == [0, 8]
    assert recorder.drain() == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_decorated_modules_are_scripted():
    class Decorated(torch.nn.Module):
        @scope.stage("forward")
        def forward(self, x: torch.Tensor, by: int = 2) -> torch.Tensor:
            return torch.relu(x) * by

    assert torch.jit.script(Decorated())(torch.ones(2)).tolist() == [2, 2]


def test_the_functions_are_documented_and_eager_code_is_timed(recorder):
    assert "Time a region" in (inspect.getdoc(scope.stage) or "")
    assert list(inspect.signature(scope.request).parameters)[:3] == ["name", "size", "items"]
    staged(torch.ones(2))
    requested(torch.ones(2))
    expected = [] if isinstance(recorder, DisabledRecorder) else ["outer", "inner", "score", "inside"]
    assert [labels[0] for _, kind, labels, *_ in recorder.series() if kind in {"stage", "request"}] == expected
    with pytest.raises(TypeError):
        scope.stage()
    with pytest.raises(TypeError):
        scope.stage("a", "b")


def test_without_any_integration_or_hook():
    """The public names, reached for the first time while dynamo traces; neither torch nor wrapt comes from us."""
    code = """
import sys
import inferscope as scope
assert not {"torch", "wrapt", "numpy", "opentelemetry"} & set(sys.modules)
import torch
def function(x):
    with scope.stage("a"), scope.request("r") as request:
        request.items = 2
        return torch.relu(x) * request.items
graphs = []
run = torch.compile(function, fullgraph=True, backend=lambda graph, _: graphs.append(graph) or graph.forward)
assert run(torch.ones(2)).tolist() == [2, 2]
assert len(graphs) == torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
import pickle
assert pickle.loads(pickle.dumps(scope.stage)) is scope.stage
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, env={**os.environ, "INFERSCOPE_DISABLED": "0"}, timeout=120)
    assert pickle.dumps(compiled.Silent("x"))
