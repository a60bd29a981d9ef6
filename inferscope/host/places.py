"""What code threads are in, by number: the innermost line that belongs to the application and not to a library.

A sampler only notes stacks, as short tuples that are kept once each. Which of a stack's files are libraries is decided when evidence is
written, from where the loaded modules lie. Without the compiled core nothing can look at another thread's stack, and every number is 0.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Final

from inferscope.record import core

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Places"]

_DEPTH: Final = 14
_KEPT: Final = 4096
"""Stacks that are told apart; later ones are unknown."""
_OURS: Final = str(PurePath(__file__).parents[1])

_Frame = tuple[str, str, int]


class Places:
    """Stacks by number, from 1 up; for the sampling thread, read by others."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[_Frame, ...], int] = {}
        self._stack: Callable[[int, int], tuple[_Frame, ...] | None] | None = getattr(core.default, "_stack", None)

    def clear(self) -> None:
        """Forget them."""
        self._numbers = {}

    def look(self, ident: int | None) -> int:
        """The number of where a thread is now; 0 when that is not known."""
        if ident is None or self._stack is None:
            return 0
        stack = self._stack(ident, _DEPTH)
        if not stack:
            return 0
        number = self._numbers.get(stack)
        if number is None and len(self._numbers) < _KEPT:
            number = self._numbers[stack] = len(self._numbers) + 1
        return number or 0

    def names(self) -> list[str]:
        """`function (file:line)` by number, of each stack's innermost line that is no library's; empty for a stack of libraries alone."""
        libraries = _libraries()
        found = [""]
        for stack in list(self._numbers):
            frame = next((frame for frame in stack if not _is_library(frame[1], libraries)), None)
            found.append("" if frame is None else f"{frame[0]} ({frame[1].rpartition('/')[2]}:{frame[2]})")
        return found


def _is_library(file: str, libraries: frozenset[str]) -> bool:
    return file in libraries or file.startswith("<")


def _libraries() -> frozenset[str]:
    """The last two parts of the paths, as stacks have them, of all loaded modules that lie with the interpreter or its packages, and ours."""
    roots = tuple({path for key in ("stdlib", "platstdlib", "purelib", "platlib") if (path := sysconfig.get_path(key))} | {_OURS})
    found: set[str] = set()
    for module in list(sys.modules.values()):
        names: dict[str, Any] = getattr(module, "__dict__", {})
        file: object = names.get("__file__")
        if isinstance(file, str) and (file.startswith(roots) or "site-packages" in file):
            found.add("/".join(PurePath(file).parts[-2:]))
    return frozenset(found)
