"""Builds the rooms and starts the threads; nothing else in the package does either.

    record ──▶ aggregate ──Window──▶ detect ──Breach──▶ capture ──▶ diagnose (child process) ──▶ export · report

Three daemon threads: `worker` takes a window a tick and judges it, `export` sends, `capture` writes profiles, evidence and manifests.
A process that forks before it served anything (a preload master) goes dormant and gives its slot back; a forked child wakes with its
first request.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from inferscope import fork, guard
from inferscope.clock import NS_PER_S, now_ns, unix_offset_ns
from inferscope.rooms import Rooms

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferscope.record.core import Recorder
    from inferscope.settings import Settings
    from inferscope.types import Snapshot

__all__ = ["Runtime"]

_BREATH_S: Final = 0.0
_CAPTURE_PERIOD_S: Final = 0.2


def _breathe() -> None:
    """Let request threads have the interpreter between two slices."""
    time.sleep(_BREATH_S)


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
        self._stop = threading.Event()
        self._tick_lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._cpu: dict[str, int] = {}
        self._started_ns = now_ns()
        self._dormant = False

    def start(self) -> None:
        """Lease a slot, give the recorder its edges and hooks, start the threads."""
        self.rooms.activate()
        fork.on_child("runtime", self._in_child)
        fork.on_parent("runtime", self._before_fork, self._after_fork)
        self._start_threads()

    def _start_threads(self) -> None:
        loops: list[tuple[str, float, Callable[[], None]]] = [
            ("worker", self.settings.tick_s, self.tick),
            ("export", min(self.settings.export_interval_s, 1.0), self.rooms.export),
            ("capture", _CAPTURE_PERIOD_S, self.rooms.keep),
        ]
        self._threads = [
            threading.Thread(target=self._loop, args=loop, name=f"inferscope-{loop[0]}", daemon=True) for loop in loops
        ]
        for thread in self._threads:
            thread.start()

    def _loop(self, name: str, period_s: float, work: Callable[[], None]) -> None:
        stop = self._stop
        while not stop.wait(period_s):
            if not guard.is_off(name):
                with guard.guard(name):
                    work()
            self._cpu[name] = time.thread_time_ns()

    def tick(self) -> None:
        """One window: aggregate, detect, and what follows from it."""
        with self._tick_lock:
            if self._dormant:
                if not self.rooms.served():
                    return
                self._dormant = False
                self.rooms.activate()
            self.rooms.step(now_ns(), _breathe)

    def flush(self, timeout_s: float) -> bool:
        """Take a window now and deliver it."""
        deadline = time.monotonic() + timeout_s
        self.tick()
        self.rooms.keep()
        return self.rooms.export(deadline - time.monotonic(), force=True)

    def shutdown(self, timeout_s: float) -> None:
        """Stop within `timeout_s`: last window, last delivery, profiler and hooks off, slot back."""
        deadline = time.monotonic() + timeout_s
        self._stop.set()
        if self._tick_lock.acquire(timeout=timeout_s / 4):
            try:
                with guard.guard("shutdown"):
                    if not self._dormant:
                        self.rooms.step(now_ns(), _breathe)
            finally:
                self._tick_lock.release()
        self.rooms.close(deadline)
        current = threading.current_thread()
        for thread in self._threads:
            if thread is not current:
                thread.join(max(0.0, deadline - time.monotonic()))

    def mark_ready(self) -> None:
        """End the warm-up."""
        self.rooms.trigger.mark_ready()

    def is_ready(self) -> bool:
        """Whether the warm-up is over."""
        return self.rooms.trigger.ready

    def capture_now(self, reason: str, requests: int) -> str:
        """Open a manual incident; see `inferscope.capture_now`."""
        with self._tick_lock:
            return self.rooms.capture_now(reason, requests, now_ns())

    def snapshot(self) -> Snapshot:
        """Current numbers, after a window taken now."""
        self.tick()
        return self.rooms.snapshot(now_ns() + unix_offset_ns())

    def status(self) -> dict[str, Any]:
        """What runs, what it costs."""
        wall = max(1, now_ns() - self._started_ns)
        return {
            **self.rooms.status(),
            "dormant": self._dormant,
            "threads": {thread.name: thread.is_alive() for thread in self._threads},
            "overhead": {name: {"cpu_s": spent / NS_PER_S, "share": spent / wall} for name, spent in self._cpu.items()},
            "problems": list(self.settings.problems),
        }

    def _before_fork(self) -> None:
        # A tick holds locks of the aggregator: the child must not inherit them held.
        self._tick_lock.acquire(timeout=0.5)

    def _after_fork(self) -> None:
        if self._tick_lock.locked():
            self._tick_lock.release()
        if os.getpid() == self.rooms.pid and not self._dormant and not self._stop.is_set() and not self.rooms.served():
            self._dormant = True
            self.rooms.deactivate()

    def _in_child(self) -> None:
        if self._stop.is_set():
            return
        self._tick_lock = threading.Lock()
        self._stop = threading.Event()
        self._cpu = {}
        self._dormant = True
        self.rooms.after_fork()
        self._start_threads()
