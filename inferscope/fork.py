"""What must happen around `os.fork`, in one registration for the process.

Callbacks are held by name so that a second `configure()` replaces them; the interpreter offers no way to unregister.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from inferscope.guard import guard

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["at_process_end", "on_child", "on_parent"]

_child: dict[str, Callable[[], None]] = {}
_before: dict[str, Callable[[], None]] = {}
_after: dict[str, Callable[[], None]] = {}
_ending: dict[str, Callable[..., None]] = {}
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


def at_process_end(call: Callable[[], None]) -> None:
    """Run `call` when a process of `multiprocessing` ends: it leaves by `os._exit`, which skips `atexit`.

    Holds for this process and its forked children; a later call replaces the earlier one. Called in the parent, or in a child before
    its work begins. Does nothing where `multiprocessing` was not imported yet.
    """
    _ending["call"] = call
    util = sys.modules.get("multiprocessing.util")
    process = sys.modules.get("multiprocessing.process")
    if util is None or process is None or "registered" in _ending:
        return
    _ending["registered"] = _register_ending
    if process.parent_process() is not None:
        _register_ending(util)
    # A child drops inherited finalizers as it starts, and runs these right after.
    util.register_after_fork(util, _register_ending)


def _register_ending(util: Any) -> None:
    # Below zero: after the process's own children were joined.
    util.Finalize(None, _end, exitpriority=-1)


def _end() -> None:
    with guard("exit"):
        _ending["call"]()


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
