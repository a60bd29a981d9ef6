"""Running totals to OTLP metrics: which series leave, and their protobuf.

`ExportBatch` -> `SeriesBuilder.build` -> tuple of `Series` -> `DeltaTracker.delta` (only for delta temporality) -> `encode`.
Everything works in slices with a yield between them, because a background thread that holds the interpreter for long is seen in the
very percentiles that it exports.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from inferscope import semconv
from inferscope.export.otlp.buckets import SCALES, combine, explicit, exponential, objective_bounds
from inferscope.export.otlp.series import CUMULATIVE, Series, Slices, Total

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from inferscope.export.otlp.series import Attributes, Exemplar, Scalar
    from inferscope.types import ClassKey, Distribution


__all__ = ["DeltaTracker", "ExportBatch", "SeriesBuilder", "class_attributes", "encode"]

FOLD_NS: Final = 300 * 1_000_000_000
"""Delta windows that failed are folded into the next for at most this long."""

_OWN_CAP: Final = frozenset({semconv.BAND_TIME, semconv.BAND_REQUESTS, semconv.BAND_SIZES, semconv.BAND_SIZES_SQUARED})
"""Asked for on purpose and bounded where they are made (`bands.SERIES_LIMIT`)."""
_OVERFLOW: Final[Attributes] = ((semconv.ATTR_OVERFLOW, True),)


@dataclass(frozen=True, slots=True)
class ExportBatch:
    """Everything that one export says; all numbers are running totals since `start_unix_ns`."""

    distributions: tuple[Distribution, ...]
    totals: tuple[Total, ...]
    start_unix_ns: int
    """Stable for as long as the totals run: it changes when a forked child starts from zero."""
    now_unix_ns: int
    resource: Mapping[str, Scalar]


def class_attributes(key: ClassKey) -> Attributes:
    """Attributes of a request class; absent model and class are left out."""
    pairs = ((semconv.ATTR_REQUEST, key.request), (semconv.ATTR_MODEL, key.model), (semconv.ATTR_CLASS, key.cls))
    return tuple((name, value) for name, value in pairs if value)


def _request(labels: tuple[str, ...]) -> Attributes:
    names = (semconv.ATTR_REQUEST, semconv.ATTR_MODEL, semconv.ATTR_CLASS)
    return tuple((name, value) for name, value in zip(names, labels, strict=False) if value)


def _stage(labels: tuple[str, ...]) -> Attributes:
    return ((semconv.ATTR_STAGE, labels[0]), (semconv.ATTR_CLOCK, labels[1] if len(labels) > 1 else "host"))


def _device_stage(labels: tuple[str, ...]) -> Attributes:
    return ((semconv.ATTR_STAGE, labels[0]), (semconv.ATTR_CLOCK, "device"))


def _copy(labels: tuple[str, ...]) -> Attributes:
    attributes: list[tuple[str, Scalar]] = [(semconv.ATTR_COPY_DIRECTION, labels[0])]
    if {"sync", "async"} & set(labels[1:]):
        attributes.append((semconv.ATTR_COPY_SYNC, "sync" in labels[1:]))
    if {"pinned", "pageable"} & set(labels[1:]):
        attributes.append((semconv.ATTR_COPY_PINNED, "pinned" in labels[1:]))
    return tuple(attributes)


def _generation(labels: tuple[str, ...]) -> Attributes:
    digits = "".join(filter(str.isdecimal, labels[0]))  # "2", "gen2"
    return ((semconv.ATTR_GC_GENERATION, int(digits) if digits else labels[0]),)


def _named(attribute: str) -> Callable[[tuple[str, ...]], Attributes]:
    return lambda labels: ((attribute, labels[0]),)


_KINDS: Final[dict[str, tuple[str, Callable[[tuple[str, ...]], Attributes]]]] = {
    "request": (semconv.REQUEST_DURATION, _request),
    "stage": (semconv.STAGE_DURATION, _stage),
    "device": (semconv.STAGE_DURATION, _device_stage),
    "lock.wait": (semconv.LOCK_WAIT_DURATION, _named(semconv.ATTR_LOCK)),
    "lock.hold": (semconv.LOCK_HOLD_DURATION, _named(semconv.ATTR_LOCK)),
    "copy": (semconv.COPY_DURATION, _copy),
    "queue": (semconv.QUEUE_DURATION, _named(semconv.ATTR_QUEUE)),
    "first_byte": (semconv.FIRST_BYTE, _named(semconv.ATTR_REQUEST)),
    "gc": (semconv.GC_PAUSE, _generation),
    "device.queue": (semconv.DEVICE_QUEUE_DURATION, _named(semconv.ATTR_STAGE)),
}


def _identity(distribution: Distribution) -> tuple[str, Attributes]:
    name, attributes = _KINDS.get(distribution.kind, (f"inferscope.{distribution.kind}.duration", _named("inferscope.name")))
    return name, attributes(distribution.labels) if distribution.labels else ()


class SeriesBuilder:
    """Chooses the series that leave and maps their counts.

    Args:
        scale: Exponential scale, 3 to 8, the same for every series and process.
        limit: Series of one process; what comes later is added up in one overflow series a metric (`otel.metric.overflow`). A fifth of the
            limit is kept for requests and exact counters, so that many stages cannot push those out.
        bounds: None for exponential histograms; a mapping from request name to objective in ns switches to explicit buckets.

    Raises:
        ValueError: The scale is out of range.
    """

    def __init__(self, scale: int = 5, limit: int = 100, bounds: Mapping[str, int] | None = None) -> None:
        if scale not in SCALES:
            raise ValueError(f"scale={scale!r}: expected an integer from {SCALES.start} to {SCALES.stop - 1}")
        self._scale = scale
        self._limit = limit
        self._bounds = bounds
        self._fallback = objective_bounds(min(bounds.values()) if bounds else None)
        self._admitted: set[tuple[str, Attributes]] = set()
        self._refused: set[tuple[str, Attributes]] = set()
        self._exemplars: Mapping[tuple[str, ...], tuple[Exemplar, ...]] = {}

    @property
    def overflowed(self) -> int:
        """Distinct series that were folded into overflow series so far."""
        return len(self._refused)

    def build(
        self, batch: ExportBatch, slices: Slices | None = None, exemplars: Mapping[tuple[str, ...], tuple[Exemplar, ...]] | None = None
    ) -> tuple[Series, ...]:
        """The series of a batch, requests and exact numbers first; empty distributions are left out.

        Args:
            batch: Running totals.
            slices: Where to yield.
            exemplars: By the labels of the requests' distributions.
        """
        self._exemplars = exemplars or {}
        slices = slices or Slices()
        result: list[Series] = []
        overflow: dict[str, Series] = {}
        ordered = sorted(batch.distributions, key=lambda item: item.kind != "request")
        requests = sum(item.kind == "request" for item in ordered)
        for item in ordered[:requests]:
            self._histogram(item, batch, result, overflow)
            slices.step()
        for total in batch.totals:
            admitted = self._admit(total.name, total.attributes, first_class=True)
            point = Series(total.name, total.attributes, batch.start_unix_ns, batch.now_unix_ns, None, total.value, total.monotonic)
            self._place(point, result if admitted else None, overflow)
            slices.step()
        for item in ordered[requests:]:
            self._histogram(item, batch, result, overflow)
            slices.step()
        return (*result, *overflow.values())

    def _histogram(self, item: Distribution, batch: ExportBatch, result: list[Series], overflow: dict[str, Series]) -> None:
        if not item.count:
            return
        name, attributes = _identity(item)
        admitted = self._admit(name, attributes, first_class=item.kind == "request")
        if self._bounds is None:
            buckets = exponential(item, self._scale)
        else:
            # What goes into one overflow series must have one set of bounds.
            objective = self._bounds.get(item.labels[0]) if admitted and item.kind == "request" and item.labels else None
            buckets = explicit(item, objective_bounds(objective) if objective else self._fallback)
        if buckets.count:
            shown = self._exemplars.get(item.labels, ()) if admitted and item.kind == "request" else ()
            point = Series(name, attributes, batch.start_unix_ns, batch.now_unix_ns, buckets, exemplars=shown)
            self._place(point, result if admitted else None, overflow)

    @staticmethod
    def _place(series: Series, result: list[Series] | None, overflow: dict[str, Series]) -> None:
        if result is not None:
            result.append(series)
            return
        if series.buckets is None and not series.monotonic:
            return  # gauges do not add up
        held = overflow.get(series.name)
        if held is None:
            overflow[series.name] = replace(series, attributes=_OVERFLOW)
        elif series.buckets is None or held.buckets is None:
            overflow[series.name] = replace(held, value=held.value + series.value)
        else:
            overflow[series.name] = replace(held, buckets=combine(held.buckets, series.buckets))

    def _admit(self, name: str, attributes: Attributes, *, first_class: bool) -> bool:
        """Sticky, so that a series never moves in or out of the overflow and cumulative numbers stay monotone."""
        key = (name, attributes)
        if key in self._admitted or name in _OWN_CAP:
            return True
        if key in self._refused:
            return False
        room = self._limit if first_class else self._limit - self._limit // 5
        if name.startswith("inferscope.self.") or len(self._admitted) < room:
            self._admitted.add(key)
            return True
        self._refused.add(key)
        return False


class DeltaTracker:
    """Differences to what the receiver last acknowledged.

    The baseline moves only on success, so that a window that failed is part of the next one. After `FOLD_NS` without success the
    baseline moves anyway and `dropped` counts the windows that were lost.
    """

    def __init__(self, fold_ns: int = FOLD_NS) -> None:
        self._fold_ns = fold_ns
        self._base: dict[tuple[str, Attributes], Series] = {}
        self._unacknowledged = 0
        self._failing_since: int | None = None
        self.dropped = 0

    def delta(self, series: Iterable[Series], slices: Slices | None = None) -> tuple[Series, ...]:
        """The differences; series without news are left out, gauges pass."""
        slices = slices or Slices()
        result: list[Series] = []
        for item in series:
            found = self._one(item)
            if found is not None:
                result.append(found)
            slices.step()
        return tuple(result)

    def _one(self, item: Series) -> Series | None:
        if item.buckets is None and not item.monotonic:
            return item
        base = self._base.get(item.key)
        if base is None or base.start_unix_ns != item.start_unix_ns:
            return item
        start = base.now_unix_ns
        if item.buckets is None or base.buckets is None:
            gained = item.value - base.value
            return replace(item, value=gained, start_unix_ns=start) if gained > 0 else None
        if item.buckets.count <= base.buckets.count:
            return None
        return replace(item, buckets=combine(item.buckets, base.buckets, -1), start_unix_ns=start)

    def acknowledge(self, series: Iterable[Series], slices: Slices | None = None) -> None:
        """The receiver has these running totals: they are the new baseline."""
        slices = slices or Slices()
        for item in series:  # not in one go: hashing the names and attributes of 500 series takes 0.5 ms
            self._base[item.key] = item
            slices.step()
        self._unacknowledged = 0
        self._failing_since = None

    def failed(self, series: tuple[Series, ...], slices: Slices | None = None) -> None:
        """The window did not arrive: keep it for the next one, or give it up when it is too old."""
        now = max((item.now_unix_ns for item in series), default=0)
        if self._failing_since is None:
            self._failing_since = now
        self._unacknowledged += 1
        if now - self._failing_since > self._fold_ns:
            self.dropped += self._unacknowledged
            self.acknowledge(series, slices)


def encode(
    series: Iterable[Series],
    resource: Mapping[str, Scalar],
    temporality: int = CUMULATIVE,
    slices: Slices | None = None,
    cache: dict[tuple[str, Attributes], bytes] | None = None,
) -> bytes:
    """Serialize an ExportMetricsServiceRequest.

    Points are serialized one by one and put together by protobuf's own rule that concatenated encodings of a message merge: no step
    holds the interpreter for longer than one point takes.

    Args:
        series: What to send.
        resource: Resource attributes.
        temporality: `CUMULATIVE` or `DELTA`.
        slices: Where to yield.
        cache: Kept by the caller between exports: serialized attributes by series.
    """
    from inferscope.export.otlp import protobuf

    slices = slices or Slices()
    cache = {} if cache is None else cache
    points: dict[tuple[str, str], list[bytes]] = {}
    for item in series:
        shape, body = protobuf.point(item)
        attributes = cache.get(item.key)
        if attributes is None:
            attributes = cache[item.key] = protobuf.point_attributes(item)
        points.setdefault((item.name, shape), []).extend(protobuf.framed(shape, attributes, body))
        slices.step()
    metrics: list[bytes] = []
    for (name, shape), bodies in points.items():
        metrics += protobuf.metric(name, semconv.UNITS.get(name, "s"), shape, bodies, temporality)
        slices.step()
    request = b"".join(protobuf.request(metrics, resource))
    slices.rest()
    return request
