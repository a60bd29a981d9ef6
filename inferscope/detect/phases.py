"""What every judge shares: its phases, what a firing says, and how long it keeps quiet afterwards."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

from inferscope.clock import NS_PER_S

__all__ = ["COOLDOWN_S", "LONGEST_COOLDOWN_S", "Cooldown", "Firing", "Phase"]

Phase = Literal["warming", "armed", "open", "cooldown"]

COOLDOWN_S: Final = 600.0
LONGEST_COOLDOWN_S: Final = 3600.0


class Firing(NamedTuple):
    """Evidence passed the threshold."""

    trigger: str
    onset_ns: int
    requests: int
    exceeding: int
    statistic: float
    design_effect: float


class Cooldown:
    """How long a judge keeps quiet after an incident: doubled, up to an hour, while the cause is the same as before.

    Args:
        base_s: The first one, seconds.
    """

    def __init__(self, base_s: float = COOLDOWN_S) -> None:
        self._base_s = self.length_s = base_s
        self.until_ns: int | None = None
        """When it ends; None while there is none."""
        self._closed_ns = 0
        self._fingerprint: str | None = None

    def begin(self, now_ns: int) -> None:
        """An incident closed."""
        self._closed_ns = now_ns
        self.until_ns = now_ns + int(self.length_s * NS_PER_S)

    def over(self, now_ns: int) -> bool:
        """Whether it has ended; a clock that went back ends it as well, since nobody knows how long it has lasted then."""
        return self.until_ns is None or now_ns >= self.until_ns or now_ns < self._closed_ns

    def end(self) -> None:
        """Fire again from now on."""
        self.until_ns = None

    def note_cause(self, fingerprint: str) -> None:
        """Tell the cause of the latest incident; it may come after the cooldown has begun."""
        repeated = fingerprint == self._fingerprint
        self._fingerprint = fingerprint
        self.length_s = min(2.0 * self.length_s, max(LONGEST_COOLDOWN_S, self._base_s)) if repeated else self._base_s
        if self.until_ns is not None:
            self.until_ns = self._closed_ns + int(self.length_s * NS_PER_S)
