"""The unit that an objective judges, and the root of its spans."""

from __future__ import annotations

import sys
import time
from array import array
from threading import get_ident
from typing import TYPE_CHECKING, Final, TypeVar

from inferscope.record.pure.critical import critical_path, pack
from inferscope.record.pure.decorate import decorate
from inferscope.record.pure.host import thread_switches, whole
from inferscope.record.pure.span import POSITIONS, Mark, Span
from inferscope.record.pure.state import name_of_error
from inferscope.types import COLUMN_LIMIT, Reason, SpanFlag

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextvars import Token
    from types import FrameType, TracebackType
    from typing import Any

    from typing_extensions import Self

    from inferscope.record.pure.classes import RequestClass
    from inferscope.record.pure.recorder import Recorder
    from inferscope.record.pure.settle import Pin
    from inferscope.record.pure.state import Traffic

    F = TypeVar("F", bound=Callable[..., Any])

__all__ = ["Request"]

_SUSPENDING: Final = 0x20 | 0x80 | 0x100 | 0x200
"""Code flags of generators, coroutines, generator-based coroutines and asynchronous generators."""

_BLANK: Final = [0] * COLUMN_LIMIT


class Request:
    """One request: context manager, decorator, and what is current while it is open.

    Args:
        recorder: Where it is counted.
        name: Request name.
        size: Whatever makes work larger; settable.
        items: For throughput; settable.
        model: Model name.
        cls: A bounded class, such as a tenant tier.
        started_ns: True arrival on the recorder's clock; earlier than the entry, it moves the start.
        kind: What hooks are told: `with` or `call`.
    """

    __slots__ = (
        "__weakref__", "_before", "_depth", "_generation", "_kind", "_of", "_outer", "_recorder", "_started_ns", "_token", "_traffic", "_weight",
        "cls", "column", "cpu_known", "end_ns", "error", "handed", "id", "ident", "items", "latest_ns", "model", "name", "native_id", "open",
        "overlapping", "pin", "profiled", "size", "spans", "start_ns", "top", "trace", "truncated", "vector", "wanted",
    )  # fmt: skip

    top: Span | Request | None
    ident: int
    native_id: int
    latest_ns: int
    truncated: bool
    overlapping: bool
    cpu_known: bool
    _generation: int
    _of: RequestClass
    _traffic: Traffic
    _weight: int

    def __init__(
        self,
        recorder: Recorder,
        name: str,
        size: float | None = None,
        items: int = 1,
        model: str | None = None,
        cls: str | None = None,
        started_ns: int | None = None,
        kind: str = "with",
    ) -> None:
        self._recorder = recorder
        self.name = name
        self.size = size
        self.items = items
        self.model = model
        self.cls = cls
        self._started_ns = started_ns
        self._kind = kind
        self._depth = 0
        self._token: Token[Request | None] | None = None
        self._outer: Span | None = None
        self._before: tuple[int, int, int, int] | None = None
        self.id = 0
        self.start_ns = 0
        self.end_ns = 0
        self.column = 0  # the time that no span owns
        self.open = False
        self.handed = False
        self.top = None
        self.wanted = False
        self.profiled = False
        self.pin: Pin | None = None
        self.trace: tuple[str, ...] | None = None
        self.error: str | None = None
        self.spans: list[Span | Mark] = []
        self.vector = _BLANK

    @property
    def stage_name(self) -> str | None:
        """Where who holds a lock in no stage is."""
        return None

    def __enter__(self) -> Self:
        if self.open:
            self._depth += 1
            return self
        recorder = self._recorder
        try:
            self._begin(recorder, sys._getframe(1))  # pyright: ignore[reportPrivateUsage] - documented in `sys`
        except Exception:  # noqa: BLE001 - nothing of ours reaches the application
            recorder.failed()
        return self

    def _begin(self, recorder: Recorder, caller: FrameType) -> None:
        """Open the request and make it current."""
        outer = recorder.context.get()
        nested = outer is not None and outer.open
        self._of = of = recorder.registry.request_class(self.name, self.model, self.cls)
        thread = recorder.thread
        self._traffic = traffic = thread.traffic
        self.ident, self.native_id = get_ident(), thread.native_id
        self._generation = recorder.generation
        if self.id:
            self.wanted = self.profiled = False
            self.trace = self.error = None
        self.id = recorder.next_id()
        self._clear()
        if nested:
            self._outer = Span.of(recorder.registry.nested(of.name))
            self._outer.__enter__()
        else:
            self._outer = None
            traffic.entered += 1
        mode = recorder.cpu_mode
        self._weight = of.cpu_weight() if mode == "auto" else int(mode == "on")
        # A frame that can be suspended, or another request of this thread, would add foreign CPU time.
        own = 1 if nested and outer is not None and outer.shares(traffic) else 0
        self.cpu_known = bool(self._weight) and not caller.f_code.co_flags & _SUSPENDING and traffic.open == own
        self._before = self._readings() if self.cpu_known else None
        self._start(recorder)

    def _clear(self) -> None:
        """Forget what an earlier entry recorded."""
        self.spans, self.vector = [], _BLANK.copy()
        self.latest_ns = self.end_ns = self._depth = 0
        self.truncated = self.overlapping = False

    def shares(self, traffic: Traffic) -> bool:
        """Whether this request was entered on the thread of `traffic`."""
        return self._traffic is traffic

    def _start(self, recorder: Recorder) -> None:
        """Read the start, become current, tell the hooks."""
        now = recorder.clock()
        arrival = self._started_ns
        self.start_ns = now if arrival is None or arrival > now else int(arrival)
        self.open, self.top = True, self
        if self._outer is None:
            self._traffic.open += 1
        self._token = recorder.context.set(self)
        if self.start_ns < now:
            recorder.interval("queue", "backlog", self.start_ns, now)
        if recorder.armed:
            recorder.start_hook(self)
        if self.wanted and self._kind:
            recorder.enter_hook(self, self.name, self._kind)

    def _readings(self) -> tuple[int, int, int, int] | None:
        """Thread CPU in ns, voluntary and involuntary switches, requests entered on this thread."""
        switches = thread_switches()
        return None if switches is None else (time.thread_time_ns(), *switches, self._traffic.entered)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._depth:
            self._depth -= 1
            return
        try:
            self.finish(None if kind is None else kind.__qualname__)
        except Exception:  # noqa: BLE001 - nothing of ours reaches the application
            self._recorder.failed()
        finally:
            self._leave()

    def _leave(self) -> None:
        """Make the outer request current again, also when another context than the entry's runs this."""
        token, self._token = self._token, None
        if token is None:
            return
        context = self._recorder.context
        try:
            context.reset(token)
        except (ValueError, RuntimeError):
            if context.get() is self:
                context.set(None)

    def finish(self, error: type[BaseException] | BaseException | str | bool | None = None) -> None:  # noqa: FBT001  (anything that tells)
        """Close and count the request now, from any thread or task; later calls do nothing.

        Args:
            error: What went wrong: a name, an exception or its type, or True; unless `error` is set already.
        """
        if not self.open:
            return
        recorder = self._recorder
        end = recorder.clock()
        self.open = False
        try:
            if error is not None and self.error is None:
                self.error = name_of_error(error)
            self._close(recorder, end)
            if self._generation == recorder.generation:
                self._count(recorder, end - self.start_ns)
        except Exception:  # noqa: BLE001 - nothing of ours reaches the application
            recorder.failed()
        finally:
            self._forget_pin()
            # Spans refer to their request: left here, they would be a cycle, and work for the garbage collector.
            self.spans = []

    def began(self) -> None:
        """The first value of a stream is handed over; later ones say nothing."""
        if self.handed or not self.open:
            return
        self.handed = True
        self._recorder.interval("first_byte", self._of.name, self.start_ns, self._recorder.clock())

    def discard(self) -> None:
        """Close without counting; later spans are late."""
        if self.open:
            end = self._recorder.clock()
            self.open = False
            try:
                self._close(self._recorder, end)
            except Exception:  # noqa: BLE001 - nothing of ours reaches the application
                self._recorder.failed()
            finally:
                self._forget_pin()
                self.spans = []

    def _close(self, recorder: Recorder, end: int) -> None:
        """End open spans here and settle the vector, which then sums to the wall time exactly."""
        self._traffic.open -= self._outer is None
        self._end_open(end)
        if self._outer is not None:
            self._outer.__exit__(None, None, None)
        if self.overlapping:
            self.vector = critical_path(self.spans, self.start_ns, end, COLUMN_LIMIT)
        else:
            self.vector[0] += end - self.start_ns
        if self.pin is not None:
            self.pin.apply(self.vector)
        if self.wanted:
            if self._kind:
                recorder.exit_hook(self, self.name, self._kind)
            recorder.finish_hook(self, end - self.start_ns)

    def _end_open(self, end: int) -> None:
        """End what is still open."""
        self.end_ns = end
        node, self.top = self.top, None
        while isinstance(node, Span):
            node.end_ns = end
            duration = end - node.start_ns
            self.vector[node.column] += duration
            self.vector[node.parent.column] -= duration
            node = node.parent

    def _count(self, recorder: Recorder, wall_ns: int) -> None:
        """Fold the request into its class; hand it over when something asks for it."""
        of = self._of
        if self.error is not None and of.withhold(wall_ns, self.error):
            if self.pin is not None:
                recorder.pins.forget(self.id)
                self.pin = None
            return
        before, after = self._before, None
        if before is not None and self.cpu_known and get_ident() == self.ident:
            after = self._readings()
        cpu = switched = forced = None
        if before is not None and after is not None and before[3] == after[3]:
            cpu, switched, forced = after[0] - before[0], after[1] - before[1], after[2] - before[2]
        of.count_request(wall_ns, whole(self.items), self.error, profiled=self.profiled)
        if self.truncated:
            of.truncated += 1
            recorder.losses.truncated += 1
        row = -1
        if self.profiled:
            of.excluded += 1
        else:
            row = of.count_latency(wall_ns, self.vector)
            if cpu is not None:
                of.count_cpu(cpu, wall_ns, self._weight)
        self._retain(recorder, wall_ns, row, (cpu, switched, forced))

    def _retain(self, recorder: Recorder, wall_ns: int, row: int, cpu: tuple[int | None, int | None, int | None]) -> None:
        """Put the whole record in the reader's queue if there is a reason to."""
        of = self._of
        reasons = recorder.retention.decide(of, wall_ns, row, profiled=self.profiled)
        pin, self.pin = self.pin, None
        kept = bool(reasons) and recorder.retention.room()
        if pin is not None and (kept or row >= 0):
            recorder.pins.hold(self.id, pin, row, self.vector, len(recorder.registry.columns))
        elif pin is not None:
            recorder.pins.forget(self.id)
        if kept:
            if self.trace is None and reasons & ~Reason.RESERVOIR:
                recorder.ask_trace(self)
            band = row if row >= 0 else of.row_of(wall_ns)
            vector = array("q", self.vector[: len(recorder.registry.columns)]).tobytes()
            spans = pack(self.spans, self.native_id)
            recorder.retention.put(
                (
                    self.id, of.index, self.start_ns, wall_ns, band, reasons, self.native_id, self.size, self.items, self.error,
                    *cpu, self.truncated, vector, spans, self.trace,
                ),
                pin,
            )  # fmt: skip

    def _forget_pin(self) -> None:
        """After an end that was not counted."""
        if self.pin is not None:
            self._recorder.pins.forget(self.id)
            self.pin = None

    def pinned(self) -> int:
        """Note that a device span is pending; gives what `settle` and `unpin` take, 0 for a request that closed."""
        return self._recorder.pins.pin(self, self._of) if self.open else 0

    def elsewhere(self) -> int:
        """Flags of a span that runs on another thread than the request's entry; its CPU time is then unknown."""
        self.cpu_known = False
        return SpanFlag.OTHER_THREAD | self._recorder.thread.native_id << 8

    def late(self) -> None:
        """Count something that came after the end."""
        self._of.late_spans += 1
        self._recorder.losses.late_spans += 1

    def belongs_to(self, recorder: Recorder) -> bool:
        """Whether a recorder made this request."""
        return self._recorder is recorder

    def left(self, span: Span, end: int) -> None:
        """A span that is not the innermost one was left: after the request's end, or while another one still runs."""
        if not self.open:
            self.late()
            return
        span.end_ns = end
        self.overlapping = True
        node = self.top
        while isinstance(node, Span):
            if node.parent is span:
                # It outlives its supposed parent, so it was never a part of it.
                node.parent = span.parent
            node = node.parent

    def place(self, column: int, start_ns: int, end_ns: int, flags: int, aux: int) -> None:
        """Put a measured interval under the innermost open span that covers its start."""
        parent = self.top
        if parent is None:
            self.late()
            return
        start, end = max(start_ns, self.start_ns), min(end_ns, self._recorder.clock())
        if end < start:
            return
        passed = 0
        while isinstance(parent, Span) and parent.start_ns > start:
            passed, parent = parent.start_ns, parent.parent
        if start < self.latest_ns or (passed and end > passed):
            self.overlapping = True
        if get_ident() != self.ident:
            flags |= self.elsewhere()
        if len(self.spans) < POSITIONS:
            self.spans.append(Mark(parent, column, start, end, flags, aux))
        else:
            self.truncated = True
        self.vector[column] += end - start
        self.vector[parent.column] -= end - start
        self.latest_ns = max(self.latest_ns, end)

    def __call__(self, function: F) -> F:
        """Make every call of a function a request of this name, with these arguments."""
        recorder = self._recorder
        name, size, items, model, cls, started_ns = self.name, self.size, self.items, self.model, self.cls, self._started_ns
        return decorate(function, lambda kind: Request(recorder, name, size, items, model, cls, started_ns, kind), recorder)
