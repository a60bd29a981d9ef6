"""The life of at most one incident a pod: opened by a breach, filled with profiles and evidence, diagnosed by a child process, closed.

`step` runs on the worker at each tick and only decides; everything that writes, waits or encodes happens in `run_once` on the capture
thread. One worker, nearly always the pod's leader, owns the directory and its manifests; the others put their evidence and profiles
beside it. When the owner dies, the next leader carries on with what is there.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from inferscope.capture import guards
from inferscope.capture.bundle import Bundle
from inferscope.capture.diagnosing import Diagnosing, resume
from inferscope.capture.held import (
    Open,
    Sources,
    is_healthy,
    manual_refusal,
    parts_are_there,
    read_breach,
    shares,
    still_wanted,
    write_evidence,
)
from inferscope.capture.plan import AUTOMATIC
from inferscope.capture.retention import prune
from inferscope.capture.stacks import SlowStacks
from inferscope.capture.target import Target
from inferscope.clock import NS_PER_MS, NS_PER_S
from inferscope.errors import CaptureRefusedError, EvidenceError
from inferscope.guard import guard, log_once

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from inferscope.capture.plan import Plan
    from inferscope.capture.request_scoped import RequestScopedCapture
    from inferscope.types import Breach, RequestRecord

__all__ = ["CAPTURE_S", "IncidentKeeper"]

CAPTURE_S: Final = 30.0
"""How long after OPEN profiles and evidence are collected before the first diagnosis."""
SETTLE_S: Final = 5.0
"""How long the owner waits for the other workers' parts."""
BEFORE_S: Final = 60.0
"""The horizon begins this long before the onset, so that it holds ordinary requests."""
LONGEST_S: Final = 900.0
_DRAIN_S: Final = 3.0
_LAST_DRAIN_S: Final = 0.1


class IncidentKeeper:
    """Keeps the incident of this worker.

    Args:
        sources: The rest of the process.
        capture: The profiles; None where captures are off.
    """

    def __init__(self, sources: Sources, capture: RequestScopedCapture | None) -> None:
        self._sources = sources
        self._capture = capture
        self._open: Open | None = None
        self._jobs: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self.diagnosing = Diagnosing(sources)
        self.stacks = SlowStacks(*sources.looks)
        self._working = threading.Lock()
        self._stopping = False
        self.opened = 0
        self.last: Path | None = None
        """The newest incident's directory."""
        first = sources.pod.announcement()
        self._heard = first.sequence if first is not None else 0
        root = sources.pod.slot.directory
        if root is not None and sources.diagnose == "local":
            spared = first.directory if first is not None and first.open else None
            self._jobs.put(lambda: resume(self.diagnosing, root, spared, self._jobs.put))

    @property
    def current(self) -> Path | None:
        """Directory of the open incident."""
        return self._open.directory if self._open is not None else None

    @property
    def busy(self) -> bool:
        """Whether something is still to be written or diagnosed."""
        return self.diagnosing.running or not self._jobs.empty()

    @property
    def diagnosed(self) -> int:
        """Incidents that were diagnosed."""
        return self.diagnosing.done

    # On the worker

    def open(self, breach: Breach, now_ns: int) -> bool:
        """Open an incident for `breach` and ask for profiles; False when one is open or there is nowhere to keep it."""
        root = self._sources.pod.slot.directory
        if self._open is not None or root is None:
            return False
        held = self._begin(breach, now_ns, root)
        self._jobs.put(lambda: self._create(held, root))
        return True

    def _begin(self, breach: Breach, now_ns: int, root: Path) -> Open:
        self._open = held = Open(breach, root / "incidents" / breach.id, now_ns + int(CAPTURE_S * NS_PER_S), owned=True)
        self.opened += 1
        self.last = held.directory
        return held

    def ask(self, breach: Breach, now_ns: int, *, reason: str, plan: Plan) -> str:
        """Open an incident that somebody asked for; it closes by itself after `CAPTURE_S`, whether requests came or not.

        Args:
            breach: As `Trigger.manual` makes it.
            now_ns: Now, monotonic.
            reason: Why, for the audit trail.
            plan: What to record, slow or not.

        Returns:
            The incident's id; that of the open one while it still collects profiles.

        Raises:
            CaptureRefusedError: There is nowhere to keep it, another incident is open, or a guard denies captures.
        """
        held, pod, root = self._open, self._sources.pod, self._sources.pod.slot.directory
        if held is not None and not held.collected and held.armed:
            return held.breach.id
        if held is not None:
            raise CaptureRefusedError(f"incident {held.breach.id} is open and takes no profiles any more; try again when it is closed")
        word = pod.announcement()
        if word is not None and word.open and pod.owner_lives(now_ns, word):
            raise CaptureRefusedError(f"another worker has incident {Path(word.directory).name} open; try again when it is closed")
        if root is None:
            raise CaptureRefusedError("there is no state directory to keep a capture in; set INFERSCOPE_STATE_DIR")
        refusal = manual_refusal(self._capture, root, self._sources.budget, plan)
        if refusal is not None:
            raise CaptureRefusedError(refusal)
        if not self._working.acquire(timeout=1.0):
            raise CaptureRefusedError("evidence of an earlier incident is being written; try again in a moment")
        try:
            held = self._begin(breach, now_ns, root)
            held.plan, held.asked_by = plan, {"reason": reason, "uid": os.getuid(), "pid": os.getpid(), **asdict(plan)}
            refusal = self._create(held, root)
        except EvidenceError as error:
            self._open = None
            raise CaptureRefusedError(str(error)) from error
        finally:
            self._working.release()
        if refusal is not None:
            # Something changed since it was asked: what was opened closes like any other, without profiles.
            held.until_ns = now_ns
            raise CaptureRefusedError(refusal)
        return breach.id

    def step(self, now_ns: int, records: Sequence[RequestRecord], closed: Sequence[str]) -> None:
        """One tick on the worker: hand records to the profiles, follow the owner, see what is due."""
        if self._capture is not None:
            self._capture.attach_records(records)
        orphan = self._sources.pod.orphan(now_ns)
        if orphan is not None:
            self._inherit(Path(orphan), now_ns)
        self._follow(now_ns)
        held = self._open
        if held is None:
            return
        if not held.collected and (now_ns >= held.until_ns or self._profiles_complete(held, now_ns)):
            self._end_collection(held, now_ns)
        settled = held.complete or now_ns >= held.settled_ns
        if held.bundle is not None and held.collected and not held.asked and settled:
            held.asked = True
            self._jobs.put(lambda: self._publish_and_diagnose(held))
        if held.breach.id in closed:
            held.closing = True
        manual_over = held.breach.trigger == "manual" and held.asked
        if held.owned and (held.closing or manual_over) and held.asked and not held.ended and not self.busy:
            held.ended = True
            self._jobs.put(lambda: self._close(held))

    def _end_collection(self, held: Open, now_ns: int) -> None:
        held.collected = True
        held.settled_ns = now_ns + int(SETTLE_S * NS_PER_S)
        if held.owned and now_ns < held.until_ns:
            held.until_ns = now_ns
            self._announce(held)
        self._jobs.put(lambda: self._collect(held, now_ns))

    def _announce(self, held: Open) -> None:
        self._heard = self._sources.pod.announce(
            open_=True, onset_ns=held.breach.onset_ns, until_ns=held.until_ns, directory=str(held.directory)
        )

    def _profiles_complete(self, held: Open, now_ns: int) -> bool:
        """Whether the owner's profiles are on disk, early enough to save the rest of the wait."""
        capture = self._capture
        if not held.owned or not held.armed or capture is None or not capture.complete or capture.pending:
            return False
        return held.plan is not None or now_ns >= held.until_ns - int(CAPTURE_S / 2 * NS_PER_S)

    def _follow(self, now_ns: int) -> None:
        """Take part in an incident that another worker opened."""
        pod = self._sources.pod
        heard = pod.announcement()
        if heard is None or heard.sequence == self._heard:
            return
        held = self._open
        if held is not None and held.owned:
            if heard.token != pod.token and not heard.open:
                return  # a new leader's first word, while ours is open
            self._heard = heard.sequence
            return
        self._heard = heard.sequence
        if not heard.open:
            self._open = None
            if self._capture is not None:
                self._jobs.put(self._capture.disarm)
            return
        if held is not None and str(held.directory) == heard.directory:
            held.until_ns = heard.until_ns
        elif now_ns < heard.until_ns:
            self._jobs.put(lambda: self._join(Path(heard.directory), heard.until_ns))

    def _inherit(self, directory: Path, now_ns: int) -> None:
        """The owner of an open incident is gone: carry on with it, or finish it with what lies there."""
        word = self._sources.pod.announcement()
        self._heard = word.sequence if word is not None else self._heard
        held = self._open
        if held is not None and held.directory == directory:
            held.owned = held.closing = True  # its objective's state died with the owner: it closes once it is diagnosed
            self._announce(held)
            self._jobs.put(held.adopt)
        elif held is None:
            self._jobs.put(lambda: self._finish_orphan(directory, now_ns))

    def finish(self, now_ns: int) -> None:
        """Write what there is now, for a process that stops; the diagnosis is left to the next leader or `inferscope explain`."""
        held = self._open
        if held is None:
            return
        if not held.collected:
            held.collected = True
            self._jobs.put(lambda: self._collect(held, now_ns))
        if held.owned and not held.asked:
            held.asked = True
            self._jobs.put(held.seal)

    def stop(self) -> None:
        """Begin no long work any more."""
        self._stopping = True
        self.diagnosing.stop()

    # On the capture thread

    def run_once(self) -> None:
        """Do what is queued, write profiles, look after the child; one thread at a time, a second one returns at once."""
        if not self._working.acquire(blocking=False):
            return
        try:
            while not self._jobs.empty():
                with guard("incident"):
                    self._jobs.get_nowait()()
            if self._capture is not None:
                with guard("capture"):
                    self._capture.run_once()
            with guard("diagnose"):
                self.diagnosing.poll()
            held = self._open
            if held is not None and held.bundle is not None and held.collected and not held.asked:
                with guard("incident"):
                    held.complete = parts_are_there(self._sources.pod, held.directory)
        finally:
            self._working.release()

    def _arm(self, held: Open) -> str | None:
        """Ask for profiles, this worker's share of the pod's; returns why not, the incident then goes on without them."""
        self.stacks.arm(held.breach.request, round(held.breach.threshold_ms * NS_PER_MS))
        capture = self._capture
        if capture is None:
            return "captures are off"
        plan = held.plan
        slow, body = (plan.requests, 0) if plan is not None else shares(self._sources.budget, self._sources.pod)
        if slow == 0:
            return None
        capture.budget = replace(self._sources.budget, slow=slow, body=body)
        breach = held.breach
        refusal = capture.arm(
            Target(
                incident=breach.id,
                directory=held.directory,
                request=None if plan is not None else breach.request,
                threshold_ns=round(breach.threshold_ms * NS_PER_MS),
                body_ns=lambda: self._sources.body_ns(breach.request),
                keep_all=plan is not None,
                prefix=f"s{self._sources.pod.slot.index}",
                detected_ns=None if plan is not None else breach.detected_ns,
                plan=plan or AUTOMATIC,
            )
        )
        held.armed = refusal is None
        if refusal is not None and refusal != guards.REASONS["torch_not_imported"]:
            log_once(f"capture-{breach.id}", f"no profiles for {breach.id}: {refusal}")
        return refusal

    def _create(self, held: Open, root: Path) -> str | None:
        """Make the incident and arm; returns why there will be no profiles."""
        sources = self._sources
        objective = {**sources.objective(held.breach.slo), **({"asked_by": held.asked_by} if held.asked_by else {})}
        try:
            bundle = Bundle.create(root, held.breach, sources.fingerprint(), objective, sources.versions)
            self._write_healthy(bundle, held.breach)
            digest = bundle.publish("open")
        except Exception:
            self._open = None  # nothing lies there that could be continued
            raise
        held.bundle = bundle
        self._prune()
        self._announce(held)
        with guard("incident"):
            sources.emit("opened", held.breach, held.directory, digest)
        return self._arm(held)

    def _write_healthy(self, bundle: Bundle, breach: Breach) -> None:
        """The last healthy time before the onset: the body of an incident in which most requests exceed the objective."""
        end = breach.onset_ns - int(BEFORE_S * NS_PER_S)
        document = self._sources.evidence(breach.request, breach.onset_ns - int(LONGEST_S * NS_PER_S), end)
        if is_healthy(document, breach):
            write_evidence(bundle.path / f"healthy-{self._sources.pod.slot.index}-1.json", document)
            bundle.add_rest()

    def _join(self, directory: Path, until_ns: int) -> None:
        if self._open is not None:
            return
        held = Open(read_breach(directory), directory, until_ns)
        self._open = held
        self._arm(held)

    def _finish_orphan(self, directory: Path, now_ns: int) -> None:
        """Seal and diagnose what a dead owner left, unless that was done or nothing of use is there."""
        if self._open is not None or not directory.is_dir():
            return
        bundle = Bundle.open(directory)
        held = Open(read_breach(directory), directory, now_ns, bundle, owned=True, collected=True, asked=True, closing=True)
        self._open = held
        self._announce(held)
        evidence = any(directory.glob("evidence-*.json")) and not any(directory.glob("diagnosis-*.json"))
        self._jobs.put(lambda: self._publish_and_diagnose(held) if evidence else held.seal())

    def _collect(self, held: Open, now_ns: int) -> None:
        capture = self._capture
        if capture is not None:
            capture.disarm()
            self._drain(capture, _LAST_DRAIN_S if self._stopping else _DRAIN_S)
            gpu = None if self._stopping else capture.monitor.end()
            if gpu is not None:
                write_evidence(held.directory / f"gpu-{self._sources.pod.slot.index}-1.json", gpu)
        if not held.owned and not still_wanted(self._sources.pod, held.directory):
            return
        self.stacks.disarm()
        slot = self._sources.pod.slot.index
        write_evidence(held.directory / f"stacks-{slot}-1.json", self.stacks.document(slot))
        begin = max(held.breach.onset_ns - int(BEFORE_S * NS_PER_S), now_ns - int(LONGEST_S * NS_PER_S))
        document = self._sources.evidence(held.breach.request, begin, now_ns)
        write_evidence(held.directory / f"evidence-{slot}-1.json", document)

    def _drain(self, capture: RequestScopedCapture, seconds: float) -> None:
        """Write out the profiles that were kept, while the worker fills in their spans; what is late is dropped."""
        deadline = time.monotonic() + seconds
        while capture.pending and time.monotonic() < deadline and not (self._stopping and seconds > _LAST_DRAIN_S):
            capture.run_once()
            time.sleep(0.02)
        capture.shelf.clear()

    def _publish_and_diagnose(self, held: Open) -> None:
        held.seal()
        self.diagnosing.want(held)

    def _close(self, held: Open) -> None:
        self._heard = self._sources.pod.announce(open_=False, onset_ns=0, until_ns=0, directory="")
        self._open = None
        if held.bundle is None:
            return
        held.bundle.add_rest()
        digest = held.bundle.publish("closed")
        self._sources.emit("closed", held.breach, held.directory, digest)
        self._prune()

    def _prune(self) -> None:
        """Keep to the caps; the open incident stays."""
        root, budget = self._sources.pod.slot.directory, self._sources.budget
        if root is not None:
            keep = (self._open.directory,) if self._open is not None else ()
            prune(root, max_bytes=budget.disk_mb << 20, max_count=budget.incidents, keep=keep)
