"""Hangs what a carrier recorded into a request that waited for it."""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING, Final, TypeAlias

from inferscope.record.pure.span import POSITIONS, Mark, Span
from inferscope.types import COLUMN_LIMIT, SpanFlag

if TYPE_CHECKING:
    from inferscope.record.pure.registry import Registry
    from inferscope.record.pure.request import Request

__all__ = ["Packed", "splice"]

Packed: TypeAlias = "tuple[int, tuple[tuple[str, str], ...], bytes, bool]"
"""Process id, columns, spans (the carrier first, columns as in the table), whether positions are missing."""

_SPAN: Final = struct.Struct("<qqqIHBB")


class _Piece:
    """One packed span, its column as this recorder numbers it."""

    __slots__ = ("aux", "column", "end_ns", "flags", "parent", "start_ns", "thread")

    def __init__(self, row: tuple[int, ...], columns: list[int]) -> None:
        self.start_ns, self.end_ns, self.aux, self.thread, column, self.parent, self.flags = row
        self.column = columns[column]


def _unpack(packed: Packed, registry: Registry) -> list[_Piece]:
    """The spans of a packed tuple.

    Raises:
        ValueError: It is none.
    """
    pid, columns, spans, _ = packed
    if len(columns) > COLUMN_LIMIT or not spans or len(spans) > (POSITIONS + 1) * _SPAN.size:
        message = "no record of a carrier"
        raise ValueError(message)
    here = [registry.column(kind, name) for kind, name in columns]
    pieces: list[_Piece] = []
    for index, row in enumerate(_SPAN.iter_unpack(spans)):
        piece = _Piece(row, here)
        if piece.end_ns < piece.start_ns or (index and piece.parent >= index):
            message = "a span of a carrier's record has no place"
            raise ValueError(message)
        if pid != os.getpid() and columns[row[4]][0] == "lock":
            piece.aux = 0  # a site of that process
        pieces.append(piece)
    return pieces


def splice(packed: Packed, request: Request, registry: Registry, now_ns: int) -> int:
    """Place a carrier's spans in an open request; they take their time from the spans that waited, and the sum stays.

    Args:
        packed: From a carrier, of this process or another one on this machine.
        request: Open.
        registry: Where columns are found.
        now_ns: What lies after this cannot be part of the request yet.

    Returns:
        Id of the carrier, 0 for one of another process.

    Raises:
        ValueError: `packed` is malformed.
    """
    pieces = _unpack(packed, registry)
    carrier, pieces[0].aux = pieces[0].aux if packed[0] == os.getpid() else 0, 0
    if packed[3]:
        request.truncated = True
    start, end = max(pieces[0].start_ns, request.start_ns), min(pieces[0].end_ns, now_ns)
    if start >= end:
        return carrier
    waiters = _waiters(request, start, end)
    if request.truncated:
        request.overlapping = True  # a region without a position may be the one that waited: only positions can tell what is left of it
    low = start
    for waiter, following in zip([request, *waiters], [*waiters, None], strict=True):
        high = end if following is None else following.start_ns
        if high > low:
            _place(pieces, request, waiter, low, high)
            low = high
    return carrier


def _waiters(request: Request, start_ns: int, end_ns: int) -> list[Span | Mark]:
    """Positions that were open when the work ended, from the outermost in. What else ran beside it makes the request `overlapping`."""
    waiters: list[Span | Mark] = []
    for node in tuple(request.spans):
        its_end = getattr(node, "end_ns", None)
        if node.start_ns >= end_ns or its_end == node.start_ns or (its_end is not None and its_end <= start_ns):
            continue
        if its_end is None or (its_end >= end_ns and not node.flags & SpanFlag.OTHER_THREAD):
            waiters.append(node)
        else:
            request.overlapping = True
    waiters.sort(key=lambda node: node.start_ns)
    return waiters


def _place(pieces: list[_Piece], request: Request, waiter: Request | Span | Mark, low: int, high: int) -> None:
    """Hang what lies in [low, high) under one waiter."""
    marks: list[Mark] = []
    latest: list[int] = []
    for index, piece in enumerate(pieces):
        parent = marks[piece.parent] if index else None
        above = waiter if parent is None else parent
        begin = max(piece.start_ns, low if parent is None else parent.start_ns)
        finish = max(begin, min(piece.end_ns, high if parent is None else parent.end_ns))
        flags = piece.flags
        if piece.thread != request.native_id:
            request.cpu_known = False
            flags |= SpanFlag.OTHER_THREAD | piece.thread << 8
        mark = Mark(above, piece.column, begin, finish, flags, piece.aux)
        marks.append(mark)
        latest.append(begin)
        if begin == finish:
            continue
        if parent is not None:
            if begin < latest[piece.parent]:
                request.overlapping = True
            latest[piece.parent] = max(latest[piece.parent], finish)
        request.vector[piece.column] += finish - begin
        request.vector[above.column] -= finish - begin
        if len(request.spans) < POSITIONS:
            request.spans.append(mark)
        else:
            request.truncated = True
    request.latest_ns = max(request.latest_ns, high)
