"""Late device data: time that moves between the columns of a request, after its end if need be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferscope.record.pure.classes import RequestClass
    from inferscope.record.pure.request import Request
    from inferscope.record.pure.state import Counters

__all__ = ["Pin", "Pins"]

WAIT_NS: Final = 2_000_000_000
"""How long after its end a request waits for its device data."""
_LIMIT: Final = 4096
_MOVES: Final = 16


class Pin:
    """What is kept of a request while device spans of it are pending.

    Args:
        of: The request's class.
    """

    __slots__ = ("band", "carries", "columns", "heirs", "incomplete", "moves", "of", "pending", "until", "vector")

    def __init__(self, of: RequestClass) -> None:
        self.of = of
        self.pending = 0
        self.until = 0
        """End of the wait; 0 while the request is open, and again when it waits no more."""
        self.band = -1
        self.carries = False
        """Of a carrier that ended: it has no vector, what moves in it moves in its heirs."""
        self.heirs: list[int] = []
        self.columns = 0
        self.incomplete = False
        self.moves: dict[tuple[int, int], int] = {}
        self.vector: list[int] = []

    def note(self, source: int, target: int, ns: int) -> bool:
        """Remember a move until the request ends; False when there are too many."""
        if (source, target) not in self.moves and len(self.moves) >= _MOVES:
            return False
        self.moves[source, target] = self.moves.get((source, target), 0) + ns
        return True

    def apply(self, vector: list[int]) -> None:
        """Make the moves that were noted while the request was open."""
        for (source, target), ns in self.moves.items():
            _move(vector, source, target, ns)

    def move(self, source: int, target: int, ns: int) -> int:
        """Move time of the ended request, here and in its band; gives what was moved."""
        moved = _move(self.vector, source, target, ns)
        self.columns = max(self.columns, target + 1)
        if self.band >= 0:
            self.of.bands.move(self.band, source, target, moved)
        return moved


def _move(vector: list[int], source: int, target: int, ns: int) -> int:
    moved = max(min(ns, vector[source]), 0)
    vector[source] -= moved
    vector[target] += moved
    return moved


class Pins:
    """Requests with pending device spans, by request id.

    Args:
        clock: The recorder's.
        counters: Takes what is refused or incomplete.
    """

    def __init__(self, clock: Callable[[], int], counters: Counters) -> None:
        self._clock = clock
        self._counters = counters
        self._by_id: dict[int, Pin] = {}

    def pin(self, request: Request, of: RequestClass) -> int:
        """A device span of an open request is pending; gives its reference, 0 when there is no room."""
        pin = request.pin
        if pin is None:
            if len(self._by_id) >= _LIMIT:
                self._counters.pins_refused += 1
                return 0
            pin = request.pin = self._by_id[request.id] = Pin(of)
        pin.pending += 1
        return request.id

    def unpin(self, ref: int) -> None:
        """One pending span less; the last one lets the record of an ended request go."""
        pin = self._by_id.get(ref)
        if pin is not None:
            pin.pending = max(pin.pending - 1, 0)
            if pin.pending or not pin.until:
                return
            if not pin.carries:
                self._release(ref, pin)
                return
            heirs, pin.heirs = pin.heirs, []  # it stays for whoever is spliced later, until the next drain
            for heir in heirs:
                self.unpin(heir)

    def settle(self, ref: int, source: int, target: int, ns: int) -> int:
        """Move time between columns; gives what was moved."""
        pin = self._by_id.get(ref)
        if pin is None or source == target or ns <= 0:
            return 0
        if pin.until and not pin.carries:
            return pin.move(source, target, ns)
        if pin.note(source, target, ns):
            for heir in pin.heirs:
                self.settle(heir, source, target, ns)
            return ns
        self._counters.settles_refused += 1
        return 0

    def hold(self, ref: int, pin: Pin, band: int, vector: list[int], columns: int) -> None:
        """A pinned request ended and is retained or in a band: keep its vector until its device data came."""
        pin.band, pin.vector, pin.columns = band, vector, columns
        if pin.pending:
            pin.until = self._clock() + WAIT_NS
        else:
            self.forget(ref)

    def carry(self, pin: Pin) -> None:
        """A pinned carrier ended: what it holds goes to the requests that it is spliced into from now on."""
        pin.carries, pin.until = True, self._clock() + WAIT_NS

    def inherit(self, carrier: int, request: Request) -> None:
        """A carrier was spliced into an open request, which waits for its device data too."""
        pin = self._by_id.get(carrier)
        if pin is None or not pin.carries or not (pin.pending or pin.moves):
            return
        ref = request.pinned()
        heir = request.pin
        if heir is None:
            return
        for (source, target), ns in pin.moves.items():
            self.settle(ref, source, target, ns)
        if pin.pending:
            pin.heirs.append(ref)
        else:
            heir.pending -= 1

    def forget(self, ref: int) -> None:
        """Nothing more can come of a request."""
        self._by_id.pop(ref, None)

    def expire(self) -> None:
        """Let go of ended requests whose device data did not come in time."""
        if not self._by_id:
            return
        now = self._clock()
        for ref, pin in tuple(self._by_id.items()):
            if pin.until and (pin.until <= now or (pin.carries and not pin.pending)):
                self._counters.device_incomplete += not pin.carries  # its requests count
                pin.incomplete = True
                self._release(ref, pin)

    def refold(self, of: RequestClass, base_of: Callable[[int], int]) -> None:
        """Rows of a class's edges return to the bands that they were cut from."""
        for pin in tuple(self._by_id.values()):
            if pin.of is of and pin.band >= 0:
                pin.band = base_of(pin.band)

    def clear(self) -> None:
        """Forget all of it."""
        self._by_id = {}

    def _release(self, ref: int, pin: Pin) -> None:
        pin.until = 0
        self.forget(ref)
