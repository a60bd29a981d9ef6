"""inferscope: why is the P99 of this inference service what it is, and what would change it?

    import inferscope as scope

    scope.configure(service="risk-scoring", slo=scope.SLO("score", p99_ms=20))
    scope.instrument("torch", "copies", "asgi")

Importing this package loads the recording core and nothing heavy: no torch, no OpenTelemetry, no NumPy. The rest is imported in
`configure()`, before traffic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from inferscope.errors import InferscopeError
from inferscope.version import __version__ as __version__

if TYPE_CHECKING:
    from inferscope.api import (
        capture_now,
        configure,
        flush,
        instrument,
        ready,
        shutdown,
        snapshot,
        status,
        uninstrument,
        watch,
    )
    from inferscope.capture.budget import CaptureBudget
    from inferscope.detect.slo import SLO
    from inferscope.record.batch import batch
    from inferscope.record.core import attach, lock, request, stage
    from inferscope.types import Incident, Snapshot

__all__ = [  # noqa: RUF022  (grouped by purpose)
    "configure",
    "shutdown",
    "flush",
    "status",
    "ready",
    "request",
    "stage",
    "batch",
    "lock",
    "watch",
    "attach",
    "instrument",
    "uninstrument",
    "capture_now",
    "snapshot",
    "SLO",
    "CaptureBudget",
    "Snapshot",
    "Incident",
    "InferscopeError",
]

# The hot path is methods of the process's recorder: no lookup and no wrapper lies between a call and the core.
_HOT = frozenset({"attach", "lock", "request", "stage"})
_ELSEWHERE = {
    "SLO": "inferscope.detect.slo",
    "batch": "inferscope.record.batch",
    "CaptureBudget": "inferscope.capture.budget",
    "Snapshot": "inferscope.types",
    "Incident": "inferscope.types",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'inferscope' has no attribute {name!r}")
    import importlib

    if name in _HOT:
        value = getattr(importlib.import_module("inferscope.record.core"), name)
    else:
        value = getattr(importlib.import_module(_ELSEWHERE.get(name, "inferscope.api")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
