"""Exact numbers of request classes and objectives, as the totals that an `ExportBatch` takes.

Pages come from these counters, not from percentiles: requests and violations add over replicas without any error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from inferscope import semconv
from inferscope.clock import NS_PER_S
from inferscope.export.otlp.metrics import class_attributes
from inferscope.export.otlp.series import Total

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from inferscope.aggregate.window import ClassTotals

__all__ = ["Objective", "request_totals"]

_ERROR: Final = (semconv.ERROR_TYPE, "_OTHER")
"""Errors are counted, not told apart: OpenTelemetry's value for that."""


@dataclass(frozen=True, slots=True)
class Objective:
    """What the export needs of an SLO."""

    name: str
    request: str
    threshold_ns: int
    quantile: float
    model: str | None = None
    """None is any."""
    cls: str | None = None
    """None is any."""


def request_totals(classes: Iterable[ClassTotals], objectives: Sequence[Objective] = ()) -> tuple[Total, ...]:
    """Requests, errors, items, profiled requests, violations and targets.

    `inferscope.requests` has successful requests without and failed ones with `error.type`, so that their sum is all requests.
    Violations are left out where the recorder has no edge at the objective's threshold: a number would be wrong.
    """
    found = [total for item in classes for total in _class(item, objectives)]
    for objective in objectives:
        attributes = (
            (semconv.ATTR_SLO, objective.name),
            (semconv.ATTR_REQUEST, objective.request),
            ("inferscope.slo.quantile", objective.quantile),
        )
        found.append(Total(semconv.SLO_TARGET, objective.threshold_ns / NS_PER_S, attributes, monotonic=False))
    return tuple(found)


def _class(item: ClassTotals, objectives: Sequence[Objective]) -> Iterator[Total]:
    attributes = class_attributes(item.key)
    yield Total(semconv.REQUESTS, item.count - item.errors, attributes)
    if item.errors:
        yield Total(semconv.REQUESTS, item.errors, (*attributes, _ERROR))
    yield Total(semconv.ITEMS, item.items, attributes)
    if item.excluded:
        yield Total(semconv.PROFILED, item.excluded, attributes)
    for objective in objectives:
        if objective.request != item.key.request or objective.threshold_ns not in item.edges_ns:
            continue
        if (objective.model or item.key.model) == item.key.model and (objective.cls or item.key.cls) == item.key.cls:
            exceeding = item.violations[item.edges_ns.index(objective.threshold_ns)]
            yield Total(semconv.SLO_VIOLATIONS, exceeding, (*attributes, (semconv.ATTR_SLO, objective.name)))
