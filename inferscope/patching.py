"""Reversible replacement of attributes on other people's classes and modules.

A ledger remembers what stood in the owner's own `__dict__` (or that nothing did: `torch.Tensor.to` is inherited) and restores it only
while our wrapper is still on top. When somebody patched over us the wrapper stays and goes dormant: it asks `Patch.active` first.
"""

from __future__ import annotations

import functools
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final, cast

from inferscope.errors import IntegrationUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Ledger", "Patch"]

_MISSING: Final = object()
_NAMES: Final = ("__module__", "__name__", "__qualname__", "__doc__")


class Patch:
    """One replaced attribute.

    Attributes:
        active: False once undone; a wrapper that could not be removed then calls the original and nothing else.
    """

    __slots__ = ("active", "name", "original", "owner", "stored", "wrapper")

    def __init__(self, owner: Any, name: str) -> None:
        self.owner = owner
        self.name = name
        own = cast("dict[str, Any]", vars(owner))
        self.stored: Any = own.get(name, _MISSING)
        self.original: Any = getattr(owner, name)
        self.wrapper: Any = None
        self.active = True

    def undo(self) -> bool:
        """Restore the original if our wrapper is still in place; returns whether it was."""
        self.active = False
        own = cast("dict[str, Any]", vars(self.owner))
        if own.get(self.name, _MISSING) is not self.wrapper:
            return False
        if self.stored is _MISSING:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.stored)
        return True


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
        if getattr(owner, name, None) is None or any(p.owner is owner and p.name == name for p in self._patches):
            return False
        patch = Patch(owner, name)
        wrapper = make(patch.original, patch)
        if type(wrapper) is FunctionType:  # a stand-in of the core passes for the original and would hand the names on to it
            functools.update_wrapper(wrapper, patch.original, assigned=_NAMES, updated=())
        patch.wrapper = wrapper
        try:
            setattr(owner, name, wrapper)
        except TypeError as error:  # gevent puts types of C in place of the standard library's
            raise IntegrationUnavailableError(f"{owner.__module__}.{owner.__qualname__} is a type that cannot be changed") from error
        self._patches.append(patch)
        return True

    def places(self) -> list[tuple[Any, str]]:
        """Owner and attribute of every patch, in the order in which they were made."""
        return [(patch.owner, patch.name) for patch in self._patches]

    def undo(self) -> int:
        """Undo everything; returns how many wrappers had to stay, dormant, because somebody patched over them."""
        stayed = 0
        while self._patches:
            stayed += not self._patches.pop().undo()
        return stayed
