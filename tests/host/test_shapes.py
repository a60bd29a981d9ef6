"""The shape that a request gives to its model stays with the retained request; without a size of its own it becomes one."""

from __future__ import annotations

import importlib.util

import pytest

from inferscope import copied, integration
from inferscope.host.gc import GcPauses
from inferscope.host.watch import HostWatch
from inferscope.record import core
from inferscope.types import ClassKey, Reason, RequestRecord


@pytest.fixture(autouse=True)
def fresh():
    integration.forget_copies()
    yield
    integration.forget_copies()


def record(number, reasons=Reason.BREACH):
    fields = (number, ClassKey("score", None, None), 10, 100, 9, reasons, 7, None, 1, None, None, None, None)
    return RequestRecord(*fields, truncated=False, vector=(100,), spans=())


def test_the_first_model_of_a_request_says_its_shape():
    with core.default.request("score") as first:
        integration.record_shape((2, 8))
        integration.record_shape((2, 64))
    with core.default.request("score", size=7) as second:
        integration.record_shape((2, 8))
    assert copied.shape_of(first.id) == ((2, 8), True)
    assert copied.shape_of(second.id) == ((2, 8), False)
    assert (first.size, second.size) == (16.0, 7.0)
    assert copied.shape_of(second.id + 8192) is None
    integration.record_shape((1,))  # outside of a request


def test_retained_requests_keep_it():
    with core.default.request("score") as held:
        integration.record_shape((4, 4))
    watch = HostWatch(GcPauses(core.default))
    watch.tick(1000, [record(held.id), record(held.id + 1)])
    known, unknown = watch.evidence("score", 0, 1000)["requests"]
    assert (known["shape"], known["new_shape"]) == ([4, 4], True)
    assert (unknown["shape"], unknown["new_shape"]) == (None, None)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_the_forward_patch_notes_it():
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    integration.registry.instrument(["torch"])
    try:
        with core.default.request("score") as held:
            model(torch.ones(3, 4))
    finally:
        integration.registry.uninstrument(["torch"])
    assert copied.shape_of(held.id) == ((3, 4), True)
    assert held.size == 12.0
