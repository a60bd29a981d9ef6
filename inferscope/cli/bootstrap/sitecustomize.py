"""Loaded by every interpreter that `inferscope run` starts, workers included: chains an existing sitecustomize, then waits for imports.

Nothing of inferscope is imported until the application imports something that can be measured: an interpreter that runs pip or a shell
script's helper pays for this file alone. `INFERSCOPE_WATCHED` names the modules that end the wait; `inferscope run` fills it.
"""

from __future__ import annotations

import os
import sys

_HERE = os.path.dirname(os.path.realpath(__file__))  # noqa: PTH120  (pathlib alone takes as long to import as all that this file does)


def _chain() -> None:
    """Run the sitecustomize that ours has hidden, if there is one; what it raises is its own, as without us."""
    ours = sys.modules.pop("sitecustomize", None)
    kept = list(sys.path)
    sys.path[:] = [entry for entry in sys.path if not entry or os.path.realpath(entry) != _HERE]
    try:
        import sitecustomize  # noqa: F401  (theirs: ours is not on the path)
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
        if ours is not None:
            sys.modules["sitecustomize"] = ours
    finally:
        sys.path[:] = kept


class _Loading:
    """Stands in for a module's loader while the module is executed, and says when that is done."""

    def __init__(self, loader, done):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204  (importing typing costs more than the rest)
        self._loader, self._done = loader, done

    def __getattr__(self, name):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
        return getattr(self._loader, name)

    def create_module(self, spec):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        return self._loader.create_module(spec)

    def exec_module(self, module):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._done()


class _Watch:
    """First in `sys.meta_path` until a module of `names` was imported."""

    def __init__(self, names):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
        self._names = names

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        if name not in self._names:
            return None
        for finder in sys.meta_path:
            spec = finder.find_spec(name, path, target) if finder is not self and hasattr(finder, "find_spec") else None
            if spec is not None:
                if hasattr(spec.loader, "exec_module") and hasattr(spec.loader, "create_module"):
                    spec.loader = _Loading(spec.loader, self._imported)
                return spec
        return None

    def _imported(self):  # type: ignore[no-untyped-def]  # noqa: ANN202
        if self in sys.meta_path:
            sys.meta_path.remove(self)  # type: ignore[arg-type]
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
        sys.meta_path.insert(0, _Watch(frozenset(_watched.split(","))))  # type: ignore[arg-type]
