"""What a trace says, as values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "Collective",
    "Idle",
    "Kernel",
    "MatrixWork",
    "Operator",
    "Overlap",
    "Roofline",
    "ShapeUse",
    "StageSpan",
    "SyncSite",
    "TraceSummary",
    "Transfer",
    "head",
]


@dataclass(frozen=True, slots=True)
class Operator:
    """Time in one operator or runtime call, without its children."""

    name: str
    calls: int
    self_ms: float


@dataclass(frozen=True, slots=True)
class Kernel:
    """Work of one name on the device."""

    name: str
    calls: int
    self_ms: float


@dataclass(frozen=True, slots=True)
class Transfer:
    """Copies of one kind on the device's time line."""

    direction: str
    """`HtoD`, `DtoH`, `DtoD` or what the trace says."""
    memory: str
    """`pageable`, `pinned` or `unknown`: the host side."""
    copies: int
    bytes: int
    ms: float
    synchronous: int = 0
    """Of them, those that a blocking call made, or that the same thread waited for at once."""


@dataclass(frozen=True, slots=True)
class SyncSite:
    """Waits for the device from one place."""

    call: str
    where: tuple[str, ...]
    """Operators and Python functions around the call, innermost first; as much as the trace holds."""
    calls: int
    ms: float


@dataclass(frozen=True, slots=True)
class Idle:
    """Time between two pieces of device work, by what the later one waited for; sums to the device's idle time between its first and last work."""

    gaps: int
    median_us: float
    """Median length of a gap."""
    host_ms: float
    """Before the launch was called: the host was busy elsewhere."""
    sync_ms: float
    """Before the launch was called, while its thread waited for the device."""
    launch_ms: float
    """After the launch was called: its latency, or work on another queue that it depends on."""
    unknown_ms: float
    """The trace does not hold the launch."""

    @property
    def total_ms(self) -> float:
        """All of it."""
        return self.host_ms + self.sync_ms + self.launch_ms + self.unknown_ms


@dataclass(frozen=True, slots=True)
class ShapeUse:
    """How many input shapes one operator met."""

    operator: str
    calls: int
    shapes: int


@dataclass(frozen=True, slots=True)
class MatrixWork:
    """Device time of matrix multiplications, convolutions and attention, told by the kernels' names; ms."""

    tensor_ms: float
    """On matrix units (tensor cores, MFMA)."""
    plain_ms: float
    """On ordinary units."""
    unknown_ms: float
    """The name does not say."""
    plain_kernel: str = ""
    """The longest one on ordinary units."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """Operations and bytes of the operators whose shapes are known, over the time of their kernels: an estimate, since bytes count each operand once."""

    flops: float
    bytes: float
    ms: float
    """Device time of these kernels."""
    covered: float
    """Their part of all kernel time."""
    peak_flops: float | None
    """Of the card, for the operand type that most operations had; None when the card is not known here."""
    peak_bytes_s: float | None

    @property
    def intensity(self) -> float | None:
        """Operations a byte."""
        return self.flops / self.bytes if self.bytes else None

    @property
    def ridge(self) -> float | None:
        """Operations a byte from which the card is limited by arithmetic."""
        return self.peak_flops / self.peak_bytes_s if self.peak_flops and self.peak_bytes_s else None

    @property
    def of_flops(self) -> float | None:
        """Fraction of the card's peak arithmetic."""
        return self.flops / (self.ms / 1e3) / self.peak_flops if self.peak_flops and self.ms else None

    @property
    def of_bandwidth(self) -> float | None:
        """Fraction of the card's peak bandwidth."""
        return self.bytes / (self.ms / 1e3) / self.peak_bytes_s if self.peak_bytes_s and self.ms else None


@dataclass(frozen=True, slots=True)
class Overlap:
    """Copies and kernels on one device; ms."""

    copy_ms: float
    kernel_ms: float
    both_ms: float
    """Time in which both ran."""
    streams: int
    """Queues on which either ran."""


class Collective(NamedTuple):
    """One collective operation as this rank saw it."""

    name: str
    group: str
    sequence: int
    """Number within the group, the same on every rank; -1 when the trace does not say."""
    start_unix_ns: int
    ms: float


class StageSpan(NamedTuple):
    """One of our spans, to join operators to."""

    label: str
    start_unix_ns: int
    end_unix_ns: int
    thread_id: int


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """What a trace says."""

    events: int
    """Complete (`X`) events."""
    threads: tuple[int, ...]
    """Native ids of the threads with operators."""
    window_ms: float
    """From the first to the last complete event."""
    base_unix_ns: int
    """Added to `ts` it gives unix time; 0 when the trace does not say, as in older ones whose `ts` is unix time itself."""
    operators: tuple[Operator, ...]
    """By descending self time."""
    transfers: tuple[Transfer, ...]
    synchronisations: tuple[Operator, ...]
    """Runtime calls that wait for the device, by descending time."""
    synchronous_copies: int
    """Pageable copies directly followed by a stream synchronise on the same thread."""
    launches: int
    device_events: int
    device_busy: float | None
    """Union of this process's device work over its own span; None without device events. Others may share the card: it never proves that the card is idle."""
    device_ms: float = 0.0
    """Sum of the device work's durations."""
    stages_ms: Mapping[str, float] = field(default_factory=dict[str, float])
    """Self time of operators and runtime calls joined to our stages; to the trace's own annotations when it is somebody else's."""
    stages_device_ms: Mapping[str, float] = field(default_factory=dict[str, float])
    """Time of the device work that was launched inside them."""
    kernels: tuple[Kernel, ...] = ()
    """By descending time."""
    sync_sites: tuple[SyncSite, ...] = ()
    """By descending time."""
    idle: Idle | None = None
    """None with fewer than two pieces of device work."""
    small_kernels: float | None = None
    """Fraction of the kernels that are shorter than 10 us; None without kernels."""
    shapes: tuple[ShapeUse, ...] = ()
    """Operators with several shapes, most first; empty when shapes were not recorded."""
    graphs: int = 0
    """Compiled regions that ran."""
    recompiles: int = 0
    """Of them, later versions of a region: the code was compiled again for other inputs."""
    compile_ms: float = 0.0
    """Self time of compilation that the trace holds."""
    matrix: MatrixWork | None = None
    """None without kernels."""
    roofline: Roofline | None = None
    """None when no operator with known shapes could be joined to a kernel."""
    overlap: Overlap | None = None
    """None without device events."""
    collectives: tuple[Collective, ...] = ()
    collective_ms: float = 0.0
    """Time in collectives."""
    collective_wait_ms: float | None = None
    """Part of it beyond the fastest of its kind: waiting for other ranks, an estimate; None without collectives."""
    rank: int | None = None
    ranks: int | None = None
    device: str = ""
    """The first device's name, as the trace says it."""


_Row = TypeVar("_Row", Operator, Kernel)


def head(rows: Sequence[_Row], part: float = 0.8) -> Sequence[_Row]:
    """The largest rows that together make `part` of the time; the 80/20 cut by default.

    Args:
        rows: By descending time.
        part: Fraction of their sum.
    """
    left = part * sum(row.self_ms for row in rows)
    for number, row in enumerate(rows):
        if left <= 0:
            return rows[:number]
        left -= row.self_ms
    return rows
