"""What the inferscope in a service that is measured says: why its tail is what it is."""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from inferscope.capture.bundle import list_incidents
from inferscope.control import workers
from inferscope.diagnose.incident import load, to_dict
from inferscope.errors import EvidenceError, InferscopeError

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferscope.types import Incident

__all__ = ["EXTRA", "Inside", "top_cause"]

EXTRA: Final = 20
"""Requests made one at a time after the load, so that an asked-for incident has something to look at."""
_WAIT_S: Final = 40.0
_STEP_S: Final = 0.2
_KEPT: Final = ("id", "verdict", "attribution", "withheld", "what_if", "findings", "notes")


class Inside:
    """Asks the workers whose state lies in a directory; remembers which incidents there were before.

    Args:
        state_dir: the service's state directory.
    """

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir
        self._known = set(list_incidents(state_dir)) if state_dir.is_dir() else set[Path]()
        self.path: Path | None = None
        """The incident that was read."""

    @property
    def there(self) -> bool:
        """Whether a service keeps anything here."""
        return self._state_dir.is_dir() and any(self._state_dir.iterdir())

    def ask(self, nudge: Callable[[], object], wait_s: float = _WAIT_S) -> dict[str, Any]:
        """The diagnosis of an incident that the load opened, else of one that is asked for now.

        Args:
            nudge: makes a few requests.
            wait_s: how long a diagnosis may take.

        Returns:
            Verdict, attribution, what-ifs and findings; without a diagnosis `verdict` says why not and the rest is empty.
        """
        deadline = time.monotonic() + wait_s
        try:
            found = self._diagnosed(self._opened() or self._asked(nudge), deadline)
        except InferscopeError as error:
            return self._nothing(str(error))
        if found is None:
            return self._nothing("the service opened an incident and did not explain it in time")
        value = to_dict(found)
        return {**{name: value[name] for name in _KEPT}, "path": str(self.path)}

    def opened(self) -> Incident | None:
        """A diagnosed incident that was opened since; None when there is none."""
        return self._diagnosed(self._opened(), time.monotonic())

    def _nothing(self, why: str) -> dict[str, Any]:
        return {"id": None, "verdict": f"n/a: {why}", "attribution": [], "withheld": why, "what_if": [], "findings": [], "notes": []}

    def _opened(self) -> list[Path]:
        return [path for path in list_incidents(self._state_dir) if path not in self._known]

    def _asked(self, nudge: Callable[[], object]) -> list[Path]:
        worker = workers.one(self._state_dir)
        id_ = f"bench-{secrets.token_hex(8)}"
        ticket: dict[str, Any] = workers.request(worker, "capture", id_, {"reason": "inferscope bench", "requests": 1})
        end = time.monotonic() + 5.0
        while ticket["state"] == "queued" and time.monotonic() < end:
            time.sleep(_STEP_S / 4)
            answer = workers.request(worker, "ticket", "poll", {"id": id_})
            ticket = dict(answer["result"]) if answer["state"] == "done" else {**ticket, "state": "denied", "why": answer["why"]}
        if ticket["state"] != "done":
            raise EvidenceError(f"the service denies evidence: {ticket['why'] or 'it did not answer in time'}")
        nudge()
        return [worker.path.parent / "incidents" / str(ticket["result"]["incident"])]

    def _diagnosed(self, paths: list[Path], deadline: float) -> Incident | None:
        while paths:
            for path in paths:
                try:
                    found = load(path)
                except EvidenceError:
                    continue
                self.path = path
                return found
            if time.monotonic() >= deadline:
                return None
            time.sleep(_STEP_S)
        return None


def top_cause(inside: dict[str, Any] | None) -> str:
    """The greatest part of the tail in words; empty when nothing is known."""
    rows: list[dict[str, Any]] = (inside or {}).get("attribution") or []
    if not rows:
        return ""
    first = max(rows, key=lambda row: row["share"])
    between = f" [{100 * first['ci'][0]:.0f}, {100 * first['ci'][1]:.0f}]" if first.get("ci") else ""
    return f"{first['name']} {100 * first['share']:.0f} %{between} of what the tail takes longer"
