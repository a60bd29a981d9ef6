"""Calls to inference servers, and what those servers say of themselves: running totals that an incident keeps.

An integration asks for a row once (`calls(system, method, model, server)`) and adds to its fields after each call. What a server counts comes
from a `Poller`: an object with a client of its own, asked on a thread of ours every few seconds, never on the application's thread nor
through the application's client.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from inferscope import guard

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["LIMIT", "Calls", "Poller", "ServerTotals", "calls", "evidence", "forget", "poll", "watch"]

LIMIT: Final = 64
"""Rows and pollers of a process; what comes later shares the row of model `other`."""


@dataclass(slots=True)
class Calls:
    """Calls of one kind; instants and durations in ns, sizes in bytes. A duration that this kind cannot know stays None."""

    system: str
    """`triton`."""
    method: str
    """`http.infer`, `http.async_infer`, `grpc.stream` and so on."""
    model: str
    server: str
    """`host:port`."""
    count: int = 0
    errors: int = 0
    wall_ns: int = 0
    submitted: int = 0
    """Asynchronous requests that were started."""
    submit_ns: int | None = None
    """Time in the calls that only start them."""
    serialize_ns: int | None = None
    wire_ns: int | None = None
    """From the end of serialization to the head of the answer, or to the result where that is not seen: network, server, gRPC's protobuf."""
    read_ns: int | None = None
    """From the head of the answer to the result: reading and decoding its body."""
    binary_bytes: int = 0
    json_inputs: int = 0
    json_elements: int = 0
    shared_inputs: int = 0
    largest_bytes: int = 0
    """The largest sum of binary inputs in one call."""


@dataclass(slots=True)
class ServerTotals:
    """What a server counted for one model since it was first asked; ns. Means only: their quotients are per request of the server."""

    system: str
    server: str
    model: str
    state: str = "waiting"
    """`watched`, or `off: REASON`."""
    window_ns: int = 0
    own: int = 0
    """Calls of this process that were answered meanwhile."""
    count: int = 0
    """Requests of all clients."""
    executions: int = 0
    inferences: int = 0
    total_ns: int = 0
    queue_ns: int = 0
    input_ns: int = 0
    infer_ns: int = 0
    output_ns: int = 0
    busy_ns: int = 0
    """Time in executions, all instances together."""
    instances: int | None = None
    max_queue_delay_ns: int | None = None


class Poller(Protocol):
    """One server and model that is asked."""

    totals: ServerTotals

    def poll(self) -> None:
        """Ask, within a second or so, and add to `totals`; runs on a thread of ours."""
        ...


_rows: dict[tuple[str, str, str, str], Calls] = {}
_pollers: dict[tuple[str, str, str], Poller] = {}
_pid = os.getpid()


def calls(system: str, method: str, model: str, server: str) -> Calls:
    """The row of these calls, made on first use."""
    key = (system, method, model, server)
    row = _rows.get(key)
    if row is None:
        if len(_rows) >= LIMIT:
            key = (system, method, "other", "other")
        row = _rows.setdefault(key, Calls(*key))
    return row


def watch(system: str, server: str, model: str, make: Callable[[], Poller]) -> None:
    """Ask a server about a model from now on; `make` is called once for each, and must not connect."""
    key = (system, server, model)
    if key not in _pollers and len(_pollers) < LIMIT:
        with guard.guard("remote"):
            _pollers.setdefault(key, make())


def poll() -> None:
    """Ask every server once; what the poll thread does."""
    if os.getpid() != _pid:  # a forked child: connections and counts are the parent's
        forget()
    for poller in list(_pollers.values()):
        if not poller.totals.state.startswith("off"):
            guard.contained("remote", poller.poll, None)


def evidence() -> dict[str, Any]:
    """Running totals: `calls` and `servers`, as the incident keeps them."""
    return {
        "calls": [dataclasses.asdict(row) for row in list(_rows.values()) if row.count or row.errors],
        "servers": [dataclasses.asdict(poller.totals) for poller in list(_pollers.values())],
    }


def forget() -> None:
    """Start afresh: in a forked child and in tests."""
    global _pid  # noqa: PLW0603  (which process the rows belong to)
    _rows.clear()
    _pollers.clear()
    _pid = os.getpid()
