"""torch copies between host and device: bytes, direction, pinned or pageable, blocking or not, the line that asked, and the device's time.

Methods of `torch.Tensor` are replaced: the torch function and dispatch modes tax every operation and see one thread only. What is called a
synchronous pageable copy is told from facts (`non_blocking`, `is_pinned()`), never from time. Reading a value that lies on a device (`item`,
`tolist`, `if tensor:`) is a copy that waits, too. Copies inside compiled graphs and C++ are not seen here; a capture shows them.
"""

from __future__ import annotations

import contextlib
import sys
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, ClassVar, Final

from inferscope.clock import now_ns
from inferscope.device.copies import PREFIX
from inferscope.device.events import timer
from inferscope.integration import Integration, record_copy, recorder, stand_in
from inferscope.types import SpanFlag

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferscope.device.events import Channel, Started
    from inferscope.patching import Ledger, Patch

__all__ = ["READS", "CopiesIntegration", "direction"]

READS: Final = ("item", "tolist", "numpy", "nonzero", "equal", "allclose", "masked_select", "__bool__", "__int__", "__float__", "__index__")
"""What waits for the device because the host wants a value or a size. `__getitem__` stays as it is: torch does not survive its restoration."""

_moving_module: ContextVar[bool] = ContextVar("inferscope_moving_module", default=False)
_NOT_CALLERS: Final = ("inferscope_integrations/copies.py", "torch/_tensor.py")
_told_until: ContextVar[int] = ContextVar("inferscope_copies_told_until", default=0)


def direction(source_on_host: bool, result_on_host: bool) -> str | None:  # noqa: FBT001  (two symmetric facts)
    """`h2d`, `d2h`, or None when both sides lie on the same kind of memory."""
    if source_on_host == result_on_host:
        return None
    return "h2d" if source_on_host else "d2h"


def _site() -> str:
    """The line that asked: the innermost one that is neither ours nor that of torch's dispatch for subclasses of tensors."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]  (the only cheap way to the caller's line)
    while frame.f_code.co_filename.endswith(_NOT_CALLERS) and frame.f_back is not None:
        frame = frame.f_back
    code = frame.f_code
    return f"{code.co_name} ({code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno})"


def _begin(device: Any) -> tuple[Channel, Started] | None:
    """Mark the start of a copy on the device it concerns; None when it is not timed."""
    try:
        channel = timer.channel(device)
        started = None if channel is None else channel.begin(recorder().current())
    except Exception:  # noqa: BLE001  (the copy goes on)
        return None
    return None if channel is None or started is None else (channel, started)


def _abandon(begun: tuple[Channel, Started] | None) -> None:
    if begun is not None:
        begun[0].abandon(begun[1])


def _nested(began: int) -> bool:
    """Whether a call that started at `began` was already told of: torch calls a method of a tensor's subclass once more, from within."""
    if _told_until.get() > began:
        return True
    _told_until.set(now_ns())
    return False


def _report(
    begun: tuple[Channel, Started] | None, host_side: Any, way: str, nbytes: int, began: int, ended: int, *, non_blocking: bool
) -> None:
    """Tell of a copy that was made; `host_side` is None for one from device to device, which nobody waits for."""
    try:
        if _nested(began):
            _abandon(begun)
            return
        pageable = host_side is not None and not host_side.is_pinned()
        # A copy from or to pageable memory is staged and waits, whatever non_blocking says.
        sync = host_side is not None and (not non_blocking or pageable)
        if begun is not None:
            flags = (SpanFlag.SYNC if sync else 0) | (SpanFlag.PAGEABLE if pageable else 0)
            begun[0].end(begun[1], PREFIX + way, nbytes, flags)
        record_copy(way, nbytes, began, ended, sync=sync, pageable=pageable, site=_site())
    except Exception:  # noqa: BLE001  (the copy itself has succeeded; a lost record must not turn it into an error)
        pass


def _device_asked(args: tuple[Any, ...], kwargs: dict[str, Any], device_type: type, tensor_type: type) -> Any:
    """The device that `to` was asked for; None when it was asked for a dtype alone."""
    value = args[0] if args else kwargs.get("device", kwargs.get("other"))
    if isinstance(value, device_type):
        return value
    if isinstance(value, str):
        return device_type(value)
    return getattr(value, "device", None) if isinstance(value, tensor_type) else None


class CopiesIntegration(Integration):
    """Patches `torch.Tensor.{to, cuda, cpu, copy_, pin_memory}` and the methods that read (`READS`)."""

    name: ClassVar[str] = "copies"
    target: ClassVar[str] = "torch"
    distribution: ClassVar[str] = "torch"
    versions: ClassVar[tuple[tuple[int, ...], tuple[int, ...] | None]] = ((2, 4), None)

    def patch(self, ledger: Ledger) -> None:
        """Replace the copying methods, and `Module._apply`, whose thousands of copies at load time are no request's."""
        import torch

        for name in ("to", "cuda", "cpu"):
            ledger.replace(torch.Tensor, name, _moving(torch, name))
        ledger.replace(torch.Tensor, "copy_", _copying(torch))
        ledger.replace(torch.Tensor, "pin_memory", _pinning)
        for name in READS:
            ledger.replace(torch.Tensor, name, _reading(torch))
        ledger.replace(torch.nn.Module, "_apply", _applying)


def _way(source: Any, result: Any) -> str | None:
    """Direction of what was copied, `d2d` between two devices; None when it stayed where it was."""
    if source.is_cpu or result.is_cpu:
        return direction(source.is_cpu, result.is_cpu)
    return "d2d" if result is not source and result.device != source.device else None


def _device_concerned(torch: Any, name: str, tensor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The device whose stream a copy by `to`, `cuda` or `cpu` goes through, the source's between two; None when it is no copy."""
    try:
        if name == "cpu":
            return None if tensor.is_cpu else tensor.device
        if name == "cuda":
            return torch.device("cuda") if tensor.is_cpu else None
        asked = _device_asked(args, kwargs, torch.device, torch.Tensor)
        if tensor.is_cpu:
            return None if asked is None or asked.type == "cpu" else asked
        if asked is None or (asked.type != "cpu" and asked.index in {None, tensor.device.index}):
            return None
        return tensor.device
    except Exception:  # noqa: BLE001  (the original will complain about its arguments)
        return None


def _tell(begun: tuple[Channel, Started] | None, source: Any, result: Any, began: int, *, non_blocking: bool) -> None:
    """Tell of what `to`, `cuda` or `cpu` copied; nothing when the tensor stayed where it was."""
    way = _way(source, result)
    if way is None:
        _abandon(begun)
    else:
        host_side = {"h2d": source, "d2h": result}.get(way)
        _report(begun, host_side, way, result.nbytes, began, now_ns(), non_blocking=non_blocking)


def _moving(torch: Any, name: str) -> Callable[[Any, Patch], Callable[..., Any]]:
    """Makes `Tensor.to`, `cuda` or `cpu`."""
    is_compiling = torch.compiler.is_compiling

    def make(original: Any, patch: Patch) -> Callable[..., Any]:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not patch.active or _moving_module.get():
                return original(self, *args, **kwargs)
            began = now_ns()
            device = _device_concerned(torch, name, self, args, kwargs) if timer.enabled else None
            begun = None if device is None else _begin(device)
            try:
                result = original(self, *args, **kwargs)
            except BaseException:
                _abandon(begun)
                raise
            _tell(begun, self, result, began, non_blocking=_asynchronous(args, kwargs))
            return result

        def note(began: int, result: Any, self: Any, *args: Any, **kwargs: Any) -> None:
            if not is_compiling() and not _moving_module.get():
                _tell(None, self, result, began, non_blocking=_asynchronous(args, kwargs))

        return stand_in("move", original, patch, method, timer=timer, note=note)

    return make


def _asynchronous(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether `to` or `cuda` was asked not to wait: (device, dtype, non_blocking), (dtype or other, non_blocking), (device, non_blocking)."""
    if "non_blocking" in kwargs:
        return bool(kwargs["non_blocking"])
    flags = [value for value in args[1:3] if isinstance(value, bool)]
    return bool(flags) and flags[0]


def _reading(torch: Any) -> Callable[[Any, Patch], Callable[..., Any]]:
    """Makes a method that waits for the device when its tensor lies there."""
    is_compiling = torch.compiler.is_compiling

    def make(original: Any, patch: Patch) -> Callable[..., Any]:
        def read(self: Any, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not patch.active or getattr(self, "is_cpu", True):
                return original(self, *args, **kwargs)
            began = now_ns()
            begun = _begin(self.device) if timer.enabled else None
            try:
                result = original(self, *args, **kwargs)
            except BaseException:
                _abandon(begun)
                raise
            if _nested(began):
                _abandon(begun)
                return result
            with contextlib.suppress(Exception):  # the value has been read
                nbytes = _read_bytes(self, result)
                if begun is not None:
                    begun[0].end(begun[1], f"{PREFIX}d2h", nbytes, SpanFlag.SYNC | SpanFlag.PAGEABLE | SpanFlag.IMPLICIT_SYNC)
                record_copy("d2h", nbytes, began, now_ns(), sync=True, pageable=True, implicit=True, site=_site())
            return result

        return stand_in("read", original, patch, read)

    return make


def _read_bytes(tensor: Any, result: Any) -> int:
    """What came to the host: the tensor for `tolist` and `numpy`, one element for a number, a count of elements for a new tensor."""
    if isinstance(result, (bool, int, float, complex)):
        return int(tensor.element_size())
    return 8 if isinstance(result, tuple) or hasattr(result, "is_cpu") else int(tensor.nbytes)


def _pinning(original: Any, patch: Patch) -> Callable[..., Any]:
    def pin_memory(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not patch.active:
            return original(self, *args, **kwargs)
        began = now_ns()
        result = original(self, *args, **kwargs)
        with contextlib.suppress(Exception):  # the memory is pinned
            if result is not self and not _nested(began):
                record_copy("pin", self.nbytes, began, now_ns(), sync=True, pageable=True, site=_site())
        return result

    return stand_in("call", original, patch, pin_memory)


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
                begun = _begin(src.device if self.is_cpu else self.device)
            try:
                result = original(self, *args, **kwargs)
            except BaseException:
                _abandon(begun)
                raise
            _tell_written(begun, src, self, began, non_blocking=non_blocking)
            return result

        return stand_in("call", original, patch, copy_)

    return make


def _tell_written(begun: tuple[Channel, Started] | None, source: Any, target: Any, began: int, *, non_blocking: bool) -> None:
    """Tell of what `copy_` copied, on one device too: that is a copy in the device's memory."""
    way = direction(source.is_cpu, target.is_cpu) or (None if target.is_cpu else "d2d")
    if way is None:
        return
    host_side = {"h2d": source, "d2h": target}.get(way)
    _report(begun, host_side, way, target.nbytes, began, now_ns(), non_blocking=non_blocking)


def _applying(original: Any, _patch: Patch) -> Callable[..., Any]:
    def _apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        token = _moving_module.set(True)
        try:
            return original(self, *args, **kwargs)
        finally:
            _moving_module.reset(token)

    return _apply
