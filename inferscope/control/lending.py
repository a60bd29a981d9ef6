"""What the runtime lends to this room, made into `Operations`: switches, objectives, the audit trail."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Any, Final, Protocol

from inferscope.clock import now_ns
from inferscope.control.channels import Control, Options
from inferscope.control.protocol import Actor, Operations, Wanted
from inferscope.detect import Trigger, check_objectives, edges_by_request
from inferscope.detect.slo import SLO
from inferscope.errors import CaptureRefusedError, InferscopeError
from inferscope.export.otlp.logs import Event

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from inferscope.settings import Settings
    from inferscope.types import Snapshot

__all__ = ["EVENT", "Lender", "Serving", "audit_event", "lend", "put_in_force", "record", "remote", "switch_part", "with_change"]

EVENT: Final = "inferscope.control"
"""Name of the log event of a change."""
_QUANTILES: Final = ("p95_ms", "p99_ms", "p999_ms")
_REASON_LENGTH: Final = 300

_logger = logging.getLogger("inferscope")


class Lender(Protocol):
    """What this room uses of the rooms."""

    off: set[str]
    """Parts that were switched off on demand."""
    settings: Settings

    @property
    def trigger(self) -> Trigger:
        """The detector; another one may be put in its place."""
        ...

    @trigger.setter
    def trigger(self, trigger: Trigger, /) -> None: ...

    @property
    def recorder(self) -> Any:
        """The recorder."""
        ...

    @property
    def capture(self) -> Any:
        """The captures; None where they are off."""
        ...

    @property
    def exporter(self) -> Any:
        """The exporter; None where it is off."""
        ...

    @property
    def pod(self) -> Any:
        """The worker's place among the others."""
        ...


class Serving(Protocol):
    """What this room uses of the runtime."""

    def status(self) -> dict[str, Any]:
        """What runs, what it costs."""
        ...

    def snapshot(self) -> Snapshot:
        """Current numbers."""
        ...

    def capture_now(self, wanted: Wanted) -> str:
        """Open a manual incident; takes the lock of a tick itself."""
        ...


def with_change(slos: tuple[SLO, ...], name: str, keywords: Mapping[str, Any]) -> tuple[SLO, ...]:
    """The objectives with one of them changed.

    Args:
        slos: Those in force.
        name: Which one.
        keywords: Keywords of `SLO` to replace; another quantile takes the place of the one before.

    Raises:
        ConfigurationError: A keyword has a value that cannot be used.
        InferscopeError: There is no such objective.
    """
    held = next((slo for slo in slos if slo.name == name), None)
    if held is None:
        raise InferscopeError(f"there is no objective {name!r}; known are {', '.join(slo.name for slo in slos) or 'none'}")
    before = {field.name: getattr(held, field.name) for field in dataclasses.fields(held) if field.init and field.name != "_"}
    if any(key in keywords for key in _QUANTILES):
        before |= dict.fromkeys(_QUANTILES)
    changed = SLO(**{**before, **keywords})
    return tuple(changed if slo is held else slo for slo in slos)


def put_in_force(rooms: Lender, slos: Sequence[SLO | Mapping[str, Any]], limits: Mapping[str, Any] | None = None) -> None:
    """Judge by other objectives and triggers; the warm-up is not repeated, and what stays the same goes on where it stood.

    An incident of an objective that is gone or changed closes. The caller holds the lock of a tick.

    Args:
        rooms: The rooms.
        slos: The objectives.
        limits: The triggers; default those in force.

    Raises:
        ConfigurationError: They cannot be used together; nothing was changed then.
    """
    settings = rooms.settings
    trigger = Trigger(
        check_objectives(slos),
        limits=rooms.trigger.limits if limits is None else limits,
        trigger=settings.trigger,
        fleet_size=settings.fleet_size,
        warmup_s=settings.warmup_s,
        warmup_requests=settings.warmup_requests,
    )
    trigger.adopt(rooms.trigger)
    rooms.settings = dataclasses.replace(settings, slo=trigger.slos, triggers=trigger.limits)
    rooms.trigger = trigger
    for request, edges in edges_by_request(trigger.slos).items():
        rooms.recorder.set_edges(request, edges)


def audit_event(entry: Mapping[str, Any]) -> Event:
    """A change as a log event: who, what, whether, and why not."""
    actor: Mapping[str, Any] = entry["actor"]
    said = Actor(actor["channel"], actor["uid"], actor["pid"], actor["peer"])
    attributes = {
        "inferscope.control.op": entry["op"],
        "inferscope.control.id": entry["id"],
        "inferscope.control.state": entry["state"],
        "inferscope.control.why": entry["why"],
        "inferscope.control.channel": said.channel,
        "inferscope.control.uid": said.uid,
        "inferscope.control.pid": said.pid,
        "inferscope.control.peer": said.peer,
        **{f"inferscope.control.args.{key}": value for key, value in entry["args"].items()},
    }
    why = f": {entry['why']}" if entry["why"] else ""
    what = " ".join([entry["op"], *([entry["args"]["key"]] if "key" in entry["args"] else [])])
    body = f"{what} asked by {said}, {entry['state']}{why}"
    return Event(EVENT, entry["at_unix_ns"], body, {key: value for key, value in attributes.items() if value is not None})


def record(rooms: Lender, entry: Mapping[str, Any]) -> None:
    """Write a change into the audit trail: a log line, and an event that leaves."""
    event = audit_event(entry)
    _logger.info("inferscope: %s", event.body)
    if rooms.exporter is not None:
        rooms.exporter.event(event)


def switch_part(rooms: Lender, part: str, on: bool) -> None:  # noqa: FBT001  (a switch)
    """Switch one of `protocol.PARTS`; the caller holds the lock of a tick.

    Raises:
        InferscopeError: It was never on.
    """
    if part == "recording":
        rooms.recorder.enabled = on
    elif on and (rooms.capture if part == "capture" else rooms.exporter) is None:
        raise InferscopeError(f"{part} was off from the start; only configure() can switch it on")
    elif part == "capture" and not on and rooms.capture is not None:
        rooms.capture.disarm()
    (rooms.off.discard if on else rooms.off.add)(part)


def remote(rooms: Lender, runtime: Serving, lock: Callable[[], AbstractContextManager[Any]]) -> Control:
    """The control room of a runtime, with the channels that the settings ask for; `open` opens them.

    Args:
        rooms: The rooms.
        runtime: The runtime.
        lock: Gives the lock that a tick holds, the one of this process at the time of the call.
    """
    return Control(lend(rooms, runtime, lock), Options.of(rooms.settings))


def lend(rooms: Lender, runtime: Serving, lock: Callable[[], AbstractContextManager[Any]]) -> Operations:
    """The operations of a runtime; arguments as of `remote`."""

    def capture(wanted: Wanted, actor: Actor) -> str:
        if "capture" in rooms.off:
            raise CaptureRefusedError("captures were switched off on demand; switch them on first")
        return runtime.capture_now(dataclasses.replace(wanted, reason=f"{wanted.reason} ({actor})"[:_REASON_LENGTH]))

    def set_slo(name: str, keywords: Mapping[str, Any]) -> None:
        with lock():
            workers = len(rooms.pod.workers(now_ns()))
            if workers > 1:
                raise InferscopeError(
                    f"{workers} workers count for this objective together: change the settings file, which all of them read"
                )
            if any(state.phase == "open" for state in rooms.trigger.state.values()):
                raise InferscopeError("an incident is open; change the objective when it is closed")
            put_in_force(rooms, with_change(rooms.trigger.slos, name, keywords))

    def switch(part: str, *, on: bool) -> None:
        with lock():
            switch_part(rooms, part, on)

    return Operations(
        status=runtime.status,
        snapshot=runtime.snapshot,
        capture=capture,
        enable=lambda part: switch(part, on=True),
        disable=lambda part: switch(part, on=False),
        set_slo=set_slo,
        audit=lambda entry: record(rooms, entry),
    )
