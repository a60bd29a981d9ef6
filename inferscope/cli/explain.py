"""`inferscope explain`: diagnose an incident's evidence again, or summarise a trace from torch.profiler."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from inferscope.cli.completing import add_profiles
from inferscope.cli.output import emit, find_incident, present, state_argument
from inferscope.diagnose.incident import load_directory
from inferscope.diagnose.one_trace import explain_trace
from inferscope.diagnose.replicas import explain_replicas
from inferscope.errors import EvidenceError
from inferscope.report import document
from inferscope.report import trace as report

if TYPE_CHECKING:
    import argparse

HELP = """Say why: diagnose the evidence of an incident (its id, the beginning of it, or a directory; default the newest), or summarise a
trace file. A closed incident that its service left to the command line gets its profiles as pprof files. Several incidents, copied from
the replicas of a fleet, are merged: intervals are then over replicas."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this verb."""
    state_argument(parser)
    parser.add_argument("incident", nargs="*", metavar="ID|DIR|TRACE", help="incidents, or a torch.profiler trace (.json, .json.gz)")


def run(options: argparse.Namespace) -> int:
    """Explain it; 2 when the objective is broken."""
    given: list[str] = options.incident
    if len(given) > 1:
        return _several(options, given)
    asked = options.incident = given[0] if given else None
    if asked is not None and asked.endswith((".json", ".json.gz", ".gz")) and not Path(asked).is_dir():
        trace = explain_trace(Path(asked))
        emit(options, report.to_json(trace), report.render(trace).rstrip("\n"))
        return 0
    directory = find_incident(options)
    incident = load_directory(directory)
    value = document.to_json(incident)
    added = add_profiles(directory)
    said = f"\nAdded for pprof, and to the chain of manifests: {', '.join(added)}\n" if added else ""
    emit(options, value, present(incident) + said)
    return 2 if value["slo"]["broken"] else 0


def _several(options: argparse.Namespace, given: list[str]) -> int:
    """Merge the incidents of several replicas."""
    directories: list[Path] = []
    for options.incident in given:
        directories.append(find_incident(options))
    if len({directory.resolve() for directory in directories}) < len(directories):
        raise EvidenceError("one incident is named twice: it would count twice")
    incident = explain_replicas(directories)
    value = document.to_json(incident)
    emit(options, value, present(incident))
    return 2 if value["slo"]["broken"] else 0
