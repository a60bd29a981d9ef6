"""The lifecycle calls, over one runtime a process.

Only `configure` (bad keyword), `instrument` (unknown name) and `capture_now` (denied) raise; everything else contains its own errors.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any, TypedDict

from inferscope import guard, settings
from inferscope.errors import InferscopeError, IntegrationUnavailableError
from inferscope.record import core
from inferscope.slots import slots

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from typing_extensions import Unpack

    from inferscope.capture.budget import CaptureBudget
    from inferscope.detect.slo import SLO
    from inferscope.runtime import Runtime
    from inferscope.types import Snapshot

__all__ = [
    "Keywords",
    "capture_now",
    "configure",
    "flush",
    "instrument",
    "ready",
    "shutdown",
    "snapshot",
    "status",
    "uninstrument",
    "watch",
]


class Keywords(TypedDict, total=False):
    """Keywords of `inferscope.configure()`; each may also come from `INFERSCOPE_<NAME>` or a settings file."""

    service: str | None
    """`service.name`; default `OTEL_SERVICE_NAME`, else "unknown_service"."""
    version: str | None
    """`service.version`; default that of `OTEL_RESOURCE_ATTRIBUTES`."""
    slo: SLO | Sequence[SLO] | str | None
    """Objectives, as `SLO` values or text such as "score:p99_ms=20"; default none."""
    state_dir: str | os.PathLike[str] | None
    """Where evidence lies; default `$XDG_STATE_HOME/inferscope` or `~/.local/state/inferscope`."""
    endpoint: str | None
    """OTLP endpoint; default the standard variables. With none, nothing is sent: a local ring is kept."""
    protocol: str | None
    """"http/protobuf" or "grpc"; default by the standard variables and the port."""
    headers: str | None
    """OTLP headers as "key=value,key2=value2"."""
    export_interval_s: float | None
    """Seconds between metric exports, default 10."""
    otlp_scale: int | None
    """Scale of exponential histograms, 3 to 8; default 5, whose buckets are at most 1.08 % off."""
    series_limit: int | None
    """Metric series this process may export, default 100; the rest is one overflow series."""
    export_bands: bool | None
    """Whether time by latency band and stage leaves too, so that a tail can be attributed over a whole fleet; at most 750 series more,
    default False."""
    budget: CaptureBudget | Mapping[str, Any] | str | None
    """What captures may cost, or its keywords; default `CaptureBudget()`."""
    warmup_s: float | None
    """Seconds before an objective is judged, default 300."""
    warmup_requests: int | None
    """Requests before it is judged, default 2000; whichever comes first."""
    fleet_size: int | None
    """Replicas that share the allowance of false triggers, default 1."""
    trigger: str | None
    """"e_detector" (default) or "burn_rate"."""
    triggers: Mapping[str, Any] | str | None
    """Limits of triggers beside the objectives, such as {"lock_wait_ms": 50, "gc_pause_ms": 100, "device_idle": 0.3, "memory_headroom": 0.05,
    "error_rate": 0.01, "throughput_drop": 0.5, "predicate": function of a `Window`}; default none. See docs/control.md."""
    sampling: Mapping[str, int] | str | None
    """Requests kept whole in ten seconds: `breaching` (default 2048), `reservoir` (64 a latency band), `slowest` (32)."""
    diagnose: str | None
    """"local" (default): a child process explains an incident; "deferred": the command line does; "off"."""
    capture: bool | None
    """Whether breaches are profiled, default True."""
    export: bool | None
    """Whether anything leaves the process, default True."""
    enabled: bool | None
    """False makes everything a passthrough; default True."""
    integrations: Sequence[str] | None
    """Names to instrument at once, as `instrument` takes them; default none."""
    tick_s: float | None
    """Seconds between windows, default 1."""
    on_incident: Callable[[Path], None] | None
    """Called with the incident's directory after each diagnosis, on a thread of ours."""
    watch: bool | None
    """Whether the settings file is read again when it changes, default True; see docs/control.md for what takes effect at once."""
    host_lock: str | os.PathLike[str] | None
    """File by which all processes of a host capture one at a time; default `capture.lock` in the state directory."""
    control: bool | None
    """Whether a running service can be asked, default True: by the owner-only socket, and by what else is on. False switches all off."""
    control_http: str | int | None
    """[HOST:]PORT on loopback where it can be asked over HTTP too, with a bearer token; default off."""
    control_signal: str | None
    """"SIGUSR1", "SIGUSR2" or "SIGHUP" to ask for a capture with; default off."""
    control_opamp: str | None
    """URL of an OpAMP server that may ask for captures; default off. Needs `inferscope-sdk[opamp]`."""
    control_token_file: str | os.PathLike[str] | None
    """File with the bearer token; default `INFERSCOPE_CONTROL_TOKEN`, else one that is made beside the socket."""


_lock = threading.Lock()
_runtime: Runtime | None = None


def configure(**keywords: Unpack[Keywords]) -> None:
    """Start measuring, detecting and exporting in this process; a second call replaces the first.

    Args:
        **keywords: See `inferscope.api.Keywords`: `service`, `slo`, `endpoint`, `state_dir`, `budget` and others, all optional.
            What is not given comes from `INFERSCOPE_*`, then from inferscope.toml or `[tool.inferscope]`, then from the defaults.

    Raises:
        ConfigurationError: A keyword has an unusable value, or two objectives share a name. Nothing was changed then.
    """
    global _runtime  # noqa: PLW0603  (one runtime a process is the contract of this module)
    loaded = settings.load(keywords)
    if core.IMPLEMENTATION == "disabled":
        return
    if not loaded.enabled:
        shutdown(timeout_s=1.0)
        core.default.enabled = False
        return
    with _lock:
        if keywords.get("integrations"):
            from inferscope.integration import registry

            registry.require(loaded.integrations)
        try:
            from inferscope.runtime import Runtime

            built = Runtime(loaded, core.default)  # objectives are checked here, before anything running is touched
        except Exception as error:
            if guard.strict() or isinstance(error, InferscopeError):
                raise
            guard.failed("start", error)  # a package that does not load, say: the service starts without us
            return
        if _runtime is not None:
            _runtime.shutdown(1.0)
        core.default.enabled = True
        _runtime = built
        with guard.guard("start"):
            built.start()
    for name in loaded.integrations:
        try:
            instrument(name)
        except IntegrationUnavailableError as error:  # named by the environment or a file: a rollout does not fail because of it
            guard.log_once(f"integration {name}", f"{error}; it is left out")


def _current() -> Runtime | None:
    return _runtime


def running() -> bool:
    """Whether `configure()` was called in this process and not undone since."""
    return _runtime is not None


def shutdown(timeout_s: float = 1.0) -> None:
    """Send what is pending, stop our threads and give the slot back, within `timeout_s` seconds (default 1). Requests go on unmeasured."""
    global _runtime
    with _lock:
        running, _runtime = _runtime, None
    if running is not None:
        with guard.guard("shutdown"):
            running.shutdown(timeout_s)


def flush(timeout_s: float = 2.0) -> bool:
    """Take a window now and send everything pending; returns whether all of it left within `timeout_s` seconds (default 2)."""
    running = _current()
    if running is None:
        return False
    with guard.guard("flush"):
        return running.flush(timeout_s)
    return False


def ready(warm: bool | None = None) -> bool:  # noqa: FBT001  (reads as a sentence: ready(True))
    """Whether warm-up is over; `ready(True)` ends it, for services that know when they are warm."""
    running = _current()
    if running is None:
        return False
    if warm:
        guard.contained("detect", running.rooms.mark_ready, None)
    return guard.contained("detect", running.rooms.ready, otherwise=False)


def status() -> dict[str, Any]:
    """What is on, what is off and why, drops, errors and our own overhead."""
    running = _current()
    base: dict[str, Any] = {
        "core": core.IMPLEMENTATION,
        "core_note": core.REASON,
        "enabled": bool(core.default.enabled),
        "running": running is not None,
        "pid": os.getpid(),
        "failures": guard.counts(),
        "switched_off": guard.disabled(),
    }
    from inferscope.integration import registry

    base["integrations"] = registry.states()
    if running is not None:
        with guard.guard("status"):
            base.update(running.status())
    return base


def snapshot() -> Snapshot:
    """Counts and percentiles of every series since start, in seconds; empty when nothing runs."""
    running = _current()
    if running is None:
        import time

        from inferscope.types import Snapshot

        return Snapshot(time.time_ns(), (), {}, {})
    return running.snapshot()


def capture_now(
    *,
    reason: str,
    requests: int = 8,
    id: str | None = None,  # noqa: A002  (the ticket's own name everywhere)
    window_ms: float | None = None,
    tier: int = 1,
    shapes: bool = False,
    stacks: bool = False,
    allow_stall_ms: float | None = None,
) -> str:
    """Ask for a profile of the next requests, whether they are slow or not.

    Args:
        reason: Why, for the audit trail; it is written into the incident.
        requests: How many profiles to keep, 1 to 64, default 8.
        id: Makes it one capture however often it is asked for, here or over a channel. Default: each call is one of its own.
        window_ms: Record all threads for this long, 1 to 10000, in place of single requests; needs tier 2 or 3. Default None.
        tier: 1 (default) single requests; 2 short windows of all threads; 3 what can stop the whole process for a moment.
        shapes: Dimensions of operators' inputs; tier 3 only.
        stacks: Python functions with file and line; tier 3 only.
        allow_stall_ms: Longest stop of the whole process that is acceptable, milliseconds; tier 3 needs it. Default None.

    Returns:
        The id of the incident that will hold them.

    Raises:
        CaptureRefusedError: Nothing is configured, captures are off, or a guard denies them; the message says which.
        ConfigurationError: An argument is out of range.
    """
    from inferscope.control.protocol import Wanted
    from inferscope.errors import CaptureRefusedError, ConfigurationError

    if not 1 <= requests <= 64:
        raise ConfigurationError("requests", requests, "an integer from 1 to 64")
    running = _current()
    if running is None:
        raise CaptureRefusedError("inferscope is not configured in this process; call inferscope.configure() first")
    wanted = Wanted(reason, requests, window_ms, tier, shapes, stacks, allow_stall_ms)
    if id is None:
        return running.capture_now(wanted)
    return running.control.capture(id, wanted)


def instrument(*names: str) -> dict[str, str]:
    """Switch integrations on; an explicit list is the recommended form, no name means all installed ones.

    Returns:
        State by name: "active", "waiting" (for the library's import) or "skipped: reason".

    Raises:
        IntegrationUnavailableError: No installed package offers that name.
    """
    from inferscope.integration import registry

    if core.IMPLEMENTATION == "disabled":
        return dict.fromkeys(names, "skipped: INFERSCOPE_DISABLED=1")
    return registry.instrument(names)


def uninstrument(*names: str) -> dict[str, str]:
    """Undo integrations and restore what they replaced; no name means all."""
    from inferscope.integration import registry

    return registry.uninstrument(names)


def watch(model: Any, name: str) -> Any:
    """Name a model, so that its forward is the stage `forward:NAME`; returns the model itself, untouched."""
    if slots.on_model_loaded is not None:
        with guard.guard("watch"):
            slots.on_model_loaded(name, model)
    return model
