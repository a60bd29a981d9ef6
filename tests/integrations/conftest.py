"""What the process's own recorder saw, read back as values."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from inferscope.aggregate.window import decode
from inferscope.integration import Registry, forget_copies
from inferscope.record import core
from inferscope.types import ClassKey, Column, RequestRecord


class Seen:
    """Retained requests of the default recorder since the test began."""

    def requests(self) -> list[RequestRecord]:
        keys = {entry[0]: ClassKey(*entry[1:4]) for entry in core.default.classes()}
        return [decode(retained, keys[retained[1]]) for retained in core.default.drain()]

    def columns(self, record: RequestRecord) -> dict[str, int]:
        """Nanoseconds by column label, without the empty ones."""
        labels = [Column(*column).label for column in core.default.columns()]
        return {labels[index]: value for index, value in enumerate(record.vector) if value}

    def series(self, kind: str) -> dict[str, int]:
        """Counts by label of one kind of series."""
        found = {}
        for index, kind_, labels, _, _, size in core.default.series():
            if kind_ == kind:
                from array import array

                found[labels[0]] = core.default.read_counts(index, array("q", bytes(8 * size)))[0]
        return found


@pytest.fixture
def seen() -> Seen:
    core.default.drain()
    core.default.begin_epoch()
    return Seen()


@pytest.fixture
def instrument() -> Iterator[Callable[..., dict[str, str]]]:
    """Switches integrations on for one test and proves that switching them off leaves nothing behind."""
    registry = Registry()
    yield lambda *names: registry.instrument(names)
    states = registry.uninstrument()
    assert all(state == "off" for state in states.values()), states
    forget_copies()
