"""What threads were seen to do, from one instant to another."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from array import array

    from inferscope.host.places import Places

__all__ = ["Chapter", "Held"]


class Held(NamedTuple):
    """What one thread did in a chapter."""

    thread: int
    name: str | None
    rows: array[int]
    places: array[int]


class Chapter(NamedTuple):
    """What was seen from one `arm` or `turn` to the next; instants are monotonic ns."""

    first_ns: int
    last_ns: int
    spans: list[list[int]]
    """Begin and end of each time without a rest."""
    samples: int
    dropped: int
    """Intervals that did not fit any more."""
    threads: list[Held]
    """In order of time; a thread may occur more than once."""
    places: Places
    sites: dict[tuple[str, str], list[int]]

    def intervals(self) -> dict[int, tuple[str | None, array[int], array[int]]]:
        """By native thread id: Python name, intervals of four numbers each (see `inferscope.host.gil.ROW`), and the place of each; 0 is unknown."""
        found: dict[int, tuple[str | None, array[int], array[int]]] = {}
        for thread, name, rows, places in self.threads:
            known = found.get(thread)
            found[thread] = (name, rows, places) if known is None else (name or known[0], known[1] + rows, known[2] + places)
        return found
