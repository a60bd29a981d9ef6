"""`inferscope enable` and, with the same words, `inferscope disable`: switch a part of a running service's inferscope."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inferscope.cli.asking import ask, change, worker_arguments
from inferscope.control.protocol import PARTS

if TYPE_CHECKING:
    import argparse

HELP = "Switch recording, captures or export of a running service on. Exit status 1 when it is denied."


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this verb."""
    worker_arguments(parser)
    parser.add_argument("part", choices=PARTS, help="what to switch")


def switch(options: argparse.Namespace, op: str) -> int:
    """Ask for `enable` or `disable`."""
    return 0 if change(options, ask(options), op, {"part": options.part}, f"{options.part} is {'on' if op == 'enable' else 'off'}") else 1


def run(options: argparse.Namespace) -> int:
    """Switch it on."""
    return switch(options, "enable")
