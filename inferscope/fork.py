"""What must happen around `os.fork`, in one registration for the process.

Callbacks are held by name so that a second `configure()` replaces them; the interpreter offers no way to unregister.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from inferscope.guard import guard

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["on_child", "on_parent"]

_child: dict[str, Callable[[], None]] = {}
_before: dict[str, Callable[[], None]] = {}
_after: dict[str, Callable[[], None]] = {}
_registered = False


def on_child(name: str, call: Callable[[], None]) -> None:
    """Run `call` in every forked child, in the order of registration; a name registered again is replaced."""
    _child[name] = call
    _register()


def on_parent(name: str, before: Callable[[], None], after: Callable[[], None]) -> None:
    """Run `before` in the parent ahead of a fork and `after` in parent and child behind it: to hold a lock across it."""
    _before[name] = before
    _after[name] = after
    _register()


def _register() -> None:
    global _registered  # noqa: PLW0603  (os.register_at_fork has no counterpart that unregisters)
    if _registered or not hasattr(os, "register_at_fork"):
        return
    _registered = True
    os.register_at_fork(before=_run_before, after_in_parent=_run_after, after_in_child=_run_child)


def _run_all(calls: dict[str, Callable[[], None]]) -> None:
    for call in list(calls.values()):
        with guard("fork"):
            call()


def _run_before() -> None:
    _run_all(_before)


def _run_after() -> None:
    _run_all(_after)


def _run_child() -> None:
    _run_all(_after)
    _run_all(_child)
