"""What captures are armed for, and where a session may open."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from inferscope.capture.plan import AUTOMATIC, Plan

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import FrameType

__all__ = ["Target", "synchronous"]

# CO_GENERATOR, CO_COROUTINE, CO_ITERABLE_COROUTINE, CO_ASYNC_GENERATOR: spelled here because `inspect` takes 10 ms to import.
_SUSPENDABLE: Final = 0x20 | 0x80 | 0x100 | 0x200
_OWN: Final = ("inferscope", "contextlib")


@dataclass(frozen=True, slots=True)
class Target:
    """What captures are armed for.

    Args:
        incident: The incident's id.
        directory: The incident's directory; traces go to `captures/` in it.
        request: Name of the requests to draw; None or empty draws all.
        threshold_ns: A request above this is slow.
        body_ns: Gives the current (P40, P60) of ordinary requests, ns, or None while unknown; a request between them is kept to compare with.
        keep_all: Keep the next `slow` + `body` profiles whether slow or not: for a capture that somebody asked for. Default False.
        prefix: Makes capture ids unique among the workers that write into one incident. Default "s0".
        detected_ns: When the breach was detected, on the monotonic clock; an old one is refused. Default None: now.
        plan: What somebody asked for. Default: tier 1, and windows where they are allowed.
    """

    incident: str
    directory: Path
    request: str | None
    threshold_ns: int
    body_ns: Callable[[], tuple[float, float] | None] = lambda: None
    keep_all: bool = False
    prefix: str = "s0"
    detected_ns: int | None = None
    plan: Plan = AUTOMATIC


def synchronous(frame: FrameType | None) -> bool:
    """Whether the code that opened a with-block cannot be suspended inside it.

    Looks at the first frame outside inferscope and contextlib (an ExitStack enters on behalf of its caller).
    """
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] not in _OWN:
            return not frame.f_code.co_flags & _SUSPENDABLE
        frame = frame.f_back
    return False
