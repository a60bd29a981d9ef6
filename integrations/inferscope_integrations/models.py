"""Models that are no `nn.Module` call of the application's own: ONNX Runtime sessions, transformers, sentence-transformers.

| library | stage | size of the request, where the application gave none |
|---|---|---|
| onnxruntime | `forward`, around every way to run a session | none |
| transformers | `generate`; `pipeline:TASK` around a pipeline | tokens of the prompt |
| sentence-transformers | `encode`, and in it `tokenize` | tokens of the texts, padding included |

The torch integration's `forward` lies inside `generate`, `pipeline` and `encode`, and each owns its own time. What runs inside compiled code
is not measured. Sizes are read from shapes, never from values, so that no device is waited for.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, ClassVar, Final

from inferscope.integration import Integration, recorder

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferscope.patching import Ledger, Patch

__all__ = ["OnnxRuntimeIntegration", "PipelineIntegration", "SentenceTransformersIntegration", "TransformersIntegration"]

_RUNS: Final = ("run", "run_with_iobinding", "run_with_ort_values", "run_with_ortvaluevector")
_TASK: Final = "pipeline"


def _is_compiling() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.compiler.is_compiling())


def _note_size(tokens: Any) -> None:
    """Fill the request's size from the shape of `tokens`, when nobody has said it."""
    try:
        request = recorder().current()
        if request is not None and request.size is None:
            size = 1
            for length in tokens.shape:
                size *= int(length)
            request.size = size
    except Exception:  # noqa: BLE001  (tokens of a kind that has no shape)
        return


def _staged(name: str | Callable[[Any], str], after: Callable[[Any, tuple[Any, ...], dict[str, Any]], None] | None = None) -> Any:
    """A maker of wrappers that run the original as one stage; `after` sees its result and arguments."""

    def make(original: Any, patch: Patch) -> Callable[..., Any]:
        def staged(self: Any, *args: Any, **kwargs: Any) -> Any:
            if _is_compiling() or not patch.active:
                return original(self, *args, **kwargs)
            with recorder().stage(name if isinstance(name, str) else name(self)):
                result = original(self, *args, **kwargs)
            if after is not None:
                after(result, args, kwargs)
            return result

        return staged

    return make


class OnnxRuntimeIntegration(Integration):
    """Runs of ONNX Runtime sessions as stage `forward`; `run_async` returns before its work is done and is left out."""

    name: ClassVar[str] = "onnxruntime"
    target: ClassVar[str] = "onnxruntime"
    versions: ClassVar[tuple[tuple[int, ...], tuple[int, ...] | None]] = ((1, 19), None)

    def patch(self, ledger: Ledger) -> None:
        """Replace the methods on the sessions' common base, where they are defined."""
        from onnxruntime.capi.onnxruntime_inference_collection import Session

        for name in _RUNS:
            ledger.replace(Session, name, _staged("forward"))


def _task(pipeline: Any) -> str:
    task = getattr(pipeline, "task", None)
    return f"{_TASK}:{task}" if isinstance(task, str) and task else _TASK


class PipelineIntegration(Integration):
    """Calls of transformers' pipelines as stage `pipeline:TASK`."""

    name: ClassVar[str] = "transformers_pipelines"
    target: ClassVar[str] = "transformers.pipelines.base"
    distribution: ClassVar[str] = "transformers"
    versions: ClassVar[tuple[tuple[int, ...], tuple[int, ...] | None]] = ((4, 46), None)

    def patch(self, ledger: Ledger) -> None:
        """Replace `Pipeline.__call__`."""
        from transformers.pipelines.base import Pipeline

        ledger.replace(Pipeline, "__call__", _staged(_task))


def _prompt(_result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    prompt = kwargs.get("input_ids", kwargs.get("inputs", args[0] if args else None))
    if prompt is not None:
        _note_size(prompt)


class TransformersIntegration(Integration):
    """`generate` of every model that has it as stage `generate`."""

    name: ClassVar[str] = "transformers"
    target: ClassVar[str] = "transformers.generation.utils"
    distribution: ClassVar[str] = "transformers"
    versions: ClassVar[tuple[tuple[int, ...], tuple[int, ...] | None]] = ((4, 46), None)

    def patch(self, ledger: Ledger) -> None:
        """Replace `GenerationMixin.generate`."""
        from transformers.generation.utils import GenerationMixin

        ledger.replace(GenerationMixin, "generate", _staged("generate", _prompt))


def _tokens(result: Any, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
    try:
        tokens = result["input_ids"]
    except (KeyError, TypeError, IndexError):
        return
    _note_size(tokens)


class SentenceTransformersIntegration(Integration):
    """`SentenceTransformer.encode` as stage `encode` and what makes its tokens as stage `tokenize`."""

    name: ClassVar[str] = "sentence_transformers"
    target: ClassVar[str] = "sentence_transformers"
    distribution: ClassVar[str] = "sentence-transformers"
    versions: ClassVar[tuple[tuple[int, ...], tuple[int, ...] | None]] = ((3, 0), None)

    def patch(self, ledger: Ledger) -> None:
        """Replace `encode` and, by its name in this release, `preprocess` or `tokenize`."""
        from sentence_transformers import SentenceTransformer

        ledger.replace(SentenceTransformer, "encode", _staged("encode"))
        ledger.replace(
            SentenceTransformer, "preprocess" if hasattr(SentenceTransformer, "preprocess") else "tokenize", _staged("tokenize", _tokens)
        )
