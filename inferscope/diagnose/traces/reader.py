"""Events as they stream by: of each only numbers are kept."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np

from inferscope.diagnose.traces import device, host
from inferscope.diagnose.traces.device import COPY, KERNEL, OTHER, Launches, Timeline, Worked
from inferscope.diagnose.traces.host import ANNOTATION, CALL, OPERATOR, PYTHON, Sweep, Track
from inferscope.diagnose.traces.values import Collective, Operator, ShapeUse, TraceSummary, Transfer
from inferscope.diagnose.traces.work import Work, work_of
from inferscope.errors import EvidenceError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from inferscope.diagnose.traces.values import StageSpan
    from inferscope.types import FloatArray, IntArray

__all__ = ["Reader"]

_HOST: Final = {
    **dict.fromkeys(("cpu_op", "operator"), OPERATOR),
    **dict.fromkeys(("cuda_runtime", "cuda_driver", "hip_runtime", "runtime", "mtia_runtime", "xpu_runtime"), CALL),
    "python_function": PYTHON,
    "user_annotation": ANNOTATION,
}
_DEVICE: Final = {
    **dict.fromkeys(("kernel", "mtia_ccp_events"), KERNEL),
    **dict.fromkeys(("gpu_memcpy", "memcpy"), COPY),
    **dict.fromkeys(("gpu_memset", "memset"), OTHER),
}
_BLOCKING: Final = frozenset({"cudaMemcpy", "hipMemcpy", "hipMemcpyWithStream", "cuMemcpyHtoD_v2", "cuMemcpyDtoH_v2"})
_SILENT: Final = ("IsCapturing", "LastError", "GetDevice", "GetAttribute")
"""Runtime calls that may stand between a copy and the synchronise that belongs to it."""
_REGION: Final = "Torch-Compiled Region: "
_COMPILING: Final = ("dynamo_timed", "compile_inner", "compile_fx", "autotun", "graphinstantiate", "cudamalloc", "hipmalloc", "codegen")
"""Parts of names, in small letters, of what a shape that is new to the process brings about."""
_COLLECTIVES: Final = ("nccl", "rccl", "gloo:", "mpi:", "ucc:", "record_param_comms", "c10d::")
_SEEN: Final = ("kernel", "annotation", "parameters", "operator")
"""Where a collective shows, the best place first: one that was seen on several is counted once."""
_NAMES: Final = 200_000
_SHAPES: Final = 512
"""Input shapes that are told apart for one operator."""
_WORKS: Final = 20_000
_RANKED: Final = 100_000


class Reader:
    """Keeps numbers of events while they stream by, and sums them up at the end."""

    def __init__(self) -> None:
        self.header: dict[str, object] = {}
        self.elements = 0
        self.events = 0
        self.first, self.last = float("inf"), float("-inf")
        self.names: dict[str, int] = {}
        self.threads: dict[tuple[object, int], Track] = {}
        self.operators: set[tuple[object, int]] = set()
        self.transfers: dict[tuple[str, str], list[float]] = {}
        self.synchronisations: dict[str, list[float]] = {}
        self.copies = array("q")
        """Correlations of copies, with the place of their transfer in the next array."""
        self.copies_of = array("H")
        self.launches = 0
        self.timeline = Timeline()
        self.worked = Worked()
        self.shapes: dict[str, dict[int, int]] = {}
        self.regions: dict[str, int] = {}
        self.collectives: dict[str, list[Collective]] = {place: [] for place in _SEEN}
        self._works: dict[tuple[str, str, str], Work | None] = {}
        self._roles: dict[str, tuple[bool, bool]] = {}

    def add(self, event: Mapping[str, Any]) -> None:
        """Take one event.

        Raises:
            EvidenceError: It lacks a name or a time, or they are no such thing.
        """
        self.elements += 1
        if event.get("ph") != "X":
            return
        try:
            start, duration = float(event["ts"]), float(event.get("dur") or 0.0)
            category, name = str(event.get("cat", "")).lower(), str(event["name"])
        except (KeyError, TypeError, ValueError) as error:
            msg = f"damaged event ({type(error).__name__}: {error})"
            raise EvidenceError(msg) from error
        self.events += 1
        if start > 0:
            self.first, self.last = min(self.first, start), max(self.last, start + duration)
        kind = _HOST.get(category)
        if kind is not None:
            self._host(event, start, duration, name, kind)
        elif category in _DEVICE:
            self._work(event, start, duration, name, _DEVICE[category])

    def _number(self, name: str) -> int:
        if len(self.names) >= _NAMES and name not in self.names:
            name = "(other names)"
        return self.names.setdefault(name, len(self.names))

    def _host(self, event: Mapping[str, Any], start: float, duration: float, name: str, kind: int) -> None:
        key = (event.get("pid"), _integer(event.get("tid")))
        thread = self.threads.get(key)
        if thread is None:
            thread = self.threads[key] = Track()
        number = self._number(name)
        thread.add(start, duration, number, kind)
        if kind == CALL:
            self._call(event, thread, name, duration)
        elif kind == OPERATOR:
            self.operators.add(key)
            self._operator(event, name)
        if kind != CALL and name.startswith(_COLLECTIVES):
            place = "operator" if name.startswith("c10d") else "parameters" if name.startswith("record") else "annotation"
            self._collective(event, start, duration, name, place)

    def _operator(self, event: Mapping[str, Any], name: str) -> None:
        if name.startswith(_REGION):
            self.regions[name] = self.regions.get(name, 0) + 1
        arguments: Mapping[str, Any] = event.get("args") or {}
        if "Input Dims" not in arguments:
            return
        dims, types = str(arguments["Input Dims"]), str(arguments.get("Input type"))
        used = self.shapes.setdefault(name, {})
        shape = hash(dims)
        if shape in used or len(used) < _SHAPES:
            used[shape] = used.get(shape, 0) + 1
        key = (name, dims, types)
        if key not in self._works:
            if len(self._works) >= _WORKS:
                self._works.clear()
            self._works[key] = work_of(name, arguments)
        done = self._works[key]
        if done is not None and done.flops > 0:
            self.worked.add(_integer(arguments.get("External id")), done)

    def _call(self, event: Mapping[str, Any], thread: Track, name: str, duration: float) -> None:
        role = self._roles.get(name)
        if role is None:
            role = self._roles[name] = ("ynchroniz" in name or name in _BLOCKING, any(word in name for word in _SILENT))
        self.launches += "Launch" in name
        if role[0]:
            row = self.synchronisations.setdefault(name, [0, 0.0])
            row[0] += 1
            row[1] += duration
        if not role[1]:
            arguments: Mapping[str, Any] = event.get("args") or {}
            thread.corresponds.append(len(thread.start) - 1)
            thread.correlation.append(_integer(arguments.get("correlation")))

    def _work(self, event: Mapping[str, Any], start: float, duration: float, name: str, kind: int) -> None:
        arguments: Mapping[str, Any] = event.get("args") or {}
        ids = (_integer(arguments.get("correlation")), _integer(arguments.get("External id") or arguments.get("external id")))
        place = (_integer(arguments.get("device", event.get("pid"))), _integer(arguments.get("stream", event.get("tid"))))
        self.timeline.add(start, duration, self._number(name), kind, ids, place)
        if kind == COPY:
            self._copy(arguments, duration, name, ids[0])
        elif kind == KERNEL and name.startswith(_COLLECTIVES):
            self._collective(event, start, duration, name, "kernel")

    def _copy(self, arguments: Mapping[str, Any], duration: float, name: str, correlation: int) -> None:
        words = name.split()
        direction = words[1] if len(words) > 1 else name
        lower = name.lower()
        memory = "pageable" if "pageable" in lower else "pinned" if "pinned" in lower else "unknown"
        row = self.transfers.setdefault((direction, memory), [0, 0, 0.0, 0, len(self.transfers)])
        row[0] += 1
        row[1] += _integer(arguments.get("bytes"))
        row[2] += duration
        self.copies.append(correlation)
        self.copies_of.append(min(int(row[4]), 0xFFFF))

    def _collective(self, event: Mapping[str, Any], start: float, duration: float, name: str, place: str) -> None:
        rows = self.collectives[place]
        if len(rows) >= _RANKED:
            return
        arguments: Mapping[str, Any] = event.get("args") or {}
        what = str(arguments.get("Collective name") or name.partition("(")[0])
        group = str(arguments.get("Process Group Name") or "")
        sequence = arguments.get("Seq", arguments.get("seq"))
        rows.append(Collective(what, group, -1 if sequence is None else _integer(sequence), round(start * 1e3), duration / 1e3))

    def summary(self, spans: Sequence[StageSpan]) -> TraceSummary:
        """Sort, nest and add up."""
        base = _integer(self.header.get("baseTimeNanoseconds"))
        names = list(self.names)
        waits = frozenset(self.names[name] for name in self.synchronisations)
        sweep = Sweep(names, waits, spans, base)
        for (_, tid), thread in self.threads.items():
            sweep.add(thread, tid)
        pairs = self._synchronous()
        kernels = self.timeline.kernels(names) if len(self.timeline) else ()
        launches = self._launches(waits)
        self.threads.clear()  # the largest part of what is held, before the next largest is made
        collectives = self._ranked(base)
        first = self._device()
        return TraceSummary(
            events=self.events,
            threads=tuple(sorted(tid for _, tid in self.operators)),
            window_ms=max(0.0, self.last - self.first) / 1e3 if self.events else 0.0,
            base_unix_ns=base,
            operators=_sorted(Operator(names[name], int(row[0]), row[1] / 1e3) for name, row in sweep.totals.items()),
            transfers=tuple(
                sorted(
                    (
                        Transfer(way, memory, int(row[0]), int(row[1]), row[2] / 1e3, int(row[3]))
                        for (way, memory), row in self.transfers.items()
                    ),
                    key=lambda row: -row.ms,
                )
            ),
            synchronisations=_sorted(Operator(name, int(row[0]), row[1] / 1e3) for name, row in self.synchronisations.items()),
            synchronous_copies=pairs,
            launches=self.launches,
            device_events=len(self.timeline),
            device_busy=self.timeline.busy(),
            device_ms=sum(self.timeline.duration) / 1e3,
            stages_ms={label: micros / 1e3 for label, micros in sweep.stages.items()},
            stages_device_ms=self.timeline.stage_times(sweep.launched),
            kernels=kernels,
            sync_sites=sweep.sites(),
            idle=self.timeline.idle(launches),
            small_kernels=self.timeline.small() if kernels else None,
            shapes=self._shapes(),
            graphs=sum(self.regions.values()),
            recompiles=_recompiles(self.regions),
            compile_ms=sum(row[1] for number, row in sweep.totals.items() if _compiles(names[number])) / 1e3,
            matrix=device.matrix_work(kernels),
            roofline=self.timeline.roofline(self.worked, first),
            overlap=self.timeline.overlap(),
            collectives=collectives,
            collective_ms=sum(row.ms for row in collectives),
            collective_wait_ms=device.collective_wait_ms(collectives),
            rank=self._distributed("rank"),
            ranks=self._distributed("world_size"),
            device=first,
        )

    def _distributed(self, key: str) -> int | None:
        held = self.header.get("distributedInfo")
        value = cast("dict[str, object]", held).get(key) if isinstance(held, dict) else None
        return None if value is None else _integer(value)

    def _device(self) -> str:
        held = self.header.get("deviceProperties")
        rows = cast("list[dict[str, object]]", held) if isinstance(held, list) else []
        return str(rows[0].get("name") or "") if rows else ""

    def _ranked(self, base: int) -> tuple[Collective, ...]:
        """Collectives in unix time, from the best place that shows any."""
        rows: Sequence[Collective] = next((rows for rows in self.collectives.values() if rows), ())
        return tuple(row._replace(start_unix_ns=row.start_unix_ns + base) for row in rows)

    def _shapes(self) -> tuple[ShapeUse, ...]:
        rows = [ShapeUse(name, sum(used.values()), len(used)) for name, used in self.shapes.items() if len(used) > 1]
        return tuple(sorted(rows, key=lambda row: (-row.shapes, -row.calls, row.operator)))

    def _synchronous(self) -> int:
        """Pageable copies directly followed by a stream synchronise on the same thread; counts blocking copies of each kind on the way."""
        synchronise = np.array([number for name, number in self.names.items() if "StreamSynchronize" in name], dtype=np.int64)
        blocking = self._blocking()
        copies = np.frombuffer(self.copies, np.int64)
        of = np.frombuffer(self.copies_of, np.uint16)
        pageable = copies[np.isin(of, [int(row[4]) for (_, memory), row in self.transfers.items() if memory == "pageable"])]
        pairs, waited = 0, [np.zeros(0, np.int64)]
        for thread in self.threads.values():
            index = np.frombuffer(thread.corresponds, np.uint32)
            if not len(index):
                continue
            order = np.argsort(np.frombuffer(thread.start)[index], kind="stable")
            names, ids = np.frombuffer(thread.name, np.uint32)[index][order], np.frombuffer(thread.correlation, np.int64)[order]
            followed = np.append(np.isin(names[1:], synchronise), False)
            pairs += int((np.isin(ids, pageable) & (ids > 0) & followed).sum())
            waited.append(ids[(followed | np.isin(names, blocking)) & (ids > 0)])
        held = np.isin(copies, np.concatenate(waited))
        for row in self.transfers.values():
            row[3] = int((held & (of == row[4])).sum())
        return pairs

    def _launches(self, waits: frozenset[int]) -> Launches:
        """Only calls that put work on a device: a large trace has many more."""
        numbers, wanted = np.array(sorted(waits), dtype=np.uint32), np.unique(np.frombuffer(self.timeline.correlation, np.int64))
        ids: list[IntArray] = [np.zeros(0, np.int64)]
        called: list[FloatArray] = [np.zeros(0)]
        owners: list[IntArray] = [np.zeros(0, np.int64)]
        intervals: list[tuple[FloatArray, FloatArray]] = []
        for place, thread in enumerate(self.threads.values()):
            starts, names = np.frombuffer(thread.start), np.frombuffer(thread.name, np.uint32)
            index, held = np.frombuffer(thread.corresponds, np.uint32), np.frombuffer(thread.correlation, np.int64)
            chosen = _among(held, wanted)
            chosen = chosen[~np.isin(names[index[chosen]], numbers) | np.isin(names[index[chosen]], self._blocking())]
            ids.append(held[chosen])
            called.append(starts[index[chosen]])
            owners.append(np.full(len(chosen), place, np.int16).astype(np.int64))
            waiting = np.flatnonzero((np.frombuffer(thread.kind, np.uint8) == host.CALL) & np.isin(names, numbers))
            waiting = waiting[np.argsort(starts[waiting], kind="stable")]
            intervals.append((starts[waiting], starts[waiting] + np.frombuffer(thread.duration, np.float32)[waiting]))
        return Launches(np.concatenate(ids), np.concatenate(called), np.concatenate(owners), intervals)

    def _blocking(self) -> IntArray:
        return np.array([self.names[name] for name in _BLOCKING if name in self.names], dtype=np.int64)


def _among(values: IntArray, wanted: IntArray) -> IntArray:
    """Indices of the values that are in `wanted`, which ascends; without the copies that `np.isin` sorts."""
    if not len(wanted):
        return np.zeros(0, np.int64)
    place = np.searchsorted(wanted, values)
    np.minimum(place, len(wanted) - 1, out=place)
    return np.flatnonzero(wanted[place] == values)


def _sorted(rows: Any) -> tuple[Operator, ...]:
    return tuple(sorted(rows, key=lambda row: (-row.self_ms, row.name)))


def _recompiles(regions: Mapping[str, int]) -> int:
    """Compiled regions `frame/version` of a version above 0."""
    return sum(name.rpartition("/")[2] not in {"0", ""} for name in regions)


def _compiles(name: str) -> bool:
    lower = name.lower()
    return any(word in lower for word in _COMPILING)


def _integer(value: object) -> int:
    try:
        return int(cast("Any", value))
    except (TypeError, ValueError):
        return 0
