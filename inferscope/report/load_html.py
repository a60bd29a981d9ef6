"""A measured load as one HTML file: tables and curves, no script, nothing loaded from elsewhere."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any, Final

from inferscope.report.chart import STYLE, Line, chart

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["Page", "render"]

_STYLE: Final = """
:root { color-scheme: light dark; --line: #8884; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.3rem; } h2 { font-size: 1.05rem; margin-top: 2rem; } .broken { color: #c0392b; } .holds { color: #1e8449; }
table { border-collapse: collapse; width: 100%; } th, td { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid var(--line); }
code { font-family: ui-monospace, monospace; word-break: break-all; } footer { margin-top: 2rem; color: #7f8c8d; font-size: .85rem; }
@media print { body { max-width: none; margin: 0; } figure { break-inside: avoid; } }
"""
_STEPS: Final = ((0.5, "50 %"), (0.9, "90 %"), (0.99, "99 %"), (0.999, "99.9 %"), (0.9999, "99.99 %"))


@dataclass(frozen=True, slots=True)
class Page:
    """What a page on a load shows."""

    title: str
    state: str
    """One line: whether it may be believed and what held."""
    good: bool
    head: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    """Of the table."""
    remarks: Sequence[str]
    quantiles: Sequence[tuple[float, float]] = ()
    """(share of requests, ms), ascending."""
    seconds: Sequence[tuple[float, float | None, float | None, float]] = ()
    """(s from the start, P50 ms, P99 ms, requests answered well in this second)."""
    curves: Sequence[tuple[str, Sequence[Mapping[str, Any]]]] = ()
    """Resources: of what, and its samples as `bench.resources` thins them."""
    rungs: Sequence[tuple[float, float | None, float | None]] = ()
    """(load, throughput/s, P99 ms) of a ladder."""
    rung_unit: str = ""
    stages: Sequence[Sequence[str]] = ()
    details: Mapping[str, str] = field(default_factory=dict[str, str])
    """Name and value, such as the fingerprint's parts."""


def render(page: Page) -> str:
    """Write the page.

    Args:
        page: what it shows.
    """
    return "".join(_parts(page))


def _parts(page: Page) -> Iterable[str]:
    title = escape(page.title)
    yield '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta name="viewport" content="width=device-width">\n'
    yield f"<title>{title}</title>\n<style>{_STYLE}{STYLE}</style>\n</head>\n<body>\n"
    yield f'<h1>{title}</h1>\n<p class="{"holds" if page.good else "broken"}">{escape(page.state)}</p>\n'
    yield _table(page.head, page.rows)
    yield from _curves(page)
    if page.stages:
        yield "<h2>Inside</h2>\n" + _table(("stage", "times", "P50 or mean", "P99"), page.stages)
    yield f"<h2>Remarks</h2>\n<ul>{''.join(f'<li>{escape(line)}</li>' for line in page.remarks)}</ul>\n"
    if page.details:
        yield "<details><summary>Conditions</summary>" + _table(("", ""), list(page.details.items())) + "</details>\n"
    yield "<footer>inferscope bench</footer>\n</body>\n</html>\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    first = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>\n" for row in rows)
    return f"<table><tr>{first}</tr>\n{body}</table>\n"


def _curves(page: Page) -> Iterable[str]:
    if page.quantiles:
        points = [(_tail(share), value) for share, value in page.quantiles]
        yield chart("Latency by share of requests", "ms", [Line("latency", points)], [(_tail(share), label) for share, label in _STEPS])
    if page.seconds:
        times = [row[0] for row in page.seconds]
        lines = [Line("P50", [(row[0], row[1]) for row in page.seconds]), Line("P99", [(row[0], row[2]) for row in page.seconds])]
        yield chart("Latency by second", "ms", lines, _times(times))
        yield chart("Answered well", "requests/s", [Line("throughput", [(row[0], row[3]) for row in page.seconds])], _times(times))
    if page.rungs:
        ticks = [(math.log2(load), f"{load:g}") for load, _, _ in page.rungs]
        rate = Line("throughput", [(math.log2(load), value) for load, value, _ in page.rungs])
        tail = Line("P99", [(math.log2(load), value) for load, _, value in page.rungs])
        yield chart(f"Throughput by {page.rung_unit}", "requests/s", [rate], ticks)
        yield chart(f"P99 by {page.rung_unit}", "ms", [tail], ticks)
    for name, rows in page.curves:
        yield from _resources(name, rows)


def _resources(name: str, rows: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    times = [float(row["at_s"]) for row in rows]
    wanted = (
        ("CPU", "cores", 1.0, (("service", "cpu_cores"), ("machine", "host_cpu_cores"))),
        ("Memory", "MB", 1e-6, (("service", "resident_bytes"), ("device", "device_bytes"))),
        ("Device utilisation", "%", 100.0, (("busiest card", "device_utilization"),)),
    )
    for title, unit, scale, keys in wanted:
        lines = [Line(label, [(float(row["at_s"]), _scaled(row.get(key), scale)) for row in rows]) for label, key in keys]
        shown = [line for line in lines if any(y is not None for _, y in line.points)]
        yield chart(f"{title}{name and ', '}{name}", unit, shown, _times(times))


def _scaled(value: float | None, scale: float) -> float | None:
    return None if value is None else value * scale


def _tail(share: float) -> float:
    """The axis of a tail: each 9 as wide as the one before."""
    return -math.log10(max(1.0 - share, 1e-7))


def _times(times: Sequence[float]) -> list[tuple[float, str]]:
    if not times:
        return []
    step = (times[-1] - times[0]) / 4 or 1.0
    return [(times[0] + number * step, f"{times[0] + number * step:.3g} s") for number in range(5)]
