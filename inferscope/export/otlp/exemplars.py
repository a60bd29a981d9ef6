"""Requests that stand for their histogram: the three slowest since the last export, and an ordinary one."""

from __future__ import annotations

import heapq
import random
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from inferscope.clock import NS_PER_S
from inferscope.export.otlp.series import Exemplar
from inferscope.export.otlp.traces import joined_trace
from inferscope.types import Reason

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from inferscope.export.otlp.traces import Identity
    from inferscope.types import RequestRecord

__all__ = ["SLOWEST", "Exemplars"]

SLOWEST: Final = 3


@dataclass(slots=True)
class _Held:
    slowest: list[tuple[int, int, RequestRecord]] = field(default_factory=list[tuple[int, int, "RequestRecord"]])
    ordinary: RequestRecord | None = None
    seen: int = 0


class Exemplars:
    """Collects them by request class; `offer` is called by the worker, `take` by the export thread.

    Profiled requests are none: their durations are not in the histogram.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[tuple[str, ...], _Held] = {}
        self._random = random.Random()  # noqa: S311  (a sample, no secret; the module's own generator belongs to the application)

    def offer(self, records: Iterable[RequestRecord]) -> None:
        """Consider retained records."""
        with self._lock:
            for record in records:
                if record.profiled:
                    continue
                labels = record.key.request, record.key.model or "", record.key.cls or ""
                held = self._held.get(labels)
                if held is None:  # `setdefault` would make one for each record, and bring collections on
                    held = self._held[labels] = _Held()
                item = (record.wall_ns, record.id, record)
                if len(held.slowest) < SLOWEST:
                    heapq.heappush(held.slowest, item)
                else:
                    heapq.heappushpop(held.slowest, item)
                if record.reasons & Reason.RESERVOIR:
                    held.seen += 1
                    if self._random.random() * held.seen < 1:
                        held.ordinary = record

    def take(self, identity: Identity, offset_ns: int, sampled: Collection[int]) -> dict[tuple[str, ...], tuple[Exemplar, ...]]:
        """Exemplars by the labels of the request's distribution, the slowest first.

        Args:
            identity: Gives the ids of our own spans.
            offset_ns: What to add to the record's clock for Unix time.
            sampled: Ids of the records whose spans leave; any other exemplar names the application's span, or none.
        """
        with self._lock:
            taken, self._held = self._held, {}
        found: dict[tuple[str, ...], tuple[Exemplar, ...]] = {}
        for labels, held in taken.items():
            records = [item[-1] for item in sorted(held.slowest, reverse=True)]
            if held.ordinary is not None and all(record.id != held.ordinary.id for record in records):
                records.append(held.ordinary)
            found[labels] = tuple(
                Exemplar(
                    record.wall_ns / NS_PER_S,
                    record.start_ns + record.wall_ns + offset_ns,
                    identity.trace(record) if record.id in sampled else joined_trace(record),
                )
                for record in records
            )
        return found
