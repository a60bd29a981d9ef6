"""Code sites of lock holders, found by whoever has to wait."""

from __future__ import annotations

import gc
import operator
import sys
from typing import TYPE_CHECKING, Any, Final, cast

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

__all__ = ["UNKNOWN", "site_of_frame", "site_of_thread"]

UNKNOWN: Final = "unknown"
"""The site of a holder whose frame was not read."""

# Python 3.10 has no `operator.call`, and no frame objects to make either.
_call: Final[Callable[[Callable[[], Any]], Any]] = getattr(operator, "call", lambda step: step())

_OURS: Final = ("inferscope.record", "threading", "asyncio", "contextlib", "gevent")


def _skipped(frame: FrameType) -> bool:
    """Whether a frame belongs to the machinery of locks rather than to who uses them."""
    name = frame.f_globals.get("__name__")
    return isinstance(name, str) and name.startswith(_OURS) and any(name == own or name.startswith(own + ".") for own in _OURS)


def site_of_frame(frame: FrameType | None) -> str:
    """`function (file:line)` of the innermost frame that is neither ours nor the lock machinery's; `unknown` without one."""
    found = frame
    while found is not None and _skipped(found):
        found = found.f_back
    if found is None:
        return UNKNOWN
    code = found.f_code
    name: str = getattr(code, "co_qualname", code.co_name)
    file = code.co_filename.rpartition("/")[2]
    return f"{name} ({file}:{found.f_lineno})"


def site_of_thread(ident: int) -> str:
    """The site where a thread is right now; `unknown` when it is gone."""
    return site_of_frame(_frames().get(ident))


def _frames() -> dict[int, FrameType]:
    """The innermost frame of every thread.

    `sys._current_frames` of CPython 3.11 makes frame objects under the interpreter's list lock; a garbage collection that this starts and
    that frees a `threading.local` takes the same lock and hangs the process. So the collector rests meanwhile, and `map` calls
    the three functions with no chance for another thread in between.
    """
    if not gc.isenabled():
        return sys._current_frames()  # pyright: ignore[reportPrivateUsage] - documented in `sys`
    steps: tuple[Callable[[], Any], ...] = (gc.disable, sys._current_frames, gc.enable)  # pyright: ignore[reportPrivateUsage]
    try:
        _, frames, _ = map(_call, steps)
    except BaseException:
        gc.enable()
        raise
    return cast("dict[int, FrameType]", frames)
