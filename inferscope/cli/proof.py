"""What `ab` and `compare` share: the chain of evidence around a comparison."""

from __future__ import annotations

import secrets
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inferscope.bench import acceptance, metrics, runs
from inferscope.bench.evidence import Evidence
from inferscope.bench.fingerprint import source
from inferscope.bench.result import LoadResult, merged
from inferscope.cli import quantities
from inferscope.cli.output import find_incident, state_argument, state_dir

__all__ = ["arguments", "save_blocks", "write"]

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from inferscope.bench.acceptance import Objective


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the chain."""
    group = parser.add_argument_group("evidence: from the objective to this comparison, checked by 'inferscope verify DIR'")
    group.add_argument("--evidence", nargs="?", const="", metavar="DIR", help="write the chain (default under the state directory); kept")
    group.add_argument("--slo", type=quantities.checked(acceptance.parse_objective), action="append", default=[], metavar="OBJECTIVE",
                       help='what had to hold, as in "p99<=20ms"; may be repeated')  # fmt: skip
    group.add_argument("--incident", metavar="ID|DIR", help="the incident that led to the change")
    group.add_argument("--finding", metavar="ID", help="its finding that the change answers (default: the first)")
    group.add_argument("--change", metavar="TEXT", help="what was changed (default: the finding's fix)")
    group.add_argument("--rollback", metavar="TEXT", help="how it is undone (default: the finding's)")
    state_argument(parser)


def save_blocks(path: Path, command: str, results: Sequence[LoadResult], value: dict[str, Any]) -> None:
    """A version's blocks as one run; between them the other version was asked, so throughput and Little's law say nothing.

    Args:
        path: where to.
        command: what starts the version.
        results: its blocks.
        value: the comparison as data.
    """
    plan = replace(results[0].plan, seed=int(value["seed"]))
    load = merged(results, plan)
    found = {**metrics.describe(load), "throughput": {"requests_per_s": None, "items_per_s": None}, "little": None}
    document: dict[str, Any] = {
        "written_unix_ns": time.time_ns(),
        "settings": {
            "target": command,
            **{name: each for name, each in asdict(plan).items() if name != "url"},
            "inputs_sha256": value["inputs_sha256"],
        },
        "source": source(Path.cwd()),
        "fingerprint": value["fingerprint"],
        "warmup": {"cut": 0, "method": "before the first block"},
        "metrics": found,
        "problems": [],
        "valid": True,
        "blocks": len(results),
    }
    runs.save(path, document, load)


def write(
    options: argparse.Namespace,
    value: dict[str, Any],
    *,
    run: Path | None = None,
    candidate: Path | None = None,
    incident: Path | None = None,
) -> dict[str, Any] | None:
    """Write the chain when it was asked for.

    Args:
        options: of the verb.
        value: the comparison as data.
        run: the run before.
        candidate: the run after.
        incident: one that the comparison itself brought up; `--incident` goes before it.

    Returns:
        Where it lies and its root hash; None when it was not asked for.

    Raises:
        EvidenceError: a part cannot be used.
    """
    if options.evidence is None:
        return None
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    target = Path(options.evidence) if options.evidence else state_dir(options) / "evidence" / f"{stamp}-{secrets.token_hex(2)}"
    asked = find_incident(options) if options.incident else incident
    chain = Evidence(target)
    objectives: Sequence[Objective] = options.slo
    if objectives:
        chain.objective([each.text for each in objectives])
    if run is not None:
        chain.run(run)
    finding = None
    if asked is not None:
        chain.incident(asked)
        finding = chain.finding(options.finding)
    what, rollback = options.change or (finding or {}).get("fix"), options.rollback or (finding or {}).get("rollback")
    if what:
        chain.change(what, rollback or "none was stated", base=value.get("a"), candidate=value.get("b"), source=source(Path.cwd()))
    if candidate is not None:
        chain.run(candidate, "candidate")
    chain.comparison(value)
    return {"path": str(target), "root_sha256": chain.seal()}
