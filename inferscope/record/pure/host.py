"""What the operating system and the host application hand to a request."""

from __future__ import annotations

__all__ = ["thread_switches", "whole"]

try:
    from resource import RUSAGE_THREAD, getrusage
except ImportError:  # pragma: no cover - not Linux

    def thread_switches() -> tuple[int, int] | None:
        """Nothing tells here."""
        return None

else:

    def thread_switches() -> tuple[int, int] | None:
        """Voluntary and involuntary context switches of the calling thread (getrusage(2)); None where nothing tells."""
        usage = getrusage(RUSAGE_THREAD)
        return usage.ru_nvcsw, usage.ru_nivcsw


def whole(value: object) -> int:
    """A count that the application set, which may be anything; 1 when it is no whole number."""
    return value if isinstance(value, int) else 1
