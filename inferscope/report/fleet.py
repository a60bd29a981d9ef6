"""A fleet's numbers as text and as JSON types."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from inferscope.report import words

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from inferscope.export.fleet import Comparison, FleetRow, Tail

__all__ = ["comparison_json", "comparison_text", "rows_json", "rows_text"]


_DIFFERENT: Final = 0.05
"""Relative difference of items a request from which versions are said to get different sizes."""


def _name(quantile: float) -> str:
    return f"P{100 * quantile:g}"


def rows_text(rows: Sequence[FleetRow], notes: Sequence[str], origin: str) -> str:
    """Each request of each service, with its objectives and its tail."""
    lines: list[str] = []
    for row in rows:
        lines += [*_row(row), ""]
    return "\n".join([*lines, *(f"Note: {each}" for each in notes), f"From {origin}. Percentiles are of buckets; counts are exact."])


def _row(row: FleetRow) -> Iterator[str]:
    replicas = f"{row.replicas} {'replica' if row.replicas == 1 else 'replicas'}"
    yield f"{row.service}: {row.request}, {words.count(row.requests)} requests, {words.count(row.errors)} errors, {replicas}"
    off = "" if row.bucket_error is None else f"  (± {100 * row.bucket_error:.2g} % at most)"
    yield "  " + " · ".join(f"{_name(each)} {words.milliseconds(value)}" for each, value in row.latency_ms.items()) + off
    for each in row.objectives:
        state = "BROKEN" if each.broken else "HOLDS"
        yield (
            f"  {each.name}: {_name(each.quantile)} at most {each.threshold_ms:g} ms: {state}, "
            f"{words.count(each.violations)} above it ({100 * each.share:.3g} %)"
        )
    yield from _tail(row.tail)


def _tail(tail: Tail) -> Iterator[str]:
    if tail.withheld is not None:
        yield f"  Tail: {tail.withheld}."
        return
    yield f"  Tail: {words.count(tail.requests)} requests, mean {words.milliseconds(tail.tail_ms)} beside {words.milliseconds(tail.body_ms)} (P40-P60)"
    for each in tail.shares:
        if abs(each.share) >= 0.005:
            yield f"    {words.percent(each.share):>6}  {each.name}  ({words.milliseconds(each.tail_ms)} beside {words.milliseconds(each.body_ms)})"


def rows_json(rows: Sequence[FleetRow]) -> list[dict[str, Any]]:
    """The same as JSON types; unknown values are None."""
    return [
        {
            "service": row.service,
            "request": row.request,
            "replicas": row.replicas,
            "requests": row.requests,
            "errors": row.errors,
            "latency_ms": {_name(each).lower().replace(".", ""): value for each, value in row.latency_ms.items()},
            "bucket_error": row.bucket_error,
            "objectives": [
                {
                    "name": each.name,
                    "quantile": each.quantile,
                    "threshold_ms": each.threshold_ms,
                    "violations": each.violations,
                    "share": each.share,
                    "broken": each.broken,
                }
                for each in row.objectives
            ],
            "attribution": [
                {"name": each.name, "share": each.share, "tail_ms": each.tail_ms, "body_ms": each.body_ms} for each in row.tail.shares
            ],
            "withheld": row.tail.withheld,
        }
        for row in rows
    ]


def comparison_text(found: Sequence[Comparison], values: tuple[str, str], notes: Sequence[str], origin: str) -> str:
    """Two versions beside each other."""
    lines: list[str] = []
    for each in found:
        sizes = "" if each.sizes is None else f", {each.sizes} sizes"
        lines.append(
            f"{each.service}: {each.request}, {words.count(each.requests[0])} requests of {values[0]}, "
            f"{words.count(each.requests[1])} of {values[1]}, {each.classes} classes{sizes} in both"
        )
        for quantile, (first, second) in each.adjusted_ms.items():
            raw, around = each.raw_ms[quantile], each.change[quantile]
            interval = "" if around is None else f"[{100 * around[0]:+.1f}, {100 * around[1]:+.1f}]"
            lines.append(
                f"  {_name(quantile):<6} {words.milliseconds(first):>10} -> {words.milliseconds(second):>10}  {_change(first, second):>8}"
                f" {interval:<16} as served: {words.milliseconds(raw[0])} -> {words.milliseconds(raw[1])}  {_change(*raw)}"
            )
        lines += [f"  above {name}: {100 * a:.3g} % -> {100 * b:.3g} %" for name, (a, b) in each.shares.items()]
        lines += _apart(each)
    about = (
        "Same interval, every class and size weighted by its part in both versions together; in brackets 95 % of redrawn counts and sizes."
    )
    return "\n".join([*lines, *(f"Note: {each}" for each in notes), about, f"From {origin}."])


def _apart(each: Comparison) -> Iterator[str]:
    """What the adjustment could not tell apart, or had to leave out."""
    first, second = each.items
    if each.sizes is None:
        yield "  sizes are not told apart: request(size=…) with configure(export_bands=True) in both versions, or request(cls=…), does that"
        if first and second and abs(second / first - 1) > _DIFFERENT:
            yield f"  items a request {first:.3g} -> {second:.3g}: sizes differ"
    if any(each.left_out):
        yield f"  left out, served by one version only: {each.left_out[0]} and {each.left_out[1]} requests"
    if any(each.size_left_out):
        yield f"  left out, of sizes that one version only had: about {each.size_left_out[0]} and {each.size_left_out[1]} requests"
    yield ""


def _change(first: float | None, second: float | None) -> str:
    return "n/a" if first is None or second is None or first <= 0 else f"{100 * (second / first - 1):+.1f} %"


def comparison_json(found: Sequence[Comparison]) -> list[dict[str, Any]]:
    """The same as JSON types."""
    return [
        {
            "service": each.service,
            "request": each.request,
            "requests": list(each.requests),
            "classes": each.classes,
            "items": list(each.items),
            "left_out": list(each.left_out),
            "raw_ms": {_name(q): list(pair) for q, pair in each.raw_ms.items()},
            "adjusted_ms": {_name(q): list(pair) for q, pair in each.adjusted_ms.items()},
            "change": {_name(q): None if pair is None else list(pair) for q, pair in each.change.items()},
            "shares": {name: list(pair) for name, pair in each.shares.items()},
            "sizes": each.sizes,
            "size_left_out": list(each.size_left_out),
        }
        for each in found
    ]
