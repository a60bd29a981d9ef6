"""The Python side: settings, faults, the clock and the truth about what ran."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
import types
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from inferscope.testing.accelerator._build import library

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

__all__ = ["Accelerator", "Operation", "load"]

NAME: Final = "sim"
_KINDS: Final = ("kernel", "h2d", "d2h", "d2d", "event", "scalar")
_SETTINGS: Final = {
    "launch_us": ("launch_ns", 1e3),
    "jitter_us": ("jitter_ns", 1e3),
    "operator_us": ("operator_ns", 1e3),
    "copy_us": ("copy_ns", 1e3),
    "pageable_us": ("pageable_ns", 1e3),
    "call_us": ("call_ns", 1e3),
    "h2d_gb_s": ("h2d_bytes_s", 1e9),
    "d2h_gb_s": ("d2h_bytes_s", 1e9),
    "d2d_gb_s": ("d2d_bytes_s", 1e9),
    "pageable_gb_s": ("pageable_bytes_s", 1e9),
    "memory_gb": ("memory_bytes", 1e9),
    "drift_ppm": ("drift_ppm", 1.0),
    "offset_s": ("offset_ns", 1e9),
    "resolution_us": ("resolution_ns", 1e3),
    "log_events": ("log_events", 1.0),
    "log_limit": ("log_limit", 1.0),
    "query_kills_all": ("query_kills_all", 1.0),
}


class _Row(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("issue", "start", "end", "returned", "bytes")),
        *((name, ctypes.c_int32) for name in ("kind", "device", "stream", "thread", "name", "flags")),
    ]


@dataclass(frozen=True, slots=True)
class Operation:
    """One piece of work as it truly happened; instants in ns on the host clock (`Accelerator.now_ns`)."""

    kind: str
    """`kernel`, `h2d`, `d2h`, `d2d`, `event` (only with `log_events`) or `scalar` (`item()`, `nonzero()`, `x[mask]`: an implicit synchronisation)."""
    name: str
    """Operator or kernel."""
    device: int
    stream: int
    thread_id: int
    """Native id of the thread that issued it."""
    issue_ns: int
    start_ns: int
    end_ns: int
    returned_ns: int
    """When the call that issued it returned; later than `issue_ns` for a blocking copy."""
    nbytes: int
    pageable: bool
    blocking: bool
    replayed: bool


class Accelerator:
    """The simulated device; made by `load()`.

    Attributes:
        name: The device type torch knows it by.
        devices: How many there are.
    """

    name: Final = NAME
    devices: Final = 2

    def __init__(self, core: ctypes.CDLL) -> None:
        self._core = core
        self._uuids: tuple[str, ...] = ()
        core.sim_now.restype = ctypes.c_int64
        core.sim_error.restype = ctypes.c_char_p
        core.sim_name.restype = ctypes.c_char_p
        for name in ("sim_log_size", "sim_log_copy", "sim_counters", "sim_card_total"):
            getattr(core, name).restype = ctypes.c_int64
        core.sim_log_copy.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
        core.sim_counters.argtypes = [ctypes.c_char_p, ctypes.c_int64]
        core.sim_set.argtypes = [ctypes.c_char_p, ctypes.c_double]
        core.sim_cost.argtypes = [ctypes.c_char_p, ctypes.c_int64]
        core.sim_fail.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_char_p]
        core.sim_clock.argtypes = [ctypes.c_int, ctypes.c_int64]
        core.sim_advance.argtypes = core.sim_advance_to.argtypes = [ctypes.c_int64]
        core.sim_reset.argtypes = [ctypes.c_uint64]
        core.sim_share.argtypes = [ctypes.c_char_p]
        core.sim_kernel.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_char_p, ctypes.c_int64]

    def reset(self, seed: int = 1) -> None:
        """Default settings, the real clock, no faults, an empty log, idle streams; `seed` is that of the launch jitter."""
        self._core.sim_reset(seed)
        self._uuids = ()

    def configure(self, **settings: float) -> None:
        """Change how the device behaves.

        Args:
            **settings: `launch_us` (5) from issue to start on an idle stream and `jitter_us` (0), mean of an exponential on top;
                `operator_us` (10) on the device for an operator without a cost of its own; `copy_us` and `pageable_us` (5) fixed cost of a copy; `h2d_gb_s`, `d2h_gb_s` (12),
                `d2d_gb_s` (500), `pageable_gb_s` (3); `memory_gb` (8); `call_us` (0) that a call into the driver costs its caller; `drift_ppm`
                (0) and `offset_s` (0) of the device's clock against the host's, `resolution_us` (0.5) of its stamps; `log_events` (0), `log_limit`
                (1e6); `query_kills_all` (0): a query during a capture kills it from relaxed threads too, as on ROCm.

        Raises:
            ValueError: An unknown setting.
        """
        for name, value in settings.items():
            if name not in _SETTINGS:
                raise ValueError(f"unknown setting {name!r}; known: {', '.join(_SETTINGS)}")
            inner, scale = _SETTINGS[name]
            self._core.sim_set(inner.encode(), value * scale)

    def operator_cost(self, name: str, microseconds: float) -> None:
        """What an operator takes on the device, by its full name (`aten::addmm`)."""
        self._core.sim_cost(name.encode(), int(microseconds * 1e3))

    def share(self, path: str | Path) -> None:
        """Share the cards with every process that names the same file, until `reset()`: their kernels take turns in the order of issue.

        For the real clock. The file holds, for each device, two int64 in native order: the instant (CLOCK_MONOTONIC, ns) until which kernels
        hold the card, and how long they did in all, so that a stand-in for the driver's library can tell a utilisation.

        Raises:
            RuntimeError: The file cannot be used.
        """
        if self._core.sim_share(str(path).encode()) != 0:
            raise RuntimeError(self._core.sim_error().decode())

    def card_busy_ns(self, device: int = 0) -> int | None:
        """How long kernels of all processes took of a shared card; None when it is not shared."""
        total = int(self._core.sim_card_total(device))
        return None if total < 0 else total

    def identify(self, *uuids: str) -> None:
        """Give the devices UUIDs, in their order, as `torch.sim.get_device_properties` tells them: a driver's stand-in finds the card by them."""
        self._uuids = uuids

    def properties(self, device: int | None = None) -> Any:
        """`torch.sim.get_device_properties`: name and UUID; without the latter when `identify` was not called."""
        index = int(self._core.sim_current_device()) if device is None else int(device)
        found = types.SimpleNamespace(name="simulated accelerator")
        if index < len(self._uuids):
            found.uuid = self._uuids[index]
        return found

    # -- clock --------------------------------------------------------------------------------------------------------------------

    def virtual_clock(self, start_ns: int = 1_000_000_000) -> None:
        """Stop time: it passes when somebody synchronises, waits for a copy, calls (`call_us`) or advances it. Empties the streams."""
        self._core.sim_clock(1, start_ns)

    def real_clock(self) -> None:
        """Follow CLOCK_MONOTONIC, which is `time.perf_counter_ns`. Empties the streams."""
        self._core.sim_clock(0, 0)

    def advance_ms(self, milliseconds: float) -> None:
        """Let virtual time pass."""
        self._core.sim_advance(int(milliseconds * 1e6))

    def advance_to(self, instant_ns: int) -> None:
        """Let virtual time pass up to an instant; nothing when it has passed, nor on the real clock."""
        self._core.sim_advance_to(instant_ns)

    def now_ns(self) -> int:
        """The host clock that the device lives by."""
        return int(self._core.sim_now())

    # -- work and faults ----------------------------------------------------------------------------------------------------------

    def kernel(self, milliseconds: float, name: str = "kernel") -> None:
        """Issue work of that length on the current stream of the current device.

        Raises:
            RuntimeError: A planted fault of the call `launch`.
        """
        device = int(self._core.sim_current_device())
        stream = int(self._core.sim_current_stream(device))
        if self._core.sim_kernel(device, stream, name.encode(), int(milliseconds * 1e6)) != 0:
            raise RuntimeError(self._core.sim_error().decode())

    def fail(self, call: str, *, times: int | None = 1, message: str = "SIM error: unspecified launch failure") -> None:
        """Plant a fault: the next `times` calls raise RuntimeError; None makes it sticky until `heal()`.

        Args:
            call: `launch`, `copy`, `record`, `query`, `elapsed`, `synchronize`, `wait`, `event_create`, `stream_create`, `allocate`, or `*`: a
                device that is lost.
            times: How often.
            message: What the error says.
        """
        self._core.sim_fail(call.encode(), -1 if times is None else times, message.encode())

    def heal(self) -> None:
        """Take all faults back."""
        self._core.sim_heal()

    @contextlib.contextmanager
    def relaxed(self) -> Generator[None]:
        """This thread may query during other threads' captures, as after `cudaThreadExchangeStreamCaptureMode(relaxed)`."""
        before = self._core.sim_relax(2)
        try:
            yield
        finally:
            self._core.sim_relax(before)

    # -- truth --------------------------------------------------------------------------------------------------------------------

    def operations(self) -> list[Operation]:
        """Everything that ran since `reset()` or `clear_log()`, in the order of issue (blocking copies: of return)."""
        size = int(self._core.sim_log_size())
        rows = (_Row * max(1, size))()
        size = int(self._core.sim_log_copy(ctypes.byref(rows), 0, size))
        names: dict[int, str] = {}
        found: list[Operation] = []
        for index in range(size):
            row: Any = rows[index]
            if row.name not in names:
                names[row.name] = self._core.sim_name(row.name).decode()
            found.append(
                Operation(
                    kind=_KINDS[int(row.kind)],
                    name=names[row.name],
                    device=row.device,
                    stream=row.stream,
                    thread_id=row.thread,
                    issue_ns=row.issue,
                    start_ns=row.start,
                    end_ns=row.end,
                    returned_ns=row.returned,
                    nbytes=row.bytes,
                    pageable=bool(row.flags & 1),
                    blocking=bool(row.flags & 2),
                    replayed=bool(row.flags & 4),
                )
            )
        return found

    def reached_ns(self, stream: int = 0) -> dict[str, int]:
        """By kernel, when its stream reached the event that was recorded right before it: what a span's start is compared with; needs `log_events`."""
        found: dict[str, int] = {}
        reached = 0
        for op in self.operations():
            if op.stream == stream and op.kind == "event":
                reached = op.start_ns
            elif op.kind == "kernel":
                found[op.name] = reached
        return found

    def clear_log(self) -> None:
        """Forget what ran."""
        self._core.sim_log_clear()

    def counters(self) -> dict[str, int]:
        """`calls:<call>` by call, `events_created`, `events_destroyed`, `synchronizations`, `implicit_syncs`, `captures`, `captures_killed`, ..."""
        text = ctypes.create_string_buffer(1 << 14)
        self._core.sim_counters(text, len(text))
        lines = (line.rsplit(" ", 1) for line in text.value.decode().splitlines())
        return {name: int(value) for name, value in lines}


def _ignore_seed(_seed: int) -> None:
    """Operators run on the CPU, with its generator."""


def _module() -> Any:
    """What torch asks of the module of a foreign device (`torch.sim`)."""
    import torch

    module: Any = types.ModuleType(f"torch.{NAME}")
    module.is_available = module.is_initialized = lambda: True
    module.device_count = lambda: Accelerator.devices
    module.current_device = torch.accelerator.current_device_index
    module.set_device = torch.accelerator.set_device_index
    module.current_stream = torch.accelerator.current_stream
    module.synchronize = torch.accelerator.synchronize
    module._is_in_bad_fork = lambda: False  # noqa: SLF001  (torch asks for this name)
    module.manual_seed_all = _ignore_seed
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    return module


@functools.cache
def load() -> Accelerator:
    """Compile if need be, load, and register the device type `sim` with torch; later calls return the same object.

    Raises:
        AcceleratorUnavailableError: No compiler, no torch, not Linux; the message says which.
        RuntimeError: Another foreign backend was registered in this process.
    """
    path = library()
    import torch

    api: Any = torch  # parts of it carry no types
    api.utils.rename_privateuse1_backend(NAME)
    core = ctypes.CDLL(str(path))
    core.sim_register()
    module = _module()
    api._register_device_module(NAME, module)  # noqa: SLF001  (the way torch documents)
    sys.modules.setdefault(module.__name__, module)
    api.utils.generate_methods_for_privateuse1_backend()
    found = Accelerator(core)
    module.get_device_properties = found.properties
    found.reset()
    return found
