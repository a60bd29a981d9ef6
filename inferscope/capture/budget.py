"""What captures may cost, and what they have cost so far."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from inferscope.clock import NS_PER_MS, NS_PER_S
from inferscope.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CaptureBudget", "Counts", "Spending"]

_HOUR_NS: Final = 3600 * NS_PER_S
_LIKELY_NS: Final = 2 * NS_PER_S
_COIN: Final = 0.8
_RANGES: Final[dict[str, tuple[float, float, bool, str]]] = {
    "max_share": (0.001, 1.0, False, "a fraction of requests from 0.001 to 1, such as 0.2"),
    "attempts_per_s": (0.01, 100.0, False, "attempts a second from 0.01 to 100"),
    "stall_ms_per_s": (0.1, 100.0, False, "milliseconds a second from 0.1 to 100"),
    "slow": (1, 64, True, "an integer from 1 to 64"),
    "body": (0, 64, True, "an integer from 0 to 64"),
    "per_hour": (1, 1000, True, "an integer from 1 to 1000"),
    "disk_mb": (1, 1_000_000, True, "megabytes, an integer from 1 to 1000000"),
    "incidents": (1, 10_000, True, "an integer from 1 to 10000"),
    "free_memory_mb": (0, 1_000_000, True, "megabytes, an integer from 0 to 1000000"),
    "shaped": (0, 64, True, "an integer from 0 to 64"),
    "windows": (0, 64, True, "an integer from 0 to 64"),
    "window_ms": (1.0, 200.0, False, "milliseconds from 1 to 200"),
    "events": (100, 1_000_000, True, "an integer from 100 to 1000000"),
    "armed_s": (1.0, 3600.0, False, "seconds from 1 to 3600"),
    "cooldown_s": (0.0, 86_400.0, False, "seconds from 0 to 86400"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureBudget:
    """Limits of automatic captures; all are hard.

    Args:
        max_share: Largest share of the requests that a capture is tried on while an incident is open. Default 0.2.
        attempts_per_s: Most attempts a second, default 10; they are spaced evenly.
        stall_ms_per_s: Most milliseconds a second that starting, stopping and saving may take from this process, as measured; not counted is
            time in which the kernel gave the CPU to somebody else. Default 5. An attempt that took longer is paid back by a pause.
        slow: Profiles of breaching requests kept an incident, default 8.
        body: Profiles of ordinary requests kept an incident to compare with, default 5.
        per_hour: Incidents an hour that captures are tried for, default 6.
        disk_mb: What all incidents of this worker may occupy, megabytes; the oldest go first. Default 512.
        incidents: How many incidents this worker keeps, default 50.
        free_memory_mb: Memory that must be free for a capture to start, megabytes. Default 256.
        shaped: Of these profiles, how many may hold the dimensions of operators' inputs too, where the stop is likely to stay below 2 ms. Default 3.
        all_threads: Also record windows of all threads on a torch that can crash when such a session is stopped beside threads that run operators
            outside of any request. Where torch has the fix, windows are recorded without asking. Default False.
        windows: Windows kept an incident, default 8.
        window_ms: Longest window, milliseconds. Default 50.
        events: Events that a window should not exceed: stop and save hold the interpreter by the event. Default 5000.
        armed_s: How long after a breach captures are tried, seconds. Default 60.
        cooldown_s: Pause between two incidents' captures, seconds. Default 60.

    Raises:
        ConfigurationError: A keyword has a value that cannot be used.
    """

    max_share: float = 0.2
    attempts_per_s: float = 10.0
    stall_ms_per_s: float = 5.0
    slow: int = 8
    body: int = 5
    per_hour: int = 6
    disk_mb: int = 512
    incidents: int = 50
    free_memory_mb: int = 256
    armed_s: float = 60.0
    cooldown_s: float = 60.0
    shaped: int = 3
    all_threads: bool = False
    windows: int = 8
    window_ms: float = 50.0
    events: int = 5000

    def __post_init__(self) -> None:
        for key, (low, high, whole, accepted) in _RANGES.items():
            value: object = getattr(self, key)
            kinds = (int,) if whole else (int, float)
            if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
                raise ConfigurationError(key, value, f"expected {accepted}")
        if not isinstance(self.all_threads, bool):  # pyright: ignore[reportUnnecessaryIsInstance]  (callers without type checks)
            raise ConfigurationError("all_threads", self.all_threads, "expected True or False")


@dataclass(slots=True)
class Counts:
    """What happened; running totals."""

    sessions: int = 0
    kept: int = 0
    dropped: int = 0
    saved: int = 0
    save_failed: int = 0
    empty: int = 0
    busy: int = 0
    """Drawn requests that found another session open."""
    unopened: int = 0
    """Drawn requests without a region to record."""
    yielded: int = 0
    abandoned: int = 0
    truncated: int = 0
    stalls_ns: dict[str, int] = field(default_factory=lambda: {"start": 0, "stop": 0, "save": 0})
    refused: dict[str, int] = field(default_factory=dict[str, int])

    def refuse(self, reason: str) -> None:
        """Count a refusal by its guard."""
        self.refused[reason] = self.refused.get(reason, 0) + 1


class Spending:
    """Accounts for one budget. Not locked: the caller serialises `draw`, `spend` and `open_incident`.

    Args:
        budget: The limits.
        uniform: Source of numbers in [0, 1), default `random.random`; replaced in tests.
    """

    def __init__(self, budget: CaptureBudget, uniform: Callable[[], float] = random.random) -> None:
        self.budget = budget
        self.seen = 0
        """Requests that could have been drawn."""
        self.attempts = 0
        """Requests that were drawn."""
        self.stall_ns = 0
        """All measured stall."""
        self._uniform = uniform
        self._block = max(1, -int(-1.0 // budget.max_share))
        self._due = 0
        self._likely_until_ns: int | None = None
        self._attempt_gap_ns = int(NS_PER_S / budget.attempts_per_s)
        self._attempt_from_ns: int | None = None
        self._stall_from_ns: int | None = None
        self._pause_ns = 0
        # Slow ones and all, of likely attempts and of random ones; begun as if likely ones were six times as often slow, with little
        # weight: five attempts that say otherwise are enough.
        self._odds = {True: [0.5, 2.0], False: [1.0, 25.0]}
        self._opened: deque[int] = deque()
        self._next_block()

    def _next_block(self) -> None:
        # One place at random in each block of 1/share requests: the share is exact and no period of the traffic is followed.
        self._due = self.seen - self.seen % self._block + int(self._uniform() * self._block)

    def draw(self, now_ns: int, *, likely: bool = False) -> bool:
        """Count one request and say whether a capture may be tried on it.

        Args:
            now_ns: Now, monotonic.
            likely: The request starts while another one is late, so that it will probably be late too. It then need not be the one that was
                drawn at random, within the same limits; and for as long as such requests come and are slow more than twice as often as
                others, random draws wait a third longer, to leave room for them.
        """
        position = self.seen
        self.seen += 1
        # A block whose place came while an attempt had to wait gets a later one, by the toss of a coin.
        owed = position // self._block > self.attempts and self._uniform() < _COIN
        due = position == self._due or owed
        if self.seen % self._block == 0:
            self._next_block()
        if likely:
            self._likely_until_ns = now_ns + _LIKELY_NS
            due = due or self.attempts < self.budget.max_share * self.seen
        sparing = not likely and self._likely_until_ns is not None and now_ns < self._likely_until_ns and self._likely_pays()
        paced_ns = now_ns - self._attempt_gap_ns // 3 if sparing else now_ns
        if not due or (self._attempt_from_ns is not None and paced_ns < self._attempt_from_ns):
            return False
        if not self.solvent(now_ns - self._pause_ns // 3 if sparing else now_ns):
            return False
        self._attempt_from_ns = now_ns + self._attempt_gap_ns
        self.attempts += 1
        return True

    def learn(self, *, likely: bool, slow: bool) -> None:
        """Tell what became of an attempt."""
        odds = self._odds[likely]
        odds[0] += slow
        odds[1] += 1.0

    def _likely_pays(self) -> bool:
        (slow, of), (others, of_others) = self._odds[True], self._odds[False]
        return slow / of > 2.0 * others / of_others

    def solvent(self, now_ns: int) -> bool:
        """Whether every stall so far is paid back."""
        return self._stall_from_ns is None or now_ns >= self._stall_from_ns

    def spend(self, stall_ns: int, now_ns: int) -> None:
        """Account for a stall, as measured; no draw succeeds until it is paid back at `stall_ms_per_s`."""
        self.stall_ns += stall_ns
        pause_ns = int(stall_ns * NS_PER_S / (self.budget.stall_ms_per_s * NS_PER_MS))
        self._pause_ns = pause_ns
        earliest = now_ns if self._stall_from_ns is None else max(now_ns, self._stall_from_ns)
        self._stall_from_ns = earliest + pause_ns

    def open_incident(self, now_ns: int) -> bool:
        """Whether this hour has room for another incident; counts it when it has."""
        while self._opened and now_ns - self._opened[0] >= _HOUR_NS:
            self._opened.popleft()
        if len(self._opened) >= self.budget.per_hour:
            return False
        self._opened.append(now_ns)
        return True
