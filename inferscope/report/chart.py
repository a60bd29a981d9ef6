"""A few lines over an axis as SVG, for pages that load nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["STYLE", "Line", "chart"]

_WIDTH: Final = 720
_HEIGHT: Final = 180
_LEFT: Final = 64
_BELOW: Final = 22
_COLORS: Final = ("#2e86c1", "#c0392b", "#e67e22", "#1e8449")
STYLE: Final = """
figure { margin: 1.2rem 0; } figcaption { font-size: .9rem; } figure svg { width: 100%; height: auto; display: block; }
figure text { font: 11px system-ui, sans-serif; fill: currentColor; } .axis { stroke: #8888; stroke-width: 1; } .grid { stroke: #8883; }
polyline { fill: none; stroke-width: 1.5; }
"""


@dataclass(frozen=True, slots=True)
class Line:
    """Points of one line, x ascending; a y of None is a gap."""

    name: str
    points: Sequence[tuple[float, float | None]]


def chart(title: str, unit: str, lines: Sequence[Line], ticks: Sequence[tuple[float, str]]) -> str:
    """The lines over one axis from 0; empty when none has a point.

    Args:
        title: what is shown.
        unit: of the values.
        lines: at most four.
        ticks: where the x axis is labelled.
    """
    known = [(x, y) for line in lines for x, y in line.points if y is not None and math.isfinite(y)]
    if not known:
        return ""
    left, right = min(x for x, _ in known), max(x for x, _ in known)
    top = max(y for _, y in known) or 1.0
    return "".join(_parts(title, unit, lines, ticks, (left, max(right - left, 1e-9)), top))


def _parts(
    title: str, unit: str, lines: Sequence[Line], ticks: Sequence[tuple[float, str]], reach: tuple[float, float], top: float
) -> Iterator[str]:
    def across(x: float) -> float:
        return _LEFT + (x - reach[0]) / reach[1] * (_WIDTH - _LEFT - 12)

    def up(y: float) -> float:
        return _HEIGHT - _BELOW - y / top * (_HEIGHT - _BELOW - 10)

    yield f'<figure><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title, quote=True)}">'
    for share in (0.0, 0.5, 1.0):
        y = up(share * top)
        yield f'<line class="{"grid" if share else "axis"}" x1="{_LEFT}" x2="{_WIDTH - 12}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{share * top:.4g}</text>'
    for x, label in ticks:
        if reach[0] <= x <= reach[0] + reach[1]:
            yield f'<text x="{across(x):.1f}" y="{_HEIGHT - 6}" text-anchor="middle">{escape(label)}</text>'
    for number, line in enumerate(lines):
        for run in _runs(line):
            points = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in run)
            yield f'<polyline stroke="{_COLORS[number % len(_COLORS)]}" points="{points}"/>'
    names = " · ".join(
        f'<span style="color:{_COLORS[number % len(_COLORS)]}">{escape(line.name)}</span>' for number, line in enumerate(lines)
    )
    yield f"</svg><figcaption>{escape(title)}, {escape(unit)}: {names}</figcaption></figure>\n"


def _runs(line: Line) -> Iterator[list[tuple[float, float]]]:
    """Stretches without a gap; a lone point is drawn as a short one."""
    run: list[tuple[float, float]] = []
    for x, y in [*line.points, (0.0, None)]:
        if y is not None and math.isfinite(y):
            run.append((x, y))
        elif run:
            yield run if len(run) > 1 else [run[0], run[0]]
            run = []
