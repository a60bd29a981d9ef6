"""No-code start, for `inferscope run`: import hooks first, `configure()` when the application imports something that serves.

Settings come from `INFERSCOPE_*` and files alone: `INFERSCOPE_SLO=score:p99_ms=20`, `INFERSCOPE_INTEGRATIONS=torch,asgi` (default all).
"""

from __future__ import annotations

import os

from inferscope import api, guard
from inferscope.integration import registry

__all__ = ["begin"]


def begin() -> None:
    """Wait for what can be measured."""
    names = [name for name in os.environ.get("INFERSCOPE_INTEGRATIONS", "").split(",") if name.strip()]
    registry.on_active = _activated
    with guard.guard("autostart"):
        registry.instrument(names)


def _activated(name: str) -> None:
    if not registry.serves(name):
        return
    registry.on_active = None
    with guard.guard("autostart"):
        if not api.running():
            api.configure()
