"""KServe: a model's `preprocess`, `predict`, `postprocess` and `explain` as stages of the request that calls it.

Requests come from the edge: `asgi` for REST, `grpc_aio` for gRPC. KServe times the four steps itself, with a Prometheus histogram each, around
exactly the user's methods; the stages lie where these timers do, so that no class or object of the user's is touched.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, ClassVar, Final

from inferscope.errors import IntegrationUnavailableError
from inferscope.integration import Integration, recorder

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from typing_extensions import Self

    from inferscope.patching import Ledger, Patch

__all__ = ["KserveIntegration"]

_STEPS: Final = {
    "PRE_HIST_TIME": "preprocess",
    "PREDICT_HIST_TIME": "predict",
    "POST_HIST_TIME": "postprocess",
    "EXPLAIN_HIST_TIME": "explain",
}


class _Timer:
    """KServe's own timer with a stage inside it."""

    __slots__ = ("_stage", "_timer")

    def __init__(self, timer: Any, stage: Any) -> None:
        self._timer, self._stage = timer, stage

    def __enter__(self) -> Self:
        self._timer.__enter__()
        self._stage.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> Any:
        self._stage.__exit__(kind, error, trace)
        return self._timer.__exit__(kind, error, trace)


class _Histogram:
    """Stands for one of KServe's histograms, or for its child with labels: what is not `time` is the histogram's own."""

    __slots__ = ("_active", "_histogram", "_stage")

    def __init__(self, histogram: Any, stage: str, active: Callable[[], bool]) -> None:
        self._histogram, self._stage, self._active = histogram, stage, active

    @property
    def __doc__(self) -> Any:  # type: ignore[override]  # pyright: ignore[reportIncompatibleVariableOverride] - a stand-in's is the histogram's
        return self._histogram.__doc__

    @property
    def __module__(self) -> Any:  # type: ignore[override]  # pyright: ignore[reportIncompatibleVariableOverride] - likewise
        return self._histogram.__module__

    def __getattr__(self, name: str) -> Any:
        return getattr(self._histogram, name)

    def labels(self, *args: Any, **kwargs: Any) -> Any:
        child = self._histogram.labels(*args, **kwargs)
        return _Histogram(child, self._stage, self._active) if self._active() else child

    def time(self) -> Any:
        timer = self._histogram.time()
        return _Timer(timer, recorder().stage(self._stage)) if self._active() else timer


class KserveIntegration(Integration):
    """Steps of `kserve.Model.__call__`."""

    name: ClassVar[str] = "kserve"
    target: ClassVar[str] = "kserve.model"
    distribution: ClassVar[str] = "kserve"
    versions: ClassVar[tuple[tuple[int, ...], tuple[int, ...] | None]] = ((0, 21), None)

    def patch(self, ledger: Ledger) -> None:
        """Replace the histograms that `kserve.model` looks up at each step.

        Raises:
            IntegrationUnavailableError: This release of KServe has none of them.
        """
        module: Any = importlib.import_module(self.target)

        def of(stage: str) -> Callable[[Any, Patch], Any]:
            return lambda original, patch: _Histogram(original, stage, lambda: patch.active)

        for name, stage in _STEPS.items():
            ledger.replace(module, name, of(stage))
        if not len(ledger):
            raise IntegrationUnavailableError("this release of KServe does not time the steps of a model")
