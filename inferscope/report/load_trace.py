"""The slowest requests of a load on a time line, as Chrome trace JSON that Perfetto opens.

A client's view: each request is a slice from when it was due to its last byte, with what it waited for a connection or a thread and what the
service took inside it. Requests that overlap lie on tracks of their own. Below run curves of CPU and memory, and, of a target with
inferscope in it, the same requests with their stages.
"""

from __future__ import annotations

import heapq
import json
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

__all__ = ["Request", "render"]

Request = tuple[int, int, int, int, int]
"""Number, when it was due, when it was sent, when it was done (ns; 0 is never) and its status."""
_CLIENT: Final = 1_000_000
"""Process numbers of our own tracks, above those of slots."""
_COUNTERS: Final = (
    ("CPU of the service, cores", "cpu_cores", 1.0),
    ("CPU of the machine, cores", "host_cpu_cores", 1.0),
    ("memory of the service, MB", "resident_bytes", 1e-6),
    ("device memory, MB", "device_bytes", 1e-6),
    ("device utilisation, %", "device_utilization", 100.0),
)


def render(
    requests: Sequence[Request],
    *,
    unix_offset_ns: int,
    name: str,
    curve: Sequence[Mapping[str, Any]] = (),
    curve_began_ns: int | None = None,
    inside: Iterable[Mapping[str, Any]] = (),
) -> str:
    """Write the requests as a trace; instants are unix microseconds.

    Args:
        requests: what is shown, ascending by when it was due.
        unix_offset_ns: what turns their clock into unix time.
        name: of the target.
        curve: what `bench.resources` saw while the load ran.
        curve_began_ns: when the curve began, on the clock of the requests; None leaves it out.
        inside: events that the target itself made, on unix time.
    """
    events = [*_client(requests, unix_offset_ns, name)]
    if curve_began_ns is not None:
        events += _counters(curve, (curve_began_ns + unix_offset_ns) / 1e3)
    events += [dict(event) for event in inside]
    events.sort(key=lambda event: (event["ph"] != "M", event["ts"], -event.get("dur", 0.0)))
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, ensure_ascii=True, separators=(",", ":"))


def _client(requests: Sequence[Request], offset: int, name: str) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": _CLIENT, "tid": 0, "ts": 0, "args": {"name": f"client of {name}"}}
    free: list[int] = []
    ends: list[tuple[int, int]] = []
    lanes = 0
    for number, due, sent, done, status in requests:
        end = max(done, sent, due)
        while ends and ends[0][0] <= due:
            heapq.heappush(free, heapq.heappop(ends)[1])
        if not free:
            lanes += 1
            free.append(lanes)
        lane = heapq.heappop(free)
        heapq.heappush(ends, (end, lane))
        arguments = {"request": number, "status": status, "latency_ms": (done - due) / 1e6 if done else None}
        yield _slice("request" if 200 <= status < 300 else "failed request", due + offset, end - due, lane, arguments)
        if sent > due:
            yield _slice("waits to be sent", due + offset, sent - due, lane, {})
        if done > sent > 0:
            yield _slice("service", sent + offset, done - sent, lane, {})


def _slice(name: str, start_ns: int, duration_ns: int, lane: int, arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        "ph": "X", "cat": "load", "name": name, "pid": _CLIENT, "tid": lane, "ts": start_ns / 1e3, "dur": duration_ns / 1e3, "args": arguments,
    }  # fmt: skip


def _counters(curve: Sequence[Mapping[str, Any]], began_us: float) -> list[dict[str, Any]]:
    return [
        {"ph": "C", "name": label, "pid": _CLIENT, "tid": 0, "ts": began_us + row["at_s"] * 1e6, "args": {"value": row[key] * scale}}
        for row in curve
        for label, key, scale in _COUNTERS
        if row.get(key) is not None
    ]
