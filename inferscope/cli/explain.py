"""`inferscope explain`: diagnose an incident's evidence again, or summarise a trace from torch.profiler."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inferscope.cli.output import emit, find_incident, present, state_argument
from inferscope.diagnose.incident import load_directory
from inferscope.diagnose.trace import read_trace
from inferscope.report import document
from inferscope.report.words import percent

if TYPE_CHECKING:
    import argparse

    from inferscope.diagnose.trace import TraceSummary

HELP = "Say why: diagnose the evidence of an incident (its id, the beginning of it, or a directory; default the newest), or summarise a trace file."


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this verb."""
    state_argument(parser)
    parser.add_argument("incident", nargs="?", metavar="ID|DIR|TRACE", help="an incident, or a torch.profiler trace (.json, .json.gz)")


def _trace_text(path: Path, trace: TraceSummary) -> str:
    lines = [
        f"{path.name}: {trace.events} events in {trace.window_ms:.2f} ms on {len(trace.threads)} threads",
        f"device busy (this process's own work): {'n/a, no device events' if trace.device_busy is None else percent(trace.device_busy)}",
        f"synchronous copies (pageable copy, then a stream synchronise): {trace.synchronous_copies}",
        "top operators by self time:",
    ]
    lines += [f"  {operator}" for operator in map(_operator, trace.operators[:10])] or ["  none"]
    if trace.transfers:
        lines.append("copies:")
        lines += [f"  {', '.join(f'{k} {v}' for k, v in dataclasses.asdict(transfer).items())}" for transfer in trace.transfers]
    if trace.synchronisations:
        lines.append("waits for the device:")
        lines += [f"  {operator}" for operator in map(_operator, trace.synchronisations[:5])]
    return "\n".join(lines)


def _operator(operator: Any) -> str:
    values = dataclasses.asdict(operator)
    return f"{values.pop('name')}: " + ", ".join(
        f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value}" for key, value in values.items()
    )


def run(options: argparse.Namespace) -> int:
    """Explain it; 2 when the objective is broken."""
    asked = options.incident
    if asked is not None and asked.endswith((".json", ".json.gz", ".gz")) and not Path(asked).is_dir():
        trace = read_trace(Path(asked))
        emit(options, dataclasses.asdict(trace), _trace_text(Path(asked), trace))
        return 0
    incident = load_directory(find_incident(options))
    value = document.to_json(incident)
    emit(options, value, present(incident))
    return 2 if value["slo"]["broken"] else 0
