"""Records work that belongs to several requests, or to a request of another process."""

from __future__ import annotations

import os
import struct
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final, TypeVar

from inferscope.record.pure.critical import pack
from inferscope.record.pure.request import Request
from inferscope.types import SpanFlag

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from inferscope.record.pure.critical import Node
    from inferscope.record.pure.recorder import Recorder
    from inferscope.record.pure.registry import Definition
    from inferscope.record.pure.splice import Packed

    F = TypeVar("F", bound=Callable[..., Any])

__all__ = ["Carrier"]

_SPAN: Final = struct.Struct("<qqqIHBB")


class Carrier(Request):
    """A request that is counted nowhere: current inside its block, packed at its end.

    Args:
        recorder: Whose spans it gathers.
        definition: Series of the work, counted once, and the column of what no span inside it covers.
    """

    __slots__ = ("_definition", "_own", "aux", "flags", "packed", "parent")

    def __init__(self, recorder: Recorder, definition: Definition) -> None:
        super().__init__(recorder, definition.name)
        self._definition = definition
        self.column = definition.column
        self.aux = self.flags = 0
        self.parent = None
        self.packed: Packed | None = None
        """Process id, columns, spans as `<qqqIHBB`, truncated; None until the end. It pickles."""

    @property
    def stage_name(self) -> str:
        """Where who holds a lock in no stage is."""
        return self.name

    def _begin(self, recorder: Recorder, caller: FrameType) -> None:
        del caller
        outer = recorder.context.get()
        thread = recorder.thread
        self._of = recorder.registry.hidden()
        self._traffic = thread.traffic
        self._own = outer is not None and outer.open and outer.shares(thread.traffic)
        self.ident, self.native_id = get_ident(), thread.native_id
        self._generation = recorder.generation
        self.packed = self.trace = self.error = None
        self.wanted = self.profiled = False
        self.id = recorder.next_id()
        self._clear()
        if not self._own:  # to a request that another greenlet of this thread runs, it is a foreign one
            self._traffic.entered += 1
            self._traffic.open += 1
        self.start_ns = recorder.clock()
        self.open, self.top = True, self
        self._token = recorder.context.set(self)

    def _close(self, recorder: Recorder, end: int) -> None:
        del recorder
        self._traffic.open -= not self._own
        self._end_open(end)

    def _count(self, recorder: Recorder, wall_ns: int) -> None:
        self._definition.series.record(wall_ns)
        self.flags = SpanFlag.ERROR if self.error is not None else 0
        self.aux = self.id  # by which requests of this process find its device data
        nodes: list[Node] = [self, *self.spans]
        place: dict[int, int] = {}
        spans = bytearray(pack(nodes, self.native_id))
        for offset in range(0, len(spans), _SPAN.size):
            start, end, aux, thread, column, parent, flags = _SPAN.unpack_from(spans, offset)
            column = place.setdefault(column, len(place))
            _SPAN.pack_into(spans, offset, start, end, aux, thread, column, parent, flags)
        columns = recorder.registry.columns
        if self.pin is not None:
            recorder.pins.carry(self.pin)
            self.pin = None
        self.packed = (os.getpid(), tuple(columns[column] for column in place), bytes(spans), self.truncated)

    def __call__(self, function: F) -> F:
        """A function cannot carry: it would have nobody to give its record to."""
        return function
