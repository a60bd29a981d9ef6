"""One timed region inside (or outside) a request."""

from __future__ import annotations

from threading import get_ident
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar, cast

from inferscope.record.pure.decorate import decorate
from inferscope.types import SpanFlag

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from typing_extensions import Self

    from inferscope.record.pure.registry import Definition
    from inferscope.record.pure.request import Request

    F = TypeVar("F", bound=Callable[..., Any])

__all__ = ["NEVER", "POSITIONS", "Mark", "Span"]

POSITIONS: Final = 64
"""Positions that a request keeps; beyond them sums go on, positions are lost."""


NEVER: Final = -1
"""`start_ns` of a span that was not entered."""
_BITS: Final = 35
"""Durations of fewer bits, up to 17 s, are counted here, longer ones by `Series.record`."""
_SHIFT: Final = tuple(max(bits - 8, 0) for bits in range(_BITS))
_FIRST: Final = tuple(shift << 7 for shift in _SHIFT)


class Mark:
    """A positioned interval that was measured elsewhere."""

    __slots__ = ("aux", "column", "end_ns", "flags", "parent", "start_ns")

    def __init__(self, parent: Span | Request | Mark, column: int, start_ns: int, end_ns: int, flags: int, aux: int) -> None:
        self.parent = parent
        self.column = column
        self.start_ns = start_ns
        self.end_ns = end_ns
        self.flags = flags
        self.aux = aux


class Span:
    """A stage's context manager and decorator; times a region and gives its exclusive time to the stage's column.

    Every closed span adds its duration to its own column and takes it from its parent's, so a vector is exact at any moment.

    Args:
        stage: What spans of this name share.
    """

    __slots__ = ("column", "end_ns", "flags", "inner", "parent", "request", "stage", "start_ns")

    column: int
    stage: Definition
    start_ns: int
    parent: Span | Request
    request: Request | None
    inner: list[Span]
    end_ns: int
    flags: int

    kind: ClassVar[str] = "with"
    """What hooks are told: `with`, `call`, or empty for those that hooks do not hear of."""

    aux: int = 0
    """Nothing besides the time; a property would be a call for each span of a retained request."""

    @classmethod
    def of(cls, stage: Definition) -> Self:
        """A span of a stage. There is no `__init__`: the call would cost a tenth of the whole."""
        made = cls()
        made.stage = stage
        made.column = stage.column
        made.start_ns = NEVER
        return made

    @property
    def name(self) -> str:
        """The stage's name."""
        return self.stage.name

    def __enter__(self) -> Self:
        stage = self.stage
        if self.start_ns != NEVER:
            return self._enter_again()
        try:
            current = stage.current
            self.request = request = current()
            if request is not None:
                self.parent = parent = request.top  # type: ignore[assignment]  # None: closed, and this span will be late
                if parent is not None:
                    if request.wanted and self.kind:
                        stage.shared.enter_hook(request, stage.name, self.kind)
                    self.flags = 0 if get_ident() == request.ident else request.elsewhere()
                    spans = request.spans
                    if len(spans) < POSITIONS:
                        spans.append(self)
                    else:
                        request.truncated = True
                    request.top = self
            clock = stage.clock
            self.start_ns = clock()
        except Exception:  # noqa: BLE001 - nothing of ours reaches the application
            self._undo()
            self.__class__ = cast(Any, _Dead)
            stage.shared.failed()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        stage = self.stage
        try:
            clock = stage.clock
            end = clock()
            duration = end - self.start_ns
            bits = duration.bit_length()
            if bits < _BITS and duration >= 0:
                # The coarse layout of `Series.index_of` by table: a call would cost as much as the rest.
                stage.counts[_FIRST[bits] + (duration >> _SHIFT[bits])] += 1
                stage.series.sum_ns += duration
            else:
                stage.series.record(duration)
            request = self.request
            if request is not None:
                if request.top is self:
                    self.end_ns = request.latest_ns = end
                    request.top = parent = self.parent
                    vector = request.vector
                    vector[self.column] += duration
                    vector[parent.column] -= duration
                else:
                    request.left(self, end)
                if kind is not None:
                    self.flags |= SpanFlag.ERROR
                if request.wanted and self.kind:
                    stage.shared.exit_hook(request, stage.name, self.kind)
        except Exception:  # noqa: BLE001 - nothing of ours reaches the application
            self._undo()
            stage.shared.failed()

    def _enter_again(self) -> Self:
        """Open another span in place of this one, which is open or keeps its position in a record."""
        try:
            if self.__class__ is Span:
                self.inner = []
                self.__class__ = cast(Any, _Reentered)
            again = Span.of(self.stage)
            self.inner.append(again)
            again.__enter__()
        except Exception:  # noqa: BLE001 - nothing of ours reaches the application
            self.stage.shared.failed()
        return self

    def _undo(self) -> None:
        """After a failure of ours: leave the request as if this span had never been the innermost one."""
        request: Request | None = getattr(self, "request", None)
        if request is not None and request.top is self:
            request.top = self.parent
        if request is not None and self.start_ns == NEVER and request.spans and request.spans[-1] is self:
            request.spans.pop()

    def __call__(self, function: F) -> F:
        """Time every call of a function, coroutine function, generator or asynchronous generator under this name."""
        stage = self.stage
        return decorate(function, lambda kind: _KINDS[kind].of(stage), stage.shared)


class _Reentered(Span):
    """A span that was entered again while it was open, or after; exits go to the innermost entry first."""

    __slots__ = ()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.inner:
            self.inner.pop().__exit__(kind, error, trace)
        elif not hasattr(self, "end_ns"):
            super().__exit__(kind, error, trace)


class _Dead(Span):
    """A span whose entry failed: its exit has nothing to do."""

    __slots__ = ()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Nothing was opened."""


class _Call(Span):
    """One call of a decorated function."""

    __slots__ = ()
    kind = "call"


class _Unheard(Span):
    """One run of a decorated coroutine function or generator: others run in between, so hooks do not hear of it."""

    __slots__ = ()
    kind = ""


_KINDS: Final[dict[str, type[Span]]] = {"with": Span, "call": _Call, "": _Unheard}
