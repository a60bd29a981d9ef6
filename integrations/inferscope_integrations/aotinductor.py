"""Models that AOTInductor has compiled ahead of time: they are no `nn.Module`, and a call of one is a forward all the same."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, ClassVar, Final

from inferscope.integration import Integration, recorder

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferscope.patching import Ledger, Patch

__all__ = ["AotInductorIntegration"]

_FORWARD: Final = "forward"


class AotInductorIntegration(Integration):
    """Patches `AOTICompiledModel.__call__`."""

    name: ClassVar[str] = "aotinductor"
    target: ClassVar[str] = "torch.export.pt2_archive._package"
    distribution: ClassVar[str] = "torch"
    versions: ClassVar[tuple[tuple[int, ...], tuple[int, ...] | None]] = ((2, 7), None)
    serves: ClassVar[bool] = False

    def patch(self, ledger: Ledger) -> None:
        """Replace the call; the class is private to torch and where it is missing nothing is patched."""
        module: Any = importlib.import_module(self.target)

        def make(original: Any, patch: Patch) -> Callable[..., Any]:
            def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807  (stands in for the class's own method)
                if not patch.active:
                    return original(self, *args, **kwargs)
                with recorder().stage(_FORWARD):
                    return original(self, *args, **kwargs)

            return __call__

        ledger.replace(module.AOTICompiledModel, "__call__", make)
