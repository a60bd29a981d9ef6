"""Between the rooms and export: running totals, our own cost, and what happened to incidents."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from inferscope import guard, integration, semconv
from inferscope.capture.chain import manifest_numbers, parse
from inferscope.clock import NS_PER_S, now_ns, unix_offset_ns
from inferscope.diagnose.incident import load as load_incident
from inferscope.diagnose.profiles import read as read_profiles
from inferscope.export import (
    Bands,
    ExportBatch,
    Exporter,
    Objective,
    Total,
    application_resource,
    breach_event,
    capture_event,
    current_span,
    explicit_preferred,
    incident_event,
    publish,
    request_totals,
)
from inferscope.host.resource import resource
from inferscope.settings import UNNAMED

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from inferscope.rooms.process import Rooms
    from inferscope.settings import Settings
    from inferscope.types import Breach, LockSite, Window

__all__ = ["Outlet"]


class Outlet:
    """Feeds the exporter of one process.

    Args:
        settings: All settings.
        rooms: Where the numbers come from.
    """

    def __init__(self, settings: Settings, rooms: Rooms) -> None:
        self._settings = settings
        self._rooms = rooms
        self.exporter: Exporter | None = None
        """None when `export=False`: nothing leaves and nothing is kept."""
        if settings.export:
            self.exporter = Exporter(
                None,
                endpoint=settings.endpoint,
                protocol=settings.protocol,
                headers=settings.headers,
                scale=settings.otlp_scale,
                series_limit=settings.series_limit,
                objectives=_explicit(rooms) if explicit_preferred() else None,
            )
        self._bands = Bands() if settings.export_bands else None
        self.begin()

    def listen(self) -> None:
        """Let collectors of a Prometheus registry read our numbers, and kept requests ask for the application's span."""
        publish(self._batch)
        self._rooms.recorder.trace_context = current_span
        sinks = self._rooms.device.harvester.sinks
        if self.exporter is not None and self.exporter.device not in sinks:
            sinks.append(self.exporter.device)

    def silence(self) -> None:
        """The opposite."""
        publish(None)
        self._rooms.recorder.trace_context = None

    def begin(self) -> None:
        """Totals count from now on: at start and in a forked child."""
        self._start_unix_ns = now_ns() + unix_offset_ns()
        self._exported_ns = 0
        if self._bands is not None:
            self._bands.clear()

    def retain(self, window: Window, lock_sites: Iterable[LockSite]) -> None:
        """Hand over the window's retained requests, from which spans and exemplars are made later."""
        if self.exporter is not None and window.records:
            self.exporter.retain(window.records, window.columns, {site.site_id: site.site for site in lock_sites})
        if self._bands is not None:
            self._bands.add(window)

    def export(self, timeout_s: float, *, force: bool) -> bool:
        """Send what is due; `force` sends although the interval is not over. Returns whether all of it was delivered."""
        exporter = self.exporter
        if exporter is None:
            return True
        moment = now_ns()
        if force or moment - self._exported_ns >= self._settings.export_interval_s * NS_PER_S:
            self._exported_ns = moment
            exporter.offer(self._batch(moment))
        return exporter.flush(timeout_s) if force else exporter.run_once(timeout_s)

    def close(self, deadline: float) -> None:
        """Deliver what is left before `deadline` (`time.monotonic`)."""
        self.silence()
        if self.exporter is not None:
            self.exporter.offer(self._batch())
            self.exporter.shutdown(max(0.05, deadline - time.monotonic()))

    def _batch(self, moment_ns: int | None = None) -> ExportBatch:
        """Everything as of the last tick."""
        rooms = self._rooms
        objectives = tuple(
            Objective(slo.name, slo.request_name, slo.threshold_ns, slo.quantile, slo.model, slo.cls) for slo in rooms.trigger.slos
        )
        totals = (*request_totals(rooms.aggregator.totals(), objectives), *self._own_totals())
        if self._bands is not None:
            totals += self._bands.totals()
        now_unix_ns = (now_ns() if moment_ns is None else moment_ns) + unix_offset_ns()
        return ExportBatch(rooms.aggregator.cumulative(), totals, self._start_unix_ns, now_unix_ns, self._resource())

    def _resource(self) -> dict[str, Any]:
        """Ours over the application's: what it sends and what we send belong together."""
        own = resource(self._settings.service, self._settings.version, self._rooms.pod.slot.instance_id)
        theirs = application_resource()
        if self._settings.service == UNNAMED and semconv.SERVICE_NAME in theirs:
            own.pop(semconv.SERVICE_NAME)
        return {**theirs, **own}

    def _own_totals(self) -> list[Total]:
        """What we cost and what failed of ours."""
        spent = [
            Total(semconv.SELF_OVERHEAD, used / NS_PER_S, (("thread.name", f"inferscope-{name}"),))
            for name, used in dict(self._rooms.overhead_ns).items()
        ]
        # "export" is the exporter's own count of deliveries that failed.
        failed = [
            Total(semconv.SELF_ERRORS, times, ((semconv.ATTR_REASON, "export.room" if name == "export" else name),))
            for name, times in guard.counts().items()
        ]
        lost = [
            Total(semconv.SELF_DROPPED, times, ((semconv.ATTR_REASON, name),))
            for name, times in self._rooms.recorder.counters().items()
            if times and not name.endswith("_errors")  # those are among the failures
        ]
        return spent + failed + lost + self._captures() + _copied()

    def _captures(self) -> list[Total]:
        """What became of captures, and what they cost the requests that they were tried on."""
        capture = self._rooms.capture
        if capture is None:
            return []
        counts = capture.recording.counts
        results = {"saved": counts.saved, "dropped": counts.dropped, "save_failed": counts.save_failed, "abandoned": counts.abandoned}
        found = [Total(semconv.CAPTURES, times, ((semconv.ATTR_RESULT, result),)) for result, times in results.items() if times]
        found += [
            Total(semconv.CAPTURES, times, ((semconv.ATTR_RESULT, "refused"), (semconv.ATTR_REASON, reason)))
            for reason, times in dict(counts.refused).items()
        ]
        stalls = ((phase, spent) for phase, spent in dict(counts.stalls_ns).items() if spent)
        return found + [Total(semconv.CAPTURE_STALL, spent / NS_PER_S, (("inferscope.capture.phase", phase),)) for phase, spent in stalls]

    def emit(self, what: str, breach: Breach, directory: Path, digest: str | None) -> None:
        """Tell what happened to an incident; a diagnosis also tells the detector its cause."""
        exporter = self.exporter
        if what == "opened" and exporter is not None:
            exporter.event(breach_event(breach, str(directory), digest))
        if what != "diagnosed":
            return
        incident = load_incident(directory)
        causes = "+".join(share.name for share in incident.attribution[:2])
        self._rooms.trigger.note_cause(breach.slo, f"{breach.request}:{causes}", breach.trigger)
        if exporter is not None:
            exporter.event(incident_event(incident, digest))
            exporter.profile(read_profiles(directory), incident.id, breach.trigger)
            hashes: dict[str, str] = guard.contained("incident", lambda: _hashes(directory), {})
            for kept in incident.captures:
                moment_ns = now_ns() + unix_offset_ns()
                exporter.event(capture_event(kept, incident.id, moment_ns, breach.trigger, sha256=hashes.get(kept.trace)))


def _hashes(directory: Path) -> dict[str, str]:
    """SHA-256 of each artefact by its path, as the newest manifest has them."""
    name = f"manifest-{manifest_numbers(directory)[-1]}.json"
    return {row["path"]: row["sha256"] for row in parse(name, (directory / name).read_bytes())["artefacts"]}


def _copied() -> list[Total]:
    """Bytes that copies moved, by direction."""
    moved: dict[str, int] = {}
    for site in integration.copies():
        moved[site["name"]] = moved.get(site["name"], 0) + int(site["bytes"])
    return [Total(semconv.COPY_IO, held, ((semconv.ATTR_COPY_DIRECTION, name),)) for name, held in moved.items()]


def _explicit(rooms: Rooms) -> dict[str, int]:
    """The strictest objective of each request, ns: explicit buckets stand around it."""
    found: dict[str, int] = {}
    for slo in rooms.trigger.slos:
        found[slo.request_name] = min(slo.threshold_ns, found.get(slo.request_name, slo.threshold_ns))
    return found
