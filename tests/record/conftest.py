"""Every test of this room runs against each implementation of the recorder."""

from __future__ import annotations

import struct
from array import array
from typing import Any, NamedTuple

import pytest

from inferscope.record import fallback

try:
    from inferscope.record import _native
except Exception as error:  # noqa: BLE001 - whatever keeps it from loading
    _native, _MISSING = None, f"the C core is not built: {error}"
else:
    _MISSING = ""


class Clock:
    """Nanoseconds that move only when told."""

    def __init__(self) -> None:
        self.now = 1_000_000

    def __call__(self) -> int:
        return self.now

    def tick(self, ns: int) -> None:
        self.now += ns


class Retained(NamedTuple):
    """What `drain` gives, with names and the packed parts opened."""

    id: int
    cls: int
    start_ns: int
    wall_ns: int
    band: int
    reasons: int
    thread_id: int
    size: float | None
    items: int
    error: str | None
    cpu_ns: int | None
    nvcsw: int | None
    nivcsw: int | None
    truncated: bool
    vector: tuple[int, ...]
    spans: list[tuple[int, ...]]
    """Start, end, aux, thread, column, parent, flags."""
    trace: object
    device_incomplete: bool


def unpack(rows: list[Any]) -> list[Retained]:
    """Open the packed parts of drained rows."""
    return [Retained(*row[:14], tuple(array("q", row[14])), list(struct.iter_unpack("<qqqIHBB", row[15])), *row[16:]) for row in rows]


class Reader:
    """Short questions to a recorder."""

    def __init__(self, recorder: Any) -> None:
        self.recorder = recorder

    def counts(self, kind: str, *labels: str) -> tuple[list[int], int, int, int]:
        """Counts, count, sum and clamped of one series."""
        for index, its_kind, its_labels, _digits, _lowest, length in self.recorder.series():
            if (its_kind, its_labels) == (kind, labels):
                buffer = array("q", bytes(8 * length))
                count, total, clamped = self.recorder.read_counts(index, buffer)
                return list(buffer), count, total, clamped
        return [], 0, 0, 0

    def count(self, kind: str, *labels: str) -> int:
        return self.counts(kind, *labels)[1]

    def sum(self, kind: str, *labels: str) -> int:
        return self.counts(kind, *labels)[2]

    def classed(self, index: int = 0) -> dict[str, Any]:
        return self.recorder.read_class(index)

    def drain(self) -> list[Retained]:
        return unpack(self.recorder.drain())

    def vector(self, record: Retained) -> dict[str, int]:
        """Nanoseconds by column name of a record, without the empty ones."""
        columns = self.recorder.columns()
        return {columns[i][1] if columns[i][0] == "stage" else ":".join(columns[i]): ns for i, ns in enumerate(record.vector) if ns}

    def bands(self, index: int = 0) -> list[tuple[int, int, tuple[int, ...]]]:
        ids, counts, sums = self.recorder.read_bands(index)
        width = len(self.recorder.columns())
        flat = array("q", sums)
        rows = zip(array("i", ids), array("q", counts), strict=True)
        return [(band, count, tuple(flat[n * width : (n + 1) * width])) for n, (band, count) in enumerate(rows)]


@pytest.fixture(params=["pure", "native"])
def implementation(request: pytest.FixtureRequest) -> Any:
    """The class under test."""
    if request.param == "pure":
        return fallback.Recorder
    if _native is None:
        pytest.skip(_MISSING)
    return _native.Recorder


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def recorder(implementation: Any) -> Any:
    """A recorder on the real clock."""
    return implementation()


@pytest.fixture
def timed(implementation: Any, clock: Clock) -> Any:
    """A recorder on the fake clock."""
    return implementation(clock=clock)


@pytest.fixture
def reader() -> type[Reader]:
    return Reader
