"""Kept profiles on their way to disk: the trace first, its side file once the request's own record has arrived."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from inferscope import guard
from inferscope.capture import guards, session
from inferscope.capture.bundle import write_atomic
from inferscope.capture.scrub import Scrubber
from inferscope.capture.session import Session, State
from inferscope.clock import NS_PER_MS, NS_PER_S, unix_offset_ns
from inferscope.errors import EvidenceError
from inferscope.types import CaptureSummary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from inferscope.capture.recording import Recording
    from inferscope.capture.window import Window
    from inferscope.types import Column, RequestRecord

__all__ = ["RECORD_WAIT_NS", "Kept", "Shelf", "save_trace", "write_side"]

SPANS: Final = 4096
"""Spans in a side file; a window shows many requests."""
THREADS: Final = 256
RECORD_WAIT_NS: Final = 3 * NS_PER_S // 2
"""How long a side file waits for the request's own record, which comes with the aggregator's next tick."""


@dataclass(slots=True)
class Kept:
    """A profile that was kept, and what its side file will say."""

    id: str
    directory: Path
    profile: Session | Window
    slow: bool
    request: str
    wall_ns: int
    """Of the request, or the length of the window."""
    start_ns: int
    tier: int = 1
    likely: bool = False
    """Whether its request was preferred over others, see `Spending.draw`."""
    requests: tuple[int, ...] = ()
    """Requests that it shows."""
    counted: Callable[[int], object] | None = None
    """Told how many events the trace holds."""
    save_cost_ns: int = 0
    events: int | None = None
    kernels: int = 0
    launches: int = 0
    scrubbed: int = 0
    """Strings that were replaced or left out."""
    launch_tax: float | None = None
    saved_ns: int = 0
    spans: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    recorded: bool = False

    @property
    def trace(self) -> str:
        """Path of the trace inside the incident."""
        return f"captures/{self.id}.trace.json"

    @property
    def side(self) -> str:
        """Path of the side file inside the incident."""
        return f"captures/{self.id}.json"

    def take_record(self, record: RequestRecord, columns: Sequence[Column]) -> None:
        """Fill the spans from the request's own record."""
        self.recorded = True
        self.spans += [
            {
                "column": columns[span.column].label if span.column < len(columns) else "other",
                "start_ns": span.start_ns,
                "end_ns": span.end_ns,
                "thread": span.thread_id,
                "flags": span.flags,
                "aux": span.aux,
            }
            for span in record.spans
        ][: SPANS - len(self.spans)]

    @property
    def threads(self) -> tuple[int, ...]:
        """Native ids of the threads that it shows."""
        return (self.profile.native,) if isinstance(self.profile, Session) else tuple(sorted(self.profile.threads))[:THREADS]

    def summary(self) -> CaptureSummary:
        """What reports and log events say about it."""
        own = self.profile
        stall_ms = (own.start_cost_ns + own.stop_cost_ns) / NS_PER_MS
        return CaptureSummary(self.id, self.tier, self.requests, self.slow, self.events, round(stall_ms, 3), self.threads, self.trace)


def _is_operator(name: str) -> bool:
    """Whether torch has an operator of that name, in a library of whosoever."""
    torch = session.loaded_torch()
    if torch is None or not name.isascii() or len(name) > 200:
        return False
    try:
        return bool(torch._C._jit_get_schemas_for_operator(name))  # noqa: SLF001  (no public name)
    except RuntimeError:
        return False


def save_trace(kept: Kept, clock: Callable[[], int]) -> None:
    """Write the trace under its name; the profile is released whatever happens, because it can be saved once only.

    What torch writes lies on disk for a moment under a temporary name; what gets the trace's name went through `Scrubber`. A full disk
    raises nothing inside torch, so the file itself is asked.

    Raises:
        EvidenceError: Nothing usable was written; no file is left.
    """
    results, kept.profile.results = kept.profile.results, None
    final = kept.directory / kept.trace
    raw, temporary = (final.with_name(f".{final.name}.{os.getpid()}.{kind}.tmp") for kind in ("raw", "new"))
    try:
        final.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if final.exists():
            # A worker that was restarted counts its requests anew; what is on disk may be published already.
            raise EvidenceError(f"{final.name} exists already")  # noqa: TRY301  (one clean-up for all ways to fail)
        begun, held = clock(), None
        try:
            held = results.save(str(raw))
        finally:
            # Kineto holds the interpreter throughout; what leaves it to others says for how long it did not.
            kept.save_cost_ns = clock() - begun if held is None else held
        scrubber = Scrubber(_is_operator)
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w", encoding="ascii") as file:
            whole = scrubber.copy(raw, file)
            file.flush()
            os.fsync(file.fileno())
        kept.events, kept.kernels, kept.launches = scrubber.events, scrubber.kernels, scrubber.launches
        kept.scrubbed = scrubber.replaced
        if not isinstance(kept.profile, Session):
            kept.profile.threads |= scrubber.threads
        if not whole:
            raise EvidenceError(f"{final.name}: the trace was not written whole")  # noqa: TRY301  (one clean-up for all ways to fail)
        temporary.replace(final)
    except Exception as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, EvidenceError):
            raise
        raise EvidenceError(f"{final.name} cannot be written: {type(error).__name__}") from error
    finally:
        # Kineto writes beside the name that it is given, and leaves that when it fails.
        for left in (raw, raw.with_name(f"{raw.name}.tmp")):
            with contextlib.suppress(OSError):
                left.unlink()


def write_side(kept: Kept) -> None:
    """Write the side file that lets a reader join the trace with the request.

    Raises:
        EvidenceError: It cannot be written.
    """
    own = kept.profile
    stalls = {"start": own.start_cost_ns / NS_PER_MS, "stop": own.stop_cost_ns / NS_PER_MS, "save": kept.save_cost_ns / NS_PER_MS}
    document: dict[str, Any] = {
        "schema": 1,
        "id": kept.id,
        "tier": kept.tier,
        "slow": kept.slow,
        "likely": kept.likely,
        "request_id": own.request_id if isinstance(own, Session) else None,
        "requests": list(kept.requests),
        "request": kept.request,
        "wall_ns": kept.wall_ns,
        "start_ns": kept.start_ns,
        "threads": list(kept.threads),
        "events": kept.events,
        "truncated": own.truncated,
        "shapes": own.asked.shapes,
        "stacks": own.asked.stacks,
        "light": own.asked.light,
        "scrubbed": kept.scrubbed,
        "stall_ms": stalls,
        "gil_gap_ms": max(stalls.values()),
        **_device(kept),
        **_extent(own),
        "trace": kept.trace,
        "unix_offset_ns": unix_offset_ns(),
        "spans": kept.spans,
        "torch": str(getattr(session.loaded_torch(), "__version__", "unknown")),
    }
    write_atomic(kept.directory / kept.side, (json.dumps(document, sort_keys=True) + "\n").encode())


def _device(kept: Kept) -> dict[str, Any]:
    """What was to be seen of the GPU, and what was not."""
    own = kept.profile
    why = own.why_no_device
    row: dict[str, Any] = {"device": own.device, "device_reason": None if why is None else guards.REASONS[why], "kernels": None}
    if own.device is not None:
        # A graph's launch stands for many kernels: loss is known only where there are fewer kernels than launches.
        lost = max(0.0, 1.0 - kept.kernels / kept.launches) if kept.launches else None
        row |= {"kernels": kept.kernels, "launches": kept.launches, "lost": lost, "launch_tax": kept.launch_tax}
        row |= {"device_truncated": own.device_stopped, "tail_lost": own.tail_lost}
    return row


def _extent(own: Session | Window) -> dict[str, Any]:
    if isinstance(own, Session):
        return {"region": {"name": own.region, "start_ns": own.opened_ns, "end_ns": own.end_ns, "thread": own.native}}
    return {"window": {"start_ns": own.opened_ns, "end_ns": own.silent_ns, "drain_ns": own.drain_ns, "length_ns": own.length_ns}}


class Shelf:
    """Kept profiles that wait to be written.

    Args:
        recording: Gives the state, takes the costs.
        clock: Nanoseconds, monotonic.
    """

    def __init__(self, recording: Recording, clock: Callable[[], int]) -> None:
        self._recording = recording
        self._clock = clock
        self._queue: deque[Kept] = deque()
        self._waiting: list[Kept] = []

    def __len__(self) -> int:
        return len(self._queue) + len(self._waiting)

    @property
    def unsaved(self) -> int:
        """Profiles whose traces are still in memory."""
        return len(self._queue)

    def put(self, kept: Kept) -> None:
        """Take a kept profile; called on the application's threads."""
        self._queue.append(kept)

    def clear(self) -> None:
        """Drop everything unwritten."""
        self._queue.clear()
        self._waiting.clear()

    def take_records(self, records: Iterable[RequestRecord], columns: Sequence[Column]) -> None:
        """Give each waiting profile its request's own record."""
        held = [kept for kept in [*self._queue, *self._waiting] if not kept.recorded]
        waiting = {kept.profile.request_id: kept for kept in held if isinstance(kept.profile, Session)}
        for record in records:
            kept = waiting.get(record.id)
            if kept is not None and record.key.request == kept.request:
                kept.take_record(record, columns)

    def work(self) -> tuple[CaptureSummary, ...]:
        """Write one trace, more while the budget is not overdrawn, and the side files that are due; returns what is complete on disk."""
        recording = self._recording
        while self._queue and not recording.gate.occupied() and self._save_next() and recording.spending.solvent(self._clock()):
            time.sleep(0)
        now = self._clock()
        due: list[Kept] = []
        early: list[Kept] = []
        for kept in self._waiting:
            (due if kept.recorded or now - kept.saved_ns >= RECORD_WAIT_NS else early).append(kept)
        self._waiting = early
        complete: list[CaptureSummary] = []
        for kept in due:
            try:
                write_side(kept)
            except EvidenceError as error:
                self._failed(error)
                continue
            recording.counts.saved += 1
            complete.append(kept.summary())
        return tuple(complete)

    def _save_next(self) -> bool:
        held, machine = session.lock, self._recording.machine
        if not held.acquire(blocking=False):
            return False
        before = machine.state
        try:
            machine.move(State.EXPORTING)
            self._save(self._queue.popleft())
        except EvidenceError as error:
            self._failed(error)
        finally:
            if machine.state is State.EXPORTING:
                machine.move(before)
            held.release()
        return True

    def _save(self, kept: Kept) -> None:
        recording = self._recording
        try:
            save_trace(kept, self._clock)
        finally:
            kept.saved_ns = self._clock()
            with recording.mutex:
                recording.counts.stalls_ns["save"] += kept.save_cost_ns
                recording.spending.spend(kept.save_cost_ns, kept.saved_ns)
        if kept.counted is not None:
            kept.counted(kept.events or 0)
        seen_nothing = kept.profile.device is not None and not kept.kernels
        if kept.profile.device is not None:
            kept.launch_tax = recording.gpu.tax
            if recording.gpu.saw(kept.kernels):
                guard.log_once("capture.gpu", f"profiles show the CPU alone from now on: {guards.REASONS['no_kernels']}")
        if not kept.events or seen_nothing:
            recording.counts.empty += 1
            recording.fault("empty trace")
        self._waiting.append(kept)

    def _failed(self, error: EvidenceError) -> None:
        self._recording.counts.save_failed += 1
        guard.log_once("capture.save", str(error))
