"""What leaves the process: one object that the export thread runs.

`offer`, `retain` and `event` only put things down and may be called from any thread; `run_once`, `flush` and `shutdown` do the work in
whichever thread calls them, one at a time. Evidence on disk comes first, then log events, metrics and at last traces; each delivery is
bounded, and so are all of a run together. With no endpoint nothing is sent and no connection is opened.
"""

from __future__ import annotations

import collections
import contextlib
import os
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from inferscope import semconv
from inferscope.export.otlp import jsonlines, profiles
from inferscope.export.otlp.metrics import DeltaTracker, ExportBatch, SeriesBuilder, encode
from inferscope.export.otlp.series import CUMULATIVE, DELTA, Slices, Total
from inferscope.export.otlp.target import TIMEOUT_S, delta_preferred
from inferscope.export.otlp.transport import Outcome, Sender, senders
from inferscope.export.ring import Ring
from inferscope.export.samples import Samples
from inferscope.export.store import Store
from inferscope.guard import guard, log_once

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from inferscope.device.harvest import DeviceSpan
    from inferscope.export.otlp.logs import Event
    from inferscope.export.otlp.series import Exemplar, Scalar, Series
    from inferscope.types import Column, RequestRecord

__all__ = ["EVENT_LIMIT", "Exporter"]

EVENT_LIMIT: Final = 512
"""Events that wait for delivery; beyond it the oldest is dropped and counted (the ring and the index have it)."""

PROFILES_LIMIT: Final = 4
"""Incidents whose profiles wait for delivery; they lie in the incident as pprof files in any case."""

SHUTDOWN_S: Final = 1.0
_LAST_DELIVERY: Final = 0.85
"""Part of the time of a shutdown that the last delivery gets; the rest is for closing files."""


class Exporter:
    """Sends and keeps metrics and events.

    Args:
        directory: `STATE_DIR/<service>/<slot>`; None keeps nothing on disk (until `open`).
        endpoint: Base URL of an OTLP receiver; None leaves it to the OTEL_EXPORTER_OTLP_* environment.
        protocol: `http/protobuf` or `grpc`; None decides by environment and port.
        headers: Added to those of the environment.
        scale: Exponential scale of all histograms, 3 to 8.
        series_limit: Series before the overflow series.
        objectives: Request name to objective in ns: switches to explicit buckets; None (default) is exponential.
        resource: Resource attributes until the first batch brings its own.
        environ: Default `os.environ`.
    """

    def __init__(
        self,
        directory: Path | None = None,
        *,
        endpoint: str | None = None,
        protocol: str | None = None,
        headers: Mapping[str, str] | str | None = None,
        scale: int = 5,
        series_limit: int = 100,
        objectives: Mapping[str, int] | None = None,
        resource: Mapping[str, Scalar] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        environ = os.environ if environ is None else environ
        self._settings = (scale, series_limit, objectives)
        self._delta = delta_preferred(environ)
        self._resource: Mapping[str, Scalar] = resource or {}
        self._lock, self._files, self._forking = threading.Lock(), threading.Lock(), False
        signals = ("logs", "traces", "metrics", *(("profiles",) if profiles.wanted(environ) else ()))
        self._senders = senders(signals, endpoint=endpoint, protocol=protocol, headers=headers, environ=environ)
        self._untaken: dict[str, str] = {}
        self._reset(directory)

    def _reset(self, directory: Path | None) -> None:
        scale, limit, objectives = self._settings
        self._builder = SeriesBuilder(scale, limit, objectives)
        self._sent_tracker = DeltaTracker()
        self._kept_tracker = DeltaTracker()
        self._attributes: dict[Any, bytes] = {}
        self._batch: ExportBatch | None = None
        self._events: collections.deque[Event] = collections.deque()
        self._unkept: collections.deque[Event] = collections.deque()
        self._profiles: collections.deque[bytes] = collections.deque(maxlen=PROFILES_LIMIT)
        self._samples = Samples()
        self._settle(directory)
        self._dropped: collections.Counter[str] = collections.Counter()
        self._undelivered = False
        self._closed = False

    def _settle(self, directory: Path | None) -> None:
        self._rings = {signal: Ring(directory, signal) for signal in ("metrics", "logs", "traces")}
        self._store = Store(None if directory is None else directory / "index.sqlite")

    def open(self, directory: Path | None) -> None:
        """Keep evidence in `directory` from now on, once this process has its slot; what was put down before goes there too."""
        with self._lock:
            for ring in self._rings.values():
                ring.close()
            self._store.close()
            self._settle(directory)

    @property
    def sends(self) -> bool:
        """Whether there is a receiver."""
        return bool(self._senders)

    @property
    def store(self) -> Store:
        """This process's index."""
        return self._store

    def offer(self, batch: ExportBatch) -> None:
        """Put down the newest totals; a batch that was not exported yet is superseded, which loses nothing: they are running totals."""
        self._batch = batch

    def retain(self, records: Sequence[RequestRecord], columns: Sequence[Column], sites: Mapping[int, str] | None = None) -> None:
        """Put down a window's retained requests: some leave as spans, some as exemplars.

        Args:
            records: As in `Window.records`.
            columns: Owners of time by column index, as in `Window.columns`.
            sites: Code that held a lock, by site id.
        """
        self._samples.offer(records, columns, sites or {})

    def device(self, span: DeviceSpan) -> None:
        """Put down a device span, a sink of the harvester: those of requests that leave as spans leave with them."""
        self._samples.device(span)

    def event(self, event: Event) -> None:
        """Put down an event; it is kept on disk once and sent until a receiver took it."""
        self._unkept.append(event)
        if len(self._unkept) > EVENT_LIMIT:
            self._drop_oldest(self._unkept, "event_kept")
        if "logs" in self._senders:
            self._events.append(event)
            if len(self._events) > EVENT_LIMIT:
                self._drop_oldest(self._events, "event_sent")

    def profile(self, folded: Sequence[Mapping[str, Any]], incident: str, reason: str) -> None:
        """Put down the profiles of an incident, where a receiver takes them; encoded here, on the caller's thread, in slices."""
        if folded and "profiles" in self._senders:
            with guard("export.profiles"):
                self._profiles.append(profiles.profiles_request(folded, self._resource, incident, reason, Slices()))

    def _drop_oldest(self, queue: collections.deque[Event], reason: str) -> None:
        with contextlib.suppress(IndexError):
            queue.popleft()
            self._dropped[reason] += 1

    def run_once(self, timeout_s: float = TIMEOUT_S, *, force: bool = False) -> bool:
        """Keep and send what was put down since the last run.

        Args:
            timeout_s: Bound of all deliveries of this run together; of the whole run where it is forced, because then a caller waits.
            force: Try even when the circuit breaker is open.

        Returns:
            Whether everything that has a receiver was delivered.
        """
        deadline = time.monotonic() + timeout_s
        if self._closed or not self._lock.acquire(timeout=timeout_s):
            return False
        try:
            return self._run(deadline, force=force, deliveries_s=0.0 if force else timeout_s)
        finally:
            self._lock.release()

    def _run(self, deadline: float, *, force: bool, deliveries_s: float = 0.0) -> bool:
        """One run until `deadline`; its deliveries have `deliveries_s` whatever the building took, which rests while busy threads compute."""
        batch, self._batch = self._batch, None
        slices = Slices(pause=self._rest)
        series: tuple[Series, ...] = ()
        traces: list[bytes] = []
        if batch is not None:
            self._resource = batch.resource
            traces, exemplars = self._take_samples(slices)
            slices.rest()
            series = self._builder.build(batch, slices, exemplars)
            series += self._own_series(batch, slices)
            slices.rest()
        with guard("export.keep"), self._files:
            self._keep(series, traces, slices)
        payload = None if batch is None else self._metrics_payload(series, batch, slices, force=force)
        deadline = max(deadline, time.monotonic() + deliveries_s)
        delivered = self._send_events(deadline, force=force)
        if batch is not None:
            self._undelivered = not self._send_metrics(series, payload, deadline, slices, force=force)
            slices.rest()
        delivered = self._send_traces(deadline, force=force) and delivered
        self._send_profiles(deadline, force=force)
        return delivered and not self._undelivered

    def _take_samples(self, slices: Slices) -> tuple[list[bytes], dict[tuple[str, ...], tuple[Exemplar, ...]]]:
        sends = "traces" in self._senders
        return self._samples.take(self._resource, slices, send=sends, shown=sends or not self._senders)

    def _own_series(self, batch: ExportBatch, slices: Slices) -> tuple[Series, ...]:
        lost = {
            **self._dropped,
            **self._samples.dropped,
            "series_overflow": self._builder.overflowed,
            "delta_window": self._sent_tracker.dropped,
            "ring_line": sum(ring.lost for ring in self._rings.values()),
            "index_row": self._store.lost,
            "refused": sum(sender.refused for sender in self._senders.values()),
        }
        totals = [Total(semconv.SELF_DROPPED, count, ((semconv.ATTR_REASON, reason),)) for reason, count in lost.items() if count]
        failed = sum(sender.failed for sender in self._senders.values())
        if failed:
            totals.append(Total(semconv.SELF_ERRORS, failed, ((semconv.ATTR_REASON, "export"),)))
        own = ExportBatch((), tuple(totals), batch.start_unix_ns, batch.now_unix_ns, batch.resource)
        return self._builder.build(own, slices)

    def _keep(self, series: tuple[Series, ...], traces: Sequence[bytes], slices: Slices) -> None:
        events: list[Event] = []
        while self._unkept:
            events.append(self._unkept.popleft())
        if series:
            windows = self._kept_tracker.delta(series, slices)
            self._kept_tracker.acknowledge(series, slices)
            slices.rest()
            self._store.add(windows, events, slices)
            self._rings["metrics"].append(jsonlines.metrics_pieces(series, self._resource, CUMULATIVE, slices))
        elif events:
            self._store.add((), events)
        if events:
            self._rings["logs"].append(jsonlines.logs_line(events, self._resource))
        if traces:
            self._rings["traces"].append(traces)

    def _send_events(self, deadline: float, *, force: bool) -> bool:
        sender = self._senders.get("logs")
        if sender is None or not self._events:
            return True
        events = [self._events.popleft() for _ in range(len(self._events))]
        outcome = Outcome.FAILED
        with guard("export.logs"):
            from inferscope.export.otlp import protobuf

            outcome = sender.send(protobuf.logs_request(events, self._resource), deadline - time.monotonic(), force=force)
        if outcome is Outcome.REJECTED:
            if self._give_up(sender):
                return True
            self._dropped["event_rejected"] += len(events)
        elif outcome is not Outcome.SENT:
            self._events.extendleft(reversed(events))
        return outcome is Outcome.SENT

    def _send_traces(self, deadline: float, *, force: bool) -> bool:
        sender = self._senders.get("traces")
        if sender is None or not self._samples.waiting:
            return True
        with guard("export.traces"):
            return self._samples.deliver(sender, self._resource, lambda: deadline - time.monotonic(), force=force) or self._give_up(sender)
        return False

    def _send_profiles(self, deadline: float, *, force: bool) -> None:
        sender = self._senders.get("profiles")
        while sender is not None and self._profiles:
            outcome = sender.send(self._profiles[0], deadline - time.monotonic(), force=force)
            if outcome not in {Outcome.SENT, Outcome.REJECTED}:
                return
            self._profiles.popleft()
            if outcome is Outcome.REJECTED:
                self._dropped["profile_rejected"] += 1
                self._give_up(sender)

    def _give_up(self, sender: Sender) -> bool:
        """Stop sending a signal that the receiver does not know: many take metrics alone, and what it would refuse is kept on disk."""
        signal = sender.target.signal
        if not sender.unknown:
            return False
        if self._senders.pop(signal, None) is not None:
            self._untaken[signal] = sender.last_error
            sender.close()
            log_once(
                f"otlp-untaken-{signal}",
                f"{sender.target.endpoint} takes no {signal} ({sender.last_error}); they are kept on disk only. "
                f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT names another receiver",
            )
        return True

    def _metrics_payload(self, series: tuple[Series, ...], batch: ExportBatch, slices: Slices, *, force: bool) -> bytes | None:
        """The request of this run, empty where nothing changed; None where it would be for nothing, or failed."""
        sender = self._senders.get("metrics")
        if sender is None or not (force or sender.breaker.allows()):
            return None
        with guard("export.metrics"):
            chosen, temporality = (self._sent_tracker.delta(series, slices), DELTA) if self._delta else (series, CUMULATIVE)
            return encode(chosen, batch.resource, temporality, slices, self._attributes) if chosen else b""
        return None

    def _send_metrics(self, series: tuple[Series, ...], payload: bytes | None, deadline: float, slices: Slices, *, force: bool) -> bool:
        sender = self._senders.get("metrics")
        if sender is None:
            return True
        outcome = Outcome.FAILED
        if payload is not None:
            with guard("export.metrics"):
                outcome = sender.send(payload, deadline - time.monotonic(), force=force) if payload else Outcome.SENT
        if self._delta:
            if outcome is Outcome.SENT:
                self._sent_tracker.acknowledge(series, slices)
            else:
                self._sent_tracker.failed(series, slices)
        elif outcome is Outcome.REJECTED:
            self._dropped["metrics_rejected"] += 1
        return outcome is Outcome.SENT

    def flush(self, timeout_s: float = TIMEOUT_S) -> bool:
        """Deliver now, breaker or not; True when everything that has a receiver was delivered."""
        return self.run_once(timeout_s, force=True)

    def shutdown(self, timeout_s: float = SHUTDOWN_S) -> bool:
        """One last delivery within `timeout_s`, then close; True when it arrived. A second call does nothing.

        A receiver that is known to be away is not tried again, and a run in another thread is given the time that is left: the caller
        gets control back in time whatever the receiver does.
        """
        if self._closed:
            return True
        deadline = time.monotonic() + timeout_s * _LAST_DELIVERY
        delivered = False
        if self._lock.acquire(timeout=timeout_s * _LAST_DELIVERY):
            try:
                with guard("export"):
                    delivered = self._run(deadline, force=False)
            finally:
                self._closed = True
                for ring in self._rings.values():
                    ring.close()
                self._store.close()
                self._lock.release()
        self._closed = True
        for sender in self._senders.values():
            sender.close()
        return delivered

    def _rest(self, seconds: float) -> None:
        if not self._forking:
            time.sleep(seconds)

    def pause(self, timeout_s: float) -> bool:
        """Keep other threads from the files until `resume`: a fork while SQLite holds its own locks would leave them held in the child.

        A run that has the files hurries meanwhile: between computing threads each of its rests takes as long as all their turns.
        """
        self._forking = True
        try:
            return self._files.acquire(timeout=timeout_s)
        finally:
            self._forking = False

    def resume(self) -> None:
        """After a `pause` that returned True."""
        self._files.release()

    def after_fork(self, directory: Path | None = None) -> None:
        """In a forked child: forget what the parent put down, never touch its files and connections, start with fresh ones.

        Args:
            directory: The child's own slot; None keeps nothing on disk.
        """
        self._lock = threading.Lock()  # another thread of the parent may have held the old ones
        self._files = threading.Lock()
        self._senders = {signal: sender.after_fork() for signal, sender in self._senders.items()}
        for ring in self._rings.values():
            ring.close()
        self._store.close()
        self._reset(directory)

    def status(self) -> dict[str, Any]:
        """What is on, where it goes, what failed."""
        return {
            "targets": {signal: sender.status() for signal, sender in self._senders.items()},
            "untaken": dict(self._untaken),
            "temporality": "delta" if self._delta else "cumulative",
            "events_waiting": len(self._events),
            "traces": {"sent": self._samples.sent, "waiting": self._samples.waiting},
            "dropped": {**self._dropped, **self._samples.dropped},
            "series_overflow": self._builder.overflowed,
            "ring": {signal: ring.problem or "on" for signal, ring in self._rings.items()},
            "index": self._store.problem or "on",
        }
