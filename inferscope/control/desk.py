"""Where requests of all channels end: reads are answered, changes queue under a ticket and are done one at a time, each is audited."""

from __future__ import annotations

import collections
import math
import threading
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from inferscope import guard
from inferscope.control.protocol import READS, Wanted, encode, plain, reply
from inferscope.errors import CaptureRefusedError, InferscopeError

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferscope.control.protocol import Actor, Operations, Request, State

__all__ = ["FLOODED", "QUEUE_LIMIT", "TICKET_LIMIT", "Allowance", "Desk"]

QUEUE_LIMIT: Final = 16
"""Changes that wait; more are denied and may be asked again."""
TICKET_LIMIT: Final = 256
"""Tickets that are remembered; the oldest finished one goes first."""
FLOODED: Final = "too many changes at once; ask again in a second"
_BURST: Final = 20
_PER_S: Final = 2.0


class Allowance:
    """So many at once, and so many a second after that.

    Args:
        burst: How many at once.
        per_s: How many come back a second.
        clock: Seconds, monotonic.
    """

    def __init__(self, burst: int, per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._burst, self._per_s, self._clock = float(burst), per_s, clock
        self._left, self._at = float(burst), clock()

    @property
    def left(self) -> bool:
        """Whether one is left."""
        now = self._clock()
        self._left = min(self._burst, self._left + max(0.0, now - self._at) * self._per_s)
        self._at = now
        return self._left >= 1.0

    def take(self) -> bool:
        """Use one; False when none is left."""
        if not self.left:
            return False
        self._left -= 1.0
        return True


@dataclass(slots=True)
class _Ticket:
    request: Request
    actor: Actor
    state: State = "queued"
    why: str | None = None
    result: Any = None

    def reply(self, *, repeat: bool = False) -> dict[str, Any]:
        return reply(self.request.id, self.request.op, self.state, why=self.why, result=self.result, repeat=repeat)


def _identity(request: Request) -> tuple[str, dict[str, Any]]:
    """What makes two requests the same; whoever asks again may wait for longer."""
    args = {name: value for name, value in request.args.items() if name != "expires_unix_s"}
    return request.op, asdict(Wanted(**args)) if request.op == "capture" else args


class Desk:
    """One thread serves it with `run_one`; others may submit.

    Args:
        operations: What may be done.
        clock: Seconds, monotonic; replaced in tests.
    """

    def __init__(self, operations: Operations, clock: Callable[[], float] = time.monotonic) -> None:
        self._operations = operations
        self._tickets: dict[str, _Ticket] = {}
        self._queue: collections.deque[_Ticket] = collections.deque()
        self._allowance = Allowance(_BURST, _PER_S, clock)
        self._lock = threading.Lock()
        """Held for the time of a dictionary access, never while something is done."""
        self.counts: collections.Counter[str] = collections.Counter()
        """Requests by how they ended: `read`, `done`, `denied`, `repeated`, `flooded`, `malformed`."""

    @property
    def waiting(self) -> bool:
        """Whether a change is queued."""
        return bool(self._queue)

    def submit(self, request: Request, actor: Actor) -> dict[str, Any]:
        """Answer a read, or give a change its ticket."""
        if request.op in READS:
            return self._read(request)
        with self._lock:
            return self._queue_up(request, actor)

    def _queue_up(self, request: Request, actor: Actor) -> dict[str, Any]:
        known = self._tickets.get(request.id)
        if known is not None:
            return self._again(known, request)
        if len(self._queue) >= QUEUE_LIMIT or not self._allowance.take():
            # Not remembered: the same id may be asked again.
            self.counts["flooded"] += 1
            return reply(request.id, request.op, "denied", why=FLOODED)
        ticket = _Ticket(request, actor)
        self._remember(ticket)
        self._queue.append(ticket)
        return ticket.reply()

    def run_one(self) -> bool:
        """Do the oldest queued change; False when there is none."""
        with self._lock:
            if not self._queue:
                return False
            ticket = self._queue.popleft()
        self._do(ticket)
        return True

    def now(self, request: Request, actor: Actor) -> dict[str, Any]:
        """Do a change in the caller's thread, under a ticket like any other: for code of the service itself, which is not limited in number."""
        with self._lock:
            known = self._tickets.get(request.id)
            if known is not None:
                return self._again(known, request)
            ticket = _Ticket(request, actor)
            self._remember(ticket)
        self._do(ticket)
        return ticket.reply()

    def _do(self, ticket: _Ticket) -> None:
        try:
            ticket.result = plain(self._change(ticket))
            ticket.state = "done"
        except InferscopeError as error:
            ticket.state, ticket.why = "denied", str(error)
        except Exception as error:  # noqa: BLE001  (whoever asked gets an answer, whatever went wrong)
            # Only the type: a message can hold the user's data.
            ticket.state, ticket.why = "denied", f"it failed ({type(error).__name__}); see status()"
            guard.tally("control.operation", type(error).__name__, error=error)
        self.counts[ticket.state] += 1
        self._audit(ticket)

    def malformed(self, why: str, id_: str | None, op: str | None) -> dict[str, Any]:
        """Answer what could not be understood."""
        self.counts["malformed"] += 1
        return reply(id_, op, "denied", why=why)

    def forget(self) -> None:
        """In a forked child: what was asked of the parent is the parent's."""
        self._lock = threading.Lock()
        self._tickets.clear()
        self._queue.clear()
        self.counts.clear()

    def _again(self, known: _Ticket, request: Request) -> dict[str, Any]:
        if _identity(known.request) != _identity(request):
            return self._deny(request, "this id was used for another request; take a new one")
        self.counts["repeated"] += 1
        return known.reply(repeat=True)

    def _deny(self, request: Request, why: str) -> dict[str, Any]:
        self.counts["denied"] += 1
        return reply(request.id, request.op, "denied", why=why)

    def _read(self, request: Request) -> dict[str, Any]:
        self.counts["read"] += 1
        if request.op == "ticket":
            with self._lock:
                ticket = self._tickets.get(str(request.args["id"]))
            if ticket is None:
                return reply(request.id, request.op, "denied", why="no such ticket; this process never had it, or it is too old")
            return reply(request.id, request.op, "done", result=ticket.reply())
        try:
            result = self._operations.status() if request.op == "status" else self._operations.snapshot()
            answer = reply(request.id, request.op, "done", result=plain(result))
            encode(answer)
        except Exception as error:  # noqa: BLE001  (as for a change)
            guard.tally("control.operation", type(error).__name__, error=error)
            return reply(request.id, request.op, "denied", why=f"it failed ({type(error).__name__})")
        return answer

    def _change(self, ticket: _Ticket) -> Any:
        operations, args = self._operations, dict(ticket.request.args)
        if ticket.request.op == "capture":
            # A request that waited for long, or was delivered again by whoever kept it, is void: nobody looks for its result any more.
            if time.time() > args.pop("expires_unix_s", math.inf):
                raise CaptureRefusedError("it has expired")
            return {"incident": operations.capture(Wanted(**args), ticket.actor)}
        if ticket.request.op == "set_slo":
            return operations.set_slo(args.pop("name"), args)
        switch = operations.enable if ticket.request.op == "enable" else operations.disable
        return switch(args["part"])

    def _remember(self, ticket: _Ticket) -> None:
        while len(self._tickets) >= TICKET_LIMIT:
            oldest = next((key for key, held in self._tickets.items() if held.state != "queued"), None)
            if oldest is None:
                break
            del self._tickets[oldest]
        self._tickets[ticket.request.id] = ticket

    def _audit(self, ticket: _Ticket) -> None:
        event = {
            "at_unix_ns": time.time_ns(),
            "op": ticket.request.op,
            "id": ticket.request.id,
            "args": dict(ticket.request.args),
            "state": ticket.state,
            "why": ticket.why,
            "result": ticket.result,
            "actor": plain(ticket.actor),
        }
        try:
            self._operations.audit(event)
        except Exception as error:  # noqa: BLE001  (the change was made: a trail that fails is counted)
            guard.tally("control.audit", type(error).__name__, error=error)
