"""BentoML: methods of a service as stages, and adaptive batching in each request that waited for its batch.

Requests come from `asgi`, named after the route; what runs in BentoML's thread pool is `anyio`'s to tell.

| what | where |
|---|---|
| stage `api:METHOD` | from the decoding of a request to its encoded answer |
| `queue:batch` | from the arrival at the dispatcher until the batch was let go |
| series `batch` | the work that was done once for all of a batch, which is in each of its requests |
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, ClassVar

from inferscope.clock import now_ns
from inferscope.integration import Integration, recorder
from inferscope.record.batch import batch

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferscope.patching import Ledger, Patch

__all__ = ["BentomlIntegration"]


class BentomlIntegration(Integration):
    """The HTTP application of services and the dispatcher of `batchable` methods."""

    name: ClassVar[str] = "bentoml"
    target: ClassVar[str] = "_bentoml_impl.server.app"
    distribution: ClassVar[str] = "bentoml"
    versions: ClassVar[tuple[tuple[int, ...], tuple[int, ...] | None]] = ((1, 4), None)

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[Any, int]] = {}

    def patch(self, ledger: Ledger) -> None:
        """Replace `ServiceAppFactory.api_endpoint` and both ends of `CorkDispatcher`."""
        ledger.replace(importlib.import_module(self.target).ServiceAppFactory, "api_endpoint", _endpoint)
        dispatcher: Any = importlib.import_module("bentoml._internal.marshal.dispatcher").CorkDispatcher
        ledger.replace(dispatcher, "inbound_call", self._arriving)
        ledger.replace(dispatcher, "outbound_call", self._leaving)

    def unpatch(self) -> None:
        """Forget who waits."""
        self._waiting.clear()

    def _arriving(self, original: Any, patch: Patch) -> Callable[..., Any]:
        async def inbound_call(dispatcher: Any, data: Any) -> Any:
            request = recorder().current() if patch.active else None
            if request is None:
                return await original(dispatcher, data)
            self._waiting[id(data)] = (request, now_ns())  # the object lives as long as this call
            try:
                return await original(dispatcher, data)
            finally:
                self._waiting.pop(id(data), None)

        return inbound_call

    def _leaving(self, original: Any, patch: Patch) -> Callable[..., Any]:
        async def outbound_call(dispatcher: Any, inputs_info: Any, *args: Any, **kwargs: Any) -> Any:
            found = [self._waiting.get(id(job.data)) for job in inputs_info] if patch.active else []
            waited = [each for each in found if each is not None]
            if not waited:
                return await original(dispatcher, inputs_info, *args, **kwargs)
            # The dispatcher's task began in the first request's context, which is none of this batch's business.
            with recorder().attach(None), batch([request for request, _ in waited], queued_ns=[since for _, since in waited]):
                return await original(dispatcher, inputs_info, *args, **kwargs)

        return outbound_call


def _endpoint(original: Any, patch: Patch) -> Callable[..., Any]:
    async def api_endpoint(self: Any, name: str, request: Any) -> Any:
        if not patch.active:
            return await original(self, name, request)
        with recorder().stage(f"api:{name}"):
            return await original(self, name, request)

    return api_endpoint
