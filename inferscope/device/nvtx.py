"""Stages as NVTX ranges, so that a timeline of Nsight Systems shows what the reports call by the same names.

Off unless a tool that collects ranges is attached, or `INFERSCOPE_NVTX=1` asks for them. They lie in a domain of their own with registered
strings (70 ns a pair with no tool; `nvtx.annotate` takes 1.2 us). Push and pop belong to one thread and nest; where several tasks share a thread, or a
request moves between threads, a stage becomes a start/end range instead, which may overlap others. Decorated coroutines and generators have no range:
others run in between.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import threading
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["DOMAIN", "Ranges", "attached"]

DOMAIN: Final = "inferscope"
_TOOLS: Final = ("NVTX_INJECTION64_PATH", "NVTX_INJECTION32_PATH", "NSYS_PROFILING_SESSION_ID")
"""How a tool says that it collects ranges: the library it injects, and Nsight Systems' own mark."""
_NAMES: Final = 512
"""Names that get a registered string; a tool keeps each for ever."""
_PUSHED: Final = -1


def attached(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether ranges are asked for (`INFERSCOPE_NVTX`), or, where it is not set, whether a tool collects them."""
    asked = environ.get("INFERSCOPE_NVTX", "").strip().lower()
    if asked:
        return asked not in {"0", "false", "no", "off"}
    return any(environ.get(name) for name in _TOOLS)


def _among_tasks() -> bool:
    """Whether this thread runs an event loop: its tasks take turns, so that ranges would not nest."""
    try:
        return asyncio._get_running_loop() is not None  # noqa: SLF001  (the one that does not raise; documented for libraries)
    except Exception:  # noqa: BLE001
        return True


class Ranges:
    """Hooks of the recorder that open and close ranges; they never raise.

    Attributes:
        off: Why there are none; empty while there are.
        opened: Ranges since start.
    """

    def __init__(self) -> None:
        self.off = "no tool is attached (INFERSCOPE_NVTX=1 asks for ranges)"
        self.opened = 0
        self._domain: Any = None
        self._attributes: dict[str, Any] = {}
        self._open: dict[int, list[tuple[str, int, int]]] = {}

    @property
    def on(self) -> bool:
        """Whether stages become ranges."""
        return not self.off

    def start(self, environ: Mapping[str, str] = os.environ) -> None:
        """Load the library when ranges are wanted."""
        if not attached(environ):
            return
        try:
            api: Any = importlib.import_module("nvtx")
            self._domain = api.get_domain(DOMAIN)
            self._domain.get_event_attributes(message=DOMAIN)
        except ImportError:
            self.off = "the package nvtx is not installed"
            return
        except Exception as error:  # noqa: BLE001  (a library that does not load)
            self.off = f"nvtx cannot be used ({type(error).__name__})"
            return
        self.off = ""

    def on_enter(self, request: Any, name: str, _kind: str) -> None:
        """A stage, or the request itself, begins on this thread."""
        attributes = self._attributes.get(name)
        if attributes is None:
            if len(self._attributes) >= _NAMES:
                return
            attributes = self._attributes[name] = self._domain.get_event_attributes(message=name)
        open_ = self._open.setdefault(request.id, [])
        thread = threading.get_ident()
        if _among_tasks() or (open_ and open_[-1][2] != thread):
            open_.append((name, self._domain.start_range(attributes), thread))
        else:
            self._domain.push_range(attributes)
            open_.append((name, _PUSHED, thread))
        self.opened += 1

    def on_exit(self, request: Any, name: str, _kind: str) -> None:
        """It ended: close the innermost range of that name."""
        open_ = self._open.get(request.id, [])
        for index in range(len(open_) - 1, -1, -1):
            known, identity, thread = open_[index]
            if known != name:
                continue
            del open_[index]
            if identity != _PUSHED:
                self._domain.end_range(identity)
            elif thread == threading.get_ident():
                self._domain.pop_range()
            break
        if not open_:  # also what was done for a batch, of whose end nobody hears
            self._open.pop(request.id, None)

    def on_finish(self, request: Any, _wall_ns: int) -> None:
        """The request is over: nothing of it stays open."""
        for _, identity, _thread in reversed(self._open.pop(request.id, [])):
            if identity != _PUSHED:
                self._domain.end_range(identity)

    def after_fork(self) -> None:
        """In a forked child: the parent's requests are not ours to close."""
        self._open = {}
