"""What somebody may ask of a capture, checked before anything is touched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from inferscope.errors import ConfigurationError

__all__ = ["AUTOMATIC", "LONGEST_SAFE_MS", "Plan", "Wanted"]

LONGEST_SAFE_MS: Final = 200.0
"""Longest window below tier 3."""


class Wanted(Protocol):
    """What `Plan.of` reads."""

    @property
    def requests(self) -> int:
        """Profiles to keep."""
        ...

    @property
    def window_ms(self) -> float | None:
        """Longest window."""
        ...

    @property
    def tier(self) -> int:
        """1 to 3."""
        ...

    @property
    def shapes(self) -> bool:
        """Dimensions of inputs."""
        ...

    @property
    def stacks(self) -> bool:
        """Python functions."""
        ...

    @property
    def allow_stall_ms(self) -> float | None:
        """Longest stop."""
        ...


def _number(key: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ConfigurationError(key, value, f"expected a number from {low:g} to {high:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One capture on demand.

    Args:
        tier: 1, the default: single regions of single requests, each on its own thread. 2: windows of all threads, in a budget of events. 3: what
            can stop the whole process for a moment: shapes, stacks, long windows.
        requests: Profiles to keep, 1 to 64: requests in tier 1, windows in tier 2. Default 8.
        window_ms: Longest window, milliseconds: 1 to 200 in tier 2, to 10000 in tier 3, where it makes the difference between windows and single
            requests. Default None: 50 in tier 2, single requests in tier 3.
        shapes: Dimensions of operators' inputs; tier 3 only. Default False.
        stacks: Python functions with file and line; tier 3 only, and of single requests only: recorded in all threads they crash interpreters
            (pytorch#144094, cpython#137400). Default False.
        allow_stall_ms: Longest stop of the whole process that is acceptable, milliseconds, 1 to 5000; required in tier 3, refused below it.

    Raises:
        ConfigurationError: A value is out of range, or tier and keywords do not go together.
    """

    tier: int = 1
    requests: int = 8
    window_ms: float | None = None
    shapes: bool = False
    stacks: bool = False
    allow_stall_ms: float | None = None

    def __post_init__(self) -> None:
        if self.tier not in {1, 2, 3} or isinstance(self.tier, bool):
            raise ConfigurationError("tier", self.tier, "expected 1, 2 or 3")
        if isinstance(self.requests, bool) or not isinstance(self.requests, int) or not 1 <= self.requests <= 64:  # pyright: ignore[reportUnnecessaryIsInstance]  (from a message)
            raise ConfigurationError("requests", self.requests, "an integer from 1 to 64")
        if self.window_ms is not None:
            if self.tier == 1:
                raise ConfigurationError("window_ms", self.window_ms, "windows are of tier 2 or 3")
            _number("window_ms", self.window_ms, 1, LONGEST_SAFE_MS if self.tier == 2 else 10_000)
        for key in ("shapes", "stacks", "allow_stall_ms"):
            value = getattr(self, key)
            if value and self.tier != 3:
                raise ConfigurationError(key, value, "tier 3 only")
        if self.stacks and self.window_ms is not None:
            raise ConfigurationError("stacks", self.stacks, "of single requests only: leave the window out")
        if self.tier == 3 and self.allow_stall_ms is None:
            raise ConfigurationError(
                "allow_stall_ms", None, "tier 3 stops the whole process for a moment: say for how long it may, in milliseconds"
            )
        if self.allow_stall_ms is not None:
            _number("allow_stall_ms", self.allow_stall_ms, 1, 5000)

    @classmethod
    def of(cls, wanted: Wanted) -> Plan:
        """What a channel asks for.

        Raises:
            ConfigurationError: As the class.
        """
        return cls(
            tier=wanted.tier,
            requests=wanted.requests,
            window_ms=wanted.window_ms,
            shapes=wanted.shapes,
            stacks=wanted.stacks,
            allow_stall_ms=wanted.allow_stall_ms,
        )

    @property
    def windows(self) -> bool:
        """Whether it records all threads."""
        return self.tier == 2 or self.window_ms is not None


AUTOMATIC: Final = Plan()
