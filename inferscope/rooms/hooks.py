"""What the recorder's hooks call: captures, and NVTX ranges where a tool is attached. Either may be missing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inferscope.capture.request_scoped import RequestScopedCapture
    from inferscope.device.nvtx import Ranges
    from inferscope.record.core import Recorder

__all__ = ["Hooks"]


class Hooks:
    """Both listeners behind the recorder's one set of hooks; what they raise the recorder contains and counts.

    Args:
        recorder: Whose hooks.
        ranges: Hears of every request while a tool is attached.
    """

    def __init__(self, recorder: Recorder, ranges: Ranges) -> None:
        self._recorder, self._ranges = recorder, ranges
        self._capture: RequestScopedCapture | None = None

    def listen(self, capture: RequestScopedCapture | None) -> None:
        """Put the hooks in place; without a tool they are the capture's own."""
        self._capture = capture
        if self._ranges.on:
            self._recorder.set_hooks(on_start=self.on_start, on_enter=self.on_enter, on_exit=self.on_exit, on_finish=self.on_finish)
            self._recorder.armed = True
        elif capture is not None:
            self._recorder.set_hooks(
                on_start=capture.on_start, on_enter=capture.on_enter, on_exit=capture.on_exit, on_finish=capture.on_finish
            )

    def arm(self, armed: bool) -> None:  # noqa: FBT001  (a switch, called with what it becomes)
        """Let captures hear of requests, or not; ranges go on."""
        self._recorder.armed = armed or self._ranges.on

    def on_start(self, request: Any) -> bool:
        """Every request is wanted: its stages become ranges."""
        if self._capture is not None:
            self._capture.on_start(request)
        return True

    def on_enter(self, request: Any, name: str, kind: str) -> None:
        """The range lies around what a capture does."""
        self._ranges.on_enter(request, name, kind)
        if self._capture is not None:
            self._capture.on_enter(request, name, kind)

    def on_exit(self, request: Any, name: str, kind: str) -> None:
        """See `on_enter`."""
        if self._capture is not None:
            self._capture.on_exit(request, name, kind)
        self._ranges.on_exit(request, name, kind)

    def on_finish(self, request: Any, wall_ns: int) -> None:
        """The request is over for both."""
        self._ranges.on_finish(request, wall_ns)
        if self._capture is not None:
            self._capture.on_finish(request, wall_ns)
