"""torch copies between host and device: bytes, direction, pinned or pageable, blocking or not, the line that asked, and the device's time.

Methods of `torch.Tensor` and functions of `torch` are replaced: the torch function and dispatch modes tax every operation and see one thread
only. Reading a value or a size that lies on a device (`item`, `tolist`, `if tensor:`, `nonzero`) is a copy that waits, too. Not seen here:
`x[mask]`, copies inside compiled graphs and in C++, and functions that were imported by name before; a capture shows them.
"""

from __future__ import annotations

import contextlib
import sys
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final

from inferscope.clock import now_ns
from inferscope.device.copying import PAGEABLE, Moved, abandon, begin, direction, moving, read, report, way_of
from inferscope.device.events import timer
from inferscope.integration import Integration, stand_in

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferscope.device.copying import Begun
    from inferscope.patching import Ledger, Patch

__all__ = ["FUNCTIONS", "READS", "CopiesIntegration", "direction"]

READS: Final = (
    "item", "tolist", "numpy", "nonzero", "argwhere", "equal", "allclose", "is_nonzero", "masked_select", "bincount", "repeat_interleave",
    "__bool__", "__int__", "__float__", "__complex__", "__index__",
)  # fmt: skip
"""What waits for the device because the host wants a value or a size. `__getitem__` stays as it is: torch does not survive its restoration."""
FUNCTIONS: Final = (
    "nonzero", "argwhere", "equal", "allclose", "is_nonzero", "masked_select", "bincount", "repeat_interleave", "where", "_unique2",
)  # fmt: skip
"""The same as functions of `torch`; `_unique2` is what `unique` comes down to."""
_UNDERLYING: Final = ("unique_dim", "unique_consecutive")
"""Of `torch._VF`: what `unique(dim=...)` and `unique_consecutive` come down to."""
_MOVES: Final = ("to", "cpu", "cuda", "xpu", "mtia")
_MAKERS: Final = ("tensor", "as_tensor", "asarray")


class CopiesIntegration(Integration):
    """Patches what moves tensors (`Tensor.to` and its like, `copy_`, `clone`, `torch.tensor`), and what reads from them (`READS`, `FUNCTIONS`)."""

    name: ClassVar[str] = "copies"
    target: ClassVar[str] = "torch"
    distribution: ClassVar[str] = "torch"
    versions: ClassVar[tuple[tuple[int, ...], tuple[int, ...] | None]] = ((2, 4), None)
    _on = False

    def patch(self, ledger: Ledger) -> None:
        """Replace methods and functions, and `Module._apply`, whose thousands of copies are told as one."""
        import torch

        _build_tables(torch)
        tensor: Any = torch.Tensor
        for name in _MOVES:
            ledger.replace(tensor, name, _moving(torch, name))
        ledger.replace(tensor, "copy_", _copying(torch))
        ledger.replace(tensor, "pin_memory", _pinning)
        ledger.replace(tensor, "clone", _cloning(torch))
        ledger.replace(tensor, "new_tensor", _making(torch, inherits=True))
        for name in READS:
            ledger.replace(tensor, name, _reading(torch, name))
        ledger.replace(torch.nn.Module, "_apply", _applying)
        self._patch_functions(torch, ledger)
        self._on = True
        _when_imported("torch._export.non_strict_utils", lambda module: _export_knows(torch, ledger, module) if self._on else None)

    def unpatch(self) -> None:
        """Let a hook that waits for an import do nothing."""
        self._on = False

    @staticmethod
    def _patch_functions(torch: Any, ledger: Ledger) -> None:
        _replace(torch, ledger, torch, "clone", _cloning(torch))
        for name in FUNCTIONS:
            _replace(torch, ledger, torch, name, _reading(torch, name))
        for name in _UNDERLYING:
            _replace(torch, ledger, torch._VF, name, _reading(torch, name))  # noqa: SLF001  (torch.functional calls it)
        for name in _MAKERS:
            _replace(torch, ledger, torch, name, _making(torch))


def _build_tables(torch: Any) -> None:
    """Let torch build what it keys by its own functions before they are replaced: `with torch.device(...)` asks this one at every call."""
    with contextlib.suppress(Exception):  # a private function; a stand-in of the core equals what it stands for anyway
        torch.utils._device._device_constructors()  # noqa: SLF001


def _replace(torch: Any, ledger: Ledger, owner: Any, name: str, make: Callable[[Any, Patch], Callable[..., Any]]) -> None:
    """Replace a function, and let TorchScript know the new one by the operator that it knew the old one by."""
    original = getattr(owner, name, None)
    if original is None or not ledger.replace(owner, name, make):
        return
    with contextlib.suppress(Exception):  # private, and of use to who scripts functions only
        _script_knows(torch.jit._builtins, name, original, getattr(owner, name))  # noqa: SLF001


def _script_knows(builtins: Any, name: str, original: Any, ours: Any) -> None:
    """TorchScript finds operators by the id of their functions; those that it lists stay alive, so that no id comes back as something else."""
    table = builtins._builtin_table  # noqa: SLF001
    operator = f"aten::{name}" if table is None else table.get(id(original))
    if operator is None:
        return
    builtins._builtin_ops += [(original, operator), (ours, operator)]  # noqa: SLF001  (what the table is built from)
    if table is not None:
        table[id(ours)] = operator


def _when_imported(name: str, then: Callable[[Any], object]) -> None:
    if name in sys.modules:
        then(sys.modules[name])
    else:
        import wrapt

        wrapt.register_post_import_hook(then, name)


def _export_knows(torch: Any, ledger: Ledger, module: Any) -> None:
    """`torch.export` has a way of its own with sizes in `torch.tensor`, which it tells by `func is torch.tensor`: give it the one that stands there."""

    def make(original: Any, patch: Patch) -> Callable[..., Any]:
        def _override(self: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
            return original(self, torch.tensor if patch.active and func == torch.tensor else func, *args, **kwargs)

        return _override

    handler = getattr(module, "_NonStrictTorchFunctionHandler", None)
    if handler is not None:
        ledger.replace(handler, "_override", make)


def _on_device(value: Any) -> bool:
    """Whether this is a tensor that lies on a device; a stand-in of `torch.fx`, whose attributes are no facts, is none."""
    return getattr(value, "is_cpu", True) is False


# -- what moves ----------------------------------------------------------------------------------------------------------------------


def _device_asked(args: tuple[Any, ...], kwargs: dict[str, Any], device_type: type, tensor_type: type) -> Any:
    """The device that `to` was asked for; None when it was asked for a dtype alone."""
    value = args[0] if args else kwargs.get("device", kwargs.get("other"))
    if isinstance(value, device_type):
        return value
    if isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool)):
        return device_type(value)
    return getattr(value, "device", None) if isinstance(value, tensor_type) else None


def _device_concerned(torch: Any, name: str, tensor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The device whose stream a copy by `to`, `cuda` or `cpu` goes through, the source's between two; None when it is no copy."""
    try:
        if name == "cpu":
            return None if tensor.is_cpu else tensor.device
        if name == "to":
            asked = _device_asked(args, kwargs, torch.device, torch.Tensor)
        else:
            value = args[0] if args else kwargs.get("device")
            asked = torch.device(name) if value is None else torch.device(name, value) if isinstance(value, int) else torch.device(value)
        if tensor.is_cpu:
            return None if asked is None or asked.type == "cpu" else asked
        stays = asked is None or (asked.type == tensor.device.type and asked.index in {None, tensor.device.index})
        return None if stays and not kwargs.get("copy") else tensor.device
    except Exception:  # noqa: BLE001  (the original will complain about its arguments)
        return None


def _tell_moved(begun: Begun, source: Any, result: Any, began: int, *, non_blocking: bool) -> None:
    """Tell of what `to`, `cuda` or `cpu` copied; nothing when the tensor stayed where it was."""
    way = way_of(source, result)
    if way is None:
        abandon(begun)
    else:
        report(begun, {"h2d": source, "d2h": result}.get(way), way, result.nbytes, began, non_blocking=non_blocking)


def _moving(torch: Any, name: str) -> Callable[[Any, Patch], Callable[..., Any]]:
    """Makes `Tensor.to`, `cuda` or `cpu`."""
    is_compiling = torch.compiler.is_compiling

    def make(original: Any, patch: Patch) -> Callable[..., Any]:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not patch.active:
                return original(self, *args, **kwargs)
            began = now_ns()
            module = moving.get()
            device = _device_concerned(torch, name, self, args, kwargs) if timer.enabled else None
            begun = begin(device) if device is not None and module is None else None
            if device is not None and module is not None:
                module.start(device)
            try:
                result = original(self, *args, **kwargs)
            except BaseException:
                abandon(begun)
                raise
            _tell(module, begun, self, result, began, args, kwargs)
            return result

        def note(began: int, result: Any, self: Any, *args: Any, **kwargs: Any) -> None:
            if not is_compiling():
                _tell(moving.get(), None, self, result, began, args, kwargs)

        return stand_in("move", original, patch, method, timer=timer, note=note)

    return make


def _tell(module: Moved | None, begun: Begun, source: Any, result: Any, began: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A copy of its own, or a part of a module's move."""
    non_blocking = _asynchronous(args, kwargs)
    if module is None:
        _tell_moved(begun, source, result, began, non_blocking=non_blocking)
        return
    with contextlib.suppress(Exception):  # the parameter has moved
        module.add(source, result, non_blocking=non_blocking)


def _asynchronous(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether `to` or `cuda` was asked not to wait: (device, dtype, non_blocking), (dtype or other, non_blocking), (device, non_blocking)."""
    if "non_blocking" in kwargs:
        return bool(kwargs["non_blocking"])
    flags = [value for value in args[1:3] if isinstance(value, bool)]
    return bool(flags) and flags[0]


def _applying(original: Any, patch: Patch) -> Callable[..., Any]:
    """Makes `Module._apply`, which calls itself for each child."""

    def _apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not patch.active or moving.get() is not None:
            return original(self, *args, **kwargs)
        moved = Moved()
        token = moving.set(moved)
        try:
            return original(self, *args, **kwargs)
        finally:
            moving.reset(token)
            with contextlib.suppress(Exception):  # the module has moved, or says itself why not
                moved.tell()

    return _apply


def _copying(torch: Any) -> Callable[[Any, Patch], Callable[..., Any]]:
    """Makes `Tensor.copy_`."""
    is_compiling = torch.compiler.is_compiling

    def make(original: Any, patch: Patch) -> Callable[..., Any]:
        def copy_(self: Any, *args: Any, **kwargs: Any) -> Any:
            src: Any = args[0] if args else kwargs.get("src")
            if is_compiling() or not patch.active or not isinstance(src, torch.Tensor):
                return original(self, *args, **kwargs)
            non_blocking = bool(args[1] if len(args) > 1 else kwargs.get("non_blocking"))
            began = now_ns()
            begun = None
            if timer.enabled and not (self.is_cpu and getattr(src, "is_cpu", True)):
                begun = begin(src.device if self.is_cpu else self.device)
            try:
                result = original(self, *args, **kwargs)
            except BaseException:
                abandon(begun)
                raise
            way = direction(src.is_cpu, self.is_cpu) or (None if self.is_cpu else "d2d")
            if way is not None:
                report(begun, {"h2d": src, "d2h": self}.get(way), way, self.nbytes, began, non_blocking=non_blocking)
            return result

        return stand_in("call", original, patch, copy_)

    return make


def _tell_cloned(begun: Begun, _: Any, result: Any, began: int) -> None:
    """Tell of a copy in the device's memory."""
    with contextlib.suppress(Exception):  # a result that only looks like a tensor
        report(begun, None, "d2d", result.nbytes, began, non_blocking=True)


def _cloning(torch: Any) -> Callable[[Any, Patch], Callable[..., Any]]:
    """Makes `clone`."""
    return _on_its_device(torch, _tell_cloned, lambda _first, _rest, _kwargs: True)


def _made_where(torch: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, inherits: bool) -> Any:
    """The device that a tensor is asked to be made on; None for the host, or a default that is not known yet."""
    value = kwargs.get("device")
    if value is None:
        return args[0].device if inherits and _on_device(args[0]) else None
    device = torch.device(value)
    return None if device.type == "cpu" else device


def _tell_made(torch: Any, begun: Begun, data: Any, result: Any, began: int) -> None:
    """Tell of what a new tensor was filled with."""
    if not _on_device(result) or result is data:
        abandon(begun)
    elif _on_device(data):
        report(begun, None, "d2d", result.nbytes, began, non_blocking=True)
    else:
        report(begun, data if isinstance(data, torch.Tensor) else PAGEABLE, "h2d", result.nbytes, began, non_blocking=False)


def _making(torch: Any, *, inherits: bool = False) -> Callable[[Any, Patch], Callable[..., Any]]:
    """Makes `torch.tensor` and its like, which copy what a list or an array holds to a device; `Tensor.new_tensor` inherits its tensor's."""
    is_compiling = torch.compiler.is_compiling
    first = int(inherits)

    def data_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args[first] if len(args) > first else kwargs.get("data", kwargs.get("obj"))

    def make(original: Any, patch: Patch) -> Callable[..., Any]:
        def function(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not patch.active:
                return original(*args, **kwargs)
            began, begun = now_ns(), None
            if timer.enabled:
                with contextlib.suppress(Exception):  # the original will complain about its arguments
                    device = _made_where(torch, args, kwargs, inherits=inherits)
                    begun = None if device is None else begin(device)
            try:
                result = original(*args, **kwargs)
            except BaseException:
                abandon(begun)
                raise
            _tell_made(torch, begun, data_of(args, kwargs), result, began)
            return result

        def note(began: int, result: Any, *args: Any, **kwargs: Any) -> None:
            if not is_compiling():
                _tell_made(torch, None, data_of(args, kwargs), result, began)

        return stand_in("make", original, patch, function, timer=timer, note=note)

    return make


def _pinning(original: Any, patch: Patch) -> Callable[..., Any]:
    """Makes `Tensor.pin_memory`."""

    def pin_memory(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not patch.active:
            return original(self, *args, **kwargs)
        began = now_ns()
        result = original(self, *args, **kwargs)
        if result is not self:
            report(None, PAGEABLE, "pin", self.nbytes, began, non_blocking=False)
        return result

    return stand_in("call", original, patch, pin_memory)


# -- what reads ----------------------------------------------------------------------------------------------------------------------


def _waits(name: str, first: Any, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of this name waits for its first tensor: some only do in one of their forms."""
    if name == "where":
        return not rest and not kwargs
    if name == "repeat_interleave":
        repeats = rest[0] if rest else kwargs.get("repeats", first)
        return not isinstance(repeats, int) and kwargs.get("output_size") is None
    return True


def _reading(torch: Any, name: str) -> Callable[[Any, Patch], Callable[..., Any]]:
    """Makes a method or function that waits for the device when its tensor lies there."""
    return _on_its_device(torch, read, partial(_waits, name))


def _on_its_device(
    torch: Any, tell: Callable[[Begun, Any, Any, int], None], concerns: Callable[[Any, tuple[Any, ...], dict[str, Any]], bool]
) -> Callable[[Any, Patch], Callable[..., Any]]:
    """Makes a method or function that is told of where its first tensor lies on a device and the call `concerns` us."""
    is_compiling = torch.compiler.is_compiling

    def make(original: Any, patch: Patch) -> Callable[..., Any]:
        def reading(*args: Any, **kwargs: Any) -> Any:
            if not args or not _on_device(args[0]) or is_compiling() or not patch.active or not concerns(args[0], args[1:], kwargs):
                return original(*args, **kwargs)
            began = now_ns()
            begun = begin(args[0].device) if timer.enabled else None
            try:
                result = original(*args, **kwargs)
            except BaseException:
                abandon(begun)
                raise
            tell(begun, args[0], result, began)
            return result

        return stand_in("read", original, patch, reading)

    return make
