"""What a run uses while it runs: CPU and memory of the service, of the machine, of the cards; as curves and in a few numbers.

A number that nobody tells is None. Of the cards only the driver tells device-wide numbers (`inferscope.device.nvml`).
"""

from __future__ import annotations

import itertools
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from inferscope.bench.process import host_cpu_s, usage
from inferscope.device.nvml import NvmlMonitor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from typing_extensions import Self

    from inferscope.device.nvml import Card

__all__ = ["Cards", "Sample", "Sampler", "summary"]

PERIOD_S: Final = 0.25
POINTS: Final = 120
"""A curve is thinned to so many."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One look; None is unknown."""

    at_s: float
    cpu_s: float | None
    """CPU seconds of the service so far."""
    resident_bytes: int | None
    peak_bytes: int | None
    host_cpu_s: float | None
    utilization: float | None
    """Of the busiest card."""
    device_bytes: int | None
    """In use on all cards, by every process."""
    clock_hz: int | None
    slowed: tuple[str, ...]


class Cards:
    """The cards of this machine as the driver tells; nothing where there is no driver.

    Args:
        monitor: another one in tests.
    """

    def __init__(self, monitor: NvmlMonitor | None = None) -> None:
        self._monitor = monitor or NvmlMonitor()

    @property
    def off(self) -> str:
        """Why nothing is known; empty while something is."""
        return self._monitor.off

    def __call__(self) -> Sequence[Card]:
        """The cards now; asked at most once a second."""
        return self._monitor.run_once()

    def close(self) -> None:
        """Let go of the driver."""
        self._monitor.close()


def look(pid: int | None, cards: Callable[[], Sequence[Card]] | None, began: float) -> Sample:
    """Everything now."""
    used = usage(pid) if pid else None
    seen = cards() if cards is not None else ()
    shares = [card.utilization for card in seen if card.utilization is not None]
    memory = [card.memory_used_bytes for card in seen if card.memory_used_bytes is not None]
    clocks = [card.clock_hz for card in seen if card.clock_hz is not None]
    return Sample(
        time.perf_counter() - began,
        None if used is None else used.cpu_s,
        None if used is None else used.resident_bytes,
        None if used is None else used.peak_bytes,
        host_cpu_s(),
        max(shares, default=None),
        sum(memory) if memory else None,
        min(clocks, default=None),
        tuple(sorted({reason for card in seen for reason in card.slowed or ()})),
    )


class Sampler:
    """Looks at a process and the cards while a block runs.

    Args:
        pid: the service, with what descends from it; None when it is not on this machine.
        cards: what tells of the cards; None asks no driver.
        period_s: between two looks.
    """

    def __init__(self, pid: int | None, cards: Callable[[], Sequence[Card]] | None = None, period_s: float = PERIOD_S) -> None:
        self._pid, self._cards, self._period_s = pid, cards, period_s
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="inferscope-resources")
        self._work: Future[None] | None = None
        self.samples: list[Sample] = []
        self.began_ns = 0
        """When it began, on the `time.perf_counter_ns` clock."""

    def __enter__(self) -> Self:
        """Begin."""
        self._began = time.perf_counter()
        self.began_ns = int(self._began * 1e9)
        self.samples.append(look(self._pid, self._cards, self._began))
        self._work = self._pool.submit(self._run)
        return self

    def _run(self) -> None:
        while not self._stop.wait(self._period_s):
            self.samples.append(look(self._pid, self._cards, self._began))

    def __exit__(self, *_: object) -> None:
        """End, with a last look."""
        self._stop.set()
        if self._work is not None:
            self._work.result()
        self._pool.shutdown()
        self.samples.append(look(self._pid, self._cards, self._began))


def _rate(samples: Sequence[Sample], name: str) -> float | None:
    first, last = getattr(samples[0], name), getattr(samples[-1], name)
    lasted = samples[-1].at_s - samples[0].at_s
    return (last - first) / lasted if first is not None and last is not None and lasted > 0 and last >= first else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _most(values: Sequence[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _memory(static: int | None, peak: int | None) -> dict[str, int] | None:
    if static is None or peak is None:
        return None
    return {"static_bytes": static, "peak_bytes": peak, "dynamic_bytes": max(peak - static, 0)}


def summary(samples: Sequence[Sample], static: Sample | None = None) -> dict[str, Any]:
    """A curve in a few numbers, and the curve.

    Args:
        samples: what was seen, at least one.
        static: before the load; default the first sample.

    Returns:
        `cpu_cores` (of the service), `host_cpu_cores` (of the whole machine), `memory` and `device.memory` with `static_bytes`, `peak_bytes` and
        `dynamic_bytes`, `device.utilization` (mean of the busiest card) and `device.busy` (share of looks with any work on it), `curve`.
    """
    before = static or samples[0]
    # The kernel's own high-water mark sees what falls between two looks, but it is of the process's whole life.
    risen = samples[-1].peak_bytes if samples[-1].peak_bytes != before.peak_bytes else None
    peak = _most([risen, *(each.resident_bytes for each in samples)])
    shares = [each.utilization for each in samples]
    known = [share for share in shares if share is not None]
    device = {
        "utilization": _mean(shares),
        "busy": sum(share > 0 for share in known) / len(known) if known else None,
        "memory": _memory(before.device_bytes, _most([each.device_bytes for each in samples])),
        "clock_hz": min((each.clock_hz for each in samples if each.clock_hz is not None), default=None),
        "slowed": sorted({reason for each in samples for reason in each.slowed}),
        "source": "nvml",
    }
    return {
        "cpu_cores": _rate(samples, "cpu_s"),
        "host_cpu_cores": _rate(samples, "host_cpu_s"),
        "memory": _memory(before.resident_bytes, peak),
        "device": device if known or device["memory"] is not None else None,
        "curve": _curve(samples),
    }


def _curve(samples: Sequence[Sample]) -> list[dict[str, float | None]]:
    step = max(1, -(-len(samples) // POINTS))
    kept = [*samples[:-1:step], samples[-1]] if len(samples) > 1 else list(samples)
    rows: list[dict[str, float | None]] = []
    for before, each in itertools.pairwise(kept):
        rows.append(
            {
                "at_s": round(each.at_s, 3),
                "cpu_cores": _rate((before, each), "cpu_s"),
                "host_cpu_cores": _rate((before, each), "host_cpu_s"),
                "resident_bytes": each.resident_bytes,
                "device_utilization": each.utilization,
                "device_bytes": each.device_bytes,
            }
        )
    return rows
