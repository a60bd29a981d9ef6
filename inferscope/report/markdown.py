"""An incident as Markdown, for a ticket or a pull request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from inferscope.report import words

if TYPE_CHECKING:
    from collections.abc import Iterable

    from inferscope.types import Finding, Incident

__all__ = ["render"]

_SMALL: Final = 0.005
_SYMBOL: Final = {"high": "🔴", "medium": "🟠", "low": "🔵", "info": "⚪"}


def render(incident: Incident) -> str:
    """Write an incident as Markdown that ends in a newline.

    Args:
        incident: A diagnosis.
    """
    return "\n".join(_lines(incident)) + "\n"


def _lines(incident: Incident) -> Iterable[str]:
    latency = incident.latency_ms
    yield f"## {'✅' if words.held(incident) else '❌'} {_text(words.objective(incident))}"
    yield ""
    yield _text(incident.verdict)
    yield ""
    yield "| P50 | P95 | P99 | P99.9 | jitter |"
    yield "|---:|---:|---:|---:|---:|"
    values = (latency.p50, latency.p95, latency.p99, latency.p999, incident.jitter_ms)
    yield "| " + " | ".join(words.milliseconds(value) for value in values) + " |"
    yield ""
    yield _text(words.load_line(incident))
    yield ""
    yield from _attribution(incident)
    if (said := words.misled(incident)) is not None:
        yield from ("", _text(said))
    if incident.what_if:
        yield from (
            "",
            "### P99 if a cause cost every request no more than its median (estimate)",
            "",
            "| fixed | P99 | objective |",
            "|---|---:|---|",
        )
        for entry in incident.what_if:
            yield f"| {_text(' + '.join(entry.fix))} | {words.milliseconds(entry.p99_ms)} | {'✅ meets' if entry.meets_objective else '❌ broken'} |"
    if incident.stages:
        yield from (
            "",
            "### Stages: slow / ordinary request",
            "",
            "| stage | time | CPU | copied | device memory |",
            "|---|---|---|---|---|",
        )
        for row in words.stage_rows(incident):
            yield "| " + " | ".join(map(_text, row)) + " |"
    yield from ("", "### Findings", "")
    if not incident.findings:
        yield "None."
    for finding in incident.findings:
        yield from _finding(finding)
    if incident.captures:
        yield from ("", "### Captures", "", *(f"- {_text(words.capture_line(capture))}" for capture in incident.captures))
    if incident.notes:
        yield from ("", "### Notes", "", *(f"- {_text(note)}" for note in incident.notes))
    yield from ("", f"Incident: `{incident.path}`")


def _attribution(incident: Incident) -> Iterable[str]:
    yield "### Where slow requests lose their time"
    yield ""
    if incident.withheld is not None:
        yield f"❔ {_text(incident.withheld)}."
        return
    yield f"{words.milliseconds(words.excess_ms(incident))} more than an ordinary request:"
    yield ""
    yield "| column | share | slow | ordinary | mean profile |"
    yield "|---|---:|---:|---:|---:|"
    for share in incident.attribution:
        if abs(share.share) >= _SMALL or share.mean_share >= _SMALL:
            numbers = f"{words.number(share.tail_ms)} ms | {words.number(share.body_ms)} ms | {words.percent(share.mean_share)}"
            yield f"| {_text(share.name)} | {words.percent(share.share)} {words.plus_minus(share)} | {numbers} |"


def _finding(finding: Finding) -> Iterable[str]:
    yield f"- {_SYMBOL.get(finding.severity, '')} **{finding.id}** ({finding.class_}, {finding.severity}, confidence {finding.confidence}) at `{finding.where}`"
    yield f"  {_text(finding.claim)}"
    for evidence in finding.evidence:
        yield f"  - {_text(words.evidence_line(evidence))}"
    if finding.what_if_p99_ms is not None:
        yield f"  - P99 without it: about {words.milliseconds(finding.what_if_p99_ms)}"
    yield f"  - Fix: {_text(finding.fix)}"
    yield f"  - Refuted if: {_text(finding.refute_by)}"
    yield f"  - Back out: {_text(finding.rollback)}"


def _text(value: str) -> str:
    """Names come from the application: keep them from being read as markup."""
    for character in "\\`*_<>|[]":
        value = value.replace(character, "\\" + character)
    return value.replace("\n", " ")
