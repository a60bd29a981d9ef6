"""Runs and verdicts as text, Markdown and JUnit XML."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from xml.sax.saxutils import quoteattr

from inferscope.errors import InferscopeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from inferscope.bench.compare import Verdict

__all__ = [
    "REPORTS",
    "baseline_lines",
    "junit",
    "markdown_table",
    "milliseconds",
    "put",
    "remarks",
    "run_cases",
    "run_lines",
    "run_markdown",
    "run_rows",
    "title",
    "verdict_markdown",
]

REPORTS: Final = (
    "p50", "p90", "p95", "p99", "p999", "throughput", "jitter", "error_rate", "cpu", "memory", "gpu_util", "gpu_mem", "cost",
)  # fmt: skip
_CAUSES: Final = 3
_SYMBOLS: Final = {"IMPROVED": "✅", "REGRESSED": "❌", "NO CHANGE": "=", "INCONCLUSIVE": "❔", "INCORRECT": "❌", "INCOMPARABLE": "❔"}


def milliseconds(value: float | None) -> str:
    """Milliseconds with their unit, or n/a."""
    return "n/a" if value is None else f"{value:.3g} ms" if value < 1 else f"{value:.2f} ms" if value < 100 else f"{value:.1f} ms"


def _quantile(name: str, found: dict[str, Any]) -> tuple[str, str, str]:
    label = "P99.9" if name == "p999" else name.upper()
    if found["ms"] is None:
        return label, "n/a", str(found["method"]).removeprefix("n/a, ")
    return (
        label,
        milliseconds(found["ms"]),
        f"[{milliseconds(found['low_ms'])}, {milliseconds(found['high_ms'])}] {100 * found.get('level', 0.95):g} %, {found['method']}",
    )


def run_rows(document: dict[str, Any], wanted: Sequence[str]) -> list[tuple[str, str, str]]:
    """A run's numbers as they are shown: name, value, and interval or remark."""
    metrics: dict[str, Any] = document["metrics"]
    process: dict[str, Any] = document.get("process") or {}
    rows: list[tuple[str, str, str]] = []
    for name in wanted:
        if name in metrics["latency"]:
            rows.append(_quantile(name, metrics["latency"][name]))
        elif name == "throughput":
            rate, items = metrics["throughput"]["requests_per_s"], metrics["throughput"]["items_per_s"]
            more = "" if items == rate or items is None else f"{items:.1f} items/s"
            rows.append(("throughput", "n/a" if rate is None else f"{rate:.1f} /s", more))
        elif name == "jitter":
            jitter = metrics["jitter"]
            rows.append(
                (
                    "jitter",
                    f"IQR {milliseconds(jitter['iqr_ms'])}",
                    f"P99 - P50 {milliseconds(jitter['p99_minus_p50_ms'])}, 1-s P99 varies by {milliseconds(jitter['p99_spread_ms'])}",
                )
            )
        elif name == "error_rate":
            rate = metrics["error_rate"]
            share = "n/a" if rate["share"] is None else f"{100 * rate['share']:.2f} %"
            rows.append(
                (
                    "error rate",
                    share,
                    f"[{100 * rate['low']:.2f}, {100 * rate['high']:.2f}] %, {metrics['failed']} of {metrics['requests']}",
                )
            )
        elif name == "cpu":
            cores = process.get("cpu_cores")
            rows.append(
                (
                    "CPU",
                    "n/a" if cores is None else f"{cores:.2f} cores",
                    "" if cores is not None else "the process is not ours; name it with --pid",
                )
            )
        elif name == "memory":
            rows.append(_memory("memory", process.get("memory"), "the process is not ours; name it with --pid"))
        elif name == "cost":
            rows.append(_cost(document))
        else:
            rows += _device(name, document.get("device"))
    return rows


def _cost(document: dict[str, Any]) -> tuple[str, str, str]:
    cost = document.get("cost_per_million")
    if cost is None:
        return "cost", "n/a", "state the price of an hour with --price"
    price = document["settings"]["price_per_hour"]
    return "cost", f"{cost:.4g}", f"a million requests, at {price:g} an hour and this throughput"


def _device(name: str, device: dict[str, Any] | None) -> list[tuple[str, str, str]]:
    """What the driver tells of the cards; what the process knows of its own devices; n/a where neither does."""
    label = "GPU memory" if name == "gpu_mem" else "GPU utilisation"
    if device is None:
        return [(label, "n/a", "nothing measures it here")]
    rows: list[tuple[str, str, str]] = []
    if name == "gpu_mem":
        if device["memory"] is not None:
            rows.append(_memory(label, device["memory"], ""))
        for each in device["devices"]:
            known = {key: each[key] for key in ("static_bytes", "peak_bytes", "dynamic_bytes") if each[key] is not None}
            label = f"{each['device']} memory"
            if len(known) == 3 or each["peak_bytes"] is None:
                rows.append(_memory(label, known if len(known) == 3 else None, "its allocator does not tell"))
            else:
                rows.append(
                    (label, f"{each['peak_bytes'] / 1e6:.1f} MB peak", "static n/a: first used under load, --baseline uses it before")
                )
    else:
        if device["utilization"] is not None:
            busy = "n/a" if device["busy"] is None else f"{100 * device['busy']:.0f} %"
            rows.append((label, f"{100 * device['utilization']:.0f} %", f"mean of the busiest card; busy {busy} of the time"))
        for each in device["devices"]:
            own_share = each["busy_own"]
            rows.append(
                (f"{each['device']} busy", "n/a" if own_share is None else f"{100 * own_share:.0f} %", "by this process's own timed work")
            )
    return rows or [(label, "n/a", "nothing measures it here")]


def _memory(label: str, memory: dict[str, int] | None, unknown: str) -> tuple[str, str, str]:
    if memory is None:
        return label, "n/a", unknown
    megabytes = {name: value / 1e6 for name, value in memory.items()}
    return (
        label,
        f"{megabytes['peak_bytes']:.1f} MB peak",
        f"static {megabytes['static_bytes']:.1f} MB, dynamic {megabytes['dynamic_bytes']:.1f} MB",
    )


def remarks(document: dict[str, Any]) -> list[str]:
    """What a reader must know before believing the table."""
    metrics, settings = document["metrics"], document["settings"]
    lines = [f"INVALID: {problem}" for problem in document["problems"]]
    if settings["mode"] == "closed":
        fixed = metrics.get("corrected")
        value = (
            f"; corrected for coordinated omission, an approximation: P99 {milliseconds(fixed['p99'])}, P99.9 {milliseconds(fixed['p999'])}"
            if fixed
            else ""
        )
        lines.append(f"closed loop: the tail is optimistic, because nobody asks while the service stands still{value}; --rate measures it")
    law = metrics["little"]
    if law is not None:
        said = "holds" if law["holds"] else "DOES NOT HOLD (a queue grows, or answers are missing)"
        lines.append(f"Little's law {said}: {law['in_system']:.2f} in the system, rate times latency {law['rate_times_latency']:.2f}")
    if metrics["lag_p99_ms"] is not None:
        lines.append(f"latency counts from the intended start; the generator's own lateness has a P99 of {metrics['lag_p99_ms']:.3f} ms")
    lines += _until(document.get("until"))
    lines.append(f"warm-up: {document['warmup']['cut']} requests left out, {document['warmup']['method']}")
    lines += baseline_lines(document.get("baseline"))
    lines += [_stage(each) for each in document.get("stages", [])]
    lines += _inside(document.get("inside"))
    lines += [f"objective {each['text']}" for each in document.get("acceptance", [])]
    if document.get("golden"):
        lines.append(f"outputs {document['golden']['text']}")
    return lines


def _until(until: dict[str, Any] | None) -> list[str]:
    """Whether a percentile became known as closely as was asked."""
    if until is None:
        return []
    width = "n/a, too few requests" if until["half_width"] is None else f"±{100 * until['half_width']:.1f} %"
    return [f"measured until {until['asked']}: {'reached' if until['reached'] else 'NOT reached within --max-time'}, {width}"]


def baseline_lines(baseline: dict[str, Any] | None) -> list[str]:
    """The service at rest and asked once at a time, in a line each."""
    if baseline is None:
        return []
    idle, single = baseline["idle"], baseline["single"]
    cores, memory = idle["cpu_cores"], idle["memory"]
    lines = [
        f"idle: {'n/a' if cores is None else f'{cores:.2f} cores'}, "
        f"{'n/a' if memory is None else '%.1f MB' % (memory['static_bytes'] / 1e6)}"
        + ("" if idle["host_cpu_cores"] is None else f"; the machine {idle['host_cpu_cores']:.2f} cores")
    ]
    if single["p50_ms"] is not None:
        lines.append(
            f"one request at a time: P50 {milliseconds(single['p50_ms'])}, least {milliseconds(single['min_ms'])} of {single['requests']}"
        )
    return lines


def _stage(each: dict[str, Any]) -> str:
    if each.get("mean_ms") is not None:
        return f"stage {each['name']}: {each['count']} times, mean {milliseconds(each['mean_ms'])}"
    return f"stage {each['name']}: {each['count']} times, P50 {milliseconds(each['p50_ms'])}, P99 {milliseconds(each['p99_ms'])}"


def _inside(inside: dict[str, Any] | None) -> list[str]:
    """Why the tail is what it is, as the inferscope in the target says."""
    if inside is None:
        return []
    lines = [f"inside: {inside['verdict']}"]
    for each in sorted(inside["attribution"], key=lambda row: -row["share"])[:_CAUSES]:
        between = "" if each["ci"] is None else f" [{100 * each['ci'][0]:.0f}, {100 * each['ci'][1]:.0f}]"
        lines.append(
            f"tail: {each['name']} {100 * each['share']:.0f} %{between} of what it takes longer, {milliseconds(each['tail_ms'])} there"
        )
    return lines


def run_cases(document: dict[str, Any]) -> list[tuple[str, str, str]]:
    """A run's objectives, outputs and validity as JUnit cases: name, outcome, message."""
    outcomes = {"HOLDS": "passed", "BROKEN": "failed", "INCONCLUSIVE": "skipped"}
    cases = [(each["objective"], outcomes[each["word"]], each["text"]) for each in document.get("acceptance", [])]
    if document.get("golden"):
        cases.append(("outputs", "passed" if document["golden"]["correct"] else "failed", document["golden"]["text"]))
    valid = "; ".join(document["problems"])
    return [*cases, ("valid run", "skipped" if valid else "passed", valid or "nothing speaks against it")]


def title(document: dict[str, Any]) -> str:
    """What was measured, in one line."""
    settings = document["settings"]
    rate = (
        f"{settings['rate']:g} requests/s, {settings['process']}"
        if settings["mode"] == "open"
        else f"closed loop of {settings['connections']}"
    )
    named = [
        f"{key.replace('_', ' ')} {settings[key]}"
        for key in ("model", "precision", "batch_size", "input_len")
        if settings.get(key) is not None
    ]
    return f"{settings['target']} · {rate}" + "".join(f" · {each}" for each in named)


def run_lines(document: dict[str, Any], wanted: Sequence[str]) -> list[str]:
    """A run for a terminal."""
    rows = run_rows(document, wanted)
    lines = [title(document), ""]
    lines += [f"  {name:<16}{value:>14}  {more}" for name, value, more in rows]
    return [*lines, "", *remarks(document), f"fingerprint {document['fingerprint']['sha256'][:12]}"]


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; bars inside cells are escaped."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in (head, ["---"] * len(head), *rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def run_markdown(document: dict[str, Any], wanted: Sequence[str]) -> str:
    """A run for a page or a comment."""
    table = markdown_table(("metric", "value", "interval and remarks"), run_rows(document, wanted))
    said = "\n".join(f"- {line}" for line in remarks(document))
    return f"### {title(document)}\n\n{table}\n\n{said}\n\nFingerprint `{document['fingerprint']['sha256']}`\n"


def _value(verdict: Verdict, value: float | None) -> str:
    if value is None:
        return "n/a"
    if verdict.metric == "error_rate":
        return f"{100 * value:.2f} %"
    return f"{value:.1f} /s" if verdict.metric == "throughput" else milliseconds(value)


def verdict_markdown(title: str, verdicts: Sequence[Verdict], remarks: Sequence[str] = ()) -> str:
    """Verdicts for a comment on a change."""
    rows: list[tuple[str, ...]] = []
    for each in verdicts:
        change = "n/a" if each.change is None else f"{100 * each.change:+.1f} %"
        interval = "n/a" if each.low is None or each.high is None else f"[{100 * each.low:+.1f}, {100 * each.high:+.1f}] %"
        symbol = f"{_SYMBOLS[each.word]} {each.word}"
        rows.append(
            (
                each.metric,
                _value(each, each.base),
                _value(each, each.candidate),
                change,
                interval,
                f"{100 * each.tolerance:g} %",
                symbol,
                "; ".join(filter(None, (each.why, each.warning))),
            )
        )
    head = ("metric", "base", "candidate", "change", "interval", "tolerance", "verdict", "")
    return f"### {title}\n\n{markdown_table(head, rows)}\n" + "".join(f"\n- {line}" for line in remarks) + ("\n" if remarks else "")


def junit(suite: str, cases: Sequence[tuple[str, str, str]]) -> str:
    """JUnit XML of (name, outcome, message): outcome is `passed`, `failed` or `skipped`."""
    failed, skipped = (sum(outcome == kind for _, outcome, _ in cases) for kind in ("failed", "skipped"))
    lines = ['<?xml version="1.0" encoding="UTF-8"?>']
    lines.append(f'<testsuite name={quoteattr(suite)} tests="{len(cases)}" failures="{failed}" skipped="{skipped}" errors="0">')
    for name, outcome, message in cases:
        said = quoteattr(_printable(message))
        inner = {"failed": f"<failure message={said}/>", "skipped": f"<skipped message={said}/>"}.get(outcome, "")
        lines.append(f'  <testcase classname="inferscope" name={quoteattr(_printable(name))}>{inner}</testcase>')
    return "\n".join([*lines, "</testsuite>", ""])


def put(option: str, target: str, content: str) -> None:
    """Write what `option` asked for: to stdout when `target` is "-", else to that file.

    Raises:
        InferscopeError: it cannot be written.
    """
    if target == "-":
        sys.stdout.write(content)
        return
    try:
        Path(target).write_text(content, encoding="utf-8")
    except OSError as error:
        raise InferscopeError(f"{option} {target}: cannot be written ({error.strerror})") from error


def _printable(text: str) -> str:
    """XML 1.0 has no control characters."""
    return "".join(letter if letter >= " " or letter in "\t\n" else "�" for letter in text)
