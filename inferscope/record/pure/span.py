"""One timed region inside (or outside) a request."""

from __future__ import annotations

from threading import get_ident
from typing import TYPE_CHECKING, Final, TypeVar

from inferscope.record.pure.decorate import decorate
from inferscope.record.pure.histogram import HIGHEST_NS
from inferscope.types import SpanFlag

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Any

    from inferscope.record.pure.registry import Definition
    from inferscope.record.pure.request import Request

    F = TypeVar("F", bound=Callable[..., Any])

__all__ = ["POSITIONS", "Mark", "Span"]

POSITIONS: Final = 64
"""Positions that a request keeps; beyond them sums go on, positions are lost."""


_NEVER: Final = -1


class Mark:
    """A positioned interval that was measured elsewhere."""

    __slots__ = ("aux", "column", "end_ns", "flags", "parent", "start_ns")

    def __init__(self, parent: Span | Request, column: int, start_ns: int, end_ns: int, flags: int, aux: int) -> None:
        self.parent = parent
        self.column = column
        self.start_ns = start_ns
        self.end_ns = end_ns
        self.flags = flags
        self.aux = aux


class Span:
    """A stage's context manager and decorator; times a region and gives its exclusive time to the stage's column.

    Args:
        stage: What spans of this name share.
        kind: What hooks are told: `with` or `call`.
    """

    __slots__ = ("child_ns", "end_ns", "flags", "inner", "kind", "latest_ns", "parent", "request", "stage", "start_ns")

    aux: Final = 0
    parent: Span | Request
    request: Request | None

    def __init__(self, stage: Definition, kind: str = "with") -> None:
        self.stage = stage
        self.kind = kind
        self.start_ns = _NEVER
        self.inner: list[Span] | None = None

    @property
    def column(self) -> int:
        """Column of the exclusive vector."""
        return self.stage.column

    @property
    def name(self) -> str:
        """The stage's name."""
        return self.stage.name

    def __enter__(self) -> Span:
        stage = self.stage
        if self.start_ns >= 0:
            return self._enter_again()
        try:
            request = stage.current()
            self.request = request
            if request is not None and request.open:
                if request.wanted:
                    stage.shared.enter_hook(request, stage.name, self.kind)
                self.parent = request.top
                self.child_ns = self.latest_ns = self.end_ns = 0
                self.flags = 0 if get_ident() == request.ident else request.elsewhere()
                spans = request.spans
                if len(spans) < POSITIONS:
                    spans.append(self)
                else:
                    request.truncated = True
                request.top = self
            self.start_ns = stage.clock()
        except Exception:
            self._undo()
            stage.shared.failed()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        stage = self.stage
        try:
            if self.inner:
                self.inner.pop().__exit__(kind, error, trace)
                return
            start = self.start_ns
            if start < 0:
                return
            end = stage.clock()
            duration = end - start
            if 0 <= duration <= HIGHEST_NS:
                # The coarse layout of `Series.index_of`, inline: a call would cost as much as the rest.
                bucket = (duration | 255).bit_length() - 8
                index = (bucket << 7) + (duration >> bucket)
                series = stage.series
                stage.counts[index] += 1
                series.count += 1
                series.sum_ns += duration
            else:
                stage.series.record(duration)
            request = self.request
            if request is None:
                return
            if kind is not None:
                self.flags |= SpanFlag.ERROR
            if request.top is self:
                self.end_ns = end
                parent = self.parent
                request.vector[stage.column] += duration - self.child_ns
                parent.child_ns += duration
                parent.latest_ns = end
                request.top = parent
            else:
                request.left(self, end)
            if request.wanted:
                stage.shared.exit_hook(request, stage.name, self.kind)
        except Exception:
            self._undo()
            stage.shared.failed()

    def _undo(self) -> None:
        """After a failure of ours: leave the request as if this span had never been the innermost one."""
        request: Request | None = getattr(self, "request", None)
        if request is not None and request.top is self:
            request.top = self.parent
        if request is not None and self.start_ns < 0 and request.spans and request.spans[-1] is self:
            request.spans.pop()

    def _enter_again(self) -> Span:
        """Open another span in place of this one, which is open or keeps its position in a record."""
        try:
            if self.inner is None:
                self.inner = []
            again = Span(self.stage, self.kind)
            self.inner.append(again)
            again.__enter__()
        except Exception:
            self.stage.shared.failed()
        return self

    def __call__(self, function: F) -> F:
        """Time every call of a function, coroutine function, generator or asynchronous generator under this name."""
        stage = self.stage
        return decorate(function, lambda kind: Span(stage, kind), stage.shared)
