"""One call to a Triton server: where its time goes on the client's side, and what it sent.

Boundaries come from functions that every call passes (`_post` of the HTTP clients, `_get_inference_request` of the gRPC ones): private names,
so a version without them leaves the split unknown, never wrong. No input or result is kept, only sizes.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

from inferscope import remote
from inferscope.clock import now_ns
from inferscope.integration import recorder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from inferscope.remote import Calls

__all__ = ["SYSTEM", "Call", "Method", "current", "traceparent"]

SYSTEM: Final = "triton"
SERIALIZE: Final = "triton.serialize"
_UNKNOWN: Final = "unknown"
_NOWHERE: Final = 1 << 30
"""Place of a parameter that a method does not have."""

current: ContextVar[Call | None] = ContextVar("inferscope_triton_call", default=None)
"""The call that this thread, task or greenlet is in, for the boundaries."""


class Call:
    """Instants of one call; 0 where a boundary was not passed."""

    __slots__ = ("answered_ns", "built_ns", "elsewhere", "request", "row", "stage", "started_ns")

    def __init__(self, row: Calls, stage: str, *, elsewhere: bool = False) -> None:
        self.row = row
        self.stage = stage
        self.elsewhere = elsewhere
        self.built_ns = 0
        self.answered_ns = 0
        self.request = recorder().current() if elsewhere else None
        self.started_ns = now_ns()

    def finish(self, *, failed: bool) -> None:
        """Add to the row, and place serialization and the wire inside the request."""
        ended, row = now_ns(), self.row
        row.count += 1
        row.errors += failed
        row.wall_ns += ended - self.started_ns
        built, answered = self.built_ns, self.answered_ns or ended
        if built:
            row.serialize_ns = (row.serialize_ns or 0) + built - self.started_ns
            row.wire_ns = (row.wire_ns or 0) + answered - built
            if self.answered_ns:
                row.read_ns = (row.read_ns or 0) + ended - answered
            record = recorder().interval
            if not self.elsewhere:
                record("stage", SERIALIZE, self.started_ns, built)
            if self.request is None:
                record("io", self.stage, built, answered)
            else:
                record("io", self.stage, built, answered, request=self.request)

    def submitted(self) -> None:
        """The call that started it has returned."""
        self.row.submitted += 1
        self.row.submit_ns = (self.row.submit_ns or 0) + now_ns() - self.started_ns

    def sends(self, inputs: Sequence[Any]) -> None:
        """Count encodings and sizes of the inputs."""
        row, total = self.row, 0
        for each in inputs:
            raw = each._raw_content if hasattr(each, "_raw_content") else each._raw_data  # noqa: SLF001  (of gRPC; of HTTP)
            if raw is not None:
                total += len(raw)
            elif getattr(each, "_data", None) is not None:
                row.json_inputs += 1
                row.json_elements += len(each._data)  # noqa: SLF001
            else:
                row.shared_inputs += 1
        row.binary_bytes += total
        if total > row.largest_bytes:  # noqa: PLR1730  (a comparison is cheaper than a call)
            row.largest_bytes = total


def traceparent() -> str | None:
    """W3C context of the application's span when that is sampled: Triton traces whatever carries one, whatever its flags say."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return None
    span = trace.get_current_span()
    if span is trace.INVALID_SPAN:
        return None
    context = span.get_span_context()
    if not (context.is_valid and context.trace_flags.sampled):
        return None
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-01"


class Method:
    """Where a client's method takes what we need, and the rows of its calls.

    Args:
        name: `http.infer` and so on.
        original: The method, whose signature tells the positions.
        server_of: Address of a client, `host:port`.
        make_poller: Makes what asks that server about a model; None leaves servers alone.
    """

    def __init__(
        self, name: str, original: Callable[..., Any], server_of: Callable[[Any], str], make_poller: Callable[[str, str, Any], Any] | None
    ) -> None:
        self.name = name
        self.places = {parameter: index - 1 for index, parameter in enumerate(inspect.signature(original).parameters)}
        self._model, self._inputs, self._headers = (self.places.get(each, _NOWHERE) for each in ("model_name", "inputs", "headers"))
        self._server_of, self._make_poller = server_of, make_poller
        self._rows: dict[int, dict[str, tuple[Calls, str]]] = {}
        self._clients: dict[int, weakref.ref[Any]] = {}

    def argument(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], otherwise: Any = None) -> Any:
        """An argument of the call, however it was given."""
        place = self.places.get(name, -1)
        return args[place] if 0 <= place < len(args) else kwargs.get(name, otherwise)

    def replaced(self, name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with another value for one of them; the caller's own are not changed."""
        place = self.places.get(name, -1)
        if 0 <= place < len(args):
            return (*args[:place], value, *args[place + 1 :]), kwargs
        return args, {**kwargs, name: value}

    def row(self, client: Any, model: Any) -> tuple[Calls, str]:
        """The row of calls to a model through a client, and the stage that they are."""
        name = model if isinstance(model, str) else _UNKNOWN
        rows = self._rows.get(id(client))
        found = None if rows is None else rows.get(name)
        return self._new_row(client, name) if found is None else found

    def _new_row(self, client: Any, model: str) -> tuple[Calls, str]:
        try:
            server = self._server_of(client)
        except Exception:  # noqa: BLE001  (another version's attributes)
            server = _UNKNOWN
        row = remote.calls(SYSTEM, self.name, model, server)
        if self._make_poller is not None and _UNKNOWN not in {server, model}:
            make = self._make_poller
            remote.watch(SYSTEM, server, model, lambda: make(server, model, row))
        key = id(client)

        def forget(_gone: weakref.ref[Any]) -> None:
            self._rows.pop(key, None)
            self._clients.pop(key, None)

        found = row, f"{SYSTEM}:{model}"
        try:
            if key not in self._clients:
                self._clients[key] = weakref.ref(client, forget)
            self._rows.setdefault(key, {})[model] = found
        except TypeError:  # no client at all: the original will say so
            pass
        return found

    def opened(self, client: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Calls, str]:
        """The row and the stage of a call; the stage is opened before `begin`, so that it covers all that the call is divided into."""
        return self.row(client, args[self._model] if self._model < len(args) else kwargs.get("model_name"))

    def begin(self, row: Calls, stage: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, elsewhere: bool = False) -> Call:
        """A call that starts now; `elsewhere` when its answer arrives on another thread or greenlet."""
        call = Call(row, stage, elsewhere=elsewhere)
        try:  # noqa: SIM105  (a context manager costs more than what it protects)
            call.sends(args[self._inputs] if self._inputs < len(args) else kwargs.get("inputs", ()))
        except Exception:  # noqa: BLE001  (inputs of another version: sizes stay unknown)
            pass
        return call

    def traced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with headers of our own copy: the library writes into what it is given, and we add the context of a sampled span."""
        try:
            given = args[self._headers] if self._headers < len(args) else kwargs.get("headers")
            parent = traceparent()
            if given is None and parent is None:
                return args, kwargs
            headers: dict[str, Any] = dict(given or ())
            if parent is not None and "traceparent" not in headers:
                headers["traceparent"] = parent
            return self.replaced("headers", headers, args, kwargs)
        except Exception:  # noqa: BLE001  (headers of a kind that the original will complain about)
            return args, kwargs

    def run(self, original: Callable[..., Any], client: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that returns its answer."""
        row, stage = self.opened(client, args, kwargs)
        with recorder().stage(stage):
            call = self.begin(row, stage, args, kwargs)
            sent, named = self.traced(args, kwargs)
            token = current.set(call)
            failed = True
            try:
                answer = original(client, *sent, **named)
                failed = False
            finally:
                current.reset(token)
                call.finish(failed=failed)
        return answer

    async def run_aio(self, original: Callable[..., Any], client: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The same for a coroutine function."""
        row, stage = self.opened(client, args, kwargs)
        with recorder().stage(stage):
            call = self.begin(row, stage, args, kwargs)
            sent, named = self.traced(args, kwargs)
            token = current.set(call)
            failed = True
            try:
                answer = await original(client, *sent, **named)
                failed = False
            finally:
                current.reset(token)
                call.finish(failed=failed)
        return answer

    def submit(
        self,
        original: Callable[..., Any],
        client: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        prepare: Callable[[Call, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]],
    ) -> Any:
        """A call that only starts a request; `prepare` puts what will see the answer into its arguments."""
        row, stage = self.opened(client, args, kwargs)
        with recorder().stage(stage):
            call = self.begin(row, stage, args, kwargs, elsewhere=True)
            sent, named = prepare(call, args, kwargs)
            token = current.set(call)
            try:
                return original(client, *sent, **named)
            finally:
                current.reset(token)
                call.submitted()
