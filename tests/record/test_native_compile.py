"""torch.compile, torch.export and torch.jit see through a decorated function, as if it were not there.

`_torchdynamo_inline` is a private name of torch: this is the test that tells when it stops working.
"""

from __future__ import annotations

from typing import Any

import pytest

native = pytest.importorskip("inferscope.record._native", reason="the C core was not built")
torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def model() -> Any:
    recorder = native.Recorder()

    @recorder.stage("scale")
    def scale(x: Any, by: int = 2, *, plus: int = 3) -> Any:
        return torch.relu(x) * by + plus

    class Model(torch.nn.Module):
        recorded = recorder

        @recorder.stage("forward")
        def forward(self, x: torch.Tensor, times: int = 1) -> torch.Tensor:
            return scale(x, plus=4) * times

        @recorder.stage("helper")
        def helper(self, x: torch.Tensor, by: int = 2) -> torch.Tensor:
            return x * by

        def both(self, x: torch.Tensor) -> torch.Tensor:
            return self(x) + self.helper(x)

    return Model()


@pytest.fixture(autouse=True)
def fresh() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_compile_gives_one_graph_without_breaks(model: Any) -> None:
    """Default values too, of functions and methods, which dynamo guards in a way of their own."""
    for function in (lambda x: model(x) + 1, lambda x: model.helper(x) + 1, model.both, model):
        torch._dynamo.reset()
        explained = torch._dynamo.explain(function)(torch.ones(2))
        assert (explained.graph_count, explained.graph_break_count) == (1, 0)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert compiled(torch.ones(2)).tolist() == model(torch.ones(2)).tolist() == [6, 6]


def test_export(model: Any) -> None:
    assert torch.export.export(model, (torch.ones(2),)).module()(torch.ones(2)).tolist() == [6, 6]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_jit_script() -> None:
    recorder = native.Recorder()

    class Model(torch.nn.Module):
        @recorder.stage("forward")
        def forward(self, x: torch.Tensor, times: int = 2) -> torch.Tensor:
            return x * times

    assert torch.jit.script(Model())(torch.ones(2)).tolist() == [2, 2]


def test_eager_calls_are_still_timed(model: Any) -> None:
    model.both(torch.ones(2))
    counted = {
        labels
        for index, kind, labels, *_, length in model.recorded.series()
        if kind == "stage" and model.recorded.read_counts(index, bytearray(8 * length))[0]
    }
    assert counted == {("scale",), ("forward",), ("helper",)}
