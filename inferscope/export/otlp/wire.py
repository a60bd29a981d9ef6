"""What the protocols have in common: one try and its answer."""

from __future__ import annotations

import email.utils
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Reply", "Wire", "retry_after_s"]


@dataclass(frozen=True, slots=True)
class Reply:
    """One try's answer."""

    ok: bool
    retryable: bool = False
    reason: str = ""
    retry_after_s: float | None = None
    refused: int = 0
    """Points or records refused although the request as a whole succeeded."""


class Wire(Protocol):
    """One protocol's connection to one target."""

    def post(self, payload: bytes, timeout_s: float) -> Reply:
        """Try once; must not take longer than `timeout_s`. May raise any Exception."""
        ...

    def close(self) -> None:
        """Drop the connection, also under a call that another thread has in flight."""
        ...


def retry_after_s(value: str | None, now_unix: float) -> float | None:
    """Seconds that a Retry-After header asks for: a number or an HTTP date; None when absent or unreadable."""
    if not value:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - now_unix
        except (TypeError, ValueError):
            return None
    return max(seconds, 0.0) if seconds < 1e9 else None
