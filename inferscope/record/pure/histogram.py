"""Latency counts in HdrHistogram's exact index layout (hdrhistogram.org; `HdrHistogram._counts_index_for` of the `hdrhistogram` package)."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["COARSE", "FINE", "HIGHEST_NS", "Series"]

HIGHEST_NS: Final = 60_000_000_000
"""Longest duration with a count of its own; longer ones are counted there and in `clamped`."""

COARSE: Final = (2, 1)
"""Digits and lowest duration of stages, locks, copies, queues and collections: 3840 counts."""

FINE: Final = (3, 1000)
"""Digits and lowest duration of requests: 18432 counts."""


class Series:
    """The running counts of one series; never reset while the process lives, so that a window is a difference of two readings.

    Args:
        index: Position in the recorder's list.
        kind: `request`, `stage`, `lock.wait`, …
        labels: Names that tell series of one kind apart.
        layout: `COARSE` or `FINE`.
    """

    __slots__ = (
        "_base",
        "_half",
        "_mask",
        "_unit",
        "clamped",
        "counts",
        "digits",
        "index",
        "kind",
        "labels",
        "lowest_ns",
        "sum_ns",
    )

    def __init__(self, index: int, kind: str, labels: tuple[str, ...], layout: tuple[int, int] = COARSE) -> None:
        self.index = index
        self.kind = kind
        self.labels = labels
        self.digits: int = layout[0]
        self.lowest_ns: int = layout[1]
        sub_bits: int = (2 * 10**self.digits - 1).bit_length()
        self._unit: int = self.lowest_ns.bit_length() - 1
        self._half = sub_bits - 1
        self._mask = ((1 << sub_bits) - 1) << self._unit
        self._base = sub_bits + self._unit
        buckets = HIGHEST_NS.bit_length() - self._base + 1
        # A list: adding to an element of an array costs twice as much, and readers are rare.
        self.counts = [0] * ((buckets + 1) << self._half)
        self.sum_ns = 0
        self.clamped = 0

    def index_of(self, ns: int) -> int:
        """The count that a duration of 0 … `HIGHEST_NS` belongs to."""
        bucket = (ns | self._mask).bit_length() - self._base
        return (bucket << self._half) + (ns >> (bucket + self._unit))

    def record(self, ns: int) -> None:
        """Count one duration: below 0 as 0, above `HIGHEST_NS` as that and as clamped; the sum takes the true value."""
        value = max(ns, 0)
        if value <= HIGHEST_NS:
            index = self.index_of(value)
            self.counts[index] += 1
        else:
            self.counts[self.index_of(HIGHEST_NS)] += 1
            self.clamped += 1
        self.sum_ns += value

    def read(self, buffer: Buffer) -> tuple[int, int, int]:
        """Copy the counts to a writable contiguous buffer of int64.

        Args:
            buffer: At least as long as the counts (a NumPy int64 array, an `array("q")`).

        Returns:
            Number of durations, their sum in ns, and how many were clamped.

        Raises:
            ValueError: The buffer is too short.
        """
        sum_ns, clamped = self.sum_ns, self.clamped
        counts = array("q", self.counts)
        source = memoryview(counts).cast("B")
        target = memoryview(buffer).cast("B")
        if len(target) < len(source):
            message = f"series {self.index} needs {len(source)} bytes, the buffer has {len(target)}"
            raise ValueError(message)
        target[: len(source)] = source
        return sum(counts), sum_ns, clamped

    def clear(self) -> None:
        """Forget everything, in place: spans keep a reference to `counts`."""
        self.counts[:] = [0] * len(self.counts)
        self.sum_ns = self.clamped = 0
