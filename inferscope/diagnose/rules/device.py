"""What the device's driver says, and under which load captures were taken."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from inferscope.diagnose.findings import Texts, plain
from inferscope.types import Evidence, Finding

if TYPE_CHECKING:
    from collections.abc import Iterable

    from inferscope.diagnose.findings import Context

__all__ = ["capture_under_overload", "low_utilisation"]

_IDLE: Final = 0.5
_WAITING: Final = 0.20


def low_utilisation(context: Context) -> Iterable[Finding]:
    """LOW_DEVICE_UTIL: the driver says that the whole device idles while the objective is broken."""
    busy = context.horizon.device_busy
    if busy is None or busy >= _IDLE or not context.objective_broken:
        return
    texts = Texts(
        where="device",
        claim=f"The device as a whole is busy {100 * busy:.0f} % of the time: a larger one would not lower this tail.",
        refute_by="Serve from a faster device on one replica: if P99 falls in proportion, this is wrong.",
        fix="Work on the columns that own the excess; what the device waits for is among them.",
        rollback="Nothing to roll back.",
    )
    evidence = (Evidence("device busy, from its driver", round(100 * busy, 1), "%"),)
    yield plain("LOW_DEVICE_UTIL", "scheduling", texts, evidence, severity="info", confidence="high")


def capture_under_overload(context: Context) -> Iterable[Finding]:
    """CAPTURE_UNDER_OVERLOAD: profiles were taken while threads waited for CPUs, so their durations hold waiting."""
    seconds = context.horizon.host.seconds
    used, waited = float(seconds[:, 2].sum()), float(seconds[:, 3].sum())
    if not context.captures or used + waited <= 0 or waited / (used + waited) < _WAITING:
        return
    texts = Texts(
        where=f"{len(context.captures)} captures",
        claim=f"While profiles were taken, threads of this process waited for a CPU {100 * waited / (used + waited):.0f} % of the time they wanted one: operator durations in them hold that waiting.",
        refute_by="Capture again on an idle replica: if the operators take as long there, the durations were right.",
        fix="Compare slow with healthy captures of the same time instead of reading durations as costs.",
        rollback="Nothing to roll back.",
    )
    evidence = (
        Evidence("run-queue delay of all threads", round(waited / 1e9, 2), "s"),
        Evidence("CPU time of all threads", round(used / 1e9, 2), "s"),
    )
    yield plain("CAPTURE_UNDER_OVERLOAD", "scheduling", texts, evidence, severity="info", confidence="high")
