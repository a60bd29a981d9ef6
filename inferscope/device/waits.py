"""Callers that wait for a device on purpose: `synchronize` of a stream, an event or a device. What the device did meanwhile owns their time.

Beside what everybody calls (`torch.cuda.synchronize`), the methods of `torch.Stream` and `torch.Event` themselves are watched: what
`torch.accelerator` hands out is of these types. A stream that is told to wait for another one is remembered too, since a copy behind such a
dependency waits for the other stream's work.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

from inferscope.device.events import timer
from inferscope.device.settling import WAIT, Scope
from inferscope.integration import recorder, stand_in
from inferscope.types import SpanFlag

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferscope.device.events import Channel, Started
    from inferscope.patching import Ledger, Patch

__all__ = ["begin_here", "watch"]

_MODULES: Final = ("accelerator", "cuda", "xpu", "mtia")
_STREAMS: Final = (("", "Stream"), ("cuda", "Stream"), ("xpu", "Stream"))
_EVENTS: Final = (("", "Event"), ("cuda", "Event"), ("xpu", "Event"))


def watch(torch: Any, ledger: Ledger) -> None:
    """Replace what blocks a caller until a device has done something, on every kind of device that torch knows or will be told of.

    Args:
        torch: The module.
        ledger: Of the integration.
    """
    foreign = torch._C._get_privateuse1_backend_name()  # noqa: SLF001  (its public twin changes the name)
    for where in (*_MODULES, foreign):
        _watch_module(torch, getattr(torch, where, None), ledger, where)
    _watch_registration(torch, ledger)
    for where, name in _STREAMS:
        owner = _type_of(torch, where, name)
        _put(ledger, owner, "synchronize", _waiting(torch, Scope.STREAM, lambda args: args[0].device, lambda args: args[0]))
        _put(ledger, owner, "wait_stream", _joining(torch, lambda args: (args[0], args[1])))
        _put(ledger, owner, "wait_event", _joining(torch, lambda args: (args[0], None)))
    for where, name in _EVENTS:
        owner = _type_of(torch, where, name)
        _put(ledger, owner, "synchronize", _waiting(torch, Scope.EVENT, lambda args: args[0].device))
        _put(ledger, owner, "wait", _joining(torch, lambda args: (args[1] if len(args) > 1 else None, None)))


def begin_here(torch: Any) -> tuple[Channel, Started] | None:
    """Mark a start on the accelerator's current stream; None when it is not timed."""
    try:
        accelerator = torch.accelerator.current_accelerator()
        return None if accelerator is None else _begin(accelerator, None)
    except Exception:  # noqa: BLE001  (the work goes on)
        return None


def _begin(device: Any, stream: Any) -> tuple[Channel, Started] | None:
    channel = timer.channel(device)
    started = None if channel is None else channel.begin(recorder().current(), stream)
    return None if channel is None or started is None else (channel, started)


def _type_of(torch: Any, where: str, name: str) -> Any:
    return getattr(getattr(torch, where, None) if where else torch, name, None)


def _put(ledger: Ledger, owner: Any, name: str, make: Callable[[Any, Patch], Callable[..., Any]]) -> None:
    """Where a type defines the method itself; an inherited one is seen at its origin."""
    if not isinstance(owner, type) or name not in vars(owner):
        return
    if owner.__flags__ & _HEAP:
        ledger.replace(owner, name, make)
    else:
        ledger.replace_static(owner, name, make)


_HEAP: Final = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made by a class statement


def _watch_module(torch: Any, module: Any, ledger: Ledger, kind: str) -> None:
    """`synchronize(device=None)` of `torch.cuda` and its like."""

    def asked(args: tuple[Any, ...]) -> Any:
        value = args[0] if args else None
        if value is None or isinstance(value, int):
            of = torch.accelerator.current_accelerator() if kind == "accelerator" else torch.device(kind)
            return None if of is None else torch.device(of.type, value) if value is not None else of
        return torch.device(value)

    if module is not None and callable(getattr(module, "synchronize", None)):
        ledger.replace(module, "synchronize", _waiting(torch, Scope.DEVICE, asked))


def _watch_registration(torch: Any, ledger: Ledger) -> None:
    """A foreign backend (`torch_npu`) brings its module after torch was imported."""

    def make(original: Any, patch: Patch) -> Callable[..., Any]:
        def register(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if patch.active and len(args) > 1:
                with contextlib.suppress(Exception):  # the backend is registered; its waits are not seen
                    _watch_module(torch, args[1], ledger, str(args[0]))
            return result

        return register

    ledger.replace(torch, "_register_device_module", make)


def _waiting(
    torch: Any, scope: str, device_of: Callable[[Any], Any], stream_of: Callable[[Any], Any] = lambda _args: None
) -> Callable[[Any, Patch], Callable[..., Any]]:
    """Makes a method or function that blocks its caller until the device has done something."""
    is_compiling = torch.compiler.is_compiling

    def make(original: Any, patch: Patch) -> Callable[..., Any]:
        def wait(*args: Any, **kwargs: Any) -> Any:
            if not timer.enabled or is_compiling() or not patch.active:
                return original(*args, **kwargs)
            begun, stage = None, ""
            try:
                request = recorder().current()
                device = None if request is None else device_of(args or tuple(kwargs.values()))
                if device is not None:
                    begun = _begin(device, stream_of(args))
                    stage = recorder()._stage_of(request) or ""  # noqa: SLF001  (the recorder's word to its friends)
            except Exception:  # noqa: BLE001  (the original will complain about its arguments)
                begun = None
            try:
                return original(*args, **kwargs)
            finally:
                if begun is not None:
                    begun[0].end(begun[1], f"{WAIT}{scope}:{stage}", 0, SpanFlag.SYNC, stream_of(args))

        return stand_in("call", original, patch, wait)

    return make


def _joining(torch: Any, parties: Callable[[Any], tuple[Any, Any]]) -> Callable[[Any, Patch], Callable[..., Any]]:
    """Makes a method that lets a stream wait for another one, or for an event of an unknown one; nobody is blocked by it."""
    is_compiling = torch.compiler.is_compiling

    def make(original: Any, patch: Patch) -> Callable[..., Any]:
        def join(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if timer.enabled and patch.active and not is_compiling():
                with contextlib.suppress(Exception):  # the dependency stands; who waits for whom is not known
                    stream, source = parties(args + tuple(kwargs.values()))
                    device = args[0].device if stream is None else stream.device
                    channel = timer.channel(device)
                    if channel is not None:
                        channel.joined(stream, source)
            return result

        return stand_in("call", original, patch, join)

    return make
