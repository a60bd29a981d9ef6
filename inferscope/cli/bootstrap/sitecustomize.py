"""Loaded by every interpreter that `inferscope run` starts, workers included: chains an existing sitecustomize, then waits for imports.

Nothing is measured and nothing heavy is imported until the application imports something that can be measured: an interpreter that runs
pip or a shell script's helper pays for the import hooks alone.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

_HERE = str(Path(__file__).resolve().parent)


def _chain() -> None:
    """Run the sitecustomize that ours has hidden, if there is one; what it raises is its own, as without us."""
    ours = sys.modules.pop("sitecustomize", None)
    kept = list(sys.path)
    sys.path[:] = [entry for entry in sys.path if not entry or str(Path(entry).resolve()) != _HERE]
    try:
        importlib.import_module("sitecustomize")
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
        if ours is not None:
            sys.modules["sitecustomize"] = ours
    finally:
        sys.path[:] = kept


def _wait_for_imports() -> None:
    if os.environ.get("INFERSCOPE_DISABLED") == "1":
        return
    try:
        from inferscope.autostart import begin

        begin()
    except Exception as error:  # noqa: BLE001  (the application starts as without us, whatever is wrong with our installation)
        sys.stderr.write(f"inferscope: not started ({type(error).__name__}); the application runs as without it\n")


_chain()
_wait_for_imports()
