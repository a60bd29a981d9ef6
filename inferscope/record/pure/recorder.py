"""The recorder of one process: names in, counts and retained requests out."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar, cast

from inferscope.record.compiled import recorder_request, recorder_stage, seen_as
from inferscope.record.pure.attach import Attachment
from inferscope.record.pure.blame import Sites, stage_of
from inferscope.record.pure.carrier import Carrier
from inferscope.record.pure.lock import InstrumentedLock, instrument
from inferscope.record.pure.noop import NOOP, Noop
from inferscope.record.pure.registry import NAME_LIMIT, NO_COLUMN, Registry
from inferscope.record.pure.request import Request
from inferscope.record.pure.retention import Retention
from inferscope.record.pure.span import NEVER, Span
from inferscope.record.pure.splice import splice
from inferscope.record.pure.state import Shared, ThreadState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from typing_extensions import Buffer

    from inferscope.record.pure.splice import Packed
    from inferscope.record.pure.state import FinishHook, SpanHook, StartHook

__all__ = ["Recorder"]

_EDGE_LIMIT = 4
_COROUTINE = 0x80

L = TypeVar("L")


class Recorder(Shared):
    """Times requests, stages, locks and intervals; read by one worker, which never blocks a writer.

    Args:
        clock: Source of nanoseconds for tests; None is `time.perf_counter_ns`.
    """

    def __init__(self, *, clock: Callable[[], int] | None = None) -> None:
        super().__init__(clock)
        self.next_id = count(1).__next__
        self.registry = Registry(self)
        self.stages = self.registry.stages
        self.retention = Retention(self.losses)
        self.sites = Sites()
        self.lock_holds = True

    @seen_as(recorder_stage)
    def stage(self, name: str, /) -> Span:
        """A span of a stage: `with recorder.stage("x"):` or `@recorder.stage("x")`; while disabled the no-op, which acts as one."""
        try:
            if not self.enabled:
                return NOOP  # type: ignore[return-value]  # a union is no typed decorator
            made = Span()  # as `Span.of`, whose call would cost a tenth of the whole
            made.stage = definition = self.stages[name]
            made.column = definition.column
            made.start_ns = NEVER
            return made
        except Exception:  # noqa: BLE001 - nothing of ours reaches the application
            self.failed()
            return NOOP  # type: ignore[return-value]

    @seen_as(recorder_request)
    def request(
        self,
        name: str,
        /,
        *,
        size: float | None = None,
        items: int = 1,
        model: str | None = None,
        cls: str | None = None,
        started_ns: int | None = None,
    ) -> Request:
        """A request: context manager and decorator; while disabled the no-op, which acts as one.

        Args:
            name: Request name; low cardinality.
            size: Whatever makes work larger (tokens, rows, pixels).
            items: Things done, for throughput.
            model: Model name.
            cls: A bounded class, such as a tenant tier.
            started_ns: True arrival on the recorder's clock; the time up to the entry is the queue `backlog`.
        """
        return Request(self, name, size, items, model, cls, started_ns) if self.enabled else NOOP  # type: ignore[return-value]

    def lock(self, name: str, lock: L, /) -> L:
        """A wrapper that acts as the lock and times waits and holds under a name; asyncio's locks too.

        What cannot be wrapped, or was wrapped already, is returned as it is.
        """
        try:
            if isinstance(lock, InstrumentedLock) or type(lock).__name__ == "InstrumentedAsyncLock":
                return lock
            code = getattr(getattr(lock, "acquire", None), "__code__", None)
            if code is not None and code.co_flags & _COROUTINE:
                from inferscope.record.locks import wrap_async  # asyncio is dear, and most applications that want it have it

                return cast(L, wrap_async(self, name, lock))
            return cast(L, instrument(self, name, lock))
        except Exception:  # noqa: BLE001 - nothing of ours reaches the application
            self.failed()
            return lock

    def lock_sites(self) -> list[tuple[str, int, str, str | None, int, int, int, str | None]]:
        """Lock, site id, site, holder's stage, waits, summed wait and longest hold in ns, holder's request: where holds began that others waited for."""
        return self.sites.rows()

    def _site(self, lock: str, site: str, stage: str | None, request: str | None) -> int:
        """The id of a site, for locks written in Python over either core."""
        return self.sites.find(lock, site, stage, request)

    def _blame(self, site_id: int, wait_ns: int, hold_ns: int = 0) -> None:
        """Add a wait (none when below 0) and a hold to a site, for locks written in Python over either core."""
        self.sites.blame(site_id, wait_ns, hold_ns)

    def _stage_of(self, request: Request | None) -> str | None:
        """The innermost open stage of a request, for locks written in Python over either core."""
        return stage_of(request)

    def interval(
        self, kind: str, name: str, start_ns: int, end_ns: int, /, *, flags: int = 0, aux: int = 0, request: Request | None = None
    ) -> None:
        """Count an interval that was measured elsewhere and place it in the current (or given) request; never raises."""
        if not self.enabled:
            return
        try:
            definition = self.registry.interval(kind, name)
            definition.series.record(end_ns - start_ns)
            into = self.context.get() if request is None else request
            if isinstance(into, Request) and definition.column != NO_COLUMN:
                into.place(definition.column, start_ns, end_ns, flags, aux)
        except Exception:  # noqa: BLE001 - nothing of ours reaches the application
            self.failed()

    def carrier(self, name: str, /) -> Carrier | Noop:
        """A context manager for work that belongs to several requests, or to a request of another process.

        Spans inside the block find it as the current request, but it is no request: it is counted once, in the series
        `batch` of its name. After the block `packed` holds its spans as a tuple that pickles, for `splice`.

        Args:
            name: Of the work; low cardinality.
        """
        try:
            return Carrier(self, self.registry.interval("batch", name)) if self.enabled else NOOP
        except Exception:  # noqa: BLE001 - nothing of ours reaches the application
            self.failed()
            return NOOP

    def splice(self, packed: Packed | None, request: Request | Noop | None, /) -> None:
        """Hang what a carrier packed into an open request, under the spans that waited for it; no series counts it again.

        Never raises: a request that closed already counts a late span, a malformed record counts as an error of ours.

        Args:
            packed: From a carrier of this process or of another one on this machine; None does nothing.
            request: Of this recorder.
        """
        if not self.enabled or packed is None or not isinstance(request, Request) or not request.belongs_to(self):
            return
        try:
            if request.open:
                self.pins.inherit(splice(packed, request, self.registry, self.clock()), request)
            else:
                request.late()
        except Exception:  # noqa: BLE001 - nothing of ours reaches the application
            self.failed()

    def idle_since(self, request: Request | Noop | None, /) -> int:
        """When an open request last began or ended a span; since then it waits, or works on what has no name. 0 when closed."""
        top = request.top if isinstance(request, Request) else None
        return 0 if request is None or top is None else max(top.start_ns, request.latest_ns)

    def column(self, kind: str, name: str, /) -> int:
        """Index of a column of the exclusive vectors, made when there is room; 1 (`other`) when there is none."""
        return self.registry.column(str(kind)[:NAME_LIMIT], str(name)[:NAME_LIMIT])

    def pin(self, request: Request | Noop | None, /) -> int:
        """Say that a device span of an open request is pending.

        Returns:
            A reference for `settle` and `unpin`; 0, which they ignore, when there is nothing that could settle.
        """
        return request.pinned() if isinstance(request, Request) and request.belongs_to(self) else 0

    def settle(self, ref: int, from_column: int, to_column: int, ns: int, /) -> int:
        """Move time of a pinned request from one column to another, in its vector and in its band; both keep their sums.

        Args:
            ref: From `pin`.
            from_column: What owned the time so far; it gives no more than it holds.
            to_column: What owns it now.
            ns: How much.

        Returns:
            What was moved, 0 when the request's data came too late. While the request is open it is noted and moved at the end.
        """
        columns = len(self.registry.columns)
        known = 0 <= from_column < columns and 0 <= to_column < columns
        return self.pins.settle(ref, from_column, to_column, ns) if known else 0

    def unpin(self, ref: int, /) -> None:
        """One pending device span less: what `pin` began, after the last `settle` of that span, also when the span was lost."""
        self.pins.unpin(ref)

    def current(self) -> Request | None:
        """The current request of this thread or task; None when there is none or it closed."""
        request = self.context.get()
        return request if request is not None and request.open else None

    def attach(self, request: Request | Noop | None) -> Attachment:
        """A context manager that makes `request` current in this thread or task."""
        return Attachment(self, request if isinstance(request, Request) else None)

    def set_edges(self, request_name: str, edges_ns: Sequence[int]) -> None:
        """Put at most 4 exact objective edges in force for every class of a request."""
        self.registry.set_edges(request_name, tuple(sorted({int(edge) for edge in edges_ns}))[:_EDGE_LIMIT])

    def set_hooks(
        self,
        *,
        on_start: StartHook | None = None,
        on_enter: SpanHook | None = None,
        on_exit: SpanHook | None = None,
        on_finish: FinishHook | None = None,
    ) -> None:
        """Replace all four hooks; what they raise is swallowed and counted.

        Args:
            on_start: At each request's start while `armed`; True makes the request wanted.
            on_enter: Before each span of a wanted request, and for the request itself.
            on_exit: After each of them.
            on_finish: When a wanted request finished, before it is counted; may set `request.profiled`.
        """
        self.on_start, self.on_enter, self.on_exit, self.on_finish = on_start, on_enter, on_exit, on_finish

    def columns(self) -> list[tuple[str, str]]:
        """Kind and name of each column of the exclusive vectors; grow-only."""
        return list(self.registry.columns)

    def series(self) -> list[tuple[int, str, tuple[str, ...], int, int, int]]:
        """Index, kind, labels, digits, lowest ns and number of counts of each series; grow-only."""
        return [(s.index, s.kind, s.labels, s.digits, s.lowest_ns, len(s.counts)) for s in tuple(self.registry.series)]

    def read_counts(self, index: int, buffer: Buffer) -> tuple[int, int, int]:
        """Copy a series' running counts to a writable int64 buffer; gives count, sum in ns and clamped.

        Raises:
            IndexError: No such series.
            ValueError: The buffer is too short.
        """
        return self.registry.series[index].read(buffer)

    def classes(self) -> list[tuple[int, str, str | None, str | None, int, tuple[int, ...]]]:
        """Index, request, model, class, series index and edges of each request class; grow-only."""
        return [(c.index, c.name, c.model, c.cls, c.series.index, c.edges) for c in tuple(self.registry.classes)]

    def read_class(self, index: int) -> dict[str, int | tuple[int, ...]]:
        """A class's running totals.

        Raises:
            IndexError: No such class.
        """
        return self.registry.classes[index].read()

    def read_bands(self, index: int) -> tuple[bytes, bytes, bytes]:
        """A class's running band sums: ids (int32), counts (int64), sums (int64, rows by columns), by ascending latency.

        Raises:
            IndexError: No such class.
        """
        of = self.registry.classes[index]
        return of.bands.read(of.edges, len(self.registry.columns))

    def drain(self) -> list[tuple[Any, ...]]:
        """Requests retained since the last call, but those that wait for device data; see `inferscope.record.core`."""
        self.pins.expire()
        return self.retention.drain()

    def begin_epoch(self, *, breaching: int = 2048, reservoir: int = 64, slowest: int = 32) -> None:
        """Renew the retention budgets.

        Args:
            breaching: Requests above their first edge, all classes together.
            reservoir: Requests sampled from each band of each class.
            slowest: Size of each class's list of the slowest.
        """
        self.retention.begin_epoch(tuple(self.registry.classes), breaching, reservoir, slowest)

    def counters(self) -> dict[str, int]:
        """Everything that was dropped or failed."""
        return {**self.losses.as_dict(), "clamped": sum(s.clamped for s in tuple(self.registry.series))}

    def after_fork(self) -> None:
        """In the child: forget counts, retained requests and open requests; names stay."""
        self.generation += 1
        self.thread = ThreadState()
        self.registry.after_fork()
        self.pins.clear()
        self.retention.clear()
        self.sites.clear()
        self.losses.clear()
        self.context.set(None)
