"""An incident for a terminal: the same characters with and without colour."""

from __future__ import annotations

import io
import textwrap
from typing import TYPE_CHECKING, Final

from inferscope.report import words

if TYPE_CHECKING:
    from collections.abc import Iterable

    from inferscope.types import Finding, Incident, Share

__all__ = ["finding_lines", "render"]

_WIDTH: Final = 100
_BAR: Final = 24
_SHORTEST_BAR: Final = 4
_NUMBERS: Final = 54
"""Columns that the attribution takes beside names and bars."""
_FEWEST: Final = 40
_SMALL: Final = 0.005
"""Columns that round to 0 % in tail and mean are left out."""

_Line = list[tuple[str, str]]
_SEVERITY: Final = {"high": "bold red", "medium": "yellow", "low": "cyan", "info": "green"}


def render(incident: Incident, *, width: int | None = None, color: bool = False) -> str:
    """Write an incident as text that ends in a newline.

    Args:
        incident: A diagnosis.
        width: Columns of the terminal; default 100, at least 40.
        color: Add ANSI colours (needs rich); the characters stay the same.
    """
    columns = max(width or _WIDTH, _FEWEST)
    lines = [line for block in _blocks(incident, columns) for line in block]
    if color:
        return _colored(lines)
    return "".join("".join(text for text, _ in line).rstrip() + "\n" for line in lines)


def _blocks(incident: Incident, width: int) -> Iterable[list[_Line]]:
    yield _head(incident, width)
    yield _attribution(incident, width)
    if (said := words.misled(incident)) is not None:
        yield _wrapped(said, width, "  ")
    if incident.what_if:
        yield _what_if(incident)
    if incident.stages:
        yield _stages(incident)
    yield [[], [("Findings", "bold")], *([] if incident.findings else [[("  none", "")]])]
    for position, finding in enumerate(incident.findings, 1):
        yield _finding(position, finding, width)
    if incident.captures:
        yield [
            [],
            [("Captures", "bold")],
            *(line for summary in words.captures_lines(incident.captures) for line in _wrapped(summary, width, "  ")),
        ]
    if incident.notes:
        yield [[], [("Notes", "bold")], *(line for note in incident.notes for line in _wrapped(note, width, "  "))]
    yield [[], [("Incident: ", "bold"), (incident.path, "")]]


def _wrapped(text: str, width: int, indent: str, style: str = "") -> list[_Line]:
    return [[(line, style)] for line in textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)]


def _head(incident: Incident, width: int) -> list[_Line]:
    latency = incident.latency_ms
    numbers = (("P50", latency.p50), ("P95", latency.p95), ("P99", latency.p99), ("P99.9", latency.p999), ("jitter", incident.jitter_ms))
    return [
        [(words.objective(incident), "bold green" if words.held(incident) else "bold red"), (f"   {incident.id}  {incident.state}", "dim")],
        *_wrapped(incident.verdict, width, ""),
        [],
        [("   ".join(f"{name} {words.milliseconds(value)}" for name, value in numbers), "")],
        *_wrapped(words.load_line(incident), width, ""),
    ]


def _attribution(incident: Incident, width: int) -> list[_Line]:
    if incident.withheld is not None:
        return [
            [],
            [("Where slow requests lose their time", "bold")],
            *_wrapped(incident.withheld[0].upper() + incident.withheld[1:] + ".", width, "  "),
        ]
    shown = [share for share in incident.attribution if abs(share.share) >= _SMALL or share.mean_share >= _SMALL]
    names = max((len(share.name) for share in shown), default=0)
    title = f"Where slow requests lose their time: {words.milliseconds(words.excess_ms(incident))} more than an ordinary request"
    bar = min(max(width - names - _NUMBERS, _SHORTEST_BAR), _BAR)
    head = f"  {'':{names}}  {'share of it':{bar}}  {'':14}{'slow':>10}{'ordinary':>10}{'mean profile':>14}"
    return [[], [(title, "bold")], [(head, "dim")], *(_bar(share, names, bar) for share in shown)]


def _bar(share: Share, names: int, bar: int) -> _Line:
    length = min(max(round(bar * share.share), 0), bar)
    numbers = f"{words.number(share.tail_ms):>7} ms{words.number(share.body_ms):>7} ms{words.percent(share.mean_share):>14}"
    return [
        (f"  {share.name:{names}}  ", ""),
        ("█" * length, "red"),
        ("·" * (bar - length), "dim"),
        (f"  {words.percent(share.share):>6} {words.plus_minus(share):<7}", "bold"),
        (numbers, ""),
    ]


def _what_if(incident: Incident) -> list[_Line]:
    rows = [words.what_if_line(entry) for entry in incident.what_if]
    names = max(len(name) for name, _ in rows)
    title = "P99 if a cause cost every request no more than its median (estimate)"
    return [[], [(title, "bold")], *([(f"  {name:{names}}  ", ""), (value, "green" if "meets" in value else "")] for name, value in rows)]


def _stages(incident: Incident) -> list[_Line]:
    rows = [("", "time", "CPU", "copied", "device memory"), *words.stage_rows(incident)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines: list[_Line] = [[], [("Stages beside time: slow / ordinary request", "bold")]]
    for position, row in enumerate(rows):
        cells = [f"{cell:{size}}" for cell, size in zip(row, widths, strict=True)]
        lines.append([(f"  {'  '.join(cells)}", "" if position else "dim")])
    return lines


def finding_lines(position: int, finding: Finding, width: int = _WIDTH) -> list[str]:
    """One finding as lines of text, as `render` writes it."""
    return ["".join(part for part, _ in line).rstrip() for line in _finding(position, finding, width)]


def _finding(position: int, finding: Finding, width: int) -> list[_Line]:
    lines: list[_Line] = [
        [
            (f"  {position} ", "bold"),
            (finding.severity.upper(), _SEVERITY.get(finding.severity, "")),
            (f"  {finding.id}", "bold"),
            (f"  {finding.class_}, confidence {finding.confidence}, {finding.where}", "dim"),
        ],
        *_wrapped(finding.claim, width, "    "),
    ]
    for evidence in finding.evidence:
        lines += _wrapped(f"- {words.evidence_line(evidence)}", width, "      ")
    if finding.what_if_p99_ms is not None:
        lines.append([(f"    P99 without it: about {words.milliseconds(finding.what_if_p99_ms)}", "")])
    for name, said in (("Fix", finding.fix), ("Refuted if", finding.refute_by), ("Back out", finding.rollback)):
        lines += _wrapped(f"{name}: {said}", width, "    ")
    return lines


def _colored(lines: list[_Line]) -> str:
    from rich.console import Console
    from rich.text import Text

    file = io.StringIO()
    console = Console(
        file=file, force_terminal=True, color_system="standard", highlight=False, soft_wrap=True, legacy_windows=False, width=1000
    )
    for line in lines:
        console.print(Text.assemble(*line))
    return file.getvalue()
