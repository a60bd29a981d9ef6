"""`inferscope snapshot`: a running service's current numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from inferscope.cli.asking import ask, worker_arguments
from inferscope.cli.output import emit
from inferscope.control import workers
from inferscope.errors import InferscopeError

if TYPE_CHECKING:
    import argparse

HELP = "Counts and percentiles of every series of a running worker, since it started."


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this verb."""
    worker_arguments(parser)


def _ms(seconds: Any) -> str:
    return "n/a" if seconds is None else f"{seconds * 1e3:.3f}"


def _table(value: dict[str, Any]) -> str:
    rows: list[tuple[str, ...]] = [("series", "count", "P50 ms", "P95 ms", "P99 ms", "P999 ms", "max ms")]
    for each in value.get("series", ()):
        name = " ".join(filter(None, [each["kind"], *(each["labels"] or ())]))
        rows.append((name, str(each["count"]), *(_ms(each[key]) for key in ("p50_s", "p95_s", "p99_s", "p999_s", "max_s"))))
    widths = [max(len(row[column]) for row in rows) for column in range(7)]
    return "\n".join(
        row[0].ljust(widths[0]) + "".join("  " + cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)) for row in rows
    )


def run(options: argparse.Namespace) -> int:
    """Ask one worker."""
    worker = ask(options)
    answer = workers.request(worker, "snapshot", "snapshot", {}, options.timeout)
    if answer["state"] != "done":
        raise InferscopeError(f"{worker.name}: {answer['why']}")
    value = {"service": worker.service, "slot": worker.slot, "pid": worker.pid, "snapshot": answer["result"]}
    emit(options, value, f"{worker.name}\n{_table(answer['result'])}")
    return 0
