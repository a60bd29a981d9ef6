"""The gRPC clients. Callbacks of `async_infer` and of streams run on a thread of the library, in an empty context: they get their request back."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

from inferscope.clock import now_ns
from inferscope.integration import recorder
from inferscope_integrations.tritonclient.calls import Method, current
from inferscope_integrations.tritonclient.statistics import GrpcPoller
from inferscope_integrations.tritonclient.streams import Outstanding, watched_inputs

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferscope.patching import Ledger, Patch
    from inferscope_integrations.tritonclient.calls import Call

__all__ = ["patch_aio", "patch_sync"]


def _server(client: Any) -> str:
    target = client._channel._channel.target  # noqa: SLF001
    if callable(target):  # of the synchronous channel a method, of the other one bytes
        target = target()
    text = target.decode() if isinstance(target, bytes) else str(target)
    return text.rpartition("/")[2]


def patch_sync(ledger: Ledger) -> None:
    """`infer`, `async_infer`, streams, and the boundary `_get_inference_request`."""
    client: Any = importlib.import_module("tritonclient.grpc").InferenceServerClient
    ledger.replace(client, "infer", _inferring)
    ledger.replace(client, "async_infer", _starting)
    outstanding = Outstanding()
    ledger.replace(client, "start_stream", functools.partial(_opening, outstanding))
    ledger.replace(client, "async_stream_infer", functools.partial(_sending, outstanding))
    ledger.replace(importlib.import_module("tritonclient.grpc._client"), "_get_inference_request", _building)


def patch_aio(ledger: Ledger) -> None:
    """`infer`, `stream_infer`, and the boundary."""
    aio: Any = importlib.import_module("tritonclient.grpc.aio")
    ledger.replace(aio.InferenceServerClient, "infer", _inferring_aio)
    ledger.replace(aio.InferenceServerClient, "stream_infer", _streaming_aio)
    ledger.replace(aio, "_get_inference_request", _building)


def _building(original: Any, _patch: Patch) -> Callable[..., Any]:
    def _get_inference_request(*args: Any, **kwargs: Any) -> Any:
        message = original(*args, **kwargs)
        call = current.get()
        if call is not None:
            call.built_ns = now_ns()
        return message

    return _get_inference_request


def _inferring(original: Any, patch: Patch) -> Callable[..., Any]:
    method = Method("grpc.infer", original, _server, GrpcPoller)

    def infer(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not patch.active:
            return original(self, *args, **kwargs)
        return method.run(original, self, args, kwargs)

    return infer


def _inferring_aio(original: Any, patch: Patch) -> Callable[..., Any]:
    method = Method("grpc.aio.infer", original, _server, GrpcPoller)

    async def infer(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not patch.active:
            return await original(self, *args, **kwargs)
        return await method.run_aio(original, self, args, kwargs)

    return infer


def _answering(call: Call, callback: Callable[..., Any]) -> Callable[..., Any]:
    """The caller's callback, which finds its request again and ends our part first."""

    def answered(*args: Any, **kwargs: Any) -> Any:
        call.finish(failed=kwargs.get("error") is not None)
        if call.request is None:
            return callback(*args, **kwargs)
        with recorder().attach(call.request):
            return callback(*args, **kwargs)

    return answered


def _starting(original: Any, patch: Patch) -> Callable[..., Any]:
    method = Method("grpc.async_infer", original, _server, GrpcPoller)

    def prepare(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        sent, named = method.traced(args, kwargs)
        callback = method.argument("callback", args, kwargs)
        return method.replaced("callback", _answering(call, callback), sent, named) if callable(callback) else (sent, named)

    def async_infer(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not patch.active:
            return original(self, *args, **kwargs)
        return method.submit(original, self, args, kwargs, prepare)

    return async_infer


def _opening(outstanding: Outstanding, original: Any, patch: Patch) -> Callable[..., Any]:
    method = Method("grpc.stream", original, _server, None)

    def start_stream(self: Any, *args: Any, **kwargs: Any) -> Any:
        callback = method.argument("callback", args, kwargs)
        if not patch.active or not callable(callback):
            return original(self, *args, **kwargs)
        outstanding.forget(self)
        sent, named = method.traced(args, kwargs)
        sent, named = method.replaced("callback", outstanding.answering(self, callback), sent, named)
        return original(self, *sent, **named)

    return start_stream


def _sending(outstanding: Outstanding, original: Any, patch: Patch) -> Callable[..., Any]:
    method = Method("grpc.stream", original, _server, GrpcPoller)

    def async_stream_infer(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not patch.active:
            return original(self, *args, **kwargs)

        def prepare(call: Call, sent: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            outstanding.sent(self, method.argument("request_id", sent, named, ""), call)
            return sent, named

        return method.submit(original, self, args, kwargs, prepare)

    return async_stream_infer


def _streaming_aio(original: Any, patch: Patch) -> Callable[..., Any]:
    method = Method("grpc.aio.stream", original, _server, GrpcPoller)

    def stream_infer(self: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = method.argument("inputs_iterator", args, kwargs)
        if not patch.active or not hasattr(inputs, "__aiter__"):
            return original(self, *args, **kwargs)
        outstanding = Outstanding()
        sent, named = method.traced(args, kwargs)
        sent, named = method.replaced("inputs_iterator", watched_inputs(self, inputs, method, outstanding), sent, named)
        return outstanding.reading(self, original(self, *sent, **named))

    return stream_infer
