"""The immutable values that travel from room to room, in the order of the flow.

Durations and instants are int nanoseconds on the `time.perf_counter_ns` clock (CLOCK_MONOTONIC on Linux) unless a name ends in
`_ms` (float milliseconds, for people) or `_unix_ns` (wall clock). NumPy arrays inside are read-only by agreement.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray

    from inferscope.costs import StageCost

    IntArray = NDArray[np.int64]
    FloatArray = NDArray[np.float64]

__all__ = [
    "BAND_COUNT",
    "BODY",
    "COLUMN_LIMIT",
    "UNATTRIBUTED",
    "BandSums",
    "Breach",
    "CaptureSummary",
    "ClassKey",
    "ClassWindow",
    "Column",
    "Distribution",
    "Evidence",
    "Finding",
    "Incident",
    "Latency",
    "LockSite",
    "Reason",
    "RequestRecord",
    "SeriesSnapshot",
    "Share",
    "Snapshot",
    "SpanFlag",
    "SpanRecord",
    "WhatIf",
    "Window",
]

COLUMN_LIMIT: Final = 64
"""Columns of an exclusive vector; column 0 is `unattributed`, column 1 takes what overflows."""

BAND_COUNT: Final = 220
"""Latency bands: 27 octaves of 8 from 1.024 us up (216), then one extra row for each of at most 4 exact objective edges."""

BODY: Final = (0.40, 0.60)
"""The quantile range that stands for an ordinary request."""


class Column(NamedTuple):
    """One owner of time in a request's exclusive vector."""

    kind: str
    """`stage`, `lock`, `copy`, `queue`, `gc`, `device`, `cpu`, `io`, `other` or `unattributed`."""
    name: str

    @property
    def label(self) -> str:
        """The name people see: a stage's own name, else `kind:name`."""
        if self.kind in {"stage", "unattributed", "other"}:
            return self.name
        return f"{self.kind}:{self.name}" if self.name else self.kind


UNATTRIBUTED: Final = Column("unattributed", "unattributed")


class SpanFlag:
    """Bits of a recorded interval's `flags`."""

    SYNC: Final = 1
    PAGEABLE: Final = 2
    IMPLICIT_SYNC: Final = 4
    ERROR: Final = 8
    OTHER_THREAD: Final = 16
    CONTENDED: Final = 32


class Reason:
    """Bits that say why a request was retained."""

    BREACH: Final = 1
    SLOWEST: Final = 2
    RESERVOIR: Final = 4
    PROFILED: Final = 8


class ClassKey(NamedTuple):
    """What a request series is keyed by."""

    request: str
    model: str | None
    cls: str | None


class SpanRecord(NamedTuple):
    """One positioned interval of a retained request; threads by their native ids."""

    column: int
    start_ns: int
    end_ns: int
    parent: int
    """Index of the enclosing span in the same record, or -1 for the request itself."""
    thread_id: int
    flags: int
    aux: int
    """Bytes for a copy, the id of the root lock site for a lock wait, else 0."""


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A retained request: its exclusive vector sums to `wall_ns`."""

    id: int
    key: ClassKey
    start_ns: int
    wall_ns: int
    band: int
    reasons: int
    thread_id: int
    size: float | None
    items: int
    error: str | None
    cpu_ns: int | None
    voluntary_switches: int | None
    involuntary_switches: int | None
    truncated: bool
    vector: tuple[int, ...]
    """Nanoseconds by column index; shorter than the column list when columns were added later."""
    spans: tuple[SpanRecord, ...]
    trace: tuple[str, ...] | None = None
    """Trace id and span id of the application's span in hex, and a third item, `unsampled`, when nobody keeps that span."""
    device_incomplete: bool = False
    """Device data of it had not come 2 s after its end: what the device did may still be with the stage that waited for it."""

    @property
    def profiled(self) -> bool:
        """Whether a capture was tried on this request, which keeps it out of the percentiles."""
        return bool(self.reasons & Reason.PROFILED)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Counts in HdrHistogram's index layout; `counts` is a window's difference or a running total, as the holder says."""

    kind: str
    """`request`, `stage`, `lock.wait`, `lock.hold`, `copy`, `queue`, `gc`."""
    labels: tuple[str, ...]
    digits: int
    lowest_ns: int
    counts: IntArray
    count: int
    sum_ns: int
    clamped: int


@dataclass(frozen=True, slots=True)
class BandSums:
    """Time by latency band and column; adds over windows, threads, processes and replicas."""

    bands: IntArray
    """Band ids that occur, ascending by the latency they hold, shape (n,)."""
    counts: IntArray
    """Requests in each band, shape (n,)."""
    sums: IntArray
    """Nanoseconds, shape (n, columns)."""


@dataclass(frozen=True, slots=True)
class ClassWindow:
    """One request class in one window; all numbers are differences over the window."""

    key: ClassKey
    edges_ns: tuple[int, ...]
    count: int
    errors: int
    items: int
    excluded: int
    """Profiled requests: in `count` and `violations`, not in `latency` nor `bands`."""
    violations: tuple[int, ...]
    """Requests above each edge, or past their deadline."""
    latency: Distribution
    bands: BandSums
    shed: int = 0
    """Requests that were refused on purpose: in `count` only."""
    cancelled: int = 0
    """Requests whose caller gave up before they were above the lowest edge: in `count` only."""
    overdue: tuple[int, ...] = ()
    """Requests past their deadline that are not above each edge; in `errors` and, by their wall time, in `latency` and `bands`."""


@dataclass(frozen=True, slots=True)
class LockSite:
    """Where holds began that others waited for; running totals. `stage` and `request`, `name (class)`, are the holder's."""

    lock: str
    site_id: int
    site: str
    """`function (file:line)`."""
    stage: str | None
    waits: int
    wait_ns: int
    longest_hold_ns: int
    request: str | None = None


@dataclass(frozen=True, slots=True)
class Window:
    """Everything one tick saw; `series` are differences over the window, of all but the requests."""

    start_ns: int
    end_ns: int
    columns: tuple[Column, ...]
    classes: tuple[ClassWindow, ...]
    series: tuple[Distribution, ...]
    records: tuple[RequestRecord, ...]
    counters: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class SeriesSnapshot:
    """Where one series stands; seconds, None where nothing was recorded."""

    kind: str
    labels: tuple[str, ...]
    count: int
    sum_s: float
    p50_s: float | None
    p95_s: float | None
    p99_s: float | None
    p999_s: float | None
    max_s: float | None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Current numbers of this process since start, as `inferscope.snapshot()` returns them."""

    taken_unix_ns: int
    series: tuple[SeriesSnapshot, ...]
    requests: Mapping[str, Mapping[str, int]]
    """By request name: count, errors, items, excluded, shed, cancelled and, when there is an objective, violations."""
    counters: Mapping[str, int]
    """Our own drops, clamps and errors."""


@dataclass(frozen=True, slots=True)
class Breach:
    """Evidence that an objective does not hold."""

    id: str
    """Becomes the incident's id: `YYYYMMDDThhmmssZ-<request>-<4 hex>`."""
    slo: str
    request: str
    threshold_ms: float
    quantile: float
    onset_ns: int
    detected_ns: int
    detected_unix_ns: int
    requests: int
    """Requests judged between onset and detection."""
    exceeding: int
    trigger: str
    """`e_detector`, `burn_rate` or `severe` for latency; else a key of `triggers.told`."""
    statistic: float
    design_effect: float


@dataclass(frozen=True, slots=True)
class Latency:
    """Percentiles in milliseconds; None where there are too few requests to say."""

    p50: float | None
    p95: float | None
    p99: float | None
    p999: float | None


@dataclass(frozen=True, slots=True)
class Share:
    """One column's part of the tail's excess over the body."""

    name: str
    kind: str
    share: float
    """Fraction of the excess; all shares sum to 1."""
    ci: tuple[float, float] | None
    """95 % interval from a bootstrap over 1-second blocks; None when there are too few slow episodes."""
    tail_ms: float
    body_ms: float
    mean_share: float
    """The share an ordinary mean profile would print."""


@dataclass(frozen=True, slots=True)
class WhatIf:
    """P99 if the named columns cost every request no more than their median: an estimate."""

    fix: tuple[str, ...]
    p99_ms: float
    meets_objective: bool
    ci: tuple[float, float] | None = None
    """95 % interval over replicas, ms; None where one process speaks for itself."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """One measured number behind a finding."""

    metric: str
    value: float | str
    unit: str
    ci: tuple[float, float] | None = None
    artefact: str | None = None
    """Path inside the incident."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A claim with its evidence."""

    id: str
    class_: str
    """`compute`, `memory`, `communication` or `scheduling`."""
    severity: str
    """`high`, `medium`, `low` or `info`."""
    confidence: str
    """`high` (direct event and interval), `medium` (elimination) or `low` (correlation)."""
    where: str
    claim: str
    evidence: tuple[Evidence, ...]
    share: float | None
    what_if_p99_ms: float | None
    refute_by: str
    fix: str
    rollback: str


@dataclass(frozen=True, slots=True)
class CaptureSummary:
    """One kept capture."""

    id: str
    tier: int
    requests: tuple[int, ...]
    slow: bool
    """True for a breaching request, False for a healthy one kept to compare with."""
    events: int | None
    stall_ms: float
    """Measured time that starting and stopping added to the captured request."""
    threads: tuple[int, ...]
    trace: str
    """Path inside the incident."""
    stages: Mapping[str, float] = field(default_factory=dict[str, float])
    """Milliseconds of traced operator time joined to each stage by thread and time."""


@dataclass(frozen=True, slots=True)
class Incident:
    """Breach, captures and diagnosis of one objective, as kept on disk and shown in reports."""

    id: str
    service: str
    path: str
    opened_unix_ns: int
    closed_unix_ns: int | None
    state: str
    """`open`, `diagnosed`, `closed` or `undiagnosed`."""
    breach: Breach
    from_ns: int
    to_ns: int
    latency_ms: Latency
    requests: int
    errors: int
    exceeding: int
    excluded: int
    throughput_rps: float
    jitter_ms: float | None
    device_busy: float | None
    """Device-wide busy fraction from the driver; None when nothing measured it."""
    verdict: str
    attribution: tuple[Share, ...]
    withheld: str | None
    """Why the attribution is not printed, if it is not."""
    what_if: tuple[WhatIf, ...]
    findings: tuple[Finding, ...]
    captures: tuple[CaptureSummary, ...]
    notes: tuple[str, ...] = ()
    stages: tuple[StageCost, ...] = ()
