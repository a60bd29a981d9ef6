"""Thread pools: the wait between handing work to a pool and its start on a worker.

`anyio.to_thread.run_sync` is what Starlette and FastAPI run synchronous endpoints with (40 threads by default): under load the wait for a
free worker is invisible to the endpoint and part of the client's latency. `ThreadPoolExecutor.submit` starts work in an empty context, so
that the request has to be carried over by hand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from inferscope.clock import now_ns
from inferscope.integration import Integration, record_wait, recorder

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferscope.patching import Ledger, Patch

__all__ = ["AnyioIntegration", "ExecutorIntegration"]


def _measured(call: Callable[..., Any], queue: str, stage: str) -> Callable[..., Any]:
    """`call`, reporting its wait in `queue` when it starts and running as one synchronous `stage`."""
    queued = now_ns()

    def run(*args: Any, **kwargs: Any) -> Any:
        record_wait(queue, queued, now_ns())
        with recorder().stage(stage):
            return call(*args, **kwargs)

    return run


class AnyioIntegration(Integration):
    """Queue wait of anyio's worker threads as `queue:threadpool`, and the function they run as stage `handler`."""

    name: ClassVar[str] = "anyio"
    target: ClassVar[str] = "anyio.to_thread"
    distribution: ClassVar[str] = "anyio"
    versions: ClassVar[tuple[tuple[int, ...], tuple[int, ...] | None]] = ((3, 7), None)

    def patch(self, ledger: Ledger) -> None:
        """Replace `anyio.to_thread.run_sync`, which its callers look up at each call."""
        import anyio.to_thread

        def make(original: Any, patch: Patch) -> Callable[..., Any]:
            async def run_sync(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
                if patch.active and recorder().current() is not None:
                    func = _measured(func, "threadpool", "handler")
                return await original(func, *args, **kwargs)

            return run_sync

        ledger.replace(anyio.to_thread, "run_sync", make)


class ExecutorIntegration(Integration):
    """Carries the current request into `concurrent.futures.ThreadPoolExecutor` and measures its queue as `queue:executor`."""

    name: ClassVar[str] = "executor"
    serves: ClassVar[bool] = False
    target: ClassVar[str] = "concurrent.futures.thread"

    def patch(self, ledger: Ledger) -> None:
        """Replace `ThreadPoolExecutor.submit`."""
        from concurrent.futures.thread import ThreadPoolExecutor

        def make(original: Any, patch: Patch) -> Callable[..., Any]:
            def submit(self: Any, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
                request = recorder().current() if patch.active else None
                if request is None:
                    return original(self, fn, *args, **kwargs)
                queued = now_ns()

                def carried(*inner: Any, **keywords: Any) -> Any:
                    with recorder().attach(request):
                        record_wait("executor", queued, now_ns())
                        return fn(*inner, **keywords)

                return original(self, carried, *args, **kwargs)

            return submit

        ledger.replace(ThreadPoolExecutor, "submit", make)
