"""`inferscope capture`: profile the next requests of a running service."""

from __future__ import annotations

import argparse
import secrets
import time
from typing import Any

from inferscope.cli.output import emit, state_argument, state_dir
from inferscope.control import workers
from inferscope.errors import CaptureRefusedError

HELP = "Ask a running service for profiles of its next requests, whether they are slow or not. Exit status 1 when it is denied."
_POLL_S = 0.05


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


def _reason(text: str) -> str:
    if not 1 <= len(text.strip()) <= 200 or not text.strip().isprintable():
        raise argparse.ArgumentTypeError("a reason has 1 to 200 printable characters")
    return text.strip()


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this verb."""
    state_argument(parser)
    parser.add_argument("--service", help="which service; needed only where several run")
    parser.add_argument("--slot", type=whole(0, 127), metavar="N", help="which of its workers (default: the one in the lowest slot)")
    parser.add_argument("--pid", type=whole(1, 1 << 31), metavar="PID", help="the worker with this process id")
    parser.add_argument("--requests", type=whole(1, 64), default=8, metavar="N", help="how many profiles to keep, 1 to 64 (default 8)")
    parser.add_argument("--reason", type=_reason, default="asked on the command line", help="why, for the audit trail")
    parser.add_argument("--timeout", type=whole(1, 600), default=15, metavar="SECONDS", help="longest wait for the service (default 15)")


def run(options: argparse.Namespace) -> int:
    """Ask, and wait until it is accepted or denied."""
    root = state_dir(options)
    worker = workers.one(root, options.service, options.slot, options.pid)
    deadline = time.monotonic() + options.timeout
    id_ = f"cli-{secrets.token_hex(8)}"
    ticket: dict[str, Any] = workers.request(worker, "capture", id_, {"reason": options.reason, "requests": options.requests})
    while ticket["state"] == "queued":
        if time.monotonic() >= deadline:
            raise CaptureRefusedError(f"{worker.name} has not answered within {options.timeout} s; the request stays queued as {id_}")
        time.sleep(_POLL_S)
        answer = workers.request(worker, "ticket", "poll", {"id": id_}, max(0.1, deadline - time.monotonic()))
        ticket = dict(answer["result"]) if answer["state"] == "done" else {**ticket, "state": "denied", "why": answer["why"]}
    value: dict[str, Any] = {"service": worker.service, "slot": worker.slot, "pid": worker.pid, "ticket": id_, "state": ticket["state"]}
    if ticket["state"] != "done":
        emit(options, {**value, "why": ticket["why"]}, f"{worker.name}: denied: {ticket['why']}")
        return 1
    incident = str(ticket["result"]["incident"])
    path = worker.path.parent / "incidents" / incident
    text = (
        f"{worker.name}: profiles of the next {options.requests} requests go to incident {incident}\n"
        f"what lies there: inferscope inspect {incident}"
    )
    emit(options, {**value, "incident": incident, "path": str(path)}, text)
    return 0
