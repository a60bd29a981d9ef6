"""Reversible replacement of attributes on other people's classes and modules.

A ledger remembers what stood in the owner's own `__dict__` (or that nothing did: `torch.Tensor.to` is inherited) and restores it only
while our wrapper is still on top. When somebody patched over us the wrapper stays and goes dormant: it asks `Patch.active` first.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import sys
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final, cast

from inferscope.errors import IntegrationUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Ledger", "Patch"]

_MISSING: Final = object()
_NAMES: Final = ("__module__", "__name__", "__qualname__", "__doc__")


def _own(owner: Any, *, static: bool) -> dict[str, Any]:
    """The owner's own attributes; of a type of C the dictionary behind the view that Python shows."""
    view = cast("object", vars(owner))
    return cast("dict[str, Any]", gc.get_referents(view)[0] if static else view)


class Patch:
    """One replaced attribute.

    Attributes:
        active: False once undone; a wrapper that could not be removed then calls the original and nothing else.
        static: Whether the owner is a type of C, whose attributes Python does not set.
    """

    __slots__ = ("active", "name", "original", "owner", "static", "stored", "wrapper")

    def __init__(self, owner: Any, name: str, *, static: bool = False) -> None:
        self.owner = owner
        self.name = name
        self.static = static
        self.stored: Any = _own(owner, static=static).get(name, _MISSING)
        self.original: Any = getattr(owner, name)
        self.wrapper: Any = None
        self.active = True

    def undo(self) -> bool:
        """Restore the original if our wrapper is still in place; returns whether it was."""
        self.active = False
        if _own(self.owner, static=self.static).get(self.name, _MISSING) is not self.wrapper:
            return False
        if self.stored is _MISSING:
            delattr(self.owner, self.name)
        else:
            self.put(self.stored)
        return True

    def put(self, value: Any) -> None:
        """Set the attribute; in a type of C behind Python's back, after which the interpreter forgets what it remembered of the type."""
        if self.static:
            _own(self.owner, static=True)[self.name] = value
            ctypes.pythonapi.PyType_Modified(ctypes.py_object(self.owner))
        else:
            setattr(self.owner, self.name, value)


class Ledger:
    """The patches of one integration, undone in reverse order."""

    def __init__(self) -> None:
        self._patches: list[Patch] = []

    def __len__(self) -> int:
        """How many attributes are replaced."""
        return len(self._patches)

    def replace(self, owner: Any, name: str, make: Callable[[Any, Patch], Callable[..., Any]]) -> bool:
        """Replace `owner.name` by `make(original, patch)`.

        Args:
            owner: A class or module.
            name: The attribute. One that does not exist is skipped, so that a renamed private function breaks nothing.
            make: Builds the wrapper: a plain function, so that classes bind it as a method, or a `stand_in`.

        Returns:
            False when the attribute is missing or already ours.

        Raises:
            IntegrationUnavailableError: The owner is a type of C, which has no attributes to set.
        """
        if self._has(owner, name):
            return False
        patch = Patch(owner, name)
        wrapper = make(patch.original, patch)
        if type(wrapper) is FunctionType:  # a stand-in of the core passes for the original and would hand the names on to it
            functools.update_wrapper(wrapper, patch.original, assigned=_NAMES, updated=())
        patch.wrapper = wrapper
        try:
            patch.put(wrapper)
        except TypeError as error:  # gevent puts types of C in place of the standard library's
            raise IntegrationUnavailableError(f"{owner.__module__}.{owner.__qualname__} is a type that cannot be changed") from error
        self._patches.append(patch)
        return True

    def replace_static(self, owner: type, name: str, make: Callable[[Any, Patch], Callable[..., Any]]) -> bool:
        """Replace a method that a type of C defines itself (`torch.Stream.synchronize`), whose attributes Python does not set.

        Ordinary methods only: what the interpreter reaches through a slot of the type (`__getitem__`) would not be called.

        Args:
            owner: The type.
            name: Of the method.
            make: As of `replace`.

        Returns:
            False when the type does not define the method, when it is ours already, or on an interpreter without a GIL.
        """
        gil: Callable[[], bool] = getattr(sys, "_is_gil_enabled", lambda: True)
        if name.startswith("__") or name not in vars(owner) or self._has(owner, name) or not gil():
            return False
        patch = Patch(owner, name, static=True)
        patch.wrapper = make(patch.original, patch)
        patch.put(patch.wrapper)
        self._patches.append(patch)
        return True

    def _has(self, owner: Any, name: str) -> bool:
        """Whether there is nothing to replace, or it is ours already."""
        return getattr(owner, name, None) is None or any(p.owner is owner and p.name == name for p in self._patches)

    def places(self) -> list[tuple[Any, str]]:
        """Owner and attribute of every patch, in the order in which they were made."""
        return [(patch.owner, patch.name) for patch in self._patches]

    def undo(self) -> int:
        """Undo everything; returns how many wrappers had to stay, dormant, because somebody patched over them."""
        stayed = 0
        while self._patches:
            stayed += not self._patches.pop().undo()
        return stayed
