"""What the verbs that ask a running service share: which worker is meant, and how a change ended."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, Any

from inferscope.cli.output import emit, state_argument, state_dir
from inferscope.control import workers
from inferscope.errors import CaptureRefusedError

if TYPE_CHECKING:
    from inferscope.control.workers import Worker

__all__ = ["ask", "change", "milliseconds", "whole", "worker_arguments"]


def whole(low: int, high: int) -> Any:
    """An integer in a range, for argparse."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is no integer") from error
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{value} is not from {low} to {high}")
        return value

    return parse


def milliseconds(text: str) -> float:
    """A duration such as 50ms, 0.5s or 50, for argparse; milliseconds."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(ms|s|)", text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no duration such as 50ms or 0.5s")
    return float(match[1]) * (1000.0 if match[2] == "s" else 1.0)


def worker_arguments(parser: argparse.ArgumentParser) -> None:
    """Which worker, and how long to wait for it."""
    state_argument(parser)
    parser.add_argument("--service", help="which service; needed only where several run")
    parser.add_argument("--slot", type=whole(0, 127), metavar="N", help="which of its workers (default: the one in the lowest slot)")
    parser.add_argument("--pid", type=whole(1, 1 << 31), metavar="PID", help="the worker with this process id")
    parser.add_argument("--timeout", type=whole(1, 600), default=15, metavar="SECONDS", help="longest wait for the service (default 15)")


def ask(options: argparse.Namespace) -> Worker:
    """The worker that is meant.

    Raises:
        InferscopeError: None answers, or workers of several services do.
    """
    return workers.one(state_dir(options), options.service, options.slot, options.pid)


def change(
    options: argparse.Namespace, worker: Worker, op: str, args: dict[str, Any], said: str, id_: str | None = None
) -> dict[str, Any] | None:
    """Ask for a change and wait for its end; one that is denied is told, and None returned: exit status 1.

    Args:
        options: With `timeout` and `json`.
        worker: Whom to ask.
        op: The operation.
        args: Its arguments.
        said: What is printed when it was done; empty leaves that to the caller.
        id_: Makes it one change however often it is asked for.

    Raises:
        CaptureRefusedError: There is no answer in time.
    """
    ticket = workers.change(worker, op, args, options.timeout, id_)
    if ticket["state"] == "queued":
        raise CaptureRefusedError(f"{worker.name} has not answered within {options.timeout} s; the request stays queued as {ticket['id']}")
    value = {"service": worker.service, "slot": worker.slot, "pid": worker.pid, "ticket": ticket["id"], "state": ticket["state"]}
    if ticket["state"] != "done":
        emit(options, {**value, "why": ticket["why"]}, f"{worker.name}: denied: {ticket['why']}")
        return None
    if said:
        emit(options, {**value, "result": ticket["result"]}, f"{worker.name}: {said}")
    return {**value, "result": ticket["result"]}
