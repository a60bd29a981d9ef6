"""`inferscope compare`: two runs that were made one after the other."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inferscope.bench import compare, runs
from inferscope.bench.compare import INCONCLUSIVE, INCORRECT, Verdict
from inferscope.cli import inside, proof, quantities
from inferscope.cli.output import emit

if TYPE_CHECKING:
    import argparse

    from inferscope.bench.runs import Run

HELP = """Compare two runs of 'inferscope bench'. They were made one after the other, so a machine that changed in between reads as a
difference; 'inferscope ab' interleaves. Refused when they differ in more than what is compared.
Exit: 0 nothing is worse, 1 regressed, 3 undecided, 4 wrong outputs, 5 not comparable."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this verb."""
    parser.add_argument("base", type=Path, metavar="BASE", help="run of the version that is there")
    parser.add_argument("candidate", type=Path, metavar="CAND", help="run of the candidate")
    quantities.gate_arguments(parser)
    parser.add_argument("--vary", action="append", default=[], metavar="NAME", help="this differs on purpose: it is what is compared")
    parser.add_argument("--force", action="store_true", help="compare whatever differs; the output says what")
    parser.add_argument("--md", nargs="?", const="-", metavar="FILE", help="as Markdown")
    parser.add_argument("--junit", metavar="FILE", help="as JUnit XML")
    proof.arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Compare them; the exit code is that of the worst verdict."""
    options.gate = quantities.gates(options, "compare")
    base, candidate = runs.read(options.base), runs.read(options.candidate)
    differing = runs.differences(base, candidate, vary=options.vary)
    value: dict[str, Any] = {
        "schema": 1,
        "kind": "inferscope.comparison",
        "method": "sequential",
        "written_unix_ns": time.time_ns(),
        "inputs": [{"path": each.path, "sha256": each.sha256} for each in (base, candidate)],
        "differences": differing,
        "changed": runs.changed(base, candidate, vary=options.vary),
        "gates": [asdict(gate) for gate in options.gate],
        "forced": bool(differing and options.force),
        "verdicts": [],
    }
    if differing and not options.force:
        sys.stderr.write(
            "inferscope compare: INCOMPARABLE, the runs differ in " + "; ".join(differing) + ". --vary NAME or --force allow it\n"
        )
        emit(options, value, "INCOMPARABLE")
        return 5
    verdicts = _verdicts(base, candidate, options.gate)
    if len(value["changed"]) > 1:
        warning = f"{len(value['changed'])} variables changed ({', '.join(value['changed'])}), so it cannot be said which of them did it"
        verdicts = [compare.warned(each, warning) for each in verdicts]
    value["verdicts"] = [each.to_json() for each in verdicts]
    remarks = ["sequential: the runs were made one after the other, so what the machine did in between is part of the difference"]
    remarks += _invalid(base, candidate)
    remarks += [f"changed: {', '.join(value['changed'])}"] if value["changed"] else []
    remarks += _bottleneck(base, candidate)
    kept = proof.write(options, value, run=options.base, candidate=options.candidate)
    if kept is not None:
        value["evidence"] = kept
        remarks.append(f"evidence: {kept['path']}, root hash {kept['root_sha256']}")
    remarks += [f"forced although the runs differ in {each}" for each in differing]
    quantities.write_verdicts(options, f"{base.name} against {candidate.name}", verdicts, remarks, kept)
    emit(options, value, "" if options.md == "-" else "\n".join([*(each.text() for each in verdicts), *remarks]))
    return compare.exit_code(verdicts)


def _invalid(*both: Run) -> list[str]:
    """What speaks against believing the runs."""
    return [f"{each.path} is invalid: {problem}" for each in both for problem in each.document.get("problems", [])]


def _bottleneck(base: Run, candidate: Run) -> list[str]:
    """What the tail is made of before and after: the bottleneck moves."""
    causes = [inside.top_cause(each.document.get("inside")) for each in (base, candidate)]
    return [f"top cause {when}: {cause}" for when, cause in zip(("before", "now"), causes, strict=True) if cause]


def _verdicts(base: Run, candidate: Run, gates: tuple[compare.Gate, ...]) -> list[Verdict]:
    found = compare.sequential(base.load, candidate.load, gates, skip=(base.skip, candidate.skip))
    invalid = _invalid(base, candidate)
    if invalid:
        found = [each if each.word == INCONCLUSIVE else compare.withhold(each, "; ".join(invalid)) for each in found]
    checked: dict[str, Any] | None = candidate.document.get("golden")
    if checked is not None and not checked.get("correct"):
        wrong = Verdict("outputs", INCORRECT, None, None, None, None, None, 0.95, 0.0, 0, "sequential", str(checked.get("text")))
        found.insert(0, wrong)
    return found
