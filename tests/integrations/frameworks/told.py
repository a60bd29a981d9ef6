"""What this process recorded, as rows that JSON takes; imported by the services beside it, which run in interpreters of their own."""

from __future__ import annotations

from inferscope.aggregate.window import decode
from inferscope.record import core
from inferscope.types import ClassKey, Column


def begin() -> None:
    core.default.begin_epoch()
    core.default.drain()


def rows() -> list[dict]:
    keys = {entry[0]: ClassKey(*entry[1:4]) for entry in core.default.classes()}
    labels = [Column(*column).label for column in core.default.columns()]
    found = []
    for kept in core.default.drain():
        record = decode(kept, keys[kept[1]])
        columns = {labels[index]: value for index, value in enumerate(record.vector) if value}
        found.append(
            {"request": record.key.request, "wall": record.wall_ns, "sum": sum(record.vector), "error": record.error, "columns": columns}
        )
    return found


def batches() -> dict[str, int]:
    """Counts of the series `batch`, by name."""
    from array import array

    return {
        labels[0]: core.default.read_counts(index, array("q", bytes(8 * size)))[0]
        for index, kind, labels, _, _, size in core.default.series()
        if kind == "batch"
    }
