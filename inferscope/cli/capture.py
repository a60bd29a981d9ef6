"""`inferscope capture`: profile the next requests of a running service."""

from __future__ import annotations

import argparse

from inferscope.cli.asking import ask, change, milliseconds, whole, worker_arguments
from inferscope.cli.output import emit

HELP = "Ask a running service for profiles of its next requests, whether they are slow or not. Exit status 1 when it is denied."


def _reason(text: str) -> str:
    if not 1 <= len(text.strip()) <= 200 or not text.strip().isprintable():
        raise argparse.ArgumentTypeError("a reason has 1 to 200 printable characters")
    return text.strip()


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this verb."""
    worker_arguments(parser)
    parser.add_argument("--requests", type=whole(1, 64), default=8, metavar="N", help="how many profiles to keep, 1 to 64 (default 8)")
    parser.add_argument(
        "--window",
        type=milliseconds,
        metavar="TIME",
        help="record all threads for this long, such as 50ms, in place of single requests (tier 2)",
    )
    parser.add_argument(
        "--tier",
        type=whole(1, 3),
        metavar="N",
        help="1: single requests, the default; 2: short windows of all threads, the default with --window; 3: with --shapes or --stacks, or long",
    )
    parser.add_argument("--shapes", action="store_true", help="dimensions of operators' inputs (tier 3)")
    parser.add_argument("--stacks", action="store_true", help="Python functions with file and line (tier 3)")
    parser.add_argument(
        "--allow-stall", type=milliseconds, metavar="TIME", help="longest stop of the whole process that is acceptable (tier 3)"
    )
    parser.add_argument("--reason", type=_reason, default="asked on the command line", help="why, for the audit trail")
    parser.add_argument(
        "--id", metavar="ID", help="makes it one capture however often it is asked for (default: each call is one of its own)"
    )


def _wanted(options: argparse.Namespace) -> dict[str, object]:
    tier = options.tier or (3 if options.shapes or options.stacks else 2 if options.window is not None else 1)
    wanted: dict[str, object] = {"reason": options.reason, "requests": options.requests}
    if tier != 1:
        wanted["tier"] = tier
    if options.window is not None:
        wanted["window_ms"] = options.window
    if options.allow_stall is not None:
        wanted["allow_stall_ms"] = options.allow_stall
    for name in ("shapes", "stacks"):
        if getattr(options, name):
            wanted[name] = True
    return wanted


def run(options: argparse.Namespace) -> int:
    """Ask, and wait until it is accepted or denied."""
    worker = ask(options)
    wanted = _wanted(options)
    done = change(options, worker, "capture", wanted, "", options.id)
    if done is None:
        return 1
    incident = str(done.pop("result")["incident"])
    what = (
        f"windows of {options.window:g} ms of all threads"
        if options.window is not None
        else f"profiles of the next {options.requests} requests"
    )
    text = f"{worker.name}: {what} go to incident {incident}\nwhat lies there: inferscope inspect {incident}"
    emit(options, {**done, "incident": incident, "path": str(worker.path.parent / "incidents" / incident)}, text)
    return 0
