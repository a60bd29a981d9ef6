"""Ray Serve: calls of a replica as requests, the router's queue before them, `@serve.batch`, and a replica's work in the request that called it.

| what | where |
|---|---|
| request `DEPLOYMENT`, `DEPLOYMENT.METHOD` | in the replica, around the user's method; over HTTP named after the route |
| `queue:backlog` | from the router's taking the request until the replica calls the user's method |
| `queue:batch` and series `batch` | the wait for a batch of `@serve.batch`, and the work that is done once for all of it |
| `queue:ray`, and what the replica did | in the request that called `handle.remote()`, when that is in another process of this machine |

Ray pickles a deployment's class and does not import its module in the replica: call `instrument` in its constructor, or start everything under
`inferscope run`. The router stamps the request's metadata with the time; it runs in the proxy, in the driver and in every replica that calls another. Where
it is not instrumented (a proxy that was started without `inferscope run`) the queue before the replica is not known.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

from inferscope.clock import now_ns
from inferscope.errors import IntegrationUnavailableError
from inferscope.guard import guard
from inferscope.integration import Integration, record_first_byte, recorder
from inferscope.record.batch import batch
from inferscope.record.carried import Inbox, Outbox

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Generator

    from inferscope.patching import Ledger, Patch

__all__ = ["RayServeIntegration"]

_QUEUE: Final = "ray"
_STAMP: Final = "inferscope_stamp"
"""Attribute of Ray's own metadata: (Unix seconds, socket of the caller or "", id of the call)."""
_SINCE: Final = "inferscope_since"
"""Attribute of an entry of a batch's queue: (the request, when it came)."""
_EDGE: Final = "inferscope.request"
"""In an ASGI scope: this request is measured already."""
_OLDEST_S: Final = 3600.0
_SERVER_ERROR: Final = 500
_RESULTS: Final = ("ActorReplicaResult", "gRPCReplicaResult")


class RayServeIntegration(Integration):
    """Routers, replicas and batch queues; which of them a process has shows itself."""

    name: ClassVar[str] = "ray_serve"
    target: ClassVar[str] = "ray.serve"
    distribution: ClassVar[str] = "ray"
    versions: ClassVar[tuple[tuple[int, ...], tuple[int, ...] | None]] = ((2, 60), None)

    def __init__(self) -> None:
        self._inbox: Inbox | None = None
        self._outbox = Outbox()
        self._calls = itertools.count()

    def patch(self, ledger: Ledger) -> None:
        """Replace where requests are routed, called, batched and answered.

        Raises:
            IntegrationUnavailableError: This release of Ray has other names for them.
        """
        router: Any = importlib.import_module("ray.serve._private.router")
        replica: Any = importlib.import_module("ray.serve._private.replica")
        results: Any = importlib.import_module("ray.serve._private.replica_result")
        queue: Any = importlib.import_module("ray.serve.batching")._BatchQueue  # noqa: SLF001
        wrapper = replica.UserCallableWrapper
        if not hasattr(wrapper, "call_user_method") or not hasattr(router, "AsyncioRouter"):
            raise IntegrationUnavailableError("this release of Ray Serve calls deployments in another way")
        ledger.replace(router.AsyncioRouter, "assign_request", self._assigning)
        ledger.replace(wrapper, "call_user_method", self._calling)
        ledger.replace(wrapper, "call_user_generator", self._streaming)
        ledger.replace(wrapper, "call_http_entrypoint", self._streaming)
        for kind in filter(None, (getattr(results, each, None) for each in _RESULTS)):
            ledger.replace(kind, "get", self._answered)
            ledger.replace(kind, "get_async", self._answered_async)
        ledger.replace(queue, "put", _queueing)
        ledger.replace(queue, "_process_batch_inner", _batching)

    def unpatch(self) -> None:
        """Close what was opened."""
        opened, self._inbox = self._inbox, None
        if opened is not None:
            opened.close()
        self._outbox.close()

    # -- the caller's process

    def _assigning(self, original: Any, patch: Patch) -> Callable[..., Any]:
        async def assign_request(router: Any, request_meta: Any, /, *args: Any, **kwargs: Any) -> Any:
            if patch.active:
                with guard("ray_serve"):
                    self._stamp(request_meta)
            return await original(router, request_meta, *args, **kwargs)

        return assign_request

    def _stamp(self, metadata: Any) -> None:
        request, path, uid = recorder().current(), "", ""
        if request is not None:
            with contextlib.suppress(OSError):  # no socket can be had: the call's work stays in the replica's own series
                inbox = self._listening()
                path, uid = str(inbox.path), str(next(self._calls))
                inbox.waiting[uid] = (request, now_ns())
        setattr(metadata, _STAMP, (time.time(), path, uid))

    def _listening(self) -> Inbox:
        if self._inbox is None or self._inbox.pid != os.getpid():
            folder = Path(tempfile.gettempdir(), f"inferscope-ray-{os.getuid()}-{os.getpid()}")
            self._inbox = Inbox(folder / "replies.sock", _QUEUE)
        return self._inbox

    def _collect(self, patch: Patch) -> None:
        if patch.active and self._inbox is not None and self._inbox.waiting:
            with guard("ray_serve"):
                self._inbox.collect()

    def _answered(self, original: Any, patch: Patch) -> Callable[..., Any]:
        def get(result: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return original(result, *args, **kwargs)
            finally:
                self._collect(patch)

        return get

    def _answered_async(self, original: Any, patch: Patch) -> Callable[..., Any]:
        async def get_async(result: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return await original(result, *args, **kwargs)
            finally:
                self._collect(patch)

        return get_async

    # -- the replica

    def _calling(self, original: Any, patch: Patch) -> Callable[..., Any]:
        def call_user_method(wrapper: Any, request_metadata: Any, *args: Any, **kwargs: Any) -> Any:
            if not patch.active or not hasattr(request_metadata, _STAMP):  # Ray's local testing mode routes nothing
                return original(wrapper, request_metadata, *args, **kwargs)

            async def measured() -> Any:
                with self._work(wrapper, request_metadata):
                    return await original(wrapper, request_metadata, *args, **kwargs)

            return measured()

        return call_user_method

    def _streaming(self, original: Any, patch: Patch) -> Callable[..., Any]:
        async def call_user_generator(wrapper: Any, request_metadata: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
            async with contextlib.aclosing(original(wrapper, request_metadata, *args, **kwargs)) as answers:
                if not patch.active:
                    async for each in answers:
                        yield each
                    return
                _mark((*args, *kwargs.values()))
                with self._work(wrapper, request_metadata) as request:
                    begun = False
                    async for each in answers:
                        if not begun:
                            begun = True
                            _look(request, each)
                        yield each

        return call_user_generator

    @contextlib.contextmanager
    def _work(self, wrapper: Any, metadata: Any) -> Generator[Any]:
        """A request of this replica; what it did goes to the caller too, when one waits."""
        sent, path, uid = getattr(metadata, _STAMP, (None, "", ""))
        with recorder().request(_name(wrapper, metadata), started_ns=_arrived_ns(sent)) as request:
            if not path:
                yield request
                return
            carrier = recorder().carrier(_QUEUE)
            try:
                with carrier:
                    yield request
            finally:
                with guard("ray_serve"):
                    recorder().splice(carrier.packed, request)
                    self._outbox.send(Path(path), uid, carrier.packed)


def _arrived_ns(sent: float | None) -> int | None:
    """When the router took the request, on the clock of `time.perf_counter_ns`; None when that is not known, or on another clock."""
    age = -1.0 if sent is None else time.time() - sent
    return now_ns() - int(age * 1e9) if 0.0 <= age <= _OLDEST_S else None


def _name(wrapper: Any, metadata: Any) -> str:
    deployment = getattr(getattr(wrapper, "_deployment_id", None), "name", "deployment")
    method = getattr(metadata, "call_method", "__call__")
    return deployment if method == "__call__" else f"{deployment}.{method}"


def _mark(arguments: tuple[Any, ...]) -> None:
    """Say in the ASGI scope, if one is among the arguments, that this request is measured."""
    for each in arguments:
        if isinstance(each, dict) and "asgi" in each:
            cast("dict[str, Any]", each)[_EDGE] = True


def _look(request: Any, answer: Any) -> None:
    """The first byte, and the status of an HTTP answer, which comes as a list of ASGI messages."""
    try:
        record_first_byte(request)
        first: dict[str, Any] = cast("Any", answer)[0] if isinstance(answer, (list, tuple)) else {}
        if first.get("type") == "http.response.start" and first["status"] >= _SERVER_ERROR:
            request.error = str(first["status"])
    except Exception:  # noqa: BLE001  (an answer of another kind)
        return


def _queueing(original: Any, patch: Patch) -> Callable[..., Any]:
    def put(queue: Any, request: Any) -> Any:
        current = recorder().current() if patch.active else None
        if current is not None:
            with contextlib.suppress(AttributeError, TypeError):  # an entry of another kind
                setattr(request, _SINCE, (current, now_ns()))
        return original(queue, request)

    return put


def _batching(original: Any, patch: Patch) -> Callable[..., Any]:
    async def _process_batch_inner(queue: Any, func: Any, entries: Any, *args: Any, **kwargs: Any) -> Any:
        waited = [getattr(each, _SINCE) for each in entries if hasattr(each, _SINCE)] if patch.active else []
        if not waited:
            return await original(queue, func, entries, *args, **kwargs)
        # The queue's task began in the first request's context, which is none of this batch's business.
        with recorder().attach(None), batch([request for request, _ in waited], queued_ns=[since for _, since in waited]):
            return await original(queue, func, entries, *args, **kwargs)

    return _process_batch_inner
