"""What a named lock knows of its waits and its holds."""

from __future__ import annotations

from threading import get_ident
from typing import TYPE_CHECKING, Any, Final

from inferscope.record.pure.blame import Hold, stage_of
from inferscope.record.pure.histogram import HIGHEST_NS
from inferscope.record.sites import request_label
from inferscope.types import SpanFlag

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferscope.record.pure.recorder import Recorder
    from inferscope.record.pure.request import Request

__all__ = ["Holds", "PermitHolds"]

_UNTIMED: Final = -1
_PERMITS: Final = 256


class Holds:
    """Waits and holds of one lock. Who holds the lock writes the stamps of its hold, so they need no lock of their own.

    Args:
        recorder: Where waits and holds are counted.
        name: As people see it.
        wrapped: Anything with a lock's `acquire` and `release`.
    """

    __slots__ = (
        "acquire", "column", "counts", "depth", "hold_counts", "hold_series", "holder", "name", "recorder", "reentrant", "release", "request",
        "root_id", "start_ns", "wait_series", "waited_ns", "watched", "wrapped",
    )  # fmt: skip

    def __init__(self, recorder: Recorder, name: str, wrapped: Any) -> None:
        self.recorder = recorder
        self.name = name
        self.wrapped = wrapped
        self.acquire: Callable[..., bool] = wrapped.acquire
        self.release: Callable[..., None] = wrapped.release
        waits = recorder.registry.interval("lock", name)
        self.wait_series = waits.series
        self.counts = waits.counts
        self.column = waits.column
        self.hold_series = recorder.registry.interval("lock.hold", name).series
        self.hold_counts = self.hold_series.counts
        # A lock that its holder may take again; any other lock that was taken is a new hold.
        self.reentrant = hasattr(wrapped, "_is_owned")
        self.forget()

    def forget(self) -> None:
        """No hold is known."""
        self.holder = 0
        self.depth = 0
        self.start_ns = 0
        self.request: Request | None = None
        self.waited_ns = 0
        self.root_id = 0
        self.watched: Hold | None = None

    def taken(self) -> None:
        """The caller took a free lock, or took its own again."""
        recorder = self.recorder
        try:
            ident = get_ident()
            if self.holder == ident and self.reentrant:
                self.depth += 1
                return
            self.counts[0] += 1
            self.begin(recorder, ident)
        except Exception:  # noqa: BLE001 - nothing of ours reaches the application
            recorder.failed()

    def begin(self, recorder: Recorder, ident: int, waited_ns: int = 0, root_id: int = 0) -> None:
        """Stamp the hold that begins now, after a wait of its own."""
        self.depth = 1
        self.watched = None
        self.waited_ns, self.root_id = waited_ns, root_id
        self.request = recorder.context.get()
        self.start_ns = recorder.clock() if recorder.lock_holds else _UNTIMED
        self.holder = ident

    def given(self) -> int:
        """Before a release: end the hold if the caller is its holder; gives its length, or -1."""
        recorder = self.recorder
        try:
            if self.holder != get_ident():
                self.holder = self.depth = 0
                return -1
            depth = self.depth = self.depth - 1
            if depth > 0:
                return -1
            start, self.holder, self.request = self.start_ns, 0, None
            if start == _UNTIMED:
                return -1
            held = recorder.clock() - start
            if self.watched is not None:
                self.seen(self.watched, held)
            return held
        except Exception:  # noqa: BLE001 - nothing of ours reaches the application
            recorder.failed()
            return -1

    def seen(self, watched: Hold, held_ns: int) -> None:
        """End a hold that somebody waits for."""
        watched.held_ns = held_ns
        self.recorder.sites.blame(watched.site_id, -1, held_ns)

    def count(self, held_ns: int) -> None:
        """Count a hold, after the release: nobody shall wait for our counting."""
        try:
            if held_ns <= HIGHEST_NS:
                # The coarse layout of `Series.index_of`, inline.
                bucket = (held_ns | 255).bit_length() - 8
                index = (bucket << 7) + (held_ns >> bucket)
                self.hold_counts[index] += 1
                self.hold_series.sum_ns += held_ns
            else:
                self.hold_series.record(held_ns)
        except Exception:  # noqa: BLE001 - nothing of ours reaches the application
            self.recorder.failed()

    def wait(self, acquire: Callable[[], bool]) -> bool:
        """Wait for the held lock; a wait that fails counts nowhere."""
        recorder = self.recorder
        hold: Hold | None = None
        start = 0
        try:
            start = recorder.clock()
            hold = self.look(start)
        except Exception:  # noqa: BLE001 - nothing of ours reaches the application
            recorder.failed()
        taken = acquire()
        if taken:
            self.waited(start, hold)
        return taken

    def waited(self, start: int, hold: Hold | None) -> None:
        """Count a wait that ended with the lock held."""
        recorder = self.recorder
        try:
            end = recorder.clock()
            root = 0 if hold is None else hold.root()
            self.begin(recorder, get_ident(), end - start, root)
            self.wait_series.record(end - start)
            if root:
                recorder.sites.blame(root, end - start)
            request = recorder.context.get()
            if request is not None:
                request.place(self.column, start, end, SpanFlag.CONTENDED, root)
        except Exception:  # noqa: BLE001 - nothing of ours reaches the application
            recorder.failed()

    def look(self, now_ns: int) -> Hold | None:
        """The hold that the caller has to wait for; where it is, is read once a hold."""
        watched, holder = self.watched, self.holder
        if holder and watched is None:
            sites = self.recorder.sites
            stage, request, waited, root = stage_of(self.request), request_label(self.request), self.waited_ns, self.root_id
            watched = Hold(sites.find(self.name, sites.where(holder, now_ns), stage, request), waited, root)
            if self.holder == holder:
                self.watched = watched
        return watched


class PermitHolds(Holds):
    """Holds of a semaphore: each permit counts as held from its acquire to a release by the same thread."""

    __slots__ = ("starts",)

    def forget(self) -> None:
        """No hold is known."""
        super().forget()
        self.starts: dict[int, list[int]] = {}

    def begin(self, recorder: Recorder, ident: int, waited_ns: int = 0, root_id: int = 0) -> None:
        """Stamp the permit that is held from now on."""
        super().begin(recorder, ident, waited_ns, root_id)
        starts = self.starts.setdefault(ident, [])
        if len(starts) < _PERMITS:
            starts.append(self.start_ns)

    def given(self) -> int:
        """Before a release: end this thread's latest permit; gives how long it was held, or -1."""
        ident = get_ident()
        try:
            starts = self.starts.get(ident)
            if not starts:
                if self.starts:  # handed over: who took that permit will not release it
                    self.starts.pop(next(iter(tuple(self.starts))), None)
                return -1
            start = starts.pop()
            if not starts:
                self.starts.pop(ident, None)
            held = -1 if start == _UNTIMED else self.recorder.clock() - start
            if start == self.start_ns and self.holder == ident:
                watched, self.holder, self.request = self.watched, 0, None
                if watched is not None:
                    self.seen(watched, held)
            return held
        except Exception:  # noqa: BLE001 - nothing of ours reaches the application
            self.recorder.failed()
            return -1
