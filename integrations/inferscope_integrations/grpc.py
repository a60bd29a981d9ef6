"""gRPC servers, threaded and asynchronous: each call is a request named after its method, from the moment the server took it up.

An interceptor of ours comes first. It runs when the server picks the call up, before the thread pool has a thread for it, so that the wait for
a thread, which handlers and ordinary interceptors cannot see, is the request's queue `backlog`. A call ends with its last response. Its error
is the status, when that says that the server failed; what the client did wrong (NOT_FOUND, INVALID_ARGUMENT) is no error of the service.
"""

from __future__ import annotations

import importlib
import inspect
from typing import TYPE_CHECKING, Any, ClassVar, Final

from inferscope.clock import now_ns
from inferscope.integration import Integration, record_first_byte, recorder

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from inferscope.patching import Ledger, Patch

__all__ = ["EXCLUDED", "SERVER_FAILURES", "GrpcAioIntegration", "GrpcIntegration"]

EXCLUDED: Final = ("/grpc.health.v1.Health/", "/grpc.reflection.")
"""Services that are no work; they appear in no signal."""
SERVER_FAILURES: Final = frozenset({"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"})
"""Status codes that are errors of a server (OpenTelemetry semantic conventions for RPC)."""
_KINDS: Final = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


def _status(context: Any) -> str | None:
    """The status that the handler has set, by name; None when it set none or OK."""
    code = context.code()
    if code is None or code == 0:
        return None
    if isinstance(code, int):
        import grpc

        return next((each.name for each in grpc.StatusCode if each.value[0] == code), str(code))
    name = str(code.name)
    return None if name == "OK" else name


def _failure(context: Any, error: BaseException | None = None) -> Any:
    """What to count the call as: a server's status, the exception where no status was set, or None."""
    try:
        status = _status(context)
    except Exception:  # noqa: BLE001  (a context of another kind)
        status = None
    if status is not None:
        return status if status in SERVER_FAILURES else None
    return None if error is None else type(error)


class _Call:
    """One call on its way to its handler."""

    __slots__ = ("arrived_ns", "name")

    def __init__(self, method: str) -> None:
        self.name = method.strip("/")
        self.arrived_ns = now_ns()

    def request(self) -> Any:
        return recorder().request(self.name, started_ns=self.arrived_ns)


class _Answers:
    """A handler's answers, the first of which is told; closing and the like reach the handler."""

    __slots__ = ("_answers", "_begun", "_request")

    def __init__(self, answers: Any, request: Any) -> None:
        self._answers, self._request, self._begun = iter(answers), request, False

    def __iter__(self) -> _Answers:
        return self

    def __next__(self) -> Any:
        answer = next(self._answers)
        if not self._begun:
            self._begun = True
            record_first_byte(self._request)
        return answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._answers, name)


class _Writes:
    """The context of a coroutine that writes its answers to it, the first of which is told. Anything else is the context's own."""

    __slots__ = ("_begun", "_context", "_request")

    def __init__(self, context: Any, request: Any) -> None:
        self._context, self._request, self._begun = context, request, False

    @property  # type: ignore[misc]  # it passes for the context
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._context.__class__

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def write(self, message: Any) -> None:
        await self._context.write(message)
        if not self._begun:
            self._begun = True
            record_first_byte(self._request)


def _answers(call: _Call, behave: Callable[..., Any]) -> Callable[..., Any]:
    def behavior(message: Any, context: Any) -> Any:
        with call.request() as request:
            try:
                answer = behave(message, context)
            except Exception as error:
                request.finish(_failure(context, error))
                raise
            request.error = _failure(context)
            return answer

    return behavior


def _streams(call: _Call, behave: Callable[..., Any]) -> Callable[..., Any]:
    def behavior(message: Any, context: Any) -> Iterator[Any]:
        with call.request() as request:
            try:
                yield from _Answers(behave(message, context), request)
            except Exception as error:
                request.finish(_failure(context, error))
                raise
            request.error = _failure(context)

    return behavior


def _answers_aio(call: _Call, behave: Callable[..., Any], *, writes: bool) -> Callable[..., Any]:
    async def behavior(message: Any, context: Any) -> Any:
        with call.request() as request:
            try:
                answer = await behave(message, _Writes(context, request) if writes else context)
            except Exception as error:
                request.finish(_failure(context, error))
                raise
            request.error = _failure(context)
            return answer

    return behavior


def _streams_aio(call: _Call, behave: Callable[..., Any]) -> Callable[..., Any]:
    async def behavior(message: Any, context: Any) -> AsyncIterator[Any]:
        with call.request() as request:
            begun = False
            try:
                async for answer in behave(message, context):
                    if not begun:
                        begun = True
                        record_first_byte(request)
                    yield answer
            except Exception as error:
                request.finish(_failure(context, error))
                raise
            request.error = _failure(context)

    return behavior


def _timed(handler: Any, method: str) -> Any:
    """The handler with its behavior timed, of the same kind: the server looks whether that is a coroutine function or a generator."""
    import grpc

    call = _Call(method)
    kind = next((each for each in _KINDS if getattr(handler, each, None) is not None), None)
    if kind is None:
        return handler
    behave = getattr(handler, kind)
    if inspect.isasyncgenfunction(behave):
        behavior = _streams_aio(call, behave)
    elif inspect.iscoroutinefunction(behave):
        behavior = _answers_aio(call, behave, writes=kind.endswith("_stream"))
    elif kind.endswith("_stream"):
        behavior = _streams(call, behave)
    else:
        behavior = _answers(call, behave)
    make = getattr(grpc, f"{kind}_rpc_method_handler")
    return make(behavior, request_deserializer=handler.request_deserializer, response_serializer=handler.response_serializer)


def _with_first(args: tuple[Any, ...], kwargs: dict[str, Any], interceptor: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A server's constructor arguments (thread_pool, generic_handlers, interceptors, …) with ours before the others."""
    if len(args) > 2:
        return (*args[:2], (interceptor, *(args[2] or ())), *args[3:]), kwargs
    return args, {**kwargs, "interceptors": (interceptor, *(kwargs.get("interceptors") or ()))}


def _is_timed(handler: Any, patch: Patch, method: str) -> bool:
    return handler is not None and patch.active and not method.startswith(EXCLUDED)


class _Grpc(Integration):
    """What the two have in common."""

    distribution: ClassVar[str] = "grpcio"
    versions: ClassVar[tuple[tuple[int, ...], tuple[int, ...] | None]] = ((1, 60), None)
    serves: ClassVar[bool] = False  # clients import grpc, too: exporters of telemetry do


class GrpcIntegration(_Grpc):
    """Servers that `grpc.server` makes from now on."""

    name: ClassVar[str] = "grpc"
    target: ClassVar[str] = "grpc"
    brings: ClassVar[tuple[str, ...]] = ("grpc_aio",)

    def patch(self, ledger: Ledger) -> None:
        """Replace the constructor of the server's class."""
        import grpc

        module: Any = importlib.import_module("grpc._server")
        base: Any = grpc.ServerInterceptor

        def make(original: Any, patch: Patch) -> Callable[..., Any]:
            class Interceptor(base):  # type: ignore[misc]
                def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
                    handler = continuation(handler_call_details)
                    method = handler_call_details.method
                    return _timed(handler, method) if _is_timed(handler, patch, method) else handler

            def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807  (stands in for the class's own method)
                args, kwargs = _with_first(args, kwargs, Interceptor()) if patch.active else (args, kwargs)
                original(self, *args, **kwargs)

            return __init__

        ledger.replace(module._Server, "__init__", make)  # noqa: SLF001


class GrpcAioIntegration(_Grpc):
    """Servers that `grpc.aio.server` makes from now on."""

    name: ClassVar[str] = "grpc_aio"
    target: ClassVar[str] = "grpc.aio"

    def patch(self, ledger: Ledger) -> None:
        """Replace the constructor of the server's class."""
        module: Any = importlib.import_module("grpc.aio._server")
        base: Any = importlib.import_module("grpc.aio").ServerInterceptor

        def make(original: Any, patch: Patch) -> Callable[..., Any]:
            class Interceptor(base):  # type: ignore[misc]
                async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
                    handler = await continuation(handler_call_details)
                    method = handler_call_details.method
                    return _timed(handler, method) if _is_timed(handler, patch, method) else handler

            def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807  (stands in for the class's own method)
                args, kwargs = _with_first(args, kwargs, Interceptor()) if patch.active else (args, kwargs)
                original(self, *args, **kwargs)

            return __init__

        ledger.replace(module.Server, "__init__", make)
