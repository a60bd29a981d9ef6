"""What is known of an armed incident and of the requests that were drawn for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inferscope.capture.session import Options, Session
    from inferscope.capture.target import Target

__all__ = ["Armed", "Drawn"]


@dataclass(slots=True)
class Armed:
    """An incident whose requests are drawn."""

    target: Target
    until_ns: int
    slow: int = 0
    body: int = 0
    shaped: int = 0
    """Profiles kept that hold shapes nobody asked for."""
    shape_tries: int = 0
    asked: Options | None = None
    allow_ns: int | None = None


@dataclass(slots=True)
class Drawn:
    """A request on which a capture is tried."""

    armed: Armed
    at_ns: int
    pick: int
    """Which of the request's regions is recorded, from 0: one that awaits has several, and each gets its turn."""
    likely: bool = False
    """Whether it was preferred because another one was late when it started."""
    session: Session | None = None
    regions: int = 0
    outer: str | None = None
    """The outermost synchronous region that is open, with its thread and how often its name is open there."""
    thread: int = 0
    depth: int = 0
