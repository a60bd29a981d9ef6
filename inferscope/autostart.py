"""No-code start, for `inferscope run`: import hooks first, `configure()` when the application imports something that serves.

Settings come from `INFERSCOPE_*` and files alone: `INFERSCOPE_SLO=score:p99_ms=20`, `INFERSCOPE_INTEGRATIONS=torch,asgi` (default all).
"""

from __future__ import annotations

import os

from inferscope import api, guard
from inferscope.integration import registry

__all__ = ["Instrumentor", "begin"]


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


class Instrumentor:
    """What `opentelemetry-instrument` finds under entry-point group `opentelemetry_instrumentor`: the same as `inferscope run`.

    `OTEL_PYTHON_DISABLED_INSTRUMENTATIONS=inferscope` leaves it out. Libraries are waited for, never imported, and their versions are checked
    when they come; this distribution has no extra `instruments`, by whose packages OpenTelemetry would leave out all of its entry points.
    """

    def instrument(self, **_options: object) -> None:
        """Wait for what can be measured."""
        if os.environ.get("INFERSCOPE_DISABLED") != "1":
            begin()

    def uninstrument(self, **_options: object) -> None:
        """Undo every integration."""
        api.uninstrument()
