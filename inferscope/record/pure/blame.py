"""Who made others wait: waits summed by the code site where the hold that began the queue was."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from inferscope.record.sites import UNKNOWN, site_of_thread

if TYPE_CHECKING:
    from inferscope.record.pure.request import Request

__all__ = ["Hold", "Sites"]

_LIMIT: Final = 1024
_PAUSE_NS: Final = 100_000


class _Site:
    """Running totals of one site."""

    __slots__ = ("id", "lock", "longest_hold_ns", "request", "site", "stage", "wait_ns", "waits")

    def __init__(self, number: int, lock: str, site: str, stage: str | None, request: str | None) -> None:
        self.id = number
        self.lock = lock
        self.site = site
        self.stage = stage
        self.request = request
        self.clear()

    def clear(self) -> None:
        self.waits = self.wait_ns = self.longest_hold_ns = 0


class Sites:
    """Sites of one recorder, by small process-unique ids from 1 up; grow-only."""

    def __init__(self) -> None:
        self._sites: list[_Site] = []
        self._known: dict[tuple[str, str, str | None, str | None], _Site] = {}
        self._read_ns = -_PAUSE_NS

    def find(self, lock: str, site: str, stage: str | None, request: str | None) -> int:
        """The id of a site, made on first use; beyond 1024 a lock's further sites are one, `other`."""
        key = (lock, site, stage, request)
        known = self._known.get(key)
        if known is None:
            if len(self._sites) >= _LIMIT and site != "other":
                return self.find(lock, "other", None, None)
            known = self._known.setdefault(key, _Site(0, lock, site, stage, request))
            if not known.id:
                self._sites.append(known)
                known.id = len(self._sites)
        return known.id

    def blame(self, site_id: int, wait_ns: int, hold_ns: int = 0) -> None:
        """Add a wait to a site, and a hold when it is the longest.

        Args:
            site_id: From `find`.
            wait_ns: The wait; below 0 when there is only a hold to tell of.
            hold_ns: The hold.
        """
        site = self._sites[site_id - 1]
        if wait_ns >= 0:
            site.waits += 1
            site.wait_ns += wait_ns
        site.longest_hold_ns = max(site.longest_hold_ns, hold_ns)

    def where(self, ident: int, now_ns: int) -> str:
        """The site where a thread is, read at most every 100 us: the look covers all threads and holds the GIL."""
        if now_ns - self._read_ns < _PAUSE_NS:
            return UNKNOWN
        self._read_ns = now_ns
        return site_of_thread(ident)

    def rows(self) -> list[tuple[str, int, str, str | None, int, int, int, str | None]]:
        """Lock, id, site, stage, waits, summed wait, longest hold and request of each site."""
        return [(s.lock, s.id, s.site, s.stage, s.waits, s.wait_ns, s.longest_hold_ns, s.request) for s in tuple(self._sites)]

    def clear(self) -> None:
        """Set all totals to 0; ids stay."""
        for site in self._sites:
            site.clear()


class Hold:
    """One hold that somebody waits for.

    Args:
        site_id: Where the holder was when the first waiter looked.
        wait_ns: How long the holder itself had waited.
        root_id: What the holder waited for, 0 for nothing.
    """

    __slots__ = ("held_ns", "root_id", "site_id", "wait_ns")

    def __init__(self, site_id: int, wait_ns: int, root_id: int) -> None:
        self.site_id = site_id
        self.wait_ns = wait_ns
        self.root_id = root_id
        self.held_ns = -1

    def root(self) -> int:
        """Whom to blame: who waited over twice as long as it then held only passed its own wait on."""
        return self.root_id if self.root_id and self.wait_ns > 2 * self.held_ns >= 0 else self.site_id


def stage_of(request: Request | None) -> str | None:
    """The name of the innermost open stage of a request."""
    top = None if request is None else request.top
    if request is None or top is None:
        return None
    return request.stage_name if top is request else top.name
