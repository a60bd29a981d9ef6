"""What integrations saw beside time: copies by the line that asked for them, shapes of inputs, first bytes of streams."""

from __future__ import annotations

import math
from typing import Any, Final

from inferscope import guard
from inferscope.clock import now_ns
from inferscope.record import core
from inferscope.slots import slots
from inferscope.types import SpanFlag

__all__ = ["NON_BLOCKING", "copies", "forget_copies", "record_copy", "record_first_byte", "record_shape", "shape_of", "shape_tables"]

_copies: dict[tuple[str, str | None], list[int]] = {}
_COPY_SITES: Final = 64
NON_BLOCKING: Final = 64
"""Bit of a copy's flags beside those of `types.SpanFlag`: it was asked not to wait, which pageable memory makes it do nevertheless."""
_SHAPES: Final = 8192
_shapes: list[tuple[int, tuple[int, ...], bool] | None] = [None] * _SHAPES
"""By request id modulo its length."""
_met: dict[tuple[int, ...], float] = {}
"""Elements of every shape that was met."""


def record_copy(
    direction: str,
    nbytes: int,
    start_ns: int,
    end_ns: int,
    *,
    sync: bool,
    pageable: bool,
    implicit: bool = False,
    non_blocking: bool = False,
    site: str | None = None,
) -> None:
    """Tell of one copy between host and device that blocked the calling thread from `start_ns` to `end_ns`.

    Args:
        direction: `h2d`, `d2h` or `d2d`; `pin` for a copy into pinned memory.
        nbytes: Bytes moved.
        start_ns: When the call began, `time.perf_counter_ns`.
        end_ns: When it returned.
        sync: Whether the call waited for the copy.
        pageable: Whether the host memory was not pinned.
        implicit: Whether a value was read (`item`, `if tensor:`) and the copy is what that takes.
        non_blocking: Whether the call was asked not to wait.
        site: `function (file:line)` of the caller, when known.
    """
    flags = (SpanFlag.SYNC if sync else 0) | (SpanFlag.PAGEABLE if pageable else 0) | (SpanFlag.IMPLICIT_SYNC if implicit else 0)
    flags |= NON_BLOCKING if non_blocking else 0
    core.default.interval("copy", direction, start_ns, end_ns, flags=flags, aux=nbytes)
    key = (direction, site)
    row = _copies.get(key)
    if row is None:
        row = _copies.setdefault(key if len(_copies) < _COPY_SITES else (direction, None), [0, 0, 0, 0, 0, 0, 0])
    row[0] += 1
    row[1] += nbytes
    row[2] += end_ns - start_ns
    row[3] += sync
    row[4] += pageable
    row[5] += implicit
    row[6] += non_blocking
    if slots.on_copy is not None and not guard.is_off("copies"):
        with guard.guard("copies"):
            slots.on_copy(direction, nbytes, start_ns, end_ns, flags, site)


def copies() -> list[dict[str, Any]]:
    """Copies by direction and call site: running totals, as the incident keeps them."""
    return [
        {
            "name": direction,
            "site": site,
            "count": n,
            "bytes": b,
            "wall_ns": w,
            "sync": s,
            "pageable": p,
            "implicit": i,
            "non_blocking": a,
        }
        for (direction, site), (n, b, w, s, p, i, a) in list(_copies.items())
    ]


def forget_copies() -> None:
    """Start the copy totals afresh: in a forked child and in tests."""
    _copies.clear()
    _met.clear()
    _shapes[:] = [None] * _SHAPES


def record_shape(shape: tuple[int, ...]) -> None:
    """Tell of the shape of what the current request gives to a model; without a size of its own, the request gets its number of elements.

    Args:
        shape: Of the first input.
    """
    request = core.default.current()
    if request is None:
        return
    number = request.id
    before, size = _shapes[number % _SHAPES], _met.get(shape)
    new = size is None
    if size is None:
        size = float(math.prod(shape))
        if len(_met) < _SHAPES:
            _met[shape] = size
    if before is not None and before[0] == number:  # the first model of several is the one that the input is of
        if new:
            _shapes[number % _SHAPES] = (number, before[1], True)
        return
    _shapes[number % _SHAPES] = (number, shape, new)
    if request.size is None:
        request.size = size


def shape_tables() -> tuple[dict[tuple[int, ...], float], list[tuple[int, tuple[int, ...], bool] | None]]:
    """Elements of the shapes that were met, and the shapes of recent requests: the compiled core writes them as `record_shape` does."""
    return _met, _shapes


def shape_of(request_id: int) -> tuple[tuple[int, ...], bool] | None:
    """Shape that a recent request gave to its first model, and whether any model met a shape in it for the first time; None when it is not known.

    A shape counts as new once; after 8192 shapes every other one does.
    """
    held = _shapes[request_id % _SHAPES]
    return (held[1], held[2]) if held is not None and held[0] == request_id else None


def record_first_byte(request: Any) -> None:
    """Tell that the first byte of a response is handed over; `SLO(until="first_byte")` judges the time until then.

    Args:
        request: The open request that it answers; a closed one is past its last byte, and says nothing.
    """
    if request.open:
        core.default.interval("first_byte", request.name, request.start_ns, now_ns())
