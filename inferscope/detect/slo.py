"""Objectives: what a request class promises. How windows are counted against them is in `counting`."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, Final, cast

from inferscope.clock import NS_PER_MS
from inferscope.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from inferscope.types import ClassKey

__all__ = ["EDGE_LIMIT", "OBJECTIVE_LIMIT", "SLO", "check_objectives", "edges_by_request"]

EDGE_LIMIT: Final = 4
"""Exact edges that a request's bands can have."""

OBJECTIVE_LIMIT: Final = 16
"""Objectives of one service."""

_QUANTILES: Final = {"p95_ms": 0.95, "p99_ms": 0.99, "p999_ms": 0.999}
_LONGEST_MS: Final = 60_000.0


@dataclass(frozen=True, slots=True)
class SLO:
    """A latency objective: at most 1 - quantile of the requests take longer than the threshold.

    Args:
        name: The objective's name; also the request it judges, unless `request` says otherwise.
        p99_ms: At most 1 % of requests may take longer, milliseconds. Exactly one of `p99_ms`, `p95_ms` and `p999_ms` is given.
        p95_ms: The same for 5 %.
        p999_ms: The same for 0.1 %.
        window_s: An incident closes when the share over the threshold was below 1 - quantile for this long. 5 to 3600, default 60.
        min_requests: Requests in one tick of the detector, at least: below this many a second, ticks last longer. Default 20; raise it where
            one slow episode hits more requests than this.
        max_error_rate: Also an incident when a larger share of requests fails, between 0 and 1. Default None: errors are not judged.
        min_throughput: Also an incident when fewer items (requests, unless they say `items=`) a second finish while requests wait in queues
            that inferscope sees. Without such a backlog it is not judged: an idle service breaks no promise. Default None.
        jitter_ms: Also an incident when P99 - P50 is above this, milliseconds: more than 1 % of requests above the current P50 plus this.
            Default None.
        max_gpu_mem: Also an incident when the fullest GPU that this process uses is fuller than this: a fraction up to 1, bytes above 1.
            The driver tells (NVML), else torch's own allocator, for bytes only. Default None.
        model: Only requests of this model. Default None: all.
        cls: Only requests of this class. Default None: all.
        size: Only requests whose `size` is at least the first number and below the second, None for no limit: `(0, 512)`, `(512, None)`; as
            text "0-512" or "512-". Estimated, see `counting.SizeFilter`. Default None: all.
        severe: Also an incident, without waiting for ticks to fill, when within ten seconds so many requests take five times the threshold
            that a share of 30 % of them is likelier than the allowed one; in three seconds at least. Default True.
        request: The request that is judged, when several objectives share one. Default None: `name`.
        until: "last_byte" (default): until the request ends, for a stream when its last byte was handed over. "first_byte": until the
            first one was, where an integration tells; without `model`, `cls`, `size` and `jitter_ms`.

    Raises:
        ConfigurationError: A keyword has a value that cannot be used.
    """

    name: str
    _: KW_ONLY
    p99_ms: float | None = None
    p95_ms: float | None = None
    p999_ms: float | None = None
    window_s: float = 60.0
    min_requests: int = 20
    max_error_rate: float | None = None
    min_throughput: float | None = None
    jitter_ms: float | None = None
    max_gpu_mem: float | None = None
    model: str | None = None
    cls: str | None = None
    size: tuple[float | None, float | None] | None = None
    request: str | None = None
    until: str = "last_byte"
    severe: bool = True

    def __post_init__(self) -> None:
        for key in ("name", "model", "cls", "request"):
            _check_text(key, getattr(self, key), optional=key != "name")
        given = {key: getattr(self, key) for key in _QUANTILES if getattr(self, key) is not None}
        if len(given) != 1:
            raise ConfigurationError(
                "slo", given or self.name, "exactly one of p99_ms, p95_ms and p999_ms, such as SLO('score', p99_ms=20)"
            )
        for key, value in given.items():
            _check_number(key, value, 0.001, _LONGEST_MS, f"milliseconds from 0.001 to {_LONGEST_MS:.0f}")
        _check_number("window_s", self.window_s, 5.0, 3600.0, "seconds from 5 to 3600")
        _check_number("min_requests", self.min_requests, 1, 1_000_000, "an integer from 1 to 1000000")
        if self.min_requests != int(self.min_requests):
            raise ConfigurationError("min_requests", self.min_requests, "an integer from 1 to 1000000")
        object.__setattr__(self, "min_requests", int(self.min_requests))  # text gives 100.0
        if self.max_error_rate is not None:
            _check_number("max_error_rate", self.max_error_rate, 0.0, 1.0, "a fraction between 0 and 1, such as 0.001")
            if not 0.0 < self.max_error_rate < 1.0:
                raise ConfigurationError("max_error_rate", self.max_error_rate, "a fraction between 0 and 1, such as 0.001")
        self._check_further()

    def _check_further(self) -> None:
        """What is promised beside a latency, and which requests are meant."""
        if self.min_throughput is not None:
            _check_number("min_throughput", self.min_throughput, 0.01, 1e9, "items a second from 0.01 to 1e9")
        if self.jitter_ms is not None:
            _check_number("jitter_ms", self.jitter_ms, 0.001, _LONGEST_MS, f"milliseconds from 0.001 to {_LONGEST_MS:.0f}")
        if self.max_gpu_mem is not None:
            _check_number("max_gpu_mem", self.max_gpu_mem, 0.01, 1e15, "a fraction up to 1, such as 0.9, or bytes")
        if self.size is not None:
            object.__setattr__(self, "size", _size(self.size))
        if not isinstance(self.severe, (bool, int, float)) or self.severe not in (0, 1):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError("severe", self.severe, "true or false, in text 1 or 0")
        object.__setattr__(self, "severe", bool(self.severe))  # text gives 0.0
        if self.until not in {"last_byte", "first_byte"}:
            raise ConfigurationError("until", self.until, "'last_byte' or 'first_byte'")
        if self.until == "first_byte":
            for key in ("model", "cls", "size", "jitter_ms"):
                if getattr(self, key) is not None:
                    raise ConfigurationError(key, getattr(self, key), "not beside until='first_byte', which is measured by request name")

    @property
    def quantile(self) -> float:
        """0.95, 0.99 or 0.999."""
        return next(quantile for key, quantile in _QUANTILES.items() if getattr(self, key) is not None)

    @property
    def threshold_ms(self) -> float:
        """The promised latency, milliseconds."""
        return float(next(value for key in _QUANTILES if (value := getattr(self, key)) is not None))

    @property
    def threshold_ns(self) -> int:
        """The promised latency, nanoseconds."""
        return round(self.threshold_ms * NS_PER_MS)

    @property
    def request_name(self) -> str:
        """The request that is judged."""
        return self.request or self.name

    def judges(self, key: ClassKey) -> bool:
        """Whether a request class counts towards this objective."""
        return key.request == self.request_name and self.model in {None, key.model} and self.cls in {None, key.cls}


def edges_by_request(slos: Iterable[SLO]) -> dict[str, tuple[int, ...]]:
    """Thresholds of every judged request, ascending, ns: what the recorder is given as exact edges."""
    edges: dict[str, set[int]] = {}
    for slo in slos:
        if slo.until == "last_byte":
            edges.setdefault(slo.request_name, set()).add(slo.threshold_ns)
    return {request: tuple(sorted(values)) for request, values in edges.items()}


def check_objectives(slos: Iterable[SLO | Mapping[str, Any]]) -> tuple[SLO, ...]:
    """Objectives as values, checked together.

    Args:
        slos: `SLO` values, or mappings of its keywords from a file or the environment.

    Raises:
        ConfigurationError: A keyword is unknown or its value unusable, a name is used twice, or a request has more than 4 thresholds.
    """
    checked: list[SLO] = []
    for item in slos:
        slo = item if isinstance(item, SLO) else _from_mapping(item)
        if any(slo.name == other.name for other in checked):
            raise ConfigurationError("slo", slo.name, "one name for each objective; give the second its own and say request=...")
        checked.append(slo)
    if len(checked) > OBJECTIVE_LIMIT:
        raise ConfigurationError("slo", len(checked), f"at most {OBJECTIVE_LIMIT} objectives for one service")
    for request, edges in edges_by_request(checked).items():
        if len(edges) > EDGE_LIMIT:
            raise ConfigurationError("slo", request, f"at most {EDGE_LIMIT} different thresholds for one request")
    return tuple(checked)


def _from_mapping(keywords: Mapping[str, Any]) -> SLO:
    known = [name for name in SLO.__dataclass_fields__ if name != "_"]
    for key, value in keywords.items():
        if key not in known:
            raise ConfigurationError(f"slo.{key}", value, f"a keyword of SLO: {', '.join(known)}")
    if "name" not in keywords:
        raise ConfigurationError("slo.name", None, "the name of a request, such as 'score'")
    return SLO(**keywords)


def _check_text(key: str, value: object, *, optional: bool) -> None:
    if value is None and optional:
        return
    if not isinstance(value, str) or not value.strip() or len(value) > 120:
        raise ConfigurationError(key, value, "a name of 1 to 120 characters")


def _check_number(key: str, value: object, low: float, high: float, accepted: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or not low <= value <= high:
        raise ConfigurationError(key, value, accepted)


def _size(value: object) -> tuple[float | None, float | None]:
    accepted = "two numbers, the first below the second, or None: (0, 512), (512, None); as text '0-512' or '512-'"
    wrong = ConfigurationError("size", value, accepted)
    parts: list[object] = []
    if isinstance(value, str):
        low, dash, high = value.partition("-")
        parts = [low.strip() or None, high.strip() or None] if dash else []
    elif isinstance(value, (tuple, list)):
        parts = list(cast("Iterable[object]", value))
    if len(parts) != 2 or any(isinstance(part, bool) or not isinstance(part, (int, float, str, type(None))) for part in parts):
        raise wrong
    try:
        first, second = (None if part is None else float(cast("float", part)) for part in parts)
    except ValueError as error:
        raise wrong from error
    if first is second is None or not all(limit is None or math.isfinite(limit) for limit in (first, second)):
        raise wrong
    if first is not None and second is not None and first >= second:
        raise wrong
    return first, second
