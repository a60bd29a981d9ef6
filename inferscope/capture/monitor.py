"""The GPU through a recorder that the application already runs: torch's always-on CUPTI monitor (torch 2.13, with `cupti-python`).

CUPTI has room for one subscriber, so where that monitor runs, sessions of ours record the CPU alone, and the GPU's part of an incident is a
trace window of the monitor's, from the breach to the collection of evidence. We never start the monitor: it is experimental, and it is the
application's choice. Its window is the application's too: one that is open already is left alone.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final, cast

from inferscope.clock import NS_PER_S, now_ns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["MODULE", "Monitor", "monitor_runs", "summary"]

MODULE: Final = "torch.profiler._cupti_monitor"
KERNELS: Final = 200
"""Kernels that are told apart, those with most time; the rest is one row."""
_DEVICE: Final = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_LONGEST_NS: Final = 120 * NS_PER_S


def _module() -> Any | None:
    """The monitor's module, if the application imported it; we never do."""
    found = sys.modules.get(MODULE)
    return found if all(hasattr(found, name) for name in ("get_monitor", "begin_trace_window", "end_trace_window")) else None


def monitor_runs() -> bool:
    """Whether torch's CUPTI monitor records in this process."""
    module = _module()
    return module is not None and module.get_monitor() is not None


def summary(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Kernels, copies and calls of a window: how often, how long; names are code, there is nothing else in them.

    Args:
        events: As `end_trace_window` gives them: `kind`, `name`, `start_ns`, `end_ns`.
    """
    rows: dict[tuple[str, str], list[int]] = {}
    total = {"kernel": 0, "gpu_memcpy": 0, "gpu_memset": 0}
    for event in events:
        kind, name = str(event.get("kind", "")), str(event.get("name") or event.get("copy_kind") or "")
        try:
            took = max(0, int(event["end_ns"]) - int(event["start_ns"]))
        except (KeyError, TypeError, ValueError):
            continue
        if kind in total:
            total[kind] += took
        elif kind not in {"cuda_runtime", "cuda_driver", "cuda_sync", "synchronization"}:
            continue
        row = rows.setdefault((kind, name[:KERNELS]), [0, 0, 0])
        row[0], row[1], row[2] = row[0] + 1, row[1] + took, max(row[2], took)
    ordered = sorted(rows.items(), key=lambda item: -item[1][1])
    kept = [{"kind": kind, "name": name, "count": row[0], "sum_ns": row[1], "max_ns": row[2]} for (kind, name), row in ordered[:KERNELS]]
    rest = ordered[KERNELS:]
    return {"rows": kept, "other": {"names": len(rest), "sum_ns": sum(row[1] for _, row in rest)}, "device_ns": sum(total.values())}


class Monitor:
    """One trace window at a time; on the capture thread, because its ends wait for CUPTI's buffers.

    Args:
        clock: Nanoseconds, monotonic.
    """

    def __init__(self, clock: Callable[[], int] = now_ns) -> None:
        self._clock = clock
        self._since: int | None = None
        self.why: str | None = None
        """Why the last incident has no window; None when it has one, or when no monitor runs."""

    def begin(self) -> bool:
        """Open a window where a monitor runs; False when none does, or when it cannot be had."""
        module = _module()
        self.why = None
        if self._since is not None or module is None or module.get_monitor() is None:
            return False
        try:
            module.begin_trace_window()
        except Exception as error:  # noqa: BLE001  (another's window, or a monitor that is ending: the incident goes on without)
            self.why = f"the monitor's window cannot be had ({type(error).__name__})"
            return False
        self._since = self._clock()
        return True

    def end(self) -> dict[str, Any] | None:
        """Close the window; what was in it as JSON types, or None without one."""
        since, self._since = self._since, None
        module = _module()
        if since is None or module is None:
            return None
        now = self._clock()
        try:
            found = cast("dict[str, Any]", module.end_trace_window())
            stats = cast("dict[str, Any]", module.monitor_stats() or {})
            events = cast("list[dict[str, Any]]", found.get("events") or [])
        except Exception as error:  # noqa: BLE001  (as above)
            self.why = f"the monitor's window was lost ({type(error).__name__})"
            return None
        late = now - since > _LONGEST_NS
        lost = stats.get("dropped_records")
        return {"schema": 1, "source": "torch CUPTI monitor", "from_ns": since, "to_ns": now, "late": late, "lost": lost, **summary(events)}
