"""`inferscope disable`: the counterpart of `inferscope enable`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inferscope.cli import enable

if TYPE_CHECKING:
    import argparse

HELP = "Switch recording, captures or export of a running service off, without a restart. Exit status 1 when it is denied."

arguments = enable.arguments


def run(options: argparse.Namespace) -> int:
    """Switch it off."""
    return enable.switch(options, "disable")
