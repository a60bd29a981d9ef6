"""When a load gives up: nobody answers any more, or nobody is there."""

from __future__ import annotations

from typing import Final

__all__ = ["GONE_AFTER_S", "Patience"]

GONE_AFTER_S: Final = 3.0
_REFUSED: Final = 20


class Patience:
    """Follows what is under way.

    Args:
        silence_s: how long requests may be under way without any answer.
    """

    def __init__(self, silence_s: float) -> None:
        self._silence_ns = int(silence_s * 1e9)
        self._under_way = 0
        self._since_ns = 0
        """Since when there has been no answer to what is under way."""
        self._good_ns = 0
        self._failed = 0

    def begin(self, now: int) -> None:
        """The schedule begins."""
        self._good_ns = now

    def sent(self, now: int) -> None:
        """A request is on its way."""
        if not self._under_way:
            self._since_ns = now
        self._under_way += 1

    def ended(self, now: int, *, answered: bool, sent: bool) -> None:
        """A request is over: answered, or lost, or never sent because nobody listens."""
        self._under_way -= sent
        self._since_ns = now
        if answered:
            self._good_ns, self._failed = now, 0
        else:
            self._failed += 1

    def over(self, now: int) -> str:
        """Why there is no point in going on; empty while there is."""
        if self._failed >= _REFUSED and now - self._good_ns > GONE_AFTER_S * 1e9:
            return f"the target is gone: {self._failed} requests in a row failed, the last answer came {(now - self._good_ns) / 1e9:.1f} s before"
        if self._under_way > 0 and now - self._since_ns > self._silence_ns:
            return (
                f"the target hangs: {self._under_way} requests are under way and none was answered for {(now - self._since_ns) / 1e9:.1f} s"
            )
        return ""
