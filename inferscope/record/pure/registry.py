"""Names become columns, series and classes once; after that a look-up is one dictionary access."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from inferscope.record.pure.classes import RequestClass
from inferscope.record.pure.histogram import FINE, Series
from inferscope.types import COLUMN_LIMIT

if TYPE_CHECKING:
    from inferscope.record.pure.state import Shared

__all__ = ["NAME_LIMIT", "NO_COLUMN", "Definition", "Registry"]

_SERIES_LIMIT: Final = 512
_CLASS_LIMIT: Final = 64
NAME_LIMIT: Final = 120
_OTHER: Final = 1
NO_COLUMN: Final = -1
_SERIES_KIND: Final = {"lock": "lock.wait"}
_SERIES_ONLY: Final = frozenset({"lock.hold", "device", "device.queue", "first_byte"})


class Definition:
    """What spans of one name share; attributes that a span needs are gathered here to save look-ups.

    Args:
        shared: The recorder's state.
        name: As people see it.
        series: Where durations are counted.
        column: Column of the exclusive vector, or `NO_COLUMN`.
    """

    __slots__ = ("clock", "column", "counts", "current", "name", "series", "shared")

    def __init__(self, shared: Shared, name: str, series: Series, column: int) -> None:
        self.shared = shared
        self.name = name
        self.series = series
        self.counts = series.counts
        self.column = column
        self.clock = shared.clock
        self.current = shared.context.get


class _Stages(dict[str, Definition]):
    """Stages by name, made on first use."""

    def __init__(self, registry: Registry) -> None:
        super().__init__()
        self._registry = registry

    def __missing__(self, name: str) -> Definition:
        return self._registry.define_stage(name)


class Registry:
    """Columns, series and request classes of one recorder; grow-only.

    Args:
        shared: The recorder's state.
    """

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._lock = threading.RLock()
        self.columns: list[tuple[str, str]] = [("unattributed", "unattributed"), ("other", "other")]
        self._column_of: dict[tuple[str, str], int] = {("unattributed", "unattributed"): 0, ("other", "other"): _OTHER}
        self.series: list[Series] = []
        self._series_of: dict[tuple[str, tuple[str, ...]], Series] = {}
        self.classes: list[RequestClass] = []
        self._class_of: dict[tuple[str, str | None, str | None], RequestClass] = {}
        self._edges: dict[str, tuple[int, ...]] = {}
        self.stages: dict[str, Definition] = _Stages(self)
        self._intervals: dict[tuple[str, str], Definition] = {}
        self._nested: dict[str, Definition] = {}
        self._other: Definition | None = None
        self._hidden: RequestClass | None = None

    def after_fork(self) -> None:
        """In a forked child: forget counts, keep names; the lock may have been held by a thread that exists no more."""
        self._lock = threading.RLock()
        for series in self.series:
            series.clear()
        for each in self.classes:
            each.clear()

    def column(self, kind: str, name: str) -> int:
        """Index of a column, made when there is room, else 1 (`other`), which counts in `column_overflow`."""
        key = (kind, name)
        known = self._column_of.get(key)
        if known is not None:
            return known
        with self._lock:
            if key in self._column_of:
                return self._column_of[key]
            index = len(self.columns)
            if index >= COLUMN_LIMIT:
                self._shared.losses.column_overflow += 1
                index = _OTHER
            else:
                self.columns.append(key)
            self._column_of[key] = index
            return index

    def find_series(self, kind: str, labels: tuple[str, ...], *, fine: bool = False, beyond: bool = False) -> Series | None:
        """The series of a kind and labels, made when there is room.

        Args:
            kind: As in the recorder's list.
            labels: As in the recorder's list.
            fine: Three digits from 1 us instead of two from 1 ns.
            beyond: Make it even when the list is full (the overflow series themselves).

        Returns:
            None when the list is full.
        """
        key = (kind, labels)
        known = self._series_of.get(key)
        if known is not None:
            return known
        with self._lock:
            if key not in self._series_of:
                if len(self.series) >= _SERIES_LIMIT and not beyond:
                    return None
                made = Series(len(self.series), kind, labels, FINE) if fine else Series(len(self.series), kind, labels)
                self.series.append(made)
                self._series_of[key] = made
            return self._series_of[key]

    def _overflow(self) -> Definition:
        """Where spans go when the series are full; every use counts."""
        self._shared.losses.series_overflow += 1
        if self._other is None:
            series = self.find_series("other", ("other",), beyond=True)
            assert series is not None  # noqa: S101 - `beyond` always makes one
            self._other = Definition(self._shared, "other", series, _OTHER)
        return self._other

    def define_stage(self, name: object) -> Definition:
        """The definition of a stage."""
        text = str(name)[:NAME_LIMIT]
        series = self.find_series("stage", (text,))
        if series is None:
            return self._overflow()
        made = Definition(self._shared, text, series, self.column("stage", text))
        return self.stages.setdefault(name, made) if isinstance(name, str) else made

    def interval(self, kind: str, name: str) -> Definition:
        """The definition of a measured interval; `lock` counts as `lock.wait`."""
        key = (kind, name)
        known = self._intervals.get(key)
        if known is not None:
            return known
        kind = "lock" if kind == "lock.wait" else kind
        kind, name = str(kind)[:NAME_LIMIT], str(name)[:NAME_LIMIT]
        series = self.find_series(_SERIES_KIND.get(kind, kind), (name,))
        if series is None:
            return self._overflow()
        column = NO_COLUMN if kind in _SERIES_ONLY else self.column(kind, name)
        return self._intervals.setdefault(key, Definition(self._shared, name, series, column))

    def nested(self, name: str) -> Definition:
        """The definition of a request inside another one: a column of the outer, counted in no stage series."""
        known = self._nested.get(name)
        if known is None:
            made = Definition(self._shared, name, Series(-1, "stage", (name,)), self.column("stage", name))
            if len(self._nested) >= _CLASS_LIMIT:
                return made
            known = self._nested.setdefault(name, made)
        return known

    def request_class(self, name: str, model: str | None, cls: str | None) -> RequestClass:
        """The class of a request; when 63 exist, all further ones are `other`, and every use of that counts in `series_overflow`."""
        key = (name, model, cls)
        known = self._class_of.get(key)
        return self._define_class(key) if known is None else known

    def _define_class(self, key: tuple[str, str | None, str | None]) -> RequestClass:
        name, model, cls = (None if part is None else str(part)[:NAME_LIMIT] for part in key)
        name = name or ""
        with self._lock:
            key = (name, model, cls)
            if key in self._class_of:
                return self._class_of[key]
            full = len(self.classes) >= _CLASS_LIMIT - 1
            if full:
                self._shared.losses.series_overflow += 1
                name, model, cls = "other", None, None
                if len(self.classes) == _CLASS_LIMIT:
                    return self.classes[-1]
            series = self.find_series("request", (name, model or "", cls or ""), fine=True, beyond=True)
            assert series is not None  # noqa: S101 - `beyond` always makes one
            made = RequestClass(len(self.classes), (name, model, cls), series, self._edges.get(name, ()))
            self.classes.append(made)
            if not full:
                self._class_of[key] = made
            return made

    def hidden(self) -> RequestClass:
        """What carriers belong to: takes what is counted by class and is read by nobody."""
        if self._hidden is None:
            self._hidden = RequestClass(-1, ("batch", None, None), Series(-1, "batch", ("batch",)), ())
        return self._hidden

    def set_edges(self, name: str, edges: tuple[int, ...]) -> None:
        """Put edges in force for every class of a request, also later ones."""
        with self._lock:
            self._edges[name] = edges
            for each in self.classes:
                if each.name == name:
                    self._shared.pins.refold(each, each.base_of)
                    each.set_edges(edges)
