"""The part `host` of the evidence as values: requests with what the kernel said of them, pauses, thread samples, seconds, limits."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from inferscope.types import FloatArray

__all__ = ["STATES", "HostFacts", "HostRequest", "HostSpan", "Pause", "SiteTimes", "ThreadRows", "read_host"]

STATES: Final = ("running", "gil", "lock", "sleep", "io", "log")
"""States of samples by number, as `inferscope.host.gil` writes them."""
_US: Final = 1000
_GAP_NS: Final = 5_000_000


class HostSpan(NamedTuple):
    """One positioned part of a request; instants are unix ns, `parent` is an index or -1."""

    column: int
    start_ns: int
    end_ns: int
    parent: int
    thread: int
    aux: int = 0
    """Bytes of a copy."""


@dataclass(frozen=True, slots=True)
class HostRequest:
    """A retained request, slow or ordinary; None is what was not measured."""

    slot: int
    start_ns: int
    wall_ns: int
    band: int
    thread: int
    size: float | None
    error: str | None
    cpu_ns: int | None
    vector: FloatArray
    spans: tuple[HostSpan, ...]
    id: int = 0
    shape: tuple[int, ...] | None = None
    """Of the model's first input."""
    new_shape: bool | None = None
    """Whether the model met that shape for the first time; None where it was not noted."""


class Pause(NamedTuple):
    """One collection; instants are unix ns."""

    slot: int
    start_ns: int
    end_ns: int
    generation: int
    thread: int


@dataclass(frozen=True, slots=True)
class ThreadRows:
    """Sampled intervals of one thread, ascending; ns."""

    slot: int
    thread: int
    name: str | None
    """None for a thread that Python did not start."""
    starts: FloatArray
    ends: FloatArray
    cpu: FloatArray
    delay: FloatArray
    state: FloatArray
    places: tuple[str, ...] = ()
    """For each interval the line of the application that the thread was in at its end, `function (file:line)`; empty where unknown."""

    def arrays(self) -> tuple[FloatArray, ...]:
        """Starts, ends, CPU time, delay and state."""
        return self.starts, self.ends, self.cpu, self.delay, self.state


class SiteTimes(NamedTuple):
    """What threads did while they were in a function that others waited for at a lock; ns."""

    site: str
    cpu_ns: float
    delay_ns: float
    blocked_ns: tuple[float, ...]
    """By `STATES`."""


@dataclass(frozen=True, slots=True)
class HostFacts:
    """All slots together; empty where nothing was measured."""

    requests: tuple[HostRequest, ...] = ()
    pauses: tuple[Pause, ...] = ()
    threads: tuple[ThreadRows, ...] = ()
    sites: tuple[SiteTimes, ...] = ()
    seconds: FloatArray = field(default_factory=lambda: np.zeros((0, 10)))
    """Columns as in `inferscope.host.scheduling.Second`; ends are unix ns."""
    ticks: FloatArray = field(default_factory=lambda: np.zeros((0, 5)))
    """Columns as in `inferscope.host.cgroup.Tick`; NaN where it is not measured."""
    children: FloatArray = field(default_factory=lambda: np.zeros((0, 3)))
    """Ends (unix ns), lengths and CPU time (ns) of ticks, for processes that this one started; empty where it started none."""
    quota: float | None = None
    allowed_cpus: int | None = None
    cpus: int | None = None
    first_request_ns: int | None = None
    reasons: tuple[str, ...] = ()
    """What could not be measured, and why."""
    sampled: tuple[tuple[int, int, int], ...] = ()
    """(begin, end, slot) of each time in which threads were sampled, by slot, ascending; unix ns."""


def read_host(documents: Sequence[tuple[Mapping[str, Any], Sequence[int]]]) -> HostFacts:
    """Read the part `host` of documents that have one.

    Args:
        documents: Each with its mapping of columns.
    """
    requests: list[HostRequest] = []
    pauses: list[Pause] = []
    threads: list[ThreadRows] = []
    sites: list[SiteTimes] = []
    seconds: list[list[float]] = []
    ticks: list[list[float]] = []
    children: list[list[float]] = []
    reasons: dict[str, None] = {}
    firsts: list[int] = []
    limits: Mapping[str, Any] = {}
    spans: list[tuple[int, int, int]] = []
    for document, mapping in documents:
        host: Mapping[str, Any] | None = document.get("host")
        if not host:
            continue
        offset, slot = int(document.get("unix_offset_ns") or 0), int(document.get("slot") or 0)
        requests += [_request(row, mapping, offset, slot) for row in host.get("requests") or ()]
        pauses += [Pause(slot, int(a) + offset, int(b) + offset, int(g), int(t)) for a, b, g, t in host.get("gc") or ()]
        chapters: list[Mapping[str, Any]] = [*(host.get("earlier_samples") or ()), host.get("samples") or {}]
        for samples in chapters:
            first, last = samples.get("from_ns"), samples.get("to_ns")
            reasons.update({str(samples["reason"]): None} if samples.get("reason") else {})
            if first is None or last is None:
                continue
            spans += [(int(a) + offset, int(b) + offset, slot) for a, b in samples.get("spans") or [(first, last)]]
            names = [str(name) for name in samples.get("places") or ()]
            threads += [_thread(row, names, int(first) + offset, slot) for row in samples.get("threads") or () if row["rows"]]
            sites += [_site(row) for row in samples.get("sites") or ()]
        scheduling: Mapping[str, Any] = host.get("scheduling") or {}
        seconds += [[float(row[0]) + offset, *map(float, row[1:])] for row in scheduling.get("seconds") or ()]
        children += [[float(row[0]) + offset, *map(float, row[1:])] for row in host.get("children") or ()]
        cgroup: Mapping[str, Any] = host.get("cgroup") or {}
        limits = limits or cgroup
        if not ticks:  # slots of a pod share their group
            ticks = [[float(row[0]) + offset, *(np.nan if v is None else float(v) for v in row[1:])] for row in cgroup.get("ticks") or ()]
        if host.get("first_request_ns") is not None:
            firsts.append(int(host["first_request_ns"]) + offset)
        reasons.update({str(scheduling["reason"]): None} if scheduling.get("reason") else {})
    return HostFacts(
        requests=tuple(requests),
        pauses=tuple(sorted(pauses)),
        threads=_joined(threads),
        sites=_added(sites),
        seconds=_table(seconds, 10),
        ticks=_table(ticks, 5),
        children=_table(children, 3),
        quota=limits.get("quota"),
        allowed_cpus=limits.get("allowed_cpus"),
        cpus=limits.get("cpus"),
        first_request_ns=min(firsts, default=None),
        reasons=tuple(reasons),
        sampled=tuple(sorted(spans, key=lambda span: (span[2], span[0]))),
    )


def _joined(parts: Sequence[ThreadRows]) -> tuple[ThreadRows, ...]:
    """One row a thread: what it did in each chapter, end to end."""
    found: dict[tuple[int, int], ThreadRows] = {}
    for part in parts:
        known = found.get((part.slot, part.thread))
        if known is not None:
            starts, ends, cpu, delay, state = (np.concatenate(pair) for pair in zip(known.arrays(), part.arrays(), strict=True))
            # places are worth nothing when only a part of the intervals has them
            places = known.places + part.places if known.places and part.places else ()
            part = ThreadRows(part.slot, part.thread, part.name or known.name, starts, ends, cpu, delay, state, places)  # noqa: PLW2901
        found[part.slot, part.thread] = part
    return tuple(found.values())


def _added(parts: Sequence[SiteTimes]) -> tuple[SiteTimes, ...]:
    found: dict[str, SiteTimes] = {}
    for part in parts:
        known = found.get(part.site, SiteTimes(part.site, 0.0, 0.0, (0.0,) * len(part.blocked_ns)))
        blocked = tuple(a + b for a, b in zip(known.blocked_ns, part.blocked_ns, strict=True))
        found[part.site] = SiteTimes(part.site, known.cpu_ns + part.cpu_ns, known.delay_ns + part.delay_ns, blocked)
    return tuple(found.values())


def _table(rows: Sequence[Sequence[float]], width: int) -> FloatArray:
    table: FloatArray = np.zeros((len(rows), width))
    for position, row in enumerate(rows):
        table[position] = row
    return table


def _request(row: Mapping[str, Any], mapping: Sequence[int], offset: int, slot: int) -> HostRequest:
    vector = np.zeros(max(mapping, default=0) + 1)
    for position, value in enumerate(row["vector"]):
        vector[mapping[position]] += value
    spans = tuple(
        HostSpan(mapping[c], int(a) + offset, int(b) + offset, int(p), int(t), int(rest[0]) if rest else 0)
        for c, a, b, p, t, *rest in row.get("spans") or ()
    )
    cpu = row.get("cpu_ns")
    return HostRequest(
        slot=slot,
        start_ns=int(row["start_ns"]) + offset,
        wall_ns=int(row["wall_ns"]),
        band=int(row["band"]),
        thread=int(row.get("thread") or 0),
        size=None if row.get("size") is None else float(row["size"]),
        error=row.get("error"),
        cpu_ns=None if cpu is None else int(cpu),
        vector=vector,
        spans=spans,
        id=int(row.get("id") or 0),
        shape=None if row.get("shape") is None else tuple(int(size) for size in row["shape"]),
        new_shape=row.get("new_shape"),
    )


def _thread(row: Mapping[str, Any], names: Sequence[str], first_ns: int, slot: int) -> ThreadRows:
    numbers = np.frombuffer(base64.b64decode(row["rows"]), np.uint32).astype(np.int64)
    ends: FloatArray = (first_ns + numbers[0::4] * _US).astype(np.float64)
    cpu: FloatArray = (numbers[1::4] * _US).astype(np.float64)
    delay: FloatArray = (numbers[2::4] * _US).astype(np.float64)
    word = numbers[3::4]
    length: FloatArray = ((word >> 3) * _US).astype(np.float64)
    surplus = 0.0  # a delay is counted when it ends: what exceeds its interval belongs to those before
    for index in range(len(ends) - 1, -1, -1):
        if index + 1 < len(ends) and ends[index + 1] - length[index + 1] - ends[index] > _GAP_NS:
            surplus = 0.0  # nobody looked in between, which is where it belongs
        delay[index] += surplus
        surplus = max(0.0, cpu[index] + delay[index] - length[index])
        delay[index] = max(0.0, delay[index] - surplus)
    places: list[int] = np.frombuffer(base64.b64decode(row.get("places") or ""), np.uint16).tolist()
    return ThreadRows(
        slot, int(row["thread"]), row.get("name"), ends - length, ends, cpu, delay, (word & 7).astype(np.float64),
        tuple(names[number] if number < len(names) else "" for number in places) if len(places) == len(ends) else (),
    )  # fmt: skip


def _site(row: Mapping[str, Any]) -> SiteTimes:
    return SiteTimes(
        str(row["site"]), float(row["cpu_us"]) * _US, float(row["delay_us"]) * _US, tuple(float(v) * _US for v in row["blocked_us"])
    )
