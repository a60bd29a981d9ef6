"""Places where `runtime` hangs what lower rooms may call in upper ones.

A slot that is empty costs one attribute read. Nothing here knows who fills it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Slots", "slots"]


class Slots:
    """The open ends of the flow; `None` means that nobody listens.

    Attributes:
        on_model_loaded: Called with (name, module) by `watch` and the torch integration.
        on_stop: Called when a server has told the application to end: what is pending leaves now, because a signal may end the process.
        on_copy: Called with (direction, bytes, start_ns, end_ns, flags, site) after each copy that Python can see.
        open_incident: Id of the incident that is being written, for log records.
    """

    __slots__ = ("on_copy", "on_model_loaded", "on_stop", "open_incident")

    def __init__(self) -> None:
        self.on_model_loaded: Callable[[str, Any], None] | None = None
        self.on_stop: Callable[[], object] | None = None
        self.on_copy: Callable[[str, int, int, int, int, str | None], None] | None = None
        self.open_incident: str | None = None

    def clear(self) -> None:
        """Empty every slot."""
        self.on_model_loaded = None
        self.on_stop = None
        self.on_copy = None
        self.open_incident = None


slots = Slots()
