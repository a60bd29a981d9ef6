"""diagnose: evidence in, `Incident` out. Pure functions and numpy; torch is never imported here.

`python -m inferscope.diagnose DIRECTORY` is the child process that a service starts for an open incident. Names are resolved lazily, so that
the child can limit itself before numpy is loaded.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from inferscope.diagnose.attribution import Attribution, attribute
    from inferscope.diagnose.evidence import Horizon, read_documents
    from inferscope.diagnose.incident import diagnose, from_dict, load, load_directory, save, to_dict
    from inferscope.diagnose.merging import merge
    from inferscope.diagnose.trace import TraceSummary, read_trace
    from inferscope.diagnose.whatif import Plan, plan

__all__ = [
    "Attribution",
    "Horizon",
    "Plan",
    "TraceSummary",
    "attribute",
    "diagnose",
    "from_dict",
    "load",
    "load_directory",
    "merge",
    "plan",
    "read_documents",
    "read_trace",
    "save",
    "to_dict",
]

_HOMES: Final = {
    "attribution": ("Attribution", "attribute"),
    "evidence": ("Horizon", "read_documents"),
    "incident": ("diagnose", "from_dict", "load", "load_directory", "save", "to_dict"),
    "merging": ("merge",),
    "trace": ("TraceSummary", "read_trace"),
    "whatif": ("Plan", "plan"),
}


def __getattr__(name: str) -> object:
    """Import the module that holds a public name."""
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)
