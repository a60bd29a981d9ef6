"""Single requests on their way out: as spans, and as exemplars of the histograms they are counted in."""

from __future__ import annotations

import collections
import threading
from typing import TYPE_CHECKING, Final

from inferscope.clock import unix_offset_ns
from inferscope.export.otlp.exemplars import Exemplars
from inferscope.export.otlp.traces import REQUEST_LIMIT, Identity, Selection, request_spans
from inferscope.export.otlp.transport import Outcome
from inferscope.guard import guard

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from inferscope.export.otlp.series import Exemplar, Scalar, Slices
    from inferscope.export.otlp.traces import TraceSpan
    from inferscope.export.otlp.transport import Sender
    from inferscope.types import Column, RequestRecord

__all__ = ["WAITING_LIMIT", "Samples"]

WAITING_LIMIT: Final = 2 * REQUEST_LIMIT
"""Requests whose spans wait for a receiver; beyond it the oldest are dropped and counted (the ring has them)."""


class Samples:
    """Chooses, builds and sends. `offer` comes from the worker, everything else from the export thread.

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
        self._waiting: collections.deque[tuple[TraceSpan, ...]] = collections.deque()
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

    def take(self, slices: Slices, *, send: bool, shown: bool) -> tuple[list[TraceSpan], dict[tuple[str, ...], tuple[Exemplar, ...]]]:
        """Spans and exemplars of the time since the last call.

        Args:
            slices: Where to yield.
            send: Keep the spans for `deliver`.
            shown: Whether our spans can be looked up where the exemplars go, so that an exemplar may name one.
        """
        with self._lock:
            columns, sites = self._columns, self._sites
        offset_ns = unix_offset_ns()
        sampled: set[int] = set()
        spans: list[TraceSpan] = []
        for record in self._selection.take():
            with guard("export.traces"):
                made = request_spans(record, columns, self._identity, offset_ns, sites)
                sampled.add(record.id)
                spans += made
                if send:
                    self._waiting.append(made)
            slices.step()
        while len(self._waiting) > WAITING_LIMIT:
            self._waiting.popleft()
            self.dropped["trace"] += 1
        return spans, self._exemplars.take(self._identity, offset_ns, sampled if shown else ())

    def deliver(self, sender: Sender, resource: Mapping[str, Scalar], slices: Slices, left_s: Callable[[], float], *, force: bool) -> bool:
        """Send what waits, at most `REQUEST_LIMIT` requests at a time; True when nothing waits any more."""
        from inferscope.export.otlp import protobuf

        while self._waiting:
            if not (force or sender.breaker.allows()):
                return False
            chosen = [self._waiting[i] for i in range(min(REQUEST_LIMIT, len(self._waiting)))]
            encoded: list[bytes] = []
            for item in (span for spans in chosen for span in spans):
                encoded.append(protobuf.span(item))
                slices.step()
            outcome = sender.send(protobuf.traces_request(encoded, resource), left_s(), force=force)
            if outcome not in {Outcome.SENT, Outcome.REJECTED}:
                return False
            for _ in chosen:
                self._waiting.popleft()
            if outcome is Outcome.REJECTED:
                self.dropped["trace_rejected"] += len(chosen)
                return False
            self.sent += len(chosen)
        return True
