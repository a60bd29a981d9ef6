"""How the services of a state directory stand, from their indexes alone: what `inferscope top` shows. Asks no process anything."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from inferscope import semconv
from inferscope.clock import NS_PER_S
from inferscope.export.otlp.buckets import Buckets, merge, quantile
from inferscope.export.store import StoredWindow, read_store

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

__all__ = ["Overview", "Row", "overview", "read_slot"]

_CLASS: Final = (semconv.ATTR_REQUEST, semconv.ATTR_MODEL, semconv.ATTR_CLASS)


@dataclass(frozen=True, slots=True)
class Row:
    """One request class, of one worker or of all workers of a service."""

    service: str
    slot: int | None
    """None is all workers together."""
    request: str
    model: str | None
    cls: str | None
    requests: int
    errors: int
    rate: float
    """Requests a second over the time that the windows cover."""
    p50_s: float | None
    p99_s: float | None
    objective: str | None
    quantile: float | None
    threshold_s: float | None
    violations: int | None
    """Requests above the objective; None without an objective."""
    seen_unix_ns: int
    """End of the newest window."""

    @property
    def broken(self) -> bool:
        """Whether more requests lie above the objective than it allows, in these windows alone; the detector judges more carefully."""
        if self.violations is None or self.quantile is None:
            return False
        return self.violations > (1 - self.quantile) * self.requests


@dataclass(frozen=True, slots=True)
class Overview:
    """All services, and the workers that have said nothing for as long as is looked back."""

    rows: tuple[Row, ...]
    quiet: tuple[tuple[str, int], ...]


@dataclass(slots=True)
class _Class:
    points: list[Buckets] = field(default_factory=list[Buckets])
    requests: int = 0
    errors: int = 0
    violations: dict[str, int] = field(default_factory=dict[str, int])
    targets: dict[str, tuple[float | None, float]] = field(default_factory=dict[str, "tuple[float | None, float]"])
    start_ns: int = 1 << 62
    end_ns: int = 0

    def add(self, other: _Class) -> None:
        """Together with another worker's."""
        self.points += other.points
        self.requests += other.requests
        self.errors += other.errors
        for name, count in other.violations.items():
            self.violations[name] = self.violations.get(name, 0) + count
        self.targets |= other.targets
        self.start_ns, self.end_ns = min(self.start_ns, other.start_ns), max(self.end_ns, other.end_ns)


_Key = tuple[str, "str | None", "str | None"]


def read_slot(windows: Iterable[StoredWindow]) -> dict[_Key, _Class]:
    """What one worker's windows say, by request class."""
    found: dict[_Key, _Class] = {}
    targets: list[StoredWindow] = []
    for window in windows:
        if window.name == semconv.SLO_TARGET:
            targets.append(window)
            continue
        if window.name not in {semconv.REQUEST_DURATION, semconv.REQUESTS, semconv.SLO_VIOLATIONS} or _CLASS[0] not in window.attributes:
            continue
        name, model, cls = (window.attributes.get(each) for each in _CLASS)
        held = found.setdefault((str(name), model, cls), _Class())
        if window.name == semconv.REQUEST_DURATION:
            if window.buckets is not None:
                held.points.append(window.buckets)
        elif window.name == semconv.REQUESTS:
            held.requests += round(window.total)
            held.errors += round(window.total) if semconv.ERROR_TYPE in window.attributes else 0
            held.start_ns, held.end_ns = min(held.start_ns, window.start_unix_ns), max(held.end_ns, window.end_unix_ns)
        else:
            slo = str(window.attributes.get(semconv.ATTR_SLO))
            held.violations[slo] = held.violations.get(slo, 0) + round(window.total)
    for (request, _, _), held in found.items():
        for window in targets:
            if window.attributes.get(_CLASS[0]) == request:
                asked: Any = window.attributes.get("inferscope.slo.quantile")
                held.targets[str(window.attributes.get(semconv.ATTR_SLO))] = (asked, window.total)
    return found


def _rows(service: str, slot: int | None, key: _Key, held: _Class) -> Iterable[Row]:
    if held.end_ns == 0:
        return  # a percentile without a count says nothing
    try:
        merged = merge(held.points) if held.points else None
    except ValueError:
        merged = None  # workers with different explicit bounds: counts add, percentiles do not
    span_s = max(held.end_ns - held.start_ns, 1) / NS_PER_S
    objectives: list[str | None] = [*sorted(held.targets)] or [None]
    for objective in objectives:
        asked, threshold = held.targets[objective] if objective is not None else (None, None)
        yield Row(
            service=service,
            slot=slot,
            request=key[0],
            model=key[1],
            cls=key[2],
            requests=held.requests,
            errors=held.errors,
            rate=held.requests / span_s,
            p50_s=quantile(merged, 0.5) if merged else None,
            p99_s=quantile(merged, 0.99) if merged else None,
            objective=objective,
            quantile=asked,
            threshold_s=threshold,
            violations=None if objective is None else held.violations.get(objective, 0),
            seen_unix_ns=held.end_ns,
        )


def overview(state_dir: Path, now_unix_ns: int, *, window_s: float = 60.0, service: str | None = None) -> Overview:
    """Read the indexes of all workers.

    Args:
        state_dir: The state directory.
        now_unix_ns: End of the time that is looked at.
        window_s: Its length.
        service: The directory name of one service; None is all.

    Returns:
        For each request class of a service a row of all its workers, followed by one a worker where there are several.
    """
    since = now_unix_ns - int(window_s * NS_PER_S)
    rows: list[Row] = []
    quiet: list[tuple[str, int]] = []
    services: dict[str, dict[int, dict[_Key, _Class]]] = {}
    for path in sorted(state_dir.glob(f"{service or '*'}/*/index.sqlite")):
        if not path.parent.name.isdecimal():
            continue
        name, slot = path.parent.parent.name, int(path.parent.name)
        # Windows that ended within the time, whole: an older one would bring in what is over.
        windows = [window for window in read_store(path, since_unix_ns=since)[0] if window.start_unix_ns <= now_unix_ns]
        found = read_slot(windows)
        if found:
            services.setdefault(name, {})[slot] = found
        else:
            quiet.append((name, slot))
    for name, slots in sorted(services.items()):
        for key in sorted({key for classes in slots.values() for key in classes}, key=lambda key: tuple(part or "" for part in key)):
            whole = _Class()
            mine = {slot: classes[key] for slot, classes in sorted(slots.items()) if key in classes}
            for held in mine.values():
                whole.add(held)
            rows += _rows(name, None, key, whole)
            if len(mine) > 1:
                for slot, held in mine.items():
                    rows += _rows(name, slot, key, held)
    return Overview(tuple(rows), tuple(quiet))
