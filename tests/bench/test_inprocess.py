"""A function under load in this process: how it is found, what it is given, how its requests are timed."""

from __future__ import annotations

import time

import numpy as np
import pytest

from inferscope.bench import inprocess
from inferscope.bench.load import LoadPlan
from inferscope.errors import InferscopeError


@pytest.fixture
def module(functions, monkeypatch):
    """The module `functions`, importable."""
    monkeypatch.syspath_prepend(str(functions))


CLOSED = LoadPlan("functions", 1.0, 5.0, connections=1, mode="closed", requests=3)


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(
    ("target", "inputs", "said"),
    [
        ("functions:nothing", [], "cannot be imported: AttributeError"),
        ("functions:CONSTANT", [], "is int, not a function"),
        ("functions:later", [], "is a coroutine function"),
        ("functions:score", [], "it needs x: give --inputs FILE"),
        ("functions:batch", [1], "it needs values, batch_size"),
        ("functions:fails", [1], "it takes no input"),
        ("functions:fails", [], "functions:fails fails: KeyError"),
        ("functions:strange", [], "an output of type object cannot be compared"),
    ],
)
def test_what_cannot_be_called_is_named(target, inputs, said):
    with pytest.raises(InferscopeError, match=said):
        inprocess.measure(CLOSED, target, {}, inputs, golden=True)


def test_a_function_gets_what_it_asks_for_by_name():
    def asks(value, *, precision, batch_size=1, model="none"):
        return value, precision, batch_size, model

    settings = {"precision": "fp16", "batch_size": None, "model": "m", "seed": 1}
    assert inprocess.bind(asks, settings, with_input=True)(7) == (7, "fp16", 1, "m")
    assert inprocess.bind(lambda: 5, settings, with_input=False)(None) == 5
    assert inprocess.bind(lambda *values: values, {}, with_input=True)(3) == (3,)


def test_waiting_for_a_busy_thread_is_latency_and_not_lateness(monkeypatch):
    """One thread, 5 ms a call, 400 arrivals a second: a queue grows, and that is the service's doing."""
    monkeypatch.setattr(inprocess, "find", lambda _: lambda: time.sleep(0.005))
    found = inprocess.measure(LoadPlan("", 400.0, 0.25, process="constant", connections=1), "m:f", {}, [], golden=False).load
    assert found.status.size == 100
    assert found.latency_ns[-1] > 100e6
    assert np.median(found.service_ns) < 100e6
    assert np.median(found.lag_ns) == 0


def test_golden_outputs_keep_the_order_of_the_inputs(monkeypatch):
    monkeypatch.setattr(inprocess, "find", lambda _: lambda values: values)
    single = inprocess.measure(CLOSED, "m:f", {}, [1, 2, 3], golden=True)
    assert single.outputs == [1, 2, 3]
    batched = inprocess.measure(CLOSED, "m:f", {"batch_size": 2}, [1, 2, 3], golden=True)
    assert batched.outputs == [[1, 2], [3, 1]]
