"""Telling of copies that integrations see: when, how many bytes, which way, from which line, with the device's two events around it.

What is called a synchronous pageable copy is told from facts (`non_blocking`, `is_pinned()`), never from time.
"""

from __future__ import annotations

import sys
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final

from inferscope.clock import now_ns
from inferscope.copied import NON_BLOCKING, record_copy
from inferscope.device.copies import PREFIX
from inferscope.device.events import timer
from inferscope.integration import recorder
from inferscope.types import SpanFlag

if TYPE_CHECKING:
    from inferscope.device.events import Channel, Started

__all__ = ["PAGEABLE", "Begun", "Moved", "abandon", "begin", "direction", "moving", "read", "report", "way_of"]

if TYPE_CHECKING:
    Begun = tuple[Channel, Started] | None

PAGEABLE: Final = object()
"""Stands for host memory that is known to be pageable, as that of a list."""
_NOT_CALLERS: Final = (
    "inferscope_integrations/copies.py",
    "inferscope/device/copying.py",
    "torch/_tensor.py",
    "torch/functional.py",
    "torch/_jit_internal.py",
    "torch/nn/modules/module.py",
    "torch/utils/backend_registration.py",
)
_told_until: ContextVar[int] = ContextVar("inferscope_copies_told_until", default=0)


def direction(source_on_host: bool, result_on_host: bool) -> str | None:  # noqa: FBT001  (two symmetric facts)
    """`h2d`, `d2h`, or None when both sides lie on the same kind of memory."""
    if source_on_host == result_on_host:
        return None
    return "h2d" if source_on_host else "d2h"


def way_of(source: Any, result: Any) -> str | None:
    """Direction of what was copied, `d2d` within a device's memory or between two; None when it stayed, or changed its dtype on its device."""
    if source.is_cpu or result.is_cpu:
        return direction(source.is_cpu, result.is_cpu)
    if result is source or (result.device == source.device and result.dtype != source.dtype):
        return None
    return "d2d"


def _site() -> str:
    """The line that asked: the innermost one that is neither ours nor torch's own way there."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]  (the only cheap way to the caller's line)
    while frame.f_code.co_filename.endswith(_NOT_CALLERS) and frame.f_back is not None:
        frame = frame.f_back
    code = frame.f_code
    return f"{code.co_name} ({code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno})"


def begin(device: Any) -> Begun:
    """Mark the start of a copy on the device it concerns; None when it is not timed."""
    try:
        channel = timer.channel(device)
        started = None if channel is None else channel.begin(recorder().current())
    except Exception:  # noqa: BLE001  (the copy goes on)
        return None
    return None if channel is None or started is None else (channel, started)


def abandon(begun: Begun) -> None:
    """Forget a start whose copy failed or was none."""
    if begun is not None:
        begun[0].abandon(begun[1])


def _nested(began: int) -> bool:
    """Whether a call that started at `began` was already told of: torch calls a method of a tensor's subclass once more, from within."""
    if _told_until.get() > began:
        return True
    _told_until.set(now_ns())
    return False


def report(begun: Begun, host_side: Any, way: str, nbytes: int, began: int, *, non_blocking: bool) -> None:
    """Tell of a copy that was made.

    Args:
        begun: From `begin`.
        host_side: The tensor on the host; None for a copy from device to device, which nobody waits for; or `PAGEABLE`.
        way: `h2d`, `d2h` or `d2d`.
        nbytes: Bytes.
        began: When the call began, ns.
        non_blocking: Whether it was asked not to wait.
    """
    try:
        if _nested(began):
            abandon(begun)
            return
        ended = now_ns()
        pageable = host_side is not None and (host_side is PAGEABLE or not host_side.is_pinned())
        # A copy from or to pageable memory is staged and waits, whatever non_blocking says.
        _tell(
            begun,
            way,
            nbytes,
            began,
            ended,
            sync=host_side is not None and (not non_blocking or pageable),
            pageable=pageable,
            asked=non_blocking,
        )
    except Exception:  # noqa: BLE001  (the copy itself has succeeded; a lost record must not turn it into an error)
        pass


def _tell(begun: Begun, way: str, nbytes: int, began: int, ended: int, *, sync: bool, pageable: bool, asked: bool) -> None:
    if begun is not None:
        flags = (SpanFlag.SYNC if sync else 0) | (SpanFlag.PAGEABLE if pageable else 0) | (NON_BLOCKING if asked else 0)
        begun[0].end(begun[1], PREFIX + way, nbytes, flags)
    record_copy(way, nbytes, began, ended, sync=sync, pageable=pageable, non_blocking=asked, site=_site())


def read(begun: Begun, tensor: Any, result: Any, began: int) -> None:
    """Tell of a value or a size that was read from a device, for which the caller waited."""
    try:
        if _nested(began):
            abandon(begun)
            return
        nbytes = _read_bytes(tensor, result)
        if begun is not None:
            begun[0].end(begun[1], f"{PREFIX}d2h", nbytes, SpanFlag.SYNC | SpanFlag.PAGEABLE | SpanFlag.IMPLICIT_SYNC)
        record_copy("d2h", nbytes, began, now_ns(), sync=True, pageable=True, implicit=True, site=_site())
    except Exception:  # noqa: BLE001  (the value has been read)
        pass


def _read_bytes(tensor: Any, result: Any) -> int:
    """What came to the host: the tensor for `tolist` and `numpy`, one element for a number, a count of elements for a new tensor."""
    if isinstance(result, (bool, int, float, complex)):
        return int(tensor.element_size())
    return 8 if isinstance(result, tuple) or hasattr(result, "is_cpu") else int(tensor.nbytes)


class Moved:
    """What one move of a module copied, parameter by parameter, told as one copy a direction."""

    __slots__ = ("_began", "_begun", "_rows")

    def __init__(self) -> None:
        self._rows: dict[str, list[int]] = {}
        self._began = now_ns()
        self._begun: Begun = None

    def start(self, device: Any) -> None:
        """Mark the start on the first device that is concerned, when a request waits for it."""
        if self._begun is None and not self._rows and timer.enabled and recorder().current() is not None:
            self._begun = begin(device)

    def add(self, source: Any, result: Any, *, non_blocking: bool) -> None:
        """Count one parameter."""
        way = way_of(source, result)
        if way is None:
            return
        host_side = {"h2d": source, "d2h": result}.get(way)
        pageable = host_side is not None and not host_side.is_pinned()
        row = self._rows.setdefault(way, [0, 0, 0, 0])
        row[0] += result.nbytes
        row[1] |= host_side is not None and (not non_blocking or pageable)
        row[2] |= pageable
        row[3] |= non_blocking

    def tell(self) -> None:
        """The module has moved."""
        ended = now_ns()
        for way, (nbytes, sync, pageable, asked) in self._rows.items():
            _tell(self._begun, way, nbytes, self._began, ended, sync=bool(sync), pageable=bool(pageable), asked=bool(asked))
            self._begun = None
        abandon(self._begun)


moving: Final[ContextVar[Moved | None]] = ContextVar("inferscope_moving_module", default=None)
"""The move of a module that this thread is in."""
