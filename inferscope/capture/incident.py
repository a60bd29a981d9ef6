"""The life of at most one incident a pod: opened by a breach, filled with profiles and evidence, diagnosed by a child process, closed.

`step` runs on the worker at each tick and only decides; everything that writes, waits or encodes happens in `run_once` on the capture
thread. The leader of the pod owns the directory and its manifests; other workers put their evidence and profiles beside it.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from inferscope.capture.bundle import Bundle, prune, write_atomic
from inferscope.capture.encode import encoded
from inferscope.capture.request_scoped import Target
from inferscope.clock import NS_PER_MS, NS_PER_S
from inferscope.guard import guard, log_once

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from inferscope.capture.budget import CaptureBudget
    from inferscope.capture.request_scoped import RequestScopedCapture
    from inferscope.pod import Pod
    from inferscope.types import Breach, RequestRecord

__all__ = ["CAPTURE_S", "IncidentKeeper", "Sources"]

CAPTURE_S: Final = 30.0
"""How long after OPEN profiles and evidence are collected before the first diagnosis."""
SETTLE_S: Final = 2.0
"""How long the leader waits for the other workers' parts."""
BEFORE_S: Final = 60.0
"""The horizon begins this long before the onset, so that it holds ordinary requests."""
LONGEST_S: Final = 900.0
CHILD_S: Final = 120.0
"""A diagnosis that takes longer is ended; the incident stays undiagnosed and `inferscope explain` can do it later."""
_DRAIN_S: Final = 5.0
_LAST_DRAIN_S: Final = 0.2
_MIN_HEALTHY: Final = 200


@dataclass(frozen=True, slots=True)
class Sources:
    """What the keeper needs of the rest of the process."""

    pod: Pod
    budget: CaptureBudget
    evidence: Callable[[str, int, int], dict[str, Any]]
    """(request, from_ns, to_ns) to the evidence document of this worker."""
    objective: Callable[[str], Mapping[str, Any]]
    """An objective's name to its JSON form."""
    fingerprint: Callable[[], Mapping[str, Any]]
    versions: Mapping[str, str | None]
    body_ns: Callable[[str], tuple[float, float] | None]
    """A request's P40 and P60, ns."""
    emit: Callable[[str, Breach, Path, str | None], None]
    """(what, breach, directory, root hash): "opened", "diagnosed" or "closed"."""
    diagnose: str = "local"
    on_incident: Callable[[Path], None] | None = None


@dataclass(slots=True)
class _Open:
    """The incident this worker takes part in."""

    breach: Breach
    directory: Path
    until_ns: int
    bundle: Bundle | None
    """None in a worker that follows the leader."""
    armed: bool = False
    collected: bool = False
    asked: bool = False
    parts: int = 0
    closing: bool = False
    keep: int = 0
    """Profiles that a manual capture asked for; 0 for a breach."""
    asked_by: Mapping[str, Any] | None = None
    """Who asked for a manual capture, and why."""


class IncidentKeeper:
    """Keeps the incident of this worker.

    Args:
        sources: The rest of the process.
        capture: The profiles; None where captures are off.
    """

    def __init__(self, sources: Sources, capture: RequestScopedCapture | None) -> None:
        self._sources = sources
        self._capture = capture
        self._open: _Open | None = None
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._child: tuple[subprocess.Popen[bytes], float, _Open] | None = None
        self._heard = 0
        self.opened = 0
        self.diagnosed = 0
        self.last: Path | None = None
        """The newest incident's directory."""
        first = sources.pod.announcement()
        if first is not None:
            self._heard = first.sequence

    @property
    def current(self) -> Path | None:
        """Directory of the open incident."""
        return self._open.directory if self._open is not None else None

    @property
    def busy(self) -> bool:
        """Whether something is still to be written or diagnosed."""
        return self._child is not None or not self._jobs.empty()

    def open(self, breach: Breach, now_ns: int, *, reason: str = "", keep: int = 0) -> bool:
        """Open an incident for `breach` and ask for profiles; False when one is open or there is nowhere to keep it.

        Args:
            breach: What happened.
            now_ns: Now, monotonic.
            reason: Why a manual capture was asked for.
            keep: How many profiles a manual capture keeps, slow or not.
        """
        root = self._sources.pod.slot.directory
        if self._open is not None or root is None:
            return False
        directory = root / "incidents" / breach.id
        until = now_ns + int(CAPTURE_S * NS_PER_S)
        held = self._open = _Open(breach, directory, until, None, keep=keep)
        if keep:
            held.asked_by = {"reason": reason, "uid": os.getuid(), "pid": os.getpid()}
        self.opened += 1
        self.last = directory
        self._jobs.put(lambda: self._create(held, root))
        return True

    def step(self, now_ns: int, records: Sequence[RequestRecord], closed: Sequence[str]) -> None:
        """One tick on the worker: hand records to the profiles, follow the leader, see what is due."""
        if self._capture is not None:
            self._capture.attach_records(records)
        self._follow(now_ns)
        held = self._open
        if held is None:
            return
        half_ns = int(CAPTURE_S / 2 * NS_PER_S)
        early = now_ns >= held.until_ns - half_ns and self._profiles_complete(held)
        if not held.collected and (early or now_ns >= held.until_ns):
            held.collected = True
            self._jobs.put(lambda: self._collect(held, now_ns))
        alone = len(self._sources.pod.workers(now_ns)) <= 1
        settled = alone or now_ns >= held.until_ns + int(SETTLE_S * NS_PER_S)
        if held.bundle is not None and held.collected and not held.asked and settled:
            held.asked = True
            self._jobs.put(lambda: self._publish_and_diagnose(held))
        if held.breach.id in closed:
            held.closing = True
        manual_over = held.breach.trigger == "manual" and held.asked
        if (held.closing or manual_over) and held.asked and self._child is None and self._jobs.empty():
            self._open = None
            if held.bundle is not None:
                self._jobs.put(lambda: self._close(held))

    def _profiles_complete(self, held: _Open) -> bool:
        """Whether all profiles that were wanted are on disk."""
        capture = self._capture
        return held.armed and capture is not None and capture.complete and not len(capture.shelf)

    def finish(self, now_ns: int) -> None:
        """Write what there is now, for a process that stops: the diagnosis is left to `inferscope explain`."""
        held = self._open
        if held is None:
            return
        if not held.collected:
            held.collected = True
            self._jobs.put(lambda: self._collect(held, now_ns, _LAST_DRAIN_S))
        if not held.asked:
            held.asked = True
            self._jobs.put(lambda: self._publish(held))

    def run_once(self) -> None:
        """Do what is queued and look after the child; on the capture thread."""
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                break
            with guard("incident"):
                job()
        if self._child is not None:
            with guard("diagnose"):
                self._poll()

    def after_fork(self) -> None:
        """In a forked child: the incident and its files belong to the parent."""
        self._open = None
        self._child = None
        self._jobs = queue.SimpleQueue()

    def _arm(self, held: _Open) -> None:
        """Ask for profiles; a refusal costs a line, the incident goes on without them."""
        if self._capture is None:
            return
        breach = held.breach
        target = Target(
            incident=breach.id,
            directory=held.directory,
            request=None if held.keep else breach.request,
            threshold_ns=round(breach.threshold_ms * NS_PER_MS),
            body_ns=lambda: self._sources.body_ns(breach.request),
            keep_all=held.keep > 0,
            prefix=f"s{self._sources.pod.slot.index}",
            detected_ns=None if held.keep else breach.detected_ns,
        )
        refusal = self._capture.arm(target)
        if refusal is None:
            held.armed = True
        else:
            log_once(f"capture-{breach.id}", f"no profiles for {breach.id}: {refusal}")

    def _create(self, held: _Open, root: Path) -> None:
        sources = self._sources
        objective = {**sources.objective(held.breach.slo), **({"asked_by": held.asked_by} if held.asked_by else {})}
        held.bundle = Bundle.create(root, held.breach, sources.fingerprint(), objective, sources.versions)
        self._write_healthy(held)
        digest = held.bundle.publish("open")
        sources.pod.announce(open_=True, onset_ns=held.breach.onset_ns, until_ns=held.until_ns, directory=str(held.directory))
        sources.emit("opened", held.breach, held.directory, digest)
        self._arm(held)

    def _write_healthy(self, held: _Open) -> None:
        """The last healthy time before the onset: the body of an incident in which most requests exceed the objective."""
        breach = held.breach
        end = breach.onset_ns - int(BEFORE_S * NS_PER_S)
        document = self._sources.evidence(breach.request, breach.onset_ns - int(LONGEST_S * NS_PER_S), end)
        counted = sum(row["count"] for row in document["classes"])
        exceeding = sum(row["violations"][0] for row in document["classes"] if row["violations"])
        if held.bundle is not None and counted >= _MIN_HEALTHY and exceeding <= (1 - breach.quantile) * counted:
            self._write(held.directory / f"healthy-{self._sources.pod.slot.index}-1.json", document)
            held.bundle.add_rest()

    def _collect(self, held: _Open, now_ns: int, drain_s: float = _DRAIN_S) -> None:
        if self._capture is not None:
            self._capture.disarm()
            self._drain(drain_s)
        begin = max(held.breach.onset_ns - int(BEFORE_S * NS_PER_S), now_ns - int(LONGEST_S * NS_PER_S))
        document = self._sources.evidence(held.breach.request, begin, now_ns)
        held.parts += 1
        self._write(held.directory / f"evidence-{self._sources.pod.slot.index}-{held.parts}.json", document)

    def _drain(self, seconds: float) -> None:
        """Write out the profiles that were kept; the worker has filled in their spans, or the wait for it is over."""
        deadline = time.monotonic() + seconds
        while self._capture is not None and len(self._capture.shelf) and time.monotonic() < deadline:
            self._capture.run_once()
            time.sleep(0.02)

    @staticmethod
    def _write(path: Path, document: Mapping[str, Any]) -> None:
        write_atomic(path, encoded(document))

    @staticmethod
    def _publish(held: _Open) -> None:
        if held.bundle is not None:
            held.bundle.add_rest()
            held.bundle.publish("captured")

    def _publish_and_diagnose(self, held: _Open) -> None:
        self._publish(held)
        if self._sources.diagnose != "local":
            self._finished(held)
            return
        environment = {key: value for key, value in os.environ.items() if key != "INFERSCOPE_STRICT"}
        command = [sys.executable, "-m", "inferscope.diagnose", str(held.directory)]
        # No preexec_fn: it would run Python between fork and exec in a threaded process. The child limits itself.
        child = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        self._child = (child, time.monotonic() + CHILD_S, held)

    def _poll(self) -> None:
        if self._child is None:
            return
        child, deadline, held = self._child
        if child.poll() is None:
            if time.monotonic() > deadline:
                child.kill()
            return
        self._child = None
        _, complaint = child.communicate()
        if child.returncode != 0:
            said = complaint.decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
            log_once(f"diagnosis-{held.breach.id}", f"diagnosis of {held.breach.id} failed (status {child.returncode}): {said[0]}")
        self._finished(held)

    def _finished(self, held: _Open) -> None:
        if held.bundle is None:
            return
        held.bundle.add_rest()
        diagnosed = any(name.startswith("diagnosis-") for name in held.bundle.artefacts)
        digest = held.bundle.publish("diagnosed") if diagnosed else held.bundle.root_hash
        if diagnosed:
            self.diagnosed += 1
            self._sources.emit("diagnosed", held.breach, held.directory, digest)
            if self._sources.on_incident is not None:
                with guard("on_incident"):
                    self._sources.on_incident(held.directory)

    def _close(self, held: _Open) -> None:
        if held.bundle is None:
            return
        digest = held.bundle.publish("closed")
        self._sources.pod.announce(open_=False, onset_ns=0, until_ns=0, directory="")
        self._sources.emit("closed", held.breach, held.directory, digest)
        root = self._sources.pod.slot.directory
        if root is not None:
            budget = self._sources.budget
            prune(root, max_bytes=budget.disk_mb << 20, max_count=budget.incidents)

    def _follow(self, now_ns: int) -> None:
        """Take part in an incident that another worker opened."""
        heard = self._sources.pod.announcement()
        if heard is None or heard.sequence == self._heard:
            return
        self._heard = heard.sequence
        ours = self._open is not None and self._open.bundle is not None or self._open is not None and str(self._open.directory) == heard.directory
        if ours:
            return
        if not heard.open:
            self._open = None
            if self._capture is not None:
                self._jobs.put(self._capture.disarm)
            return
        if now_ns < heard.until_ns:
            self._jobs.put(lambda: self._join(Path(heard.directory), heard.until_ns))

    def _join(self, directory: Path, until_ns: int) -> None:
        import json

        from inferscope.types import Breach

        document = json.loads((directory / "breach.json").read_text(encoding="utf-8"))
        breach = Breach(**{name: document[name] for name in Breach.__dataclass_fields__})
        held = self._open = _Open(breach, directory, until_ns, None)
        self._arm(held)


def objective_json(slo: Any) -> dict[str, Any]:
    """An objective as JSON types."""
    return {"name": slo.name, "quantile": slo.quantile, "threshold_ms": slo.threshold_ms, **{k: v for k, v in asdict(slo).items() if k != "_"}}
