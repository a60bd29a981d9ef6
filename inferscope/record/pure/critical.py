"""Who owned each nanosecond of a request whose stages overlapped, and the packed form of its spans."""

from __future__ import annotations

import functools
import struct
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Node", "critical_path", "pack"]

_ROOT: Final = 255


class Node(Protocol):
    """One positioned interval. `flags` holds SpanFlag in its low 8 bits and the native thread above them, 0 for the request's own."""

    @property
    def column(self) -> int:
        """Column of the exclusive vector."""
        ...

    @property
    def start_ns(self) -> int:
        """Where it begins."""
        ...

    @property
    def end_ns(self) -> int:
        """Where it ends."""
        ...

    @property
    def flags(self) -> int:
        """`SpanFlag` and thread."""
        ...

    @property
    def aux(self) -> int:
        """Bytes or a lock site."""
        ...

    @property
    def parent(self) -> object:
        """Enclosing node."""
        ...


def _parents(nodes: Sequence[Node]) -> list[int]:
    """For each node the index of its nearest ancestor among `nodes`, or -1."""
    places = {id(node): index for index, node in enumerate(nodes)}
    parents: list[int] = []
    for node in nodes:
        parent: object | None = node.parent
        while parent is not None and id(parent) not in places:
            parent = getattr(parent, "parent", None)
        parents.append(-1 if parent is None else places[id(parent)])
    return parents


def critical_path(nodes: Sequence[Node], start_ns: int, end_ns: int, columns: int) -> list[int]:
    """Share a request's wall time by the backward critical path.

    From the end backwards the child that finished latest owns the time back to its start, then the next; what no child
    covers is the parent's own. Each child is shared in the same way, so the result sums to `end_ns - start_ns` exactly.

    Args:
        nodes: Spans in the order in which they were placed, each inside its parent.
        start_ns: Start of the request.
        end_ns: End of the request.
        columns: Length of the result.

    Returns:
        Nanoseconds by column; column 0 is the request's own, unattributed time.
    """
    children: list[list[int]] = [[] for _ in range(len(nodes) + 1)]
    for index, parent in enumerate(_parents(nodes)):
        children[parent].append(index)
    for siblings in children:
        siblings.sort(key=lambda index: (nodes[index].end_ns, index), reverse=True)
    vector = [0] * columns

    def walk(index: int, column: int, low: int, high: int) -> None:
        cursor = high
        for child in children[index]:
            node = nodes[child]
            top, bottom = min(node.end_ns, cursor), max(node.start_ns, low)
            if bottom < top:
                vector[column] += cursor - top
                walk(child, node.column, bottom, top)
                cursor = bottom
        vector[column] += cursor - low

    walk(-1, 0, start_ns, end_ns)
    return vector


def pack(nodes: Sequence[Node], thread_id: int) -> bytes:
    """Spans as little-endian `<qqqIHBB`: start, end, aux, native thread, column, parent (255 is the request), flags."""
    places: dict[object, int] = dict(zip(nodes, range(len(nodes)), strict=True))
    place_of = places.get
    fields: list[int] = []
    for node in nodes:
        flags = node.flags
        parent = node.parent
        place = place_of(parent)
        if place is None:
            place = places[parent] = _above(parent, places)
        fields += node.start_ns, node.end_ns, node.aux, flags >> 8 or thread_id, node.column, place, flags & 255
    return _packer(len(nodes))(*fields)


def _above(parent: object | None, places: dict[object, int]) -> int:
    """The place of the nearest ancestor that has one, for a parent that has none."""
    while parent is not None and parent not in places:
        parent = getattr(parent, "parent", None)
    return _ROOT if parent is None else places[parent]


@functools.lru_cache(maxsize=128)
def _packer(count: int) -> Callable[..., bytes]:
    """Packs so many spans in one call."""
    return struct.Struct("<" + count * "qqqIHBB").pack
