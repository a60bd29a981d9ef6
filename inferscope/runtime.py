"""Builds the rooms and starts the threads; nothing else in the package does either.

    record ──▶ aggregate ──Window──▶ detect ──Breach──▶ capture ──▶ diagnose (child process) ──▶ export · report

Its daemon threads: `worker` takes a window a tick and judges it, `export` sends, `capture` writes profiles, evidence and manifests,
`control` answers operators, `opamp` asks a server where one is named, `sampler` looks at the threads, `harvest`
reads device events, `monitor` the driver, `poll` asks inference servers.
A process that forks before it served anything (a preload master) goes dormant and gives its slot back; a forked child wakes with its
first request.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from inferscope import fork, guard
from inferscope import remote as remote_calls
from inferscope.clock import now_ns, unix_offset_ns
from inferscope.control.lending import remote
from inferscope.pace import Pace
from inferscope.rooms import Rooms
from inferscope.slots import slots
from inferscope.types import Snapshot

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferscope.control.protocol import Wanted
    from inferscope.record.core import Recorder
    from inferscope.settings import Settings

    _Call = Callable[[], object]

__all__ = ["Runtime"]

_PERIODS_S: Final = {"capture": 0.2, "control": 0.05, "monitor": 1.0, "poll": 5.0}
_OTHERS: Final = ("export", "capture", "control", "sampler", "harvest", "monitor", "poll")
_NOTHING: Final = bool
"""The last work of loops that have none; `shutdown` itself makes the last delivery, it knows how much time is left."""
_FORK_WAIT_S: Final = (0.1, 1.0)
"""How long a fork waits for a tick to end (the child needs none of its locks, its numbers stay whole) and for files (SQLite's stay held)."""
_EXIT_S: Final = 0.9
"""What the end of the process waits for us when nobody called `shutdown`."""


class Runtime:
    """One running instance.

    Args:
        settings: All settings.
        recorder: What the application's requests run through.

    Raises:
        ConfigurationError: An objective or the budget cannot be used.
    """

    def __init__(self, settings: Settings, recorder: Recorder) -> None:
        self.settings = settings
        self.rooms = Rooms(settings, recorder)
        self.control = remote(self.rooms, self, lambda: self._tick_lock)
        self._stop, self._tick_lock = threading.Event(), threading.Lock()
        self._fork_waited, self._fork_paused = False, False
        self._threads: dict[str, threading.Thread] = {}
        self._started_ns, self._dormant = now_ns(), False
        self._others = (*_OTHERS, "opamp") if self.control.wants_opamp else _OTHERS

    def start(self) -> None:
        """Lease a slot, give the recorder its edges and hooks, start the threads."""
        guard.rearm()
        self._activate()
        fork.on_child("runtime", self._in_child)
        fork.on_parent("runtime", self._before_fork, self._after_fork)
        fork.at_process_end(self._at_exit)
        atexit.register(self._at_exit)
        slots.on_stop = lambda: self.flush(_EXIT_S)
        self._start_threads("worker", *self._others)

    def _activate(self) -> None:
        self.rooms.activate()
        slot = self.rooms.pod.slot
        self.control.open(slot.directory, slot.index, (self.settings.service, slot.instance_id))

    def _start_threads(self, *names: str) -> None:
        loops: dict[str, tuple[Callable[[], float], _Call, _Call]] = {
            "worker": (lambda: self.settings.tick_s, self.tick, self._last_tick),
            "export": (lambda: min(self.settings.export_interval_s, 1.0), lambda: self._dormant or self.rooms.export(), _NOTHING),
            "capture": (lambda: _PERIODS_S["capture"], self.rooms.keep, self._last_words),
            "control": (lambda: _PERIODS_S["control"], self.control.serve_once, self.control.close),
            "opamp": (lambda: self.control.opamp_pause_s, self.control.poll_opamp, self.control.leave_opamp),
            "sampler": (lambda: self.rooms.sample_period_s, self.rooms.sample, _NOTHING),
            "harvest": (lambda: self.rooms.device.period_s, lambda: self.rooms.device.harvest(Pace()), _NOTHING),
            "monitor": (lambda: _PERIODS_S["monitor"], self.rooms.device.monitor, _NOTHING),
            "poll": (lambda: _PERIODS_S["poll"], remote_calls.poll, _NOTHING),
        }
        for name in names:
            self._threads[name] = thread = threading.Thread(target=self._loop, args=(name, *loops[name], self._stop), daemon=True)
            thread.name = f"inferscope-{name}"
            thread.start()

    def _loop(self, name: str, period_s: Callable[[], float], work: _Call, last: _Call, stop: threading.Event) -> None:
        while not stop.wait(period_s()):
            guard.contained(name, work, None)
            self.rooms.overhead_ns[name] = time.thread_time_ns()
        guard.contained(name, last, None)

    def tick(self) -> None:
        """One window: aggregate, detect, and what follows from it."""
        with self._tick_lock:
            if self._dormant and self.rooms.served():
                self._activate()
                self._start_threads(*[name for name in self._others if name not in self._threads])
                self._dormant = False
            if self._dormant:
                self.rooms.rest()
            else:
                self.rooms.step(now_ns(), Pace())

    def _last_tick(self) -> None:
        if not self._dormant or self.rooms.served():
            self.tick()

    def _last_words(self) -> None:
        self._threads["worker"].join(_EXIT_S / 3)  # the last window belongs to the evidence
        self.rooms.last_words(now_ns())

    def flush(self, timeout_s: float) -> bool:
        """Take a window now and deliver it."""
        deadline = time.monotonic() + timeout_s
        guard.contained("worker", self.tick, None)
        return self._dormant or self.rooms.export(max(0.05, deadline - time.monotonic()), force=True)

    def shutdown(self, timeout_s: float) -> None:
        """Stop within `timeout_s`, whatever state the rooms are in: each thread does its last work, the caller waits no longer than that."""
        deadline = time.monotonic() + 0.95 * timeout_s
        atexit.unregister(self._at_exit)
        slots.on_stop = None
        self._stop.set()
        with guard.guard("shutdown"):
            self.rooms.quiet("shutdown")
            self.control.stop()
        self._join("worker", min(deadline, time.monotonic() + timeout_s / 3))
        self._join("capture", min(deadline, time.monotonic() + timeout_s / 3))
        if not self._dormant:
            self.rooms.close(deadline)
        self._join("export", deadline)

    def _join(self, name: str, until: float) -> None:
        thread = self._threads.get(name)
        if thread is not None and thread is not threading.current_thread():
            thread.join(max(0.0, until - time.monotonic()))

    def _at_exit(self) -> None:
        if not self._stop.is_set():
            with guard.guard("shutdown"):
                self.shutdown(_EXIT_S)

    def capture_now(self, wanted: Wanted) -> str:
        """Open a manual incident; see `inferscope.capture_now`."""
        with self._tick_lock:
            return self.rooms.capture_now(wanted, now_ns())

    def snapshot(self) -> Snapshot:
        """Current numbers, after a window taken now."""
        guard.contained("worker", self.tick, None)
        taken_ns = now_ns() + unix_offset_ns()
        return guard.contained("snapshot", lambda: self.rooms.snapshot(taken_ns), Snapshot(taken_ns, (), {}, {}))

    def status(self) -> dict[str, Any]:
        """What runs, what it costs."""
        running = {thread.name: thread.is_alive() for thread in self._threads.values()}
        return {
            **self.rooms.status(max(1, now_ns() - self._started_ns)),
            "dormant": self._dormant,
            "threads": running,
            "control": self.control.status(),
        }

    def _before_fork(self) -> None:
        self._fork_paused = self.rooms.exporter is not None and self.rooms.exporter.pause(_FORK_WAIT_S[1])
        self._fork_waited = self._tick_lock.acquire(timeout=_FORK_WAIT_S[0])

    def _after_fork(self) -> None:
        if self._fork_paused and self.rooms.exporter is not None:
            self.rooms.exporter.resume()
        if os.getpid() == self.rooms.pid and not self._dormant and not self._stop.is_set() and not self.rooms.served():
            self._dormant = True
            self.control.close()
            self.rooms.deactivate()
        if self._fork_waited:
            self._tick_lock.release()

    def _in_child(self) -> None:
        if self._stop.is_set():
            return
        self._stop, self._tick_lock = threading.Event(), threading.Lock()
        self._threads = {}
        self._dormant = True
        self.rooms.after_fork()
        self.control.after_fork()
        fork.at_process_end(self._at_exit)
        self._start_threads("worker")
