"""What `stage` and `request` give when recording is off."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self

    F = TypeVar("F", bound=Callable[..., Any])

__all__ = ["NOOP", "Noop"]


class Noop:
    """A span and a request that record nothing; one object is shared by all callers, and as a decorator it returns the function itself."""

    __slots__ = ()

    id: Final = 0
    start_ns: Final = 0
    name: Final = ""
    model: Final[str | None] = None
    cls: Final[str | None] = None
    open: Final = False
    packed: Final = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def __call__(self, function: F) -> F:
        """The function itself."""
        return function

    def __setattr__(self, name: str, value: object) -> None:
        """What a request lets one set is accepted and forgotten."""
        if name not in _SETTABLE:
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        try:
            return _SETTABLE[name]
        except KeyError:
            raise AttributeError(name) from None

    def finish(self, error: object = None) -> None:
        """Nothing to close."""

    def discard(self) -> None:
        """Nothing to close."""


_SETTABLE: Final[dict[str, Any]] = {
    "size": None,
    "items": 1,
    "error": None,
    "wanted": False,
    "profiled": False,
    "trace": None,
}

NOOP: Final = Noop()
"""The shared one."""
