"""What `bench` writes of a run beside its numbers: a page, a time line, percentile tables."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from inferscope.bench import text
from inferscope.bench.closed_loop import corrected
from inferscope.bench.stats import observed
from inferscope.report import hgrm, load_html, load_trace

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from inferscope.bench.result import LoadResult
    from inferscope.types import FloatArray

__all__ = ["write"]

_SLOWEST: Final = 2000
_OTHERS: Final = 2000
"""So many requests lie on a time line, or it gets too large to open."""
_POINTS: Final = 400
_LEAST: Final = 20
"""A second with fewer requests has no P99 to draw."""


def write(options: argparse.Namespace, found: dict[str, Any], result: LoadResult, inside: list[dict[str, Any]]) -> None:
    """Write what was asked for.

    Args:
        options: of `bench`.
        found: the run as data.
        result: its requests.
        inside: trace events from inside the target.
    """
    skip = int(found["warmup"]["cut"])
    if options.hgrm:
        latency = _latency_ms(result, skip)
        text.put("--hgrm", options.hgrm, _hgrm(latency))
        if result.plan.mode == "closed" and options.hgrm != "-" and latency.size:
            fixed = corrected(latency, float(np.median(latency)))
            text.put("--hgrm", str(Path(options.hgrm).with_suffix(".corrected.hgrm")), _hgrm(fixed))
    if options.html:
        text.put("--html", options.html, load_html.render(_page(options, found, result, skip)))
    if options.perfetto:
        text.put("--perfetto", options.perfetto, _trace(found, result, inside))


def _latency_ms(result: LoadResult, skip: int) -> FloatArray:
    return np.asarray(((result.done_ns - result.intended_ns)[skip:][result.fine[skip:]]) / 1e6, dtype=np.float64)


def _hgrm(latency_ms: FloatArray) -> str:
    """Latencies to the microsecond."""
    values, counts = np.unique((latency_ms * 1e3).astype(np.int64) * 1000, return_counts=True)
    return hgrm.render([(float(value), float(value), int(count)) for value, count in zip(values, counts, strict=True)])


def _page(options: argparse.Namespace, found: dict[str, Any], result: LoadResult, skip: int) -> load_html.Page:
    problems: list[str] = found["problems"]
    said = "; ".join([f"INVALID: {each}" for each in problems] or ["valid", *(each["text"] for each in found["acceptance"])])
    good = not problems and all(each["word"] == "HOLDS" for each in found["acceptance"])
    golden: dict[str, Any] | None = found.get("golden")
    return load_html.Page(
        text.title(found),
        said,
        good and (golden is None or bool(golden["correct"])),
        ("metric", "value", "interval and remarks"),
        text.run_rows(found, options.report),
        text.remarks(found),
        quantiles=_quantiles(np.sort(_latency_ms(result, skip))),
        seconds=_seconds(result, skip),
        curves=[("", found["curve"])] if found["curve"] else [],
        stages=[_stage(each) for each in found["stages"]],
        details=_details(found),
    )


def _stage(each: Mapping[str, Any]) -> tuple[str, str, str, str]:
    middle = each["p50_ms"] if each.get("mean_ms") is None else each["mean_ms"]
    return str(each["name"]), str(each["count"]), text.milliseconds(middle), text.milliseconds(each["p99_ms"])


def _quantiles(ordered: FloatArray) -> list[tuple[float, float]]:
    """Shares that the sample can tell, closer together where fewer requests are."""
    if not ordered.size:
        return []
    points = min(_POINTS, int(ordered.size))
    nines = [math.log10(ordered.size) * index / max(points - 1, 1) for index in range(points)]
    return [(1.0 - 10.0**-each, observed(ordered, 1.0 - 10.0**-each)) for each in nines]


def _seconds(result: LoadResult, skip: int) -> list[tuple[float, float | None, float | None, float]]:
    """Each second, or each of so many spans when there are more than can be drawn."""
    intended = result.intended_ns[skip:]
    if intended.size == 0:
        return []
    fine, latency = result.fine[skip:], (result.done_ns - result.intended_ns)[skip:] / 1e6
    lasted = (int(intended[-1]) - int(intended[0])) / 1e9
    width = max(1.0, lasted / _POINTS)
    where = ((intended - intended[0]) / (width * 1e9)).astype(np.int64)
    rows: list[tuple[float, float | None, float | None, float]] = []
    for number in range(int(lasted / width)):  # the last span is not a whole one
        values = np.sort(latency[(where == number) & fine])
        p50 = observed(values, 0.5) if values.size else None
        p99 = observed(values, 0.99) if values.size >= _LEAST else None
        rows.append(((number + 0.5) * width, p50, p99, values.size / width))
    return rows


def _details(found: dict[str, Any]) -> dict[str, str]:
    return {name: str(each) for part in ("settings", "source", "fingerprint", "conditions") for name, each in found[part].items()}


def _trace(found: dict[str, Any], result: LoadResult, inside: list[dict[str, Any]]) -> str:
    """The slowest requests and an even choice of the others."""
    never = result.done_ns == 0
    latency = np.where(never, np.iinfo(np.int64).max, result.done_ns - result.intended_ns)
    slowest = np.argsort(latency, kind="stable")[::-1][:_SLOWEST]
    others = np.linspace(0, max(latency.size - 1, 0), min(_OTHERS, latency.size)).astype(np.int64)
    chosen: list[int] = np.union1d(slowest, others).tolist()
    rows: list[load_trace.Request] = [
        (index, int(result.intended_ns[index]), int(result.sent_ns[index]), int(result.done_ns[index]), int(result.status[index]))
        for index in chosen
    ]
    rows.sort(key=lambda row: row[1])
    return load_trace.render(
        rows,
        unix_offset_ns=time.time_ns() - time.perf_counter_ns(),
        name=str(found["settings"]["target"]),
        curve=found["curve"],
        curve_began_ns=found["curve_began_ns"],
        inside=inside,
    )
