"""What every part of one recorder shares: clock, current request, hooks, switches and failure counts."""

from __future__ import annotations

import os
import sys
import threading
import time
from contextvars import ContextVar
from typing import TYPE_CHECKING

from inferscope.record.pure.settle import Pins

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferscope.record.pure.request import Request

    StartHook = Callable[[Request], bool | None]
    SpanHook = Callable[[Request, str, str], None]
    FinishHook = Callable[[Request, int], None]

__all__ = ["Counters", "Shared", "ThreadState", "name_of_error"]


def name_of_error(error: object) -> str | None:
    """What an error is counted as: a text as it is, an exception or its type by the type's name, another true value as `error`."""
    if error is None or error is False:
        return None
    if isinstance(error, str):
        return error
    return "error" if error is True else (error if isinstance(error, type) else type(error)).__qualname__


class Counters:
    """Everything that was dropped or failed."""

    __slots__ = (
        "column_overflow", "device_incomplete", "hook_errors", "internal_errors", "late_spans", "pins_refused", "retained_dropped",
        "series_overflow", "settles_refused", "truncated",
    )  # fmt: skip

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Set all to 0."""
        self.late_spans = 0
        self.truncated = 0
        self.column_overflow = 0
        self.series_overflow = 0
        self.retained_dropped = 0
        self.hook_errors = 0
        self.internal_errors = 0
        self.device_incomplete = 0
        self.pins_refused = 0
        self.settles_refused = 0

    def as_dict(self) -> dict[str, int]:
        """The counters by name."""
        return {name: getattr(self, name) for name in self.__slots__}


def _local() -> type[threading.local]:
    """`threading.local` of threads, also where gevent or eventlet made the name one of greenlets."""
    gevent, eventlet = sys.modules.get("gevent.monkey"), sys.modules.get("eventlet.patcher")
    found = threading.local
    try:
        if gevent is not None:
            found = gevent.get_original("threading", "local")
        elif eventlet is not None:
            found = eventlet.original("threading").local
    except Exception:  # noqa: BLE001 - half imported, say
        return threading.local
    return found


if TYPE_CHECKING:
    _Local = threading.local
else:
    _Local = _local()


class ThreadState(_Local):
    """What a recorder knows about the calling thread."""

    def __init__(self) -> None:
        self.native_id = threading.get_native_id()
        self.traffic = Traffic()


class Traffic:
    """Requests of one thread, to tell whether its CPU time belongs to a single one."""

    __slots__ = ("entered", "open")

    def __init__(self) -> None:
        self.entered = 0
        self.open = 0


class Shared:
    """The state that spans, requests and locks of one recorder share.

    Args:
        clock: Source of nanoseconds; None is `time.perf_counter_ns`.
    """

    def __init__(self, clock: Callable[[], int] | None = None) -> None:
        self.clock: Callable[[], int] = time.perf_counter_ns if clock is None else clock
        self.context: ContextVar[Request | None] = ContextVar("inferscope.request", default=None)
        self.thread = ThreadState()
        self.losses = Counters()
        self.pins = Pins(self.clock, self.losses)
        self.generation: int = 0
        self.enabled = True
        self.armed = False
        self.cpu_mode = "auto"
        self.strict = os.environ.get("INFERSCOPE_STRICT") == "1"
        self.on_start: StartHook | None = None
        self.on_enter: SpanHook | None = None
        self.on_exit: SpanHook | None = None
        self.on_finish: FinishHook | None = None
        self.trace_context: Callable[[], tuple[str, ...] | None] | None = None
        """Called when a request is kept, where it finishes; returns the ids of the application's span."""

    def failed(self) -> None:
        """Count a failure of ours; to be called in its `except` block. Raises it again when `INFERSCOPE_STRICT=1`."""
        self.losses.internal_errors += 1
        if self.strict:
            raise  # noqa: PLE0704 - documented: the caller's exception

    def start_hook(self, request: Request) -> None:
        """Let `on_start` decide whether the request is wanted."""
        try:
            if self.on_start is not None and self.on_start(request):
                request.wanted = True
        except Exception:  # noqa: BLE001 - a hook of another room
            self.losses.hook_errors += 1

    def enter_hook(self, request: Request, name: str, kind: str) -> None:
        """Tell `on_enter` that a span of a wanted request opens."""
        try:
            if self.on_enter is not None:
                self.on_enter(request, name, kind)
        except Exception:  # noqa: BLE001 - a hook of another room
            self.losses.hook_errors += 1

    def exit_hook(self, request: Request, name: str, kind: str) -> None:
        """Tell `on_exit` that a span of a wanted request closed."""
        try:
            if self.on_exit is not None:
                self.on_exit(request, name, kind)
        except Exception:  # noqa: BLE001 - a hook of another room
            self.losses.hook_errors += 1

    def finish_hook(self, request: Request, wall_ns: int) -> None:
        """Let `on_finish` see the wall time before anything is counted."""
        try:
            if self.on_finish is not None:
                self.on_finish(request, wall_ns)
        except Exception:  # noqa: BLE001 - a hook of another room
            self.losses.hook_errors += 1

    def ask_trace(self, request: Request) -> None:
        """Note the application's span of a request that is kept."""
        try:
            if self.trace_context is not None:
                request.trace = self.trace_context()
        except Exception:  # noqa: BLE001 - a hook of another room
            self.losses.hook_errors += 1
