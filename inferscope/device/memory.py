"""What torch's own allocator holds of each device, and what stages take of it: counters that it keeps anyway, so that reading them synchronises
nothing. Another process's memory is not in these numbers; what the whole card has left comes from the driver.

A stage's high-water mark is known exactly when the process's own peak rose while it ran, which the largest request so far made happen. Peaks
are never reset: they are the application's, and `max_memory_allocated` would change its answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferscope.device.events import DeviceTimer

__all__ = ["AllocatorMonitor", "Memory", "Reading", "StageMemory", "read"]


class Memory(NamedTuple):
    """One device's allocator, bytes and running totals; None where the backend does not tell."""

    device: str
    allocated_bytes: int | None
    """In tensors."""
    allocated_peak_bytes: int | None
    reserved_bytes: int | None
    """Taken from the driver: tensors and cache."""
    allocations: int | None
    """Since start."""
    driver_allocations: int | None
    """Calls that went to the driver, which synchronise the device."""
    retries: int | None
    """Allocations that flushed the cache first: each stops the device."""
    out_of_memory: int | None
    inactive_split_bytes: int | None
    """Fragmentation: free parts of blocks that are partly in use, which no large tensor fits into and the driver cannot take back."""
    free_bytes: int | None = None
    """What the driver could still give, to any process."""
    total_bytes: int | None = None
    headroom_bytes: int | None = None
    """What tensors can still grow by before memory ends, as far as one piece of it is large enough: free, and reserved without a use."""


_KEYS: Final = (
    ("allocated_bytes", "all", "current"),
    ("allocated_bytes", "all", "peak"),
    ("reserved_bytes", "all", "current"),
    ("allocation", "all", "allocated"),
    ("num_device_alloc",),
    ("num_alloc_retries",),
    ("num_ooms",),
    ("inactive_split_bytes", "all", "current"),
)


def read(device: Any) -> dict[str, Any] | None:
    """The allocator's counters as torch keeps them, nested; None where the backend has none. Some microseconds, no synchronisation.

    Args:
        device: A `torch.device` with an index.
    """
    import torch

    api: Any = torch  # the public function flattens and sorts 150 entries
    try:
        reader = getattr(api._C, "_accelerator_getDeviceStats", None)  # noqa: SLF001
        if reader is None:  # torch before 2.9
            reader = api._C._cuda_memoryStats if device.type == "cuda" else None  # noqa: SLF001
        found: dict[str, Any] | None = None if reader is None else reader(device.index)
    except Exception:  # noqa: BLE001  (a backend without these numbers, or a lost device: unknown, not zero)
        return None
    return found or None


def _dig(stats: dict[str, Any], path: tuple[str, ...]) -> int | None:
    value: Any = stats
    try:
        for name in path:
            value = value[name]
    except (KeyError, TypeError):
        return None
    return value if isinstance(value, int) else None


class AllocatorMonitor:
    """Reads the allocator of every device that the application was seen to use.

    Args:
        timer: Knows those devices; nothing is asked about others.
    """

    def __init__(self, timer: DeviceTimer) -> None:
        self._timer = timer

    def sample(self, left: Callable[[Any], tuple[int, int] | None] = lambda _device: None) -> list[Memory]:
        """One row a device; empty before the application used one.

        Args:
            left: Free and total bytes of a device's card, from its driver; None leaves them to torch.
        """
        return [self._read(device, left(device)) for device in sorted(self._timer.channels, key=str)]

    @classmethod
    def _read(cls, device: Any, left: tuple[int, int] | None) -> Memory:
        stats = read(device) or {}
        row = Memory(str(device), *(_dig(stats, path) for path in _KEYS))
        free, total = left or cls._left(device)
        held = None if row.reserved_bytes is None or row.allocated_bytes is None else row.reserved_bytes - row.allocated_bytes
        return row._replace(free_bytes=free, total_bytes=total, headroom_bytes=None if free is None or held is None else free + held)

    @staticmethod
    def _left(device: Any) -> tuple[int | None, int | None]:
        """What torch says; on CUDA that is a call into the driver, which has a thread of its own here."""
        import torch

        api: Any = torch
        try:
            free, total = api.accelerator.get_memory_info(device.index)
        except Exception:  # noqa: BLE001  (an older torch, or a backend that does not tell)
            return None, None
        return int(free), int(total)


class Reading(NamedTuple):
    """The allocator as a stage began."""

    current: int
    peak: int


@dataclass(slots=True)
class _Row:
    samples: int = 0
    highest: int = 0
    """Device's allocated bytes at the highest moment that is known of any run."""
    exact: bool = False
    """Whether `highest` is the high-water mark of a run, or only what stood at its ends."""
    dynamic: int = 0
    """Most that a run added to what it found."""
    dynamic_exact: bool = False
    batch: int | None = None
    """Rows of the first input in the run that `dynamic` is of."""
    found: int = 0
    """What that run found allocated."""


class StageMemory:
    """Static, dynamic and peak memory by stage, model, request and class; sampled by the integrations.

    Every stage's first runs are read, and every run of a larger batch than any before, then some ten a second.

    Args:
        clock: Nanoseconds, for tests.
    """

    ROWS: Final = 64
    FIRST: Final = 16
    """Runs that are read before a second is counted."""
    PERIOD_NS: Final = 100_000_000

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._rows: dict[tuple[str, str, str | None, str | None, str | None], _Row] = {}
        self._largest: dict[tuple[str, str], int] = {}
        self._runs: dict[tuple[str, str], int] = {}
        self._next = 0
        self._static: dict[str, int] = {}
        self._weights: dict[tuple[str, str], int] = {}

    def begin(self, device: Any, stage: str, batch: int | None) -> Reading | None:
        """Read the allocator when this run is one to be read.

        Args:
            device: A `torch.device`.
            stage: Its name.
            batch: Rows of the first input.
        """
        key = (str(device), stage)
        runs = self._runs[key] = self._runs.get(key, 0) + 1
        larger = batch is not None and batch > self._largest.get(key, 0)
        if not larger and runs > self.FIRST:
            now = self._clock()
            if now < self._next:
                return None
            self._next = now + self.PERIOD_NS
        stats = read(device)
        current = None if stats is None else _dig(stats, _KEYS[0])
        peak = None if stats is None else _dig(stats, _KEYS[1])
        if current is None or peak is None:
            return None
        if batch is not None and larger:
            self._largest[key] = batch
        self._static[key[0]] = min(current, self._static.get(key[0], current))
        return Reading(current, peak)

    def weigh(self, device: Any, stage: str, module: Any) -> None:
        """Add up a model's parameters and buffers on a device, once for each stage: shapes only.

        Args:
            device: A `torch.device`.
            stage: Its name.
            module: The `torch.nn.Module` whose forward it is.
        """
        key = (str(device), stage)
        if key not in self._weights:
            held = {id(each): each.nbytes for each in (*module.parameters(), *module.buffers()) if each.device == device}
            self._weights[key] = sum(held.values())

    def end(self, began: Reading, device: Any, stage: str, batch: int | None, request: Any) -> None:
        """Read it again after the stage.

        Args:
            began: From `begin`.
            device: The same.
            stage: The same.
            batch: The same.
            request: The current request, or None.
        """
        stats = read(device)
        current = None if stats is None else _dig(stats, _KEYS[0])
        peak = None if stats is None else _dig(stats, _KEYS[1])
        if current is None or peak is None:
            return
        name, model, cls = (None, None, None) if request is None else (request.name, request.model, request.cls)
        key = (str(device), stage, model, name, cls)
        row = self._rows.get(key)
        if row is None:
            if len(self._rows) >= self.ROWS:
                return
            row = self._rows.setdefault(key, _Row())
        exact = peak > began.peak  # the process's own mark rose in here
        highest = peak if exact else max(began.current, current)
        row.samples += 1
        if highest > row.highest or (highest == row.highest and exact):
            row.highest, row.exact = highest, exact
        dynamic = highest - began.current
        if (exact, dynamic) > (row.dynamic_exact, row.dynamic):
            row.dynamic, row.dynamic_exact, row.batch, row.found = dynamic, exact, batch, began.current

    def evidence(self, memory: list[Memory]) -> list[dict[str, Any]]:
        """One row for each stage, model, request and class.

        Args:
            memory: The devices' allocators, for what is left.

        Returns:
            `static_bytes` is the least that was allocated when a stage began (all that was loaded on that device), `model_bytes` the parameters
            and buffers of the stage's own model. `dynamic_bytes` is the most that a run added, `peak_bytes` the most that was allocated during
            one; both are None unless the process's own peak rose in it, and hold what other threads took meanwhile. `at_least_bytes` is what
            stood at the ends of runs. `largest_batch` is how many rows the device's memory would allow, in proportion to the run that set the
            peak: what does not grow with the rows makes it too low, fragmentation too high.
        """
        by_device = {row.device: row for row in memory}
        found: list[dict[str, Any]] = []
        for (device, stage, model, request, cls), row in list(self._rows.items()):
            found.append(
                {
                    "device": device,
                    "stage": stage,
                    "model": model,
                    "request": request,
                    "class": cls,
                    "samples": row.samples,
                    "static_bytes": self._static.get(device),
                    "model_bytes": self._weights.get((device, stage)),
                    "dynamic_bytes": row.dynamic if row.dynamic_exact else None,
                    "peak_bytes": row.highest if row.exact else None,
                    "at_least_bytes": row.highest,
                    "batch": row.batch if row.dynamic_exact else None,
                    "largest_batch": _largest(row, by_device.get(device)),
                }
            )
        return found

    def reset(self) -> None:
        """Start afresh, in a forked child."""
        self._rows.clear()
        self._largest.clear()
        self._runs.clear()
        self._static.clear()
        self._weights.clear()


def _largest(row: _Row, memory: Memory | None) -> int | None:
    """Rows that fit: those of the measured run times what there is for them over what they took."""
    if memory is None or memory.headroom_bytes is None or memory.allocated_bytes is None or not row.batch:
        return None
    if not row.dynamic_exact or row.dynamic <= 0:
        return None
    room = memory.headroom_bytes + memory.allocated_bytes - row.found - (memory.inactive_split_bytes or 0)
    return max(0, row.batch * room // row.dynamic)
