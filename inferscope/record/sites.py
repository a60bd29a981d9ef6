"""Code sites of lock holders, found by whoever has to wait."""

from __future__ import annotations

import gc
import operator
import sys
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import CodeType, FrameType

__all__ = ["UNKNOWN", "request_label", "site_of_frame", "site_of_thread"]

UNKNOWN: Final = "unknown"
"""The site of a holder whose frame was not read."""

# Python 3.10 has no `operator.call`, and no frame objects to make either.
_call: Final[Callable[[Callable[[], Any]], Any]] = getattr(operator, "call", lambda step: step())

_get: Final[Callable[..., Any]] = vars(dict)["get"]

_OURS: Final = ("inferscope.record", "threading", "asyncio", "contextlib", "gevent")

_OWN: Final = ("f_globals", "f_code", "f_lineno")
_DEPTHS: Final = (8, 4, 2, 1, 0)
_GETTERS: Final = tuple(operator.attrgetter(*_OWN, *(".".join(["f_back"] * step) for step in range(1, depth + 1))) for depth in _DEPTHS)
"""A thread's innermost frame as its attributes, then so many frames below it: each getter is one C call."""


def _machinery(scope: dict[str, Any]) -> bool:
    """Whether a frame with these globals belongs to the machinery of locks rather than to who uses them."""
    name = scope.get("__name__")
    return isinstance(name, str) and name.startswith(_OURS) and any(name == own or name.startswith(own + ".") for own in _OURS)


def _text(code: CodeType, line: int) -> str:
    name: str = getattr(code, "co_qualname", code.co_name)
    return f"{name} ({code.co_filename.rpartition('/')[2]}:{line})"


def request_label(request: Any) -> str | None:
    """A holder's request as people see it: its name, and its class in brackets. None for what is no open request."""
    name, cls = getattr(request, "name", None), getattr(request, "cls", None)
    if not isinstance(name, str) or not getattr(request, "open", False):
        return None
    return f"{name} ({cls})" if cls is not None else name


def site_of_frame(frame: FrameType | None) -> str:
    """`function (file:line)` of the innermost frame that is neither ours nor the lock machinery's; `unknown` without one.

    For frames of the calling thread or of a suspended task; another thread's stack moves while it is walked.
    """
    found = frame
    while found is not None and _machinery(found.f_globals):
        found = found.f_back
    return UNKNOWN if found is None else _text(found.f_code, found.f_lineno)


def site_of_thread(ident: int) -> str:
    """The site where a thread is right now; `unknown` when it is gone, or too deep in the machinery of locks."""
    for getter in _GETTERS:
        try:
            scope, code, line, *below = _read(ident, getter)
        except AttributeError:  # the thread is gone, or its stack is shallower
            continue
        if not _machinery(scope):
            return _text(code, line)
        found = next((frame for frame in below if not _machinery(frame.f_globals)), None)
        return UNKNOWN if found is None else _text(found.f_code, found.f_lineno)
    return UNKNOWN


def _read(ident: int, getter: Callable[[Any], tuple[Any, ...]]) -> tuple[Any, ...]:
    """What `getter` says of a thread's innermost frame, with no chance for another thread to run in between.

    CPython 3.11 has two traps here. `sys._current_frames` makes frame objects under the interpreter's list lock: a garbage collection that
    this starts and that frees a `threading.local` takes the same lock and hangs the process, so the collector rests meanwhile. And a frame
    whose function returned since can name a frame below it that is gone: reading its `f_back` then crashes. Iterators of iterators run all
    steps inside one C call, in which the thread cannot move.
    """
    frames: Iterator[Any] = map(_get, map(_call, (sys._current_frames,)), (ident,))  # pyright: ignore[reportPrivateUsage] - documented in `sys`
    if not gc.isenabled():
        return next(map(getter, frames))
    try:
        _, found, _ = chain(map(_call, (gc.disable,)), map(getter, frames), map(_call, (gc.enable,)))
    except BaseException:
        gc.enable()
        raise
    return cast("tuple[Any, ...]", found)
