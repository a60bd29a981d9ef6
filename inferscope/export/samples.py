"""Single requests on their way out: as spans, and as exemplars of the histograms they are counted in."""

from __future__ import annotations

import collections
import threading
from typing import TYPE_CHECKING, Final

from inferscope.clock import unix_offset_ns
from inferscope.export.otlp import jsonlines
from inferscope.export.otlp.device_spans import device_spans
from inferscope.export.otlp.exemplars import Exemplars
from inferscope.export.otlp.traces import REQUEST_LIMIT, Identity, Selection, request_spans, shared_work
from inferscope.export.otlp.transport import Outcome
from inferscope.guard import guard

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from inferscope.device.harvest import DeviceSpan
    from inferscope.export.otlp.series import Exemplar, Scalar, Slices
    from inferscope.export.otlp.traces import TraceSpan
    from inferscope.export.otlp.transport import Sender
    from inferscope.types import Column, RequestRecord

__all__ = ["WAITING_LIMIT", "Samples"]

WAITING_LIMIT: Final = 2 * REQUEST_LIMIT
"""Requests whose spans wait for a receiver; beyond it the oldest are dropped and counted (the ring has them)."""


DEVICE_LIMIT: Final = 2048
"""Latest device spans of requests that are kept until it is known which requests leave as spans: twice what a second may time."""


class Samples:
    """Chooses, builds and sends. `offer` comes from the worker, `device` from the harvester, everything else from the export thread.

    Args:
        limit: Requests of one export that become spans.
    """

    def __init__(self, limit: int = REQUEST_LIMIT) -> None:
        self._identity = Identity()
        self._selection = Selection(limit)
        self._exemplars = Exemplars()
        self._lock = threading.Lock()
        self._columns: Sequence[Column] = ()
        self._sites: Mapping[int, str] = {}
        self._waiting: collections.deque[bytes] = collections.deque()
        self._device: collections.deque[DeviceSpan] = collections.deque(maxlen=DEVICE_LIMIT)
        self.dropped: collections.Counter[str] = collections.Counter()
        self.sent = 0

    @property
    def waiting(self) -> int:
        """Requests whose spans wait for a receiver."""
        return len(self._waiting)

    def offer(self, records: Sequence[RequestRecord], columns: Sequence[Column], sites: Mapping[int, str]) -> None:
        """Put down a window's retained requests."""
        if not records:
            return
        with self._lock:
            self._columns, self._sites = columns, sites
        self._selection.offer(records)
        self._exemplars.offer(records)

    def device(self, span: DeviceSpan) -> None:
        """Put down what a request's work did on its device; it comes before the request's record, which waits for it."""
        if span.request is not None and span.start_ns is not None:
            self._device.append(span)

    def _work(self, chosen: Sequence[RequestRecord], slices: Slices) -> dict[int, list[DeviceSpan]]:
        """Device spans of the chosen requests, by request, as they were issued."""
        found: dict[int, list[DeviceSpan]] = {record.id: [] for record in chosen}
        for span in tuple(self._device) if found else ():
            mine = found.get(getattr(span.request, "id", -1))
            if mine is not None:
                mine.append(span)
            slices.step()
        for each in found.values():
            each.sort(key=lambda span: span.issue_ns)
        return found

    def take(
        self, resource: Mapping[str, Scalar], slices: Slices, *, send: bool, shown: bool
    ) -> tuple[list[bytes], dict[tuple[str, ...], tuple[Exemplar, ...]]]:
        """The requests of the time since the last call as a line for the ring, and exemplars.

        Spans live as objects for one request at a time: keeping those of 64 requests until they are sent, and freeing them in one go, would
        hold the interpreter for a millisecond and feed the garbage collector.

        Args:
            resource: Resource attributes.
            slices: Where to yield.
            send: Keep the spans for `deliver`.
            shown: Whether our spans can be looked up where the exemplars go, so that an exemplar may name one.
        """
        with self._lock:
            columns, sites = self._columns, self._sites
        offset_ns = unix_offset_ns()
        sampled: set[int] = set()
        texts: list[bytes] = []
        chosen = self._selection.take()
        shared = shared_work(chosen, columns, self._identity)
        work = self._work(chosen, slices)
        slices.rest()
        for record in chosen:
            with guard("export.traces"):
                spans = request_spans(record, columns, self._identity, offset_ns, sites, shared)
                spans += device_spans(record, columns, self._identity, offset_ns, work[record.id])
                slices.step()
                texts += jsonlines.span_pieces(spans, slices)
                if send:
                    self._encode(spans, slices)
                sampled.add(record.id)
        while len(self._waiting) > WAITING_LIMIT:
            self._waiting.popleft()
            self.dropped["trace"] += 1
        line = jsonlines.traces_pieces(texts, resource) if texts else []
        return line, self._exemplars.take(self._identity, offset_ns, sampled if shown else ())

    def _encode(self, spans: Sequence[TraceSpan], slices: Slices) -> None:
        from inferscope.export.otlp import protobuf

        encoded: list[bytes] = []
        for item in spans:
            encoded.append(protobuf.span(item))
            slices.step()
        self._waiting.append(b"".join(encoded))

    def deliver(self, sender: Sender, resource: Mapping[str, Scalar], left_s: Callable[[], float], *, force: bool) -> bool:
        """Send what waits, at most `REQUEST_LIMIT` requests at a time; True when nothing waits any more."""
        from inferscope.export.otlp import protobuf

        while self._waiting:
            if not (force or sender.breaker.allows()):
                return False
            count = min(REQUEST_LIMIT, len(self._waiting))
            payload = protobuf.traces_request([self._waiting[i] for i in range(count)], resource)
            outcome = sender.send(payload, left_s(), force=force)
            if outcome not in {Outcome.SENT, Outcome.REJECTED}:
                return False
            for _ in range(count):
                self._waiting.popleft()
            if outcome is Outcome.REJECTED:
                self.dropped["trace_rejected"] += 0 if sender.unknown else count
                return False
            self.sent += count
        return True
