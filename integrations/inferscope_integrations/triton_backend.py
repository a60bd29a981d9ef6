"""Models of Triton's Python backend: every `TritonPythonModel.execute` is a request named after the model.

One call serves a batch that Triton has formed, so `items` is the number of Triton requests in it. Triton's embedded interpreter runs no
sitecustomize: the model says so itself, in `initialize` or through the decorator, and its stages, copies and forward are seen as anywhere else.

    @measured                                     # or, in initialize(): inferscope.instrument("triton_backend", "torch")
    class TritonPythonModel: ...
"""

from __future__ import annotations

import functools
import json
import sys
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from inferscope.errors import IntegrationUnavailableError
from inferscope.integration import Integration, recorder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from inferscope.patching import Ledger, Patch

__all__ = ["TritonBackendIntegration", "measured"]

ModelT = TypeVar("ModelT", bound=type)
_CLASS = "TritonPythonModel"
_TRACEPARENT_PARTS = 4


def _traced(requests: Sequence[Any]) -> tuple[str, str] | None:
    """Trace and span id of the first request that carries them; Triton leaves them out now and then."""
    for request in requests:
        text = request.trace().get_context() if hasattr(request, "trace") else None
        parts = str(json.loads(text).get("traceparent", "")).split("-") if text else []
        if len(parts) == _TRACEPARENT_PARTS:
            return parts[1], parts[2]
    return None


def _first_error(responses: Any) -> str | None:
    """`triton` when one of the answers is an error; decoupled models answer elsewhere and return None."""
    for response in responses or ():
        if response is not None and response.has_error():
            return "triton"
    return None


def _executing(original: Callable[..., Any], is_active: Callable[[], bool], name_of: Callable[[Any], str]) -> Callable[..., Any]:
    def execute(self: Any, requests: Sequence[Any]) -> Any:
        if not is_active():
            return original(self, requests)
        with recorder().request(name_of(self), items=len(requests)) as request:
            responses = original(self, requests)
            try:
                request.trace = _traced(requests)
                request.error = _first_error(responses)
            except Exception:  # noqa: BLE001  (a response class of another Triton)
                pass
            return responses

    return execute


def _name_of(model: Any) -> str:
    """Triton imports a model as `VERSION.model` from the folder that bears its name."""
    file = getattr(sys.modules.get(type(model).__module__), "__file__", None) or ""
    parts = file.rsplit("/", 3)
    return parts[-3] if len(parts) == 4 and parts[-1] == "model.py" else _CLASS


def measured(model: ModelT) -> ModelT:
    """Class decorator of a `TritonPythonModel`: times `execute`; the class stays the same object."""
    kind: Any = model
    kind.execute = functools.wraps(kind.execute)(_executing(kind.execute, lambda: True, _name_of))
    return model


class TritonBackendIntegration(Integration):
    """Patches `execute` of the `TritonPythonModel` that this process has imported."""

    name: ClassVar[str] = "triton_backend"
    serves: ClassVar[bool] = False

    def patch(self, ledger: Ledger) -> None:
        """Find the models' classes and replace their `execute`.

        Raises:
            IntegrationUnavailableError: This process has none; call it in `initialize`, when the class is complete.
        """
        models = {id(found): found for module in list(sys.modules.values()) if isinstance(found := vars(module).get(_CLASS), type)}
        if not models:
            raise IntegrationUnavailableError(f"this process has no {_CLASS}; in a Triton model, call instrument() in initialize()")

        def make(original: Any, patch: Patch) -> Callable[..., Any]:
            return _executing(original, lambda: patch.active, _name_of)

        for model in models.values():
            ledger.replace(model, "execute", make)
