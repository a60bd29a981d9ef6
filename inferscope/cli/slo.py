"""`inferscope slo`: the objectives of a running service, shown or changed."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any, Final, cast

from inferscope.cli.asking import ask, change, worker_arguments
from inferscope.cli.output import emit
from inferscope.cli.status import counted
from inferscope.control import workers
from inferscope.detect.slo import SLO
from inferscope.errors import InferscopeError

HELP = "Show the objectives of a running service, or change one until it restarts: inferscope slo set score p99_ms=25. Exit status 1 when denied."

_TEXT: Final = frozenset({"model", "cls", "size", "request", "until"})
_WHOLE: Final = frozenset({"min_requests"})


def _pair(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    known = [each.name for each in dataclasses.fields(SLO) if each.name not in {"name", "_"}]
    if not equals or name not in known:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEYWORD=VALUE with one of {', '.join(known)}")
    if value.lower() == "none":
        return name, None
    if name in _TEXT:
        return name, value
    try:
        return name, int(value) if name in _WHOLE else float(value)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {value!r} is no number") from error


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this verb."""
    worker_arguments(parser)
    parser.add_argument("what", choices=("show", "set"), help="show all, or set one")
    parser.add_argument("name", nargs="?", help="which objective to set")
    parser.add_argument(
        "changes", nargs="*", type=_pair, metavar="KEYWORD=VALUE", help="keywords of SLO, such as p99_ms=25; none takes one back"
    )


def run(options: argparse.Namespace) -> int:
    """Show or change."""
    if options.what == "show":
        return _show(options)
    if not options.name or not options.changes:
        raise InferscopeError("slo set needs a name and a change: inferscope slo set score p99_ms=25")
    args = {"name": options.name, **dict(options.changes)}
    said = f"{options.name}: {', '.join(f'{key}={value}' for key, value in options.changes)}"
    return 0 if change(options, ask(options), "set_slo", args, said) else 1


def _show(options: argparse.Namespace) -> int:
    worker = ask(options)
    answer = workers.request(worker, "status", "status", {}, options.timeout)
    if answer["state"] != "done":
        raise InferscopeError(f"{worker.name}: {answer['why']}")
    objectives = cast("dict[str, dict[str, Any]]", answer["result"].get("objectives") or {})
    lines = [
        f"  {name}: {held.get('phase', 'n/a')}, {held.get('promise') or 'a trigger'}; {counted(held)}" for name, held in objectives.items()
    ]
    value = {"service": worker.service, "slot": worker.slot, "pid": worker.pid, "objectives": objectives}
    emit(options, value, "\n".join([worker.name, *lines]) if lines else f"{worker.name}: no objective")
    return 0
