"""The recorder of `INFERSCOPE_DISABLED=1`: the whole interface, nothing behind it; locks and functions stay what they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from inferscope.record.compiled import recorder_request, recorder_stage, seen_as
from inferscope.record.pure.noop import NOOP
from inferscope.record.pure.recorder import Recorder as PureRecorder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

L = TypeVar("L")

__all__ = ["Recorder"]


class Recorder(PureRecorder):
    """Records nothing.

    Args:
        clock: Unused.
    """

    def __init__(self, *, clock: Callable[[], int] | None = None) -> None:
        super().__init__(clock=clock)
        self.enabled = False

    def lock(self, name: str, lock: L, /) -> L:
        """The lock itself."""
        del name
        return lock

    def set_edges(self, request_name: str, edges_ns: Sequence[int]) -> None:
        """Nothing to judge."""

    @seen_as(recorder_stage)
    def stage(self, name: str, /) -> Any:
        """The shared no-op, also when `enabled` was set."""
        del name
        return NOOP

    @seen_as(recorder_request)
    def request(self, name: str, /, **_: Any) -> Any:
        """The shared no-op, also when `enabled` was set."""
        del name
        return NOOP

    def carrier(self, name: str, /) -> Any:
        """The shared no-op, also when `enabled` was set."""
        del name
        return NOOP

    def interval(self, *_: Any, **__: Any) -> None:
        """Nothing to count."""
