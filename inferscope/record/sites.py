"""Code sites of lock holders, found by whoever has to wait."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["UNKNOWN", "site_of_frame", "site_of_thread"]

UNKNOWN: Final = "unknown"
"""The site of a holder whose frame was not read."""

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
    return site_of_frame(sys._current_frames().get(ident))  # pyright: ignore[reportPrivateUsage] - documented in `sys`
