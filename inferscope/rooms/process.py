"""The rooms of one process, wired: what a tick, an export and the capture thread do, in the order of the flow. No threads here."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from inferscope import guard, integration, pod, remote
from inferscope.aggregate import snapshot as snapshots
from inferscope.aggregate.histogram import percentiles
from inferscope.aggregate.horizon import Horizon
from inferscope.aggregate.window import Aggregator
from inferscope.bench.fingerprint import fingerprint
from inferscope.capture import stacks
from inferscope.capture.held import Sources, objective_json
from inferscope.capture.incident import IncidentKeeper
from inferscope.capture.plan import Plan
from inferscope.capture.request_scoped import RequestScopedCapture
from inferscope.clock import NS_PER_S
from inferscope.control.lending import switch_part
from inferscope.detect import edges_by_request
from inferscope.device.nvtx import Ranges
from inferscope.device.room import DeviceRoom
from inferscope.errors import CaptureRefusedError
from inferscope.host import process
from inferscope.host.gc import GcPauses
from inferscope.host.watch import HostWatch
from inferscope.pace import Pace
from inferscope.rooms.hooks import Hooks
from inferscope.rooms.judging import Judging, budget_of
from inferscope.rooms.outlet import Outlet
from inferscope.rooms.reload import SettingsFile
from inferscope.slots import slots
from inferscope.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferscope.capture.budget import CaptureBudget
    from inferscope.control.protocol import Wanted
    from inferscope.detect import Trigger
    from inferscope.record.core import Recorder
    from inferscope.settings import Settings
    from inferscope.types import Breach, Snapshot, Window

__all__ = ["Rooms"]


class Rooms:
    """Everything but threads."""

    def __init__(self, settings: Settings, recorder: Recorder) -> None:
        self.settings, self.recorder = settings, recorder
        self.budget = budget_of(settings)
        self.judging = Judging(settings)
        self.aggregator = Aggregator(recorder)
        self.aggregator.sampling = settings.sampling or {}
        self.horizon = Horizon()
        self.gc = GcPauses(recorder)
        self.capture: RequestScopedCapture | None = None
        self.outlet = Outlet(settings, self)
        self.exporter = self.outlet.exporter
        self.host = HostWatch(self.gc)
        self.device = DeviceRoom(recorder)
        self.ranges = Ranges()
        self._hooks = Hooks(recorder, self.ranges)
        self.pod = pod.Pod(pod.Slot(0, None, "", -1))
        self.keeper: IncidentKeeper | None = None
        self.pid = os.getpid()
        self.overhead_ns: dict[str, int] = {}
        """CPU time of our own threads, by their names; kept by the runtime."""
        self.off: set[str] = set()
        """Parts that an operator switched off on demand: `capture`, `export`."""
        self._horizon_lock = threading.Lock()
        self.file = SettingsFile(self, lambda part, on: switch_part(self, part, on))

    @property
    def trigger(self) -> Trigger:
        """The detector."""
        return self.judging.trigger

    @trigger.setter
    def trigger(self, trigger: Trigger) -> None:
        self.judging.trigger = trigger

    def activate(self) -> None:
        """Take a place in the pod and begin to listen."""
        self.pod = self._take_place()
        self.pid = os.getpid()
        for request, edges in edges_by_request(self.trigger.slos).items():
            self.recorder.set_edges(request, edges)
        self.gc.start()
        self.device.start()
        self._listen()
        if self.exporter is not None:
            self.exporter.open(self.pod.slot.directory)
        self.outlet.listen()
        self.keeper = IncidentKeeper(self._sources(), self.capture)

    def _take_place(self) -> pod.Pod:
        slot = None
        try:
            slot = pod.lease(self.settings.state_dir, self.settings.service)
            return pod.Pod(slot)
        except Exception as error:  # noqa: BLE001  (whatever is wrong with the directory, the service starts)
            if slot is not None:
                slot.release()
            guard.log_once(
                "slot", f"no slot can be leased under {self.settings.state_dir} ({error}); evidence stays in memory, OTLP still works"
            )
            return pod.Pod(pod.lease(None, self.settings.service))

    def _listen(self, before: RequestScopedCapture | None = None) -> None:
        """Let captures decide about requests, and a tool that is attached see their stages."""
        self.ranges.start()
        if self.settings.capture and not guard.is_off("capture.hooks"):
            self.capture = RequestScopedCapture(
                self.budget,
                set_armed=self._set_armed,
                columns=lambda: self.aggregator.columns,
                in_flight=getattr(self.recorder, "_open", None),
            )
            if before is not None:
                self.capture.succeed(before)
        self._hooks.listen(self.capture)

    def renew_captures(self, *, budget: CaptureBudget | None = None, on: bool | None = None) -> bool:
        """Put another budget in force, or switch captures on that were off from the start; False while an incident needs the present ones."""
        keeper = self.keeper
        if keeper is not None and (keeper.current is not None or keeper.busy):
            return False
        self.budget = budget or self.budget
        self.judging.limit_host(self.budget)
        self.settings = replace(self.settings, capture=self.settings.capture if on is None else on)
        before, self.capture = self.capture, None
        if before is not None:
            before.disable("its budget changed")
        self._listen(before)
        if keeper is not None:
            self.keeper = IncidentKeeper(self._sources(), self.capture)
            self.keeper.opened, self.keeper.last = keeper.opened, keeper.last
        return True

    def _set_armed(self, armed: bool) -> None:  # noqa: FBT001  (a switch, called with what it becomes)
        self._hooks.arm(armed and "capture" not in self.off)

    def deactivate(self) -> None:
        """Give slot and lead back: this process serves nothing."""
        self.gc.stop()
        self.keeper = None
        self.pod.retire()
        self.pod = pod.Pod(pod.Slot(0, None, "", -1))

    def rest(self) -> None:
        """Close what the export room has open on disk: it belongs to a slot that was given back."""
        if self.exporter is not None:
            self.exporter.open(None)

    def last_words(self, moment_ns: int) -> None:
        """Write what an open incident has; on the capture thread, or on none when that is busy."""
        if self.keeper is not None:
            self.keeper.finish(moment_ns)
            self.keeper.run_once()

    def quiet(self, reason: str) -> None:
        """Begin nothing long any more and take our hooks off the application's threads."""
        if self.keeper is not None:
            self.keeper.stop()
        self.gc.stop()
        self.host.stop()
        with guard.guard("device"):
            self.device.stop()
        if self.capture is not None:
            with guard.guard("capture"):
                self.capture.disable(reason)
        self.recorder.set_hooks()
        self.recorder.armed = False

    def close(self, deadline: float) -> None:
        """Deliver what is left before `deadline` (`time.monotonic`), give the slot back."""
        with guard.guard("export"):
            self.outlet.close(deadline)
        with guard.guard("pod"):
            self.pod.retire()

    def after_fork(self) -> None:
        """In a forked child: nothing of the parent's counts, files, slots or sockets is ours."""
        self.recorder.after_fork()
        self.aggregator.reset()
        self.horizon.reset()
        self._horizon_lock = threading.Lock()
        integration.forget_copies()
        guard.reset()
        self.pod.close()
        self.pod = pod.Pod(pod.Slot(0, None, "", -1))
        self.keeper, slots.open_incident = None, None
        self.overhead_ns = {}
        self.judging.host.after_fork()
        self.judging = Judging(self.settings)
        self.gc.stop()
        self.gc = GcPauses(self.recorder)
        self.device.after_fork()
        self.ranges.after_fork()
        self.capture = None  # it disabled itself; a new one is made when this process serves
        self.recorder.set_hooks()
        self.recorder.armed = False
        if self.exporter is not None:
            self.exporter.after_fork(None)
        self.host.reset()  # its open descriptors are the parent's threads'
        self.host = HostWatch(self.gc)
        self.outlet.begin()

    def served(self) -> bool:
        """Whether this process has finished a request of its own."""
        return any(self.recorder.read_class(entry[0])["count"] for entry in self.recorder.classes())

    def step(self, moment_ns: int, breathe: Callable[[], object]) -> None:
        """One tick: window, horizon, objectives, incident; a room that fails costs its own part only."""
        window = guard.contained("aggregate", lambda: self.aggregator.tick(moment_ns, breathe), None)
        if window is None:
            return
        self._look_after(window)
        guard.contained("settings", self.file.poll, None)
        breathe()
        guard.contained("horizon", lambda: self._remember(window, breathe), None)
        breathe()
        guard.contained("host", lambda: self.host.tick(moment_ns, window.records, self.aggregator.lock_sites()), None)
        breathe()
        guard.contained("export", lambda: self.outlet.retain(window, self.aggregator.lock_sites()), None)
        breathe()
        breach = guard.contained("detect", lambda: self._judge(window, moment_ns), None)
        breathe()
        keeper = self.keeper
        if keeper is not None:
            guard.contained("incident", lambda: self._follow(keeper, window, breach, moment_ns), None)

    def _remember(self, window: Window, breathe: Callable[[], object]) -> None:
        sites = self.aggregator.lock_sites()
        with self._horizon_lock:
            self.horizon.add(window, sites, breathe)

    def _judge(self, window: Window, moment_ns: int) -> Breach | None:
        if guard.is_off("pod") and self.pod.slot.directory is not None:
            self._leave_pod()
        self.judging.count(window, self.device, moment_ns)
        pooled = guard.contained("pod", lambda: self.judging.pooled(self.pod, moment_ns), None)
        return self.trigger.update(moment_ns, pooled) if pooled is not None else None

    def _leave_pod(self) -> None:
        """The pool cannot be used any more: go on alone, under the same name, without a place on disk."""
        slot = self.pod.slot
        self.pod.close()
        self.pod = pod.Pod(pod.Slot(slot.index, None, slot.instance_id, -1))
        guard.rearm("pod")
        self.keeper = IncidentKeeper(self._sources(), self.capture)

    def _follow(self, keeper: IncidentKeeper, window: Window, breach: Breach | None, moment_ns: int) -> None:
        closed = self.judging.follow(keeper, breach, moment_ns)
        keeper.step(moment_ns, window.records, closed)
        slots.open_incident = keeper.current.name if keeper.current is not None else None
        if keeper.current is not None or self.judging.burning:
            self.host.arm(burning=keeper.current is None)
        else:
            self.host.disarm()

    def _look_after(self, window: Window) -> None:
        """Failures that were contained where nothing may be said: in hooks, in the core and in the collector's callback."""
        if guard.observe("gc", self.gc.failures):
            self.gc.stop()
        if guard.observe("record", window.counters.get("internal_errors", 0)):
            self.recorder.enabled = False
        if guard.observe("capture.hooks", window.counters.get("hook_errors", 0)):
            self.recorder.set_hooks()
            self.recorder.armed = False
            if self.capture is not None:
                self.capture.disable("its hooks failed")

    def keep(self) -> None:
        """What the capture thread does."""
        if self.capture is not None:
            self.capture.warm_up(ready=self.ready())
        if self.keeper is not None:
            self.keeper.run_once()

    @property
    def sample_period_s(self) -> float:
        """Seconds between two calls of `sample`."""
        return min(self.host.period_s, stacks.PERIOD_S) if self.keeper is not None and self.keeper.stacks.armed else self.host.period_s

    def sample(self) -> None:
        """What the sampling thread does: the state of every thread, the stacks of those whose requests are late."""
        self.host.sample()
        if self.keeper is not None:
            self.keeper.stacks.sample()

    def mark_ready(self) -> None:
        """End the warm-up, in every worker of the pod."""
        self.trigger.mark_ready()
        self.pod.set_warm(True)

    def ready(self) -> bool:
        """Whether the warm-up is over, here or for the pod's leader."""
        return self.trigger.ready or self.pod.warm

    def export(self, timeout_s: float = 2.0, *, force: bool = False) -> bool:
        """What the export thread does; `force` sends although the interval is not over."""
        return "export" in self.off or self.outlet.export(timeout_s, force=force)

    def _sources(self) -> Sources:
        return Sources(
            pod=self.pod,
            budget=self.budget,
            evidence=self._evidence,
            objective=lambda name: next((objective_json(slo) for slo in self.trigger.slos if slo.name == name), {"name": name}),
            fingerprint=fingerprint,
            versions={"inferscope": __version__, "service": self.settings.version},
            body_ns=self._body_ns,
            emit=self.outlet.emit,
            looks=(getattr(self.recorder, "_open", None), getattr(self.recorder, "_stack", None)),
            diagnose=self.settings.diagnose,
            on_incident=self.settings.on_incident,
        )

    def _evidence(self, request: str, from_ns: int, to_ns: int) -> dict[str, Any]:
        slot = self.pod.slot
        with self._horizon_lock:
            document = self.horizon.evidence(request, from_ns, to_ns, breathe=Pace())
        document |= {"slot": slot.index, "pid": os.getpid(), "instance_id": slot.instance_id}
        document["copies"] = integration.copies()
        document["remote"] = remote.evidence()
        document["gc"] = self.gc.evidence()
        document["host"] = guard.contained("host", lambda: self.host.evidence(request, from_ns, to_ns), None)
        document["device"] = guard.contained("device", lambda: self.device.evidence(from_ns, to_ns), document["device"])
        document["process"] = process.facts()
        document["status"] = {"objectives": {name: str(state.phase) for name, state in self.trigger.state.items()}}
        return document

    def _body_ns(self, request: str) -> tuple[float, float] | None:
        for held in self.aggregator.cumulative():
            if held.kind == "request" and held.labels[0] == request and held.count >= 50:  # fewer say nothing of P40 to P60
                low, high = percentiles(held, (0.40, 0.60))
                return (low, high) if low is not None and high is not None else None
        return None

    def capture_now(self, wanted: Wanted, moment_ns: int) -> str:
        """Open a manual incident, or raise the reason why not."""
        if self.capture is None or self.keeper is None:
            raise CaptureRefusedError("captures are off (INFERSCOPE_CAPTURE=0 or capture=False)")
        if guard.is_off("incident") or guard.is_off("capture.hooks"):
            raise CaptureRefusedError("captures were switched off after failures of ours; see inferscope.status()")
        plan = Plan.of(wanted)
        self.judging.permit(moment_ns)
        return self.keeper.ask(self.trigger.manual(moment_ns), moment_ns, reason=wanted.reason, plan=plan)

    def snapshot(self, taken_unix_ns: int) -> Snapshot:
        """Current numbers as of the last tick."""
        return snapshots.take(self.aggregator.cumulative(), self.aggregator.totals(), self.recorder.counters(), taken_unix_ns)

    def status(self, wall_ns: int) -> dict[str, Any]:
        """States of the rooms; our threads' share is of the `wall_ns` that they have run."""
        keeper = self.keeper
        cost = {name: {"cpu_s": used / NS_PER_S, "share": used / wall_ns} for name, used in dict(self.overhead_ns).items()}
        return {
            "service": self.settings.service,
            "slot": self.pod.slot.index,
            "instance_id": self.pod.slot.instance_id,
            "state_dir": str(self.settings.state_dir) if self.settings.state_dir else None,
            "leads": self.pod.leading,
            "ready": self.ready(),
            **self.judging.status(),
            "incident": str(keeper.current) if keeper is not None and keeper.current else None,
            "incidents": {"opened": keeper.opened, "diagnosed": keeper.diagnosed, "diagnosis": keeper.diagnosing.status()}
            if keeper
            else None,
            "switched_off_on_demand": sorted(self.off),
            "overhead": cost,
            "problems": list(self.settings.problems),
            "settings_file": self.file.status(),
            "host": self.host.status(),
            "device": self.device.status(),
            "nvtx": f"off: {self.ranges.off}" if self.ranges.off else "on",
            "capture": self.capture.status() if self.capture is not None else "off",
            "export": self.exporter.status() if self.exporter is not None else "off",
            "counters": self.recorder.counters(),
        }
