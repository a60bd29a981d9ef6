"""pytriton: every run of an inference callable is a request named after its model, decorators (`@batch` and the like) included.

The time between the moment that Triton hands a batch over and the moment that the callable starts is the request's queue `backlog`: callables
of one instance run one after the other on its event loop. `items` is the number of Triton requests in the batch.
"""

from __future__ import annotations

import importlib
import inspect
from typing import TYPE_CHECKING, Any, ClassVar, Final

from inferscope.clock import now_ns
from inferscope.integration import Integration, recorder

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from inferscope.patching import Ledger, Patch

__all__ = ["PytritonIntegration"]

_MODEL: Final = "pytriton"
_WAITING: Final = 1024


class PytritonIntegration(Integration):
    """Patches pytriton's `InferenceHandler`, one of which runs each instance of a model."""

    name: ClassVar[str] = "pytriton"
    target: ClassVar[str] = "pytriton"
    distribution: ClassVar[str] = "nvidia-pytriton"
    versions: ClassVar[tuple[tuple[int, ...], tuple[int, ...] | None]] = ((0, 7), None)

    def patch(self, ledger: Ledger) -> None:
        """Replace the constructor, to time what it has made of the callable, and `run_inference`, to see batches arrive."""
        handler: Any = importlib.import_module("pytriton.proxy.inference").InferenceHandler
        arrived: dict[int, int] = {}

        def making(original: Any, patch: Patch) -> Callable[..., Any]:
            def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807  (stands in for the class's own method)
                original(self, *args, **kwargs)
                inner = getattr(self, "_model_callable", None)
                if patch.active and inspect.isasyncgenfunction(inner):
                    self._model_callable = _timed(inner, _name(self), patch, arrived)

            return __init__

        def arriving(original: Any, patch: Patch) -> Callable[..., Any]:
            def run_inference(self: Any, scope: Any, requests: Any) -> Any:
                if patch.active and len(arrived) < _WAITING:
                    arrived[id(requests)] = now_ns()
                return original(self, scope, requests)

            return run_inference

        ledger.replace(handler, "__init__", making)
        ledger.replace(handler, "run_inference", arriving)


def _name(handler: Any) -> str:
    try:
        return str(handler._validator._model_config.model_name)  # noqa: SLF001
    except AttributeError:
        return _MODEL


def _timed(
    inner: Callable[[Any], AsyncIterator[Any]], name: str, patch: Patch, arrived: dict[int, int]
) -> Callable[..., AsyncIterator[Any]]:
    async def call(requests: Any) -> AsyncIterator[Any]:
        started = arrived.pop(id(requests), None)
        if not patch.active:
            async for responses in inner(requests):
                yield responses
            return
        with recorder().request(name, items=len(requests), started_ns=started):
            async for responses in inner(requests):
                yield responses

    return call
