"""Chooses the implementation that records: off, the C core, or its pure-Python twin.

`INFERSCOPE_DISABLED=1` is read before anything else loads; `INFERSCOPE_PURE=1`, or a core that was not built or does not load, gives the twin.
So does an interpreter that runs without its lock: the core would switch the lock on for the whole process. The twin counts there, but two
threads that add to one counter at the same instant may count once; `REASON`, and with it `status()`, says so.

Late device data (DESIGN 4.6). Whoever records a device span in a request settles it like this, and from any thread:

    ref = recorder.pin(request)                      # in the request, beside the first event; 0 when there is nothing to settle
    waits = recorder.column("gpu-queue", "cuda:0")   # once; `Recorder.columns()` lists them all
    recorder.settle(ref, copy_column, waits, ns)     # any number of times, in the request or after it; returns the ns moved
    recorder.unpin(ref)                              # exactly once for each pin, also when the span was lost or abandoned

`settle` moves time between two columns of that request: of its exclusive vector and, once it is counted, of the band sums that it went
into. Sums stay as they are, because a column gives no more than this request put there: what `settle` returns may be less than was
asked for. While a request has pins its retained record is withheld from `drain`, for at most 2 s after its end; then it is handed over
with `device_incomplete` set (the last field of the tuple), counted in `counters()["device_incomplete"]`, and later calls with its
reference do nothing. `pins_refused` counts pins beyond 4096 requests at once, `settles_refused` moves beyond 16 pairs of columns in one
open request. A reference is a plain int that never comes again; a request that was discarded and a no-op have 0 or are forgotten. What is
settled in a carrier (a batch) is settled in every request that it is spliced into, and those wait for its spans too.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from inferscope.record.fallback import Recorder

__all__ = ["IMPLEMENTATION", "REASON", "Recorder", "attach", "default", "lock", "request", "stage"]


_INEXACT: Final = "threads run without the interpreter's lock, so counts may miss some"


def _without_lock() -> bool:
    """Whether threads run Python code at the same time."""
    is_enabled = getattr(sys, "_is_gil_enabled", None)
    return is_enabled is not None and not is_enabled()


def _choose() -> tuple[str, str, type[Recorder]]:
    """Name, reason and class of the implementation."""
    if os.environ.get("INFERSCOPE_DISABLED") == "1":
        from inferscope.record import disabled

        return "disabled", "INFERSCOPE_DISABLED=1", disabled.Recorder
    from inferscope.record import fallback

    if os.environ.get("INFERSCOPE_PURE") == "1":
        return "pure", f"INFERSCOPE_PURE=1; {_INEXACT}" if _without_lock() else "INFERSCOPE_PURE=1", fallback.Recorder
    if _without_lock():
        return "pure", f"the C core would switch the interpreter's lock on (PYTHON_GIL=1 allows it); {_INEXACT}", fallback.Recorder
    try:
        from inferscope.record import _native
    except Exception as error:  # noqa: BLE001 - a core that does not load must not stop the application
        return "pure", f"the C core does not load: {error}", fallback.Recorder
    return "native", "", _native.Recorder  # type: ignore[return-value,unused-ignore]


_CHOICE = _choose()

IMPLEMENTATION: Final = _CHOICE[0]
"""`native`, `pure` or `disabled`."""

REASON: Final = _CHOICE[1]
"""Why it is not `native`; empty when it is."""

if not TYPE_CHECKING:
    Recorder = _CHOICE[2]

default: Final[Recorder] = Recorder()
"""The process's recorder."""

stage = default.stage
"""`inferscope.stage`."""

request = default.request
"""`inferscope.request`."""

lock = default.lock
"""`inferscope.lock`."""

attach = default.attach
"""`inferscope.attach`."""

if not TYPE_CHECKING:
    # Methods are nothing that a compiler of graphs could be told to look past.
    if IMPLEMENTATION == "native":
        from inferscope.record import compiled

        stage = default.entry(compiled.stage, compiled.traced_stage)
        request = default.entry(compiled.request, compiled.traced_request)
    else:
        from inferscope.record.pure.entry import public

        stage, request = public(default, silent=IMPLEMENTATION == "disabled")
