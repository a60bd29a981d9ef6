"""The command line: one module a verb, each with `HELP`, `arguments(parser)` and `run(options) -> exit code`.

Every verb takes `--json` (to stdout) or `--json FILE`. Exit codes: 0 well, 1 failed or regressed, 2 objective broken, 3 inconclusive,
4 wrong outputs, 5 not comparable, 64 usage. Verbs are imported when they are called, so that `inferscope --help` is quick.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import TYPE_CHECKING, Final, NoReturn

from inferscope.errors import InferscopeError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["VERBS", "main"]

VERBS: Final = {
    "demo": "run the headline case on this machine: a slow service, its diagnosis, and the fixed one",
    "run": "run a Python service with inferscope in it, without changing its code",
    "incidents": "list the incidents of all services and workers",
    "explain": "say why: diagnose an incident's evidence, or summarise a torch.profiler trace",
    "top": "show requests, percentiles, objectives and incidents of all services here, live",
    "report": "render an incident's stored diagnosis",
    "bench": "put load on a function or an address and say what it measures, how surely",
    "compare": "compare two runs that were made one after the other",
    "ab": "compare two versions of a service in one session, block by block in turn",
    "history": "list the runs of a directory, or write them as CSV for change points",
    "bundle": "pack an incident with its evidence chain into one file, verified first",
    "replay": "send what services kept on disk to an OTLP receiver, later",
    "status": "ask all running workers on this machine how they stand",
    "snapshot": "show a running worker's counts and percentiles since it started",
    "capture": "ask a running service for profiles of its next requests",
    "enable": "switch recording, captures or export of a running service on",
    "disable": "switch them off, without a restart",
    "slo": "show the objectives of a running service, or change one until it restarts",
    "inspect": "show what lies in an incident, file by file and hash by hash",
    "ship": "carry finished incidents to a directory or an HTTP address, verified",
    "doctor": "check what inferscope can measure here, and say why not",
    "verify": "recompute the hashes of an incident's evidence chain",
}
"""Verb and what it does."""

WELL: Final = 0
FAILED: Final = 1
BROKEN: Final = 2
USAGE: Final = 64


class _Parser(argparse.ArgumentParser):
    """argparse with one clear line and the conventional exit status for wrong usage."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and what is accepted, in one line."""
        sys.stderr.write(f"{self.prog}: {message}; see '{self.prog} --help'\n")
        raise SystemExit(USAGE)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="inferscope",
        description="Why is the P99 of this inference service what it is, and what would change it?",
        epilog="verbs:\n" + "\n".join(f"  {verb:<10} {text}" for verb, text in VERBS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("verb", metavar="VERB", choices=list(VERBS), help="one of the verbs below")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="its own arguments: inferscope VERB --help")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
    if not words:
        parser.print_help()
        return USAGE
    options = parser.parse_args(words)
    module = importlib.import_module(f"inferscope.cli.{options.verb}")
    own = _Parser(prog=f"inferscope {options.verb}", description=module.HELP, formatter_class=argparse.RawDescriptionHelpFormatter)
    module.arguments(own)
    own.add_argument("--json", nargs="?", const="-", metavar="FILE", help="write the same as data: to stdout, or to FILE when one is named")
    try:
        return int(module.run(own.parse_args(options.rest)))
    except InferscopeError as error:
        sys.stderr.write(f"inferscope {options.verb}: {error}\n")
        return FAILED
    except BrokenPipeError:
        return FAILED
    except KeyboardInterrupt:
        return 130
