"""Finding running workers on this machine, by the sockets that they left under the state directory."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from inferscope.control.protocol import SCHEMA
from inferscope.control.socket import NAME, Call
from inferscope.errors import InferscopeError
from inferscope.pod import safe_name

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Worker", "change", "find", "one", "request"]

_POLL_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class Worker:
    """A place where a worker answers, or did."""

    service: str
    """As the directory is named."""
    slot: int
    path: Path
    """Its socket."""
    pid: int | None = None
    refusal: str | None = None
    """Why it cannot be asked; None when it answers."""

    @property
    def name(self) -> str:
        """`service/slot`."""
        return f"{self.service}/{self.slot}"


def _look(path: Path) -> Worker:
    service, slot = path.parent.parent.name, int(path.parent.name)
    try:
        call = Call(path, 2.0)
    except InferscopeError as error:
        return Worker(service, slot, path, None, str(error))
    try:
        return Worker(service, slot, path, call.pid)
    finally:
        call.close()


def find(state_dir: Path, service: str | None = None, slot: int | None = None, pid: int | None = None) -> list[Worker]:
    """Workers that match everything given, by service and slot; those that do not answer as well, unless a pid is asked for."""
    folder = "*" if service is None else safe_name(service)
    paths = [path for path in state_dir.glob(f"{folder}/*/{NAME}") if path.parent.name.isdecimal()]
    found = [_look(path) for path in paths if slot is None or int(path.parent.name) == slot]
    return sorted((worker for worker in found if pid is None or worker.pid == pid), key=lambda worker: (worker.service, worker.slot))


def one(state_dir: Path, service: str | None = None, slot: int | None = None, pid: int | None = None) -> Worker:
    """The worker that was meant: of several of one service the one in the lowest slot.

    Raises:
        InferscopeError: None answers, or workers of several services do.
    """
    found = find(state_dir, service, slot, pid)
    live = [worker for worker in found if worker.refusal is None]
    asked = "".join(
        f" {word} {value}" for word, value in (("of service", service), ("in slot", slot), ("with pid", pid)) if value is not None
    )
    if not live:
        raise InferscopeError(found[0].refusal if found and found[0].refusal else f"no worker{asked} answers under {state_dir}")
    services = sorted({worker.service for worker in live})
    if len(services) > 1:
        raise InferscopeError(f"workers of several services answer ({', '.join(services)}): name one with --service")
    return live[0]


def request(worker: Worker, op: str, id: str, args: dict[str, Any], timeout_s: float = 5.0) -> dict[str, Any]:  # noqa: A002  (the field's name)
    """Ask one worker one thing.

    Raises:
        InferscopeError: It does not answer in time.
    """
    call = Call(worker.path, timeout_s)
    try:
        return call.ask({"schema": SCHEMA, "id": id, "op": op, "args": args})
    finally:
        call.close()


def change(worker: Worker, op: str, args: dict[str, Any], timeout_s: float, id: str | None = None) -> dict[str, Any]:  # noqa: A002  (as above)
    """Ask for a change and wait until it is done or denied.

    Args:
        worker: Whom to ask.
        op: One of `protocol.CHANGES`.
        args: Its arguments.
        timeout_s: Longest wait, seconds.
        id: Makes it one change however often it is asked for; default a new one.

    Returns:
        The ticket, whose state is `done` or `denied`, and `queued` when it is neither in time: it stays queued then.

    Raises:
        InferscopeError: The worker does not answer.
    """
    deadline = time.monotonic() + timeout_s
    ticket = request(worker, op, id or f"cli-{secrets.token_hex(8)}", args)
    while ticket["state"] == "queued" and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        answer = request(worker, "ticket", "poll", {"id": ticket["id"]}, max(0.1, deadline - time.monotonic()))
        ticket = dict(answer["result"]) if answer["state"] == "done" else {**ticket, "state": "denied", "why": answer["why"]}
    return ticket
