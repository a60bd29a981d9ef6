"""The end of an import that is under way: what is called then finds the module complete."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["is_loading", "when_loaded"]


def is_loading(module: Any) -> bool:
    """Whether the import of a module in `sys.modules` has not ended."""
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def when_loaded(module: Any, call: Callable[[], object]) -> None:
    """Call once when the import of a module that is loading has ended, however it ended.

    The import system notes the end in an attribute of the module's spec; the spec's class is replaced by one that sees that, and is put
    back there.
    """
    spec: Any = module.__spec__
    kind: Any = spec.__class__

    class Watched(kind):  # type: ignore[misc]  # the spec's own class, which differs between importers
        @property
        def _initializing(self) -> bool:
            return True

        @_initializing.setter
        def _initializing(self, value: bool) -> None:
            if not value:
                self.__class__ = kind
                self._initializing = value
                call()

    spec.__class__ = Watched
