"""torch: only the outermost forward is a stage, wherever the inner ones run from."""

from __future__ import annotations

import contextvars
import threading

import pytest

from inferscope.record import core

torch = pytest.importorskip("torch")


class Calls(torch.nn.Module):
    """A module whose forward calls an inner one in some way, and inner ones again after that."""

    def __init__(self, how) -> None:
        super().__init__()
        self.how, self.inner = how, torch.nn.Linear(4, 4)

    def forward(self, value):
        self.inner(value)
        self.how(self.inner, value)
        return self.inner(value)


def in_a_copied_context(inner, value):
    contextvars.copy_context().run(inner, value)


def in_an_empty_context(inner, value):
    contextvars.Context().run(inner, value)


def in_a_nested_request(inner, value):
    with core.default.request("nested"):
        inner(value)


def after_more_stages_than_a_record_holds(inner, value):
    for _ in range(70):
        with core.default.stage("step"):
            pass
    inner(value)


def after_the_request_ended(inner, value):
    core.default.current().finish()
    inner(value)


def forwards(seen):
    return seen.series("stage").get("forward", 0)


@pytest.mark.parametrize("how", [in_a_copied_context, in_a_nested_request, after_more_stages_than_a_record_holds, after_the_request_ended])
def test_inner_forwards_are_no_stages(seen, instrument, how) -> None:
    instrument("torch")
    before, value = forwards(seen), torch.ones(1, 4)
    with core.default.request("predict"):
        Calls(how)(value)
    assert forwards(seen) == before + 1
    with core.default.request("predict"):
        torch.nn.Linear(4, 4)(value)
    assert forwards(seen) == before + 2


def test_a_context_without_the_request_knows_of_no_forward(seen, instrument) -> None:
    instrument("torch")
    before = forwards(seen)
    with core.default.request("predict"):
        Calls(in_an_empty_context)(torch.ones(1, 4))
    assert forwards(seen) == before + 2


def test_another_thread_of_the_request_has_forwards_of_its_own(seen, instrument) -> None:
    """Two models of one request at once: the thread that took the request, and one with a copy of its context from before."""
    instrument("torch")
    before, value = forwards(seen), torch.ones(1, 4)
    running, done = threading.Event(), threading.Event()

    def beside():
        running.wait(10)
        torch.nn.Linear(4, 4)(value)
        done.set()

    def meet(_inner, _value):
        running.set()
        assert done.wait(10)

    with core.default.request("predict"):
        thread = threading.Thread(target=contextvars.copy_context().run, args=(beside,))
        thread.start()
        Calls(meet)(value)
        thread.join()
    assert forwards(seen) == before + 2


def test_a_forward_that_failed_does_not_hide_the_next(seen, instrument) -> None:
    instrument("torch")
    before = forwards(seen)
    with core.default.request("predict"):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            torch.nn.Linear(5, 4)(torch.ones(1, 4))
        torch.nn.Linear(4, 4)(torch.ones(1, 4))
    assert forwards(seen) == before + 2
