"""Loaded by every interpreter that `inferscope run` starts, workers included: chains an existing sitecustomize, then waits for imports.

Nothing of inferscope is imported until the application imports something that can be measured: an interpreter that runs pip or a shell
script's helper pays for this file alone. `INFERSCOPE_WATCHED` names the modules that end the wait; `inferscope run` fills it.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # as typing has it, whose import would cost more than all that this file does
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

_HERE = os.path.dirname(os.path.realpath(__file__))  # noqa: PTH120  (pathlib costs as much as typing)


def _chain() -> None:
    """Run the sitecustomize that ours has hidden, if there is one; what it raises is its own, as without us."""
    ours = sys.modules.pop("sitecustomize", None)
    kept = list(sys.path)
    sys.path[:] = [entry for entry in sys.path if not entry or os.path.realpath(entry) != _HERE]
    try:
        __import__("sitecustomize")  # theirs: ours is not on the path
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
        if ours is not None:
            sys.modules["sitecustomize"] = ours
    finally:
        sys.path[:] = kept


class _Loading:
    """Stands in for a module's loader while the module is executed, and says when that is done."""

    def __init__(self, loader: Any, done: Callable[[], None]) -> None:
        self._loader, self._done = loader, done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the loader does."""
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: Any) -> None:
        """As the loader does; from here on the module knows its own loader alone."""
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._done()


class _Watch:
    """First in `sys.meta_path` until a module of `names` was imported."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """What the finders after this one find, watched when it is one of the names."""
        if name not in self._names:
            return None
        for finder in sys.meta_path:
            spec = finder.find_spec(name, path, target) if finder is not self and hasattr(finder, "find_spec") else None
            if spec is not None:
                loader: Any = spec.loader
                if hasattr(loader, "exec_module") and hasattr(loader, "create_module"):
                    watched: Any = _Loading(loader, self._imported)
                    spec.loader = watched
                return spec
        return None

    def _imported(self) -> None:
        try:
            sys.meta_path.remove(self)
        except ValueError:  # another module, or another thread, was first
            return
        _begin()


def _begin() -> None:
    try:
        from inferscope.autostart import begin

        begin()
    except Exception as error:  # noqa: BLE001  (the application starts as without us, whatever is wrong with our installation)
        sys.stderr.write(f"inferscope: not started ({type(error).__name__}); the application runs as without it\n")


_chain()
if os.environ.get("INFERSCOPE_DISABLED") != "1":
    _watched = os.environ.get("INFERSCOPE_WATCHED")
    if _watched is None:
        _begin()
    else:
        sys.meta_path.insert(0, _Watch(frozenset(_watched.split(","))))
