"""`inferscope.stage` and `inferscope.request` over a recorder written in Python: functions that compilers of graphs see through."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from inferscope.record import compiled
from inferscope.record.compiled import at_home, seen_as
from inferscope.record.pure.noop import NOOP
from inferscope.record.pure.span import NEVER, Span

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferscope.record.pure.recorder import Recorder

__all__ = ["public"]


def public(recorder: Recorder, *, silent: bool = False) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The two functions.

    Args:
        recorder: Where they record.
        silent: They give the shared no-op whatever the recorder's `enabled` says.
    """
    stages = recorder.registry.stages
    opened: Callable[[], Any] = Span
    none, never = NOOP, NEVER  # `at_home` leaves a function no globals of its own
    request_method = recorder.request

    def stage(name: str, /) -> Any:
        try:
            if not recorder.enabled:
                return none
            made = opened()  # as `Recorder.stage`
            made.stage = definition = stages[name]
            made.column = definition.column
            made.start_ns = never
            return made
        except Exception:  # noqa: BLE001 - nothing of ours reaches the application
            recorder.failed()
            return none

    def nothing(name: str, /) -> Any:
        del name
        return none

    def request(name: str, /, **keywords: Any) -> Any:
        return request_method(name, **keywords)

    return _passing(nothing if silent else stage, compiled.stage, compiled.traced_stage), _passing(
        request, compiled.request, compiled.traced_request
    )


def _passing(function: Callable[..., Any], scripted: Callable[..., Any], traced: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which torch.jit.script takes for one and dynamo for another."""
    return functools.wraps(scripted)(seen_as(traced)(at_home(function, scripted)))
