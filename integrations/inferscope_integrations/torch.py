"""torch: the outermost forward of any `nn.Module` as a stage, and what it took on the device.

The patch sits on the class (`nn.Module.__call__`), so that existing models, TorchScript modules and compiled wrappers are covered and no
user object is touched. `torch.compiler.is_compiling()` comes first: a clock read inside traced code breaks the graph (pytorch#117584).
Graph captures are watched, so that nothing of ours asks a device during one (pytorch#104555).
"""

from __future__ import annotations

import contextlib
import weakref
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, cast

from inferscope.device.backends import captures
from inferscope.device.events import timer
from inferscope.device.waits import begin_here, watch
from inferscope.integration import Integration, record_shape, recorder, shape_tables, stand_in
from inferscope.slots import slots

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferscope.device.events import Channel, Started
    from inferscope.device.memory import Reading
    from inferscope.patching import Ledger, Patch

__all__ = ["FORWARD", "REPLAY", "TorchIntegration"]

FORWARD: Final = "forward"
REPLAY: Final = "replay"
"""Name of the device span of a graph that is replayed outside of every forward."""
_inside: ContextVar[bool] = ContextVar("inferscope_forward", default=False)
_names: dict[int, tuple[weakref.ref[Any], str]] = {}


def _remember(name: str, module: Any) -> None:
    """Name the forward of one module: `forward:NAME`; filled into the slot that `inferscope.watch` calls."""
    key = id(module)

    def forget(_gone: weakref.ref[Any]) -> None:
        _names.pop(key, None)

    _names[key] = (weakref.ref(module, forget), f"{FORWARD}:{name}")


def _stage_name(module: Any) -> str:
    known = _names.get(id(module))
    return known[1] if known is not None else FORWARD


class _OnDevice(NamedTuple):
    """A forward that is timed on its device."""

    channel: Channel
    started: Started
    batch: int | None
    memory: Reading | None


def _first_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The first input, or its first part; None when there is none."""
    value: Any = args[0] if args else next(iter(kwargs.values()), None)
    if isinstance(value, dict):
        value = next(iter(cast("Any", value).values()), None)
    elif isinstance(value, (list, tuple)):
        value = next(iter(cast("Any", value)), None)
    return value


def _begin(args: tuple[Any, ...], kwargs: dict[str, Any], stage: str) -> _OnDevice | None:
    """Mark the start on the device of the first input; None for the host's, or when this call is not timed."""
    try:
        value = _first_input(args, kwargs)
        if value is None or getattr(value, "is_cpu", True):
            return None
        channel = timer.channel(value.device)
        if channel is None:
            return None
        started = channel.begin(recorder().current())
        if started is None:
            return None
        batch = len(value) if value.dim() else None
        return _OnDevice(channel, started, batch, timer.memory.begin(channel.device, stage, batch))
    except Exception:  # noqa: BLE001  (an input that only looks like a tensor; the forward goes on)
        return None


def _note_shape(_began: int, _result: object, _module: object, *args: Any, **kwargs: Any) -> None:
    """Note the shape of the first input, its own or its first part's; the core does it where that shape was met before.

    While torch traces, a shape holds tensors or symbols, which nobody may hold nor compare.
    """
    try:
        shape: Any = args[0].shape
    except (AttributeError, IndexError):
        shape = getattr(_first_input(args, kwargs), "shape", None)
    if isinstance(shape, tuple):
        sizes: tuple[Any, ...] = cast("Any", shape)
        if all(type(size) is int for size in sizes):
            record_shape(sizes)


def _end(begun: _OnDevice, stage: str, result: Any, module: Any) -> None:
    """Mark the end; a forward whose result lies on another device has no device time, since its events saw one device only."""
    channel, started, batch, memory = begun
    try:
        moved = getattr(result, "device", channel.device) != channel.device
    except Exception:  # noqa: BLE001  (a result that only looks like a tensor)
        moved = False
    if moved:
        channel.host_only(started)
        return
    channel.end(started, stage)
    if memory is not None:
        with contextlib.suppress(Exception):  # the forward itself is over; its memory is not known
            timer.memory.weigh(channel.device, stage, module)
            timer.memory.end(memory, channel.device, stage, batch, started[4])


class TorchIntegration(Integration):
    """Times the outermost `nn.Module.__call__` on each thread and task."""

    name: ClassVar[str] = "torch"
    target: ClassVar[str] = "torch"
    distribution: ClassVar[str] = "torch"
    versions: ClassVar[tuple[tuple[int, ...], tuple[int, ...] | None]] = ((2, 4), None)

    def patch(self, ledger: Ledger) -> None:
        """Replace `torch.nn.Module.__call__`, and where graph captures begin and end."""
        import torch

        is_compiling = torch.compiler.is_compiling
        slots.on_model_loaded = _remember

        def make(original: Any, patch: Patch) -> Callable[..., Any]:
            def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807  (stands in for the class's own method)
                if is_compiling() or _inside.get() or not patch.active:
                    return original(self, *args, **kwargs)
                token = _inside.set(True)
                name = _stage_name(self)
                try:
                    with recorder().stage(name):
                        begun = _begin(args, kwargs, name) if timer.enabled else None
                        result = None
                        try:
                            result = original(self, *args, **kwargs)
                        finally:
                            if begun is not None:
                                _end(begun, name, result, self)
                        with contextlib.suppress(Exception):  # an input that only looks like a tensor
                            _note_shape(0, None, self, *args, **kwargs)
                        return result
                finally:
                    _inside.reset(token)

            more = {"timer": timer, "note": _note_shape, "inside": _inside, "names": _names, "name": FORWARD, "shapes": shape_tables()}
            return stand_in("forward", original, patch, __call__, **more)

        ledger.replace(torch.nn.Module, "__call__", make)
        _watch_captures(torch, ledger)
        watch(torch, ledger)

    def unpatch(self) -> None:
        """Stop naming modules."""
        slots.on_model_loaded = None
        _names.clear()


def _watch_captures(torch: Any, ledger: Ledger) -> None:
    """Tell the watch about captures that Python begins; those of C++ code are survived through the relaxed mode of the harvesting thread."""

    def beginning(original: Any, _patch: Patch) -> Callable[..., Any]:
        def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
            captures.begin(self)
            try:
                return original(self, *args, **kwargs)
            except BaseException:
                captures.end(self)
                raise

        return capture_begin

    def ending(original: Any, _patch: Patch) -> Callable[..., Any]:
        def capture_end(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return original(self, *args, **kwargs)
            finally:
                captures.end(self)

        return capture_end

    def replaying(original: Any, patch: Patch) -> Callable[..., Any]:
        def replay(self: Any, *args: Any, **kwargs: Any) -> Any:
            if _inside.get() or not patch.active or not timer.enabled:  # a forward is timed as a whole
                return original(self, *args, **kwargs)
            # From outside, as a whole: events inside a graph would be recorded anew at every replay.
            begun = begin_here(torch)
            try:
                return original(self, *args, **kwargs)
            finally:
                if begun is not None:
                    begun[0].end(begun[1], REPLAY)

        return replay

    for where, name in (("cuda", "CUDAGraph"), ("xpu", "XPUGraph"), ("accelerator", "Graph")):
        graph = getattr(getattr(torch, where, None), name, None)
        if isinstance(graph, type):
            ledger.replace(graph, "capture_begin", beginning)
            ledger.replace(graph, "capture_end", ending)
            ledger.replace(graph, "replay", replaying)
