"""torch: the outermost forward of any `nn.Module` as a stage.

The patch sits on the class (`nn.Module.__call__`), so that existing models, TorchScript modules and compiled wrappers are covered and no
user object is touched. `torch.compiler.is_compiling()` comes first: a clock read inside traced code breaks the graph (pytorch#117584).
"""

from __future__ import annotations

import weakref
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, ClassVar, Final

from inferscope.integration import Integration, recorder
from inferscope.slots import slots

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferscope.patching import Ledger, Patch

__all__ = ["FORWARD", "TorchIntegration"]

FORWARD: Final = "forward"
_inside: ContextVar[bool] = ContextVar("inferscope_forward", default=False)
_names: dict[int, tuple[weakref.ref[Any], str]] = {}


def _remember(name: str, module: Any) -> None:
    """Name the forward of one module: `forward:NAME`; filled into the slot that `inferscope.watch` calls."""
    key = id(module)

    def forget(_gone: weakref.ref[Any]) -> None:
        _names.pop(key, None)

    _names[key] = (weakref.ref(module, forget), f"{FORWARD}:{name}")


def _stage_name(module: Any) -> str:
    known = _names.get(id(module))
    return known[1] if known is not None else FORWARD


class TorchIntegration(Integration):
    """Times the outermost `nn.Module.__call__` on each thread and task."""

    name: ClassVar[str] = "torch"
    target: ClassVar[str] = "torch"
    distribution: ClassVar[str] = "torch"
    versions: ClassVar[tuple[tuple[int, ...], tuple[int, ...] | None]] = ((2, 4), None)

    def patch(self, ledger: Ledger) -> None:
        """Replace `torch.nn.Module.__call__`."""
        import torch

        is_compiling = torch.compiler.is_compiling
        slots.on_model_loaded = _remember

        def make(original: Any, patch: Patch) -> Callable[..., Any]:
            def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807  (stands in for the class's own method)
                if is_compiling() or _inside.get() or not patch.active:
                    return original(self, *args, **kwargs)
                token = _inside.set(True)
                try:
                    with recorder().stage(_stage_name(self)):
                        return original(self, *args, **kwargs)
                finally:
                    _inside.reset(token)

            return __call__

        ledger.replace(torch.nn.Module, "__call__", make)

    def unpatch(self) -> None:
        """Stop naming modules."""
        slots.on_model_loaded = None
        _names.clear()
