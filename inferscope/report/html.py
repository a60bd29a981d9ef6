"""An incident as one HTML file: no script, nothing loaded from elsewhere, prints well."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Final

from inferscope.report import words

if TYPE_CHECKING:
    from collections.abc import Iterable

    from inferscope.types import Finding, Incident, Share

__all__ = ["render"]

_SMALL: Final = 0.005
_STYLE: Final = """
:root { color-scheme: light dark; --line: #8884; --bar: #c0392b; --mean: #7f8c8d; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.3rem; } h2 { font-size: 1.05rem; margin-top: 2rem; }
.broken { color: #c0392b; } .holds { color: #1e8449; }
table { border-collapse: collapse; width: 100%; } th, td { text-align: right; padding: .25rem .6rem; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; } th { font-weight: 600; }
.bars { width: 40%; text-align: left; } svg { width: 100%; height: 1.3rem; display: block; }
.slow { fill: var(--bar); } .mean { fill: var(--mean); } .ci { stroke: currentColor; stroke-width: .6; }
article { border-left: 4px solid var(--line); padding: .1rem 1rem; margin: 1rem 0; }
article.high { border-color: #c0392b; } article.medium { border-color: #e67e22; } article.low { border-color: #2e86c1; }
code { font-family: ui-monospace, monospace; } footer { margin-top: 2rem; color: #7f8c8d; font-size: .85rem; }
@media print { body { max-width: none; margin: 0; } article { break-inside: avoid; } }
"""


def render(incident: Incident) -> str:
    """Write an incident as a self-contained HTML document.

    Args:
        incident: A diagnosis.
    """
    return "".join(_parts(incident))


def _parts(incident: Incident) -> Iterable[str]:
    title = escape(words.objective(incident))
    yield '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta name="viewport" content="width=device-width">\n'
    yield f"<title>{escape(incident.id)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
    yield f'<h1 class="{"holds" if words.held(incident) else "broken"}">{title}</h1>\n<p>{escape(incident.verdict)}</p>\n'
    yield _latency(incident)
    yield f"<p>{escape(words.load_line(incident))}</p>\n"
    yield from _attribution(incident)
    if incident.what_if:
        yield from _what_if(incident)
    if incident.stages:
        yield from _stages(incident)
    yield "<h2>Findings</h2>\n"
    yield from (_finding(finding) for finding in incident.findings)
    if not incident.findings:
        yield "<p>None.</p>\n"
    if incident.captures:
        yield from _list("Captures", [words.capture_line(capture) for capture in incident.captures])
    if incident.notes:
        yield from _list("Notes", incident.notes)
    yield f"<footer>{escape(incident.id)} · {escape(incident.state)} · <code>{escape(incident.path)}</code></footer>\n</body>\n</html>\n"


def _latency(incident: Incident) -> str:
    latency = incident.latency_ms
    values = (("P50", latency.p50), ("P95", latency.p95), ("P99", latency.p99), ("P99.9", latency.p999), ("jitter", incident.jitter_ms))
    heads = "".join(f"<th>{name}</th>" for name, _ in values)
    cells = "".join(f"<td>{words.milliseconds(value)}</td>" for _, value in values)
    return f"<table><tr>{heads}</tr><tr>{cells}</tr></table>\n"


def _attribution(incident: Incident) -> Iterable[str]:
    yield "<h2>Where slow requests lose their time</h2>\n"
    if incident.withheld is not None:
        yield f"<p>{escape(incident.withheld)}.</p>\n"
        return
    yield f"<p>{words.milliseconds(words.excess_ms(incident))} more than an ordinary request. Red: share of that; grey: what a mean profile says.</p>\n"
    yield '<table><tr><th>column</th><th class="bars"></th><th>share</th><th>slow</th><th>ordinary</th><th>mean profile</th></tr>\n'
    for share in incident.attribution:
        if abs(share.share) >= _SMALL or share.mean_share >= _SMALL:
            yield f'<tr><td>{escape(share.name)}</td><td class="bars">{_bar(share)}</td><td>{words.percent(share.share)} {words.plus_minus(share)}</td>'
            yield f"<td>{words.number(share.tail_ms)} ms</td><td>{words.number(share.body_ms)} ms</td><td>{words.percent(share.mean_share)}</td></tr>\n"
    yield "</table>\n"
    if (said := words.misled(incident)) is not None:
        yield f"<p>{escape(said)}</p>\n"


def _stages(incident: Incident) -> Iterable[str]:
    yield "<h2>Stages: slow / ordinary request</h2>\n"
    yield "<table><tr><th>stage</th><th>time</th><th>CPU</th><th>copied</th><th>device memory</th></tr>\n"
    for row in words.stage_rows(incident):
        yield f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>\n"
    yield "</table>\n"


def _bar(share: Share) -> str:
    length, mean = (min(max(100 * value, 0.0), 100.0) for value in (share.share, share.mean_share))
    line = ""
    if share.ci is not None:
        low, high = (min(max(100 * value, 0.0), 100.0) for value in share.ci)
        line = f'<line class="ci" x1="{low:.1f}" x2="{high:.1f}" y1="3" y2="3"/>'
    label = escape(f"{share.name}: {words.percent(share.share)} of the excess, {words.percent(share.mean_share)} of the mean", quote=True)
    bars = f'<rect class="slow" width="{length:.1f}" height="6"/><rect class="mean" y="7" width="{mean:.1f}" height="3"/>'
    return f'<svg viewBox="0 0 100 10" preserveAspectRatio="none" role="img" aria-label="{label}">{bars}{line}</svg>'


def _what_if(incident: Incident) -> Iterable[str]:
    yield "<h2>P99 if a cause cost every request no more than its median (estimate)</h2>\n"
    yield "<table><tr><th>fixed</th><th>P99</th><th>objective</th></tr>\n"
    for entry in incident.what_if:
        met = '<td class="holds">meets</td>' if entry.meets_objective else '<td class="broken">broken</td>'
        yield f"<tr><td>{escape(' + '.join(entry.fix))}</td><td>{words.milliseconds(entry.p99_ms)}</td>{met}</tr>\n"
    yield "</table>\n"


def _finding(finding: Finding) -> str:
    evidence = "".join(f"<li>{escape(words.evidence_line(item))}</li>" for item in finding.evidence)
    gain = "" if finding.what_if_p99_ms is None else f"<p>P99 without it: about {words.milliseconds(finding.what_if_p99_ms)}</p>"
    said = "".join(
        f"<p><b>{name}:</b> {escape(text)}</p>"
        for name, text in (("Fix", finding.fix), ("Refuted if", finding.refute_by), ("Back out", finding.rollback))
    )
    head = f"{escape(finding.severity.upper())} · {escape(finding.class_)}, confidence {escape(finding.confidence)}, <code>{escape(finding.where)}</code>"
    return (
        f'<article class="{escape(finding.severity, quote=True)}"><p><b>{escape(finding.id)}</b> {head}</p>'
        f"<p>{escape(finding.claim)}</p><ul>{evidence}</ul>{gain}{said}</article>\n"
    )


def _list(title: str, items: Iterable[str]) -> Iterable[str]:
    yield f"<h2>{title}</h2>\n<ul>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul>\n"
