"""What a stage takes beside time; part of an `Incident`, by descending time in a slow request."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["StageCost"]


@dataclass(frozen=True, slots=True)
class StageCost:
    """What one stage takes beside time, means over retained requests; None is what was not measured."""

    name: str
    slow_ms: float
    """Of a slow request, waits inside it included."""
    ordinary_ms: float
    slow_cpu_ms: float | None
    """CPU time of the stage's thread, from samples."""
    ordinary_cpu_ms: float | None
    slow_bytes: float | None
    """Copied between host and device in it."""
    ordinary_bytes: float | None
    device_bytes: int | None
    """Most that a run of it added to the device's memory."""
