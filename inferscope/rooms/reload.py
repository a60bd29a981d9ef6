"""The settings file, read again when it changes: objectives, triggers, sampling, budgets and switches take effect at once.

Everything else is read at start only, and a change of it says so. What a keyword or the environment has set goes before the file, now as at
start. Each key that changed is audited like a change over a control channel, whether it was applied or not and why.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, cast

from inferscope import forms, settings
from inferscope.control.lending import put_in_force, record
from inferscope.control.protocol import Actor, plain
from inferscope.detect import check_objectives
from inferscope.detect.signals import check_triggers
from inferscope.errors import ConfigurationError, InferscopeError
from inferscope.rooms.judging import budget_from

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from inferscope.rooms.process import Rooms

__all__ = ["HOT", "SettingsFile"]

HOT: Final = ("slo", "triggers", "sampling", "budget", "capture", "export", "enabled")
"""What takes effect while the service runs."""
_PARTS: Final = {"capture": "capture", "export": "export", "enabled": "recording"}
_DEFAULTS: Final = settings.Settings()
_LATER: Final = "later"

_Stat = tuple[int, int, int]


class SettingsFile:
    """Follows one file; the worker calls `poll` under the lock of a tick.

    Args:
        rooms: Whose settings.
        switch: Switches a part on or off: (part, on); raises what refuses it.
    """

    def __init__(self, rooms: Rooms, switch: Callable[[str, bool], None]) -> None:
        self._rooms, self._switch = rooms, switch
        self._path: Path | None = rooms.settings.file if rooms.settings.watch else None
        self._seen = self._applied = self._look()
        self._table = self._read() or {}
        self._later: dict[str, Any] = {}
        self._number = 0
        self.note = "" if self._path is not None else "off"
        """What the latest change came to; empty while there was none."""
        self.reads = 0
        """How often the file had changed, was read and taken over."""

    def _look(self) -> _Stat | None:
        if self._path is None:
            return None
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _read(self) -> dict[str, Any] | None:
        if self._path is None:
            return None
        try:
            return settings.read_table(self._path)
        except FileNotFoundError:
            return {}
        except Exception:  # noqa: BLE001  (whatever lies there, the service goes on with what it has)
            return None

    def poll(self) -> None:
        """Look at the file; one that changed is read when it has stood still since the call before."""
        if self._path is None:
            return
        seen, before = self._look(), self._seen
        self._seen = seen
        if self._later:
            self._try_again()
        if seen != before or seen == self._applied:
            return
        self._applied = seen
        self._take(self._read())
        self.reads += 1  # last: who sees it finds everything in force

    def _take(self, table: dict[str, Any] | None) -> None:
        if table is None or not self._readable(table):
            name = self._path.name if self._path is not None else "the file"
            self._audit("file", None, "denied", f"{name} cannot be read as settings; everything stays as it is")
            return
        table.pop("schema", None)
        known = {key: value for key, value in self._table.items() if key != "schema"}
        self._table = dict(table)
        for key in sorted({*table, *known}):
            if table.get(key) != known.get(key):
                self._change(key, table.get(key))

    @staticmethod
    def _readable(table: Mapping[str, Any]) -> bool:
        schema: object = table.get("schema", settings.FILE_SCHEMA)
        return isinstance(schema, int) and schema <= settings.FILE_SCHEMA

    def _change(self, key: str, value: Any) -> None:
        """Apply one key, `value` None when the file names it no more."""
        try:
            outcome = self._apply(key, value)
        except InferscopeError as error:
            self._audit(key, value, "denied", str(error))
            return
        if outcome == _LATER:
            self._later[key] = value
        else:
            self._later.pop(key, None)
            self._audit(key, value, "done", None)

    def _try_again(self) -> None:
        for key, value in dict(self._later).items():
            self._change(key, value)

    def _apply(self, key: str, value: Any) -> str | None:
        rooms, name = self._rooms, self._path.name if self._path is not None else ""
        if key not in forms.KEYS:
            raise ConfigurationError(f"{key} in {name}", value, "no setting has this name")
        before = rooms.settings.sources.get(key)
        if before in {"keyword", "environment"}:
            raise InferscopeError(
                f"{key} was set by {'a keyword' if before == 'keyword' else 'the environment'}, which goes before the file"
            )
        if key not in HOT:
            raise InferscopeError(f"{key} is read at start only; restart the service for it")
        parsed = getattr(_DEFAULTS, key) if value is None else forms.read(key, value, f"{key} in {name}")
        if key == "slo":
            put_in_force(rooms, check_objectives(parsed))
        elif key == "triggers":
            put_in_force(rooms, rooms.trigger.slos, check_triggers(parsed or {}, f"triggers in {name}"))
        elif key == "sampling":
            rooms.aggregator.sampling = parsed or {}
        elif key == "budget":
            return None if rooms.renew_captures(budget=budget_from(cast("dict[str, Any]", parsed or {}))) else _LATER
        elif key == "capture" and parsed and rooms.capture is None:
            return None if rooms.renew_captures(on=True) else _LATER
        else:
            self._switch(_PARTS[key], bool(parsed))
        return None

    def status(self) -> dict[str, Any]:
        """Which file, how often it was read again, what came of it, and which keys wait until no incident is at work."""
        path = str(self._path) if self._path is not None else None
        return {"path": path, "reads": self.reads, "latest": self.note, "waiting": sorted(self._later)}

    def _audit(self, key: str, value: Any, state: str, why: str | None) -> None:
        self._number += 1
        path = self._path
        self.note = f"{key}: {why}" if why else f"{key} applied"
        record(
            self._rooms,
            {
                "at_unix_ns": time.time_ns(),
                "op": "set",
                "id": f"file-{self._number}",
                "args": {"key": key, "value": None if value is None else str(plain(value))[:500]},
                "state": state,
                "why": why,
                "result": None,
                "actor": plain(Actor("file", peer=path.name if path is not None else None)),
            },
        )
