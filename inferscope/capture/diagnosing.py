"""When a diagnosis runs, and what becomes of it: at once, when there is room for it, at the next start, or by somebody else."""

from __future__ import annotations

import json
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from inferscope.capture.bundle import Bundle
from inferscope.capture.child import DiagnosisChild
from inferscope.capture.headroom import Headroom
from inferscope.capture.held import read_breach
from inferscope.errors import EvidenceError
from inferscope.guard import guard, log_once

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from inferscope.capture.held import Open, Sources

__all__ = ["Diagnosing", "undiagnosed"]

CHILD_S: Final = 600.0
"""A diagnosis that takes longer is ended. It runs while the machine is idle: a busy one gives it a second of time in minutes."""
PATIENCE_S: Final = 900.0
"""How long an incident waits for room; then it is left to the command line and to the next start."""
AGAIN_S: Final = 5.0
OLDEST_S: Final = 86_400.0
"""What broke longer ago is not taken up at a start."""
RESUMED: Final = 3
"""Incidents that a start takes up, newest first."""


def undiagnosed(root: Path, spared: str | None, now_s: float) -> list[Path]:
    """Incidents of one worker that have evidence and no diagnosis, newest first.

    Args:
        root: The worker's directory, `STATE_DIR/<service>/<slot>`, which is leased by this process: nobody else writes there.
        spared: Directory of an incident that another worker carries on with.
        now_s: Now, unix time.
    """
    found: list[Path] = []
    for path in sorted((root / "incidents").glob("[!.]*"), reverse=True):
        if len(found) == RESUMED:
            break
        try:
            fresh = now_s - (path / "breach.json").stat().st_mtime < OLDEST_S
        except OSError:
            continue
        if fresh and str(path) != spared and any(path.glob("evidence-*.json")) and not any(path.glob("diagnosis-*.json")):
            found.append(path)
    return found


class Diagnosing:
    """The diagnoses of one worker, one at a time; on the capture thread.

    Args:
        sources: The rest of the process.
        headroom: Says whether a child may run.
    """

    def __init__(self, sources: Sources, headroom: Headroom | None = None) -> None:
        self._sources = sources
        self._headroom = headroom or Headroom()
        self._child: tuple[DiagnosisChild, Open] | None = None
        self._waiting: deque[tuple[Open, float]] = deque()
        self._next_s = 0.0
        self._stopping = False
        self.done = 0
        self.put_off = 0
        """How often one had to wait."""
        self.left = 0
        """Incidents left to the command line: no room, or a child that failed."""
        self.why: str | None = None
        """Why one waits at present."""

    @property
    def running(self) -> bool:
        """Whether a child works."""
        return self._child is not None

    def stop(self) -> None:
        """Begin nothing any more."""
        self._stopping = True

    def want(self, held: Open) -> None:
        """Diagnose an incident that is sealed, as soon as there is room, unless somebody else does it (`diagnose=deferred` or `off`)."""
        if self._sources.diagnose != "local" or self._stopping:
            return
        self._headroom.look()
        self._waiting.append((held, time.monotonic() + PATIENCE_S))
        self._next_s = 0.0
        self._begin()

    def take_up(self, path: Path) -> None:
        """Diagnose what an earlier process of this place left behind."""
        bundle = Bundle.open(path)
        from inferscope.capture.held import Open

        held = Open(read_breach(path), path, 0, bundle, owned=True, collected=True, asked=True, closing=True)
        if bundle.state in {"open", "captured"}:
            held.seal()
        self.want(held)

    def poll(self) -> None:
        """Look after the child; begin the next one."""
        if self._child is None:
            if self._waiting:
                self._headroom.look()
                self._begin()
            return
        child, held = self._child
        if self._stopping:
            child.kill()
        if child.running():
            return
        self._child = None
        if child.complaint and not self._stopping:
            self.left += 1
            log_once(f"diagnosis-{held.breach.id}", f"diagnosis of {held.breach.id} failed ({child.complaint})")
        self._finished(held)

    def _begin(self) -> None:
        if self._child is not None or self._stopping or time.monotonic() < self._next_s:
            return
        held, until = self._waiting[0]
        self.why = self._headroom.refusal()
        if self.why is None:
            self._waiting.popleft()
            self._child = DiagnosisChild(held.directory, CHILD_S, self._headroom.share()), held
            return
        self.put_off += 1
        self._next_s = time.monotonic() + AGAIN_S
        if time.monotonic() > until:
            self._waiting.popleft()
            self.left += 1
            log_once(
                f"diagnosis-{held.breach.id}", f"{held.breach.id} is not diagnosed here: {self.why}; inferscope explain does it elsewhere"
            )

    def _finished(self, held: Open) -> None:
        if held.bundle is None:
            return
        bundle, was = held.bundle, held.bundle.state
        bundle.add_rest()
        if not any(name.startswith("diagnosis-") for name in bundle.artefacts):
            return
        digest = bundle.publish("diagnosed")
        if was == "closed" or held.ended:
            digest = bundle.publish("closed")  # it was put off until after the end
        self.done += 1
        self._sources.emit("diagnosed", held.breach, held.directory, digest)
        if self._sources.on_incident is not None:
            with guard("on_incident"):
                self._sources.on_incident(held.directory)

    def status(self) -> dict[str, Any]:
        """As JSON types."""
        return {
            "mode": self._sources.diagnose,
            "running": self.running,
            "waiting": len(self._waiting),
            "why": self.why if self._waiting else None,
            "done": self.done,
            "put_off": self.put_off,
            "left": self.left,
        }


def resume(diagnosing: Diagnosing, root: Path, spared: str | None, put: Callable[[Callable[[], object]], object]) -> int:
    """Queue what an earlier process left undiagnosed; returns how many."""
    paths = undiagnosed(root, spared, time.time())
    for path in paths:

        def take(path: Path = path) -> None:
            try:
                diagnosing.take_up(path)
            except (EvidenceError, json.JSONDecodeError) as error:
                log_once(f"resume-{path.name}", f"{path.name} cannot be taken up: {error}")

        put(take)
    return len(paths)
