"""The HTTP clients. `async_infer` of the synchronous one sends in a greenlet with an empty context: our copy of the headers carries the call."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final, cast

from inferscope.clock import now_ns
from inferscope.integration import recorder
from inferscope_integrations.tritonclient.calls import Method, current
from inferscope_integrations.tritonclient.statistics import HttpPoller

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferscope.patching import Ledger, Patch
    from inferscope_integrations.tritonclient.calls import Call

__all__ = ["patch_aio", "patch_sync"]

RESULT: Final = "triton.result"
"""Stage of `get_result()`: the wait for an asynchronous answer."""


class _Headers(dict[str, Any]):
    """Headers that know their call."""

    call: Call | None = None


def _server(client: Any) -> str:
    url = client._parsed_url  # noqa: SLF001
    return f"{url.host}:{url.port}"


def _aio_server(client: Any) -> str:
    return str(client._url.partition("://")[2].partition("/")[0])  # noqa: SLF001


def patch_sync(ledger: Ledger) -> None:
    """`infer`, `async_infer`, `get_result` and the boundary `_post`."""
    module: Any = importlib.import_module("tritonclient.http")
    ledger.replace(module.InferenceServerClient, "infer", _inferring)
    ledger.replace(module.InferenceServerClient, "async_infer", _starting)
    ledger.replace(module.InferenceServerClient, "_post", _posting)
    ledger.replace(module.InferAsyncRequest, "get_result", _waiting)


def patch_aio(ledger: Ledger) -> None:
    """`infer` and the boundary `_post`."""
    module: Any = importlib.import_module("tritonclient.http.aio")
    ledger.replace(module.InferenceServerClient, "infer", _inferring_aio)
    ledger.replace(module.InferenceServerClient, "_post", _posting_aio)


def _inferring(original: Any, patch: Patch) -> Callable[..., Any]:
    method = Method("http.infer", original, _server, HttpPoller)

    def infer(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not patch.active:
            return original(self, *args, **kwargs)
        return method.run(original, self, args, kwargs)

    return infer


def _starting(original: Any, patch: Patch) -> Callable[..., Any]:
    method = Method("http.async_infer", original, _server, HttpPoller)

    def prepare(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        sent, named = method.traced(args, kwargs)
        headers = method.argument("headers", sent, named)
        if headers is not None and not isinstance(headers, dict):
            return sent, named
        own = _Headers(cast("Any", headers or ()))
        own.call = call
        return method.replaced("headers", own, sent, named)

    def async_infer(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not patch.active:
            return original(self, *args, **kwargs)
        return method.submit(original, self, args, kwargs, prepare)

    return async_infer


def _posting(original: Any, patch: Patch) -> Callable[..., Any]:
    def _post(self: Any, *args: Any, **kwargs: Any) -> Any:
        headers = kwargs.get("headers", args[2] if len(args) > 2 else None)
        call = headers.call if isinstance(headers, _Headers) else current.get()
        if call is None or not patch.active:
            return original(self, *args, **kwargs)
        call.built_ns = now_ns()
        failed = True
        try:
            response = original(self, *args, **kwargs)
            failed = False
        finally:
            call.answered_ns = now_ns()
            if call.elsewhere:
                call.finish(failed=failed)
        return response

    return _post


def _waiting(original: Any, patch: Patch) -> Callable[..., Any]:
    def get_result(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not patch.active:
            return original(self, *args, **kwargs)
        with recorder().stage(RESULT):
            return original(self, *args, **kwargs)

    return get_result


def _inferring_aio(original: Any, patch: Patch) -> Callable[..., Any]:
    method = Method("http.aio.infer", original, _aio_server, HttpPoller)

    async def infer(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not patch.active:
            return await original(self, *args, **kwargs)
        return await method.run_aio(original, self, args, kwargs)

    return infer


def _posting_aio(original: Any, patch: Patch) -> Callable[..., Any]:
    async def _post(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = current.get()
        if call is not None and patch.active:
            call.built_ns = now_ns()
        return await original(self, *args, **kwargs)

    return _post
