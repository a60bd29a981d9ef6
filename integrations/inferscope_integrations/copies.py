"""torch copies between host and device: bytes, direction, pinned or pageable, blocking or not, and the line that asked.

Plain closures on `torch.Tensor`: the torch function and dispatch modes tax every operation and see one thread only. What is called a
synchronous pageable copy is told from facts (`non_blocking`, `is_pinned()`), never from time. Copies inside compiled graphs and C++ are not
seen here; a capture shows them.
"""

from __future__ import annotations

import sys
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, ClassVar

from inferscope.clock import now_ns
from inferscope.integration import Integration, record_copy

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferscope.patching import Ledger, Patch

__all__ = ["CopiesIntegration", "direction"]

_moving_module: ContextVar[bool] = ContextVar("inferscope_moving_module", default=False)


def direction(source_on_host: bool, result_on_host: bool) -> str | None:  # noqa: FBT001  (two symmetric facts)
    """`h2d`, `d2h`, or None when both sides lie on the same kind of memory."""
    if source_on_host == result_on_host:
        return None
    return "h2d" if source_on_host else "d2h"


def _site(depth: int) -> str:
    frame = sys._getframe(depth)  # pyright: ignore[reportPrivateUsage]  (the only cheap way to the caller's line)
    code = frame.f_code
    return f"{code.co_name} ({code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno})"


def _report(host_side: Any, way: str, nbytes: int, began: int, ended: int, *, non_blocking: bool) -> None:
    try:
        pageable = not host_side.is_pinned()
        # A copy from or to pageable memory is staged and waits, whatever non_blocking says.
        record_copy(way, nbytes, began, ended, sync=not non_blocking or pageable, pageable=pageable, site=_site(3))
    except Exception:  # noqa: BLE001  (the copy itself has succeeded; a lost record must not turn it into an error)
        pass


class CopiesIntegration(Integration):
    """Patches `torch.Tensor.{to, cuda, cpu, copy_}`."""

    name: ClassVar[str] = "copies"
    target: ClassVar[str] = "torch"
    distribution: ClassVar[str] = "torch"
    versions: ClassVar[tuple[tuple[int, ...], tuple[int, ...] | None]] = ((2, 4), None)

    def patch(self, ledger: Ledger) -> None:
        """Replace the copying methods, and `Module._apply`, whose thousands of copies at load time are no request's."""
        import torch

        is_compiling = torch.compiler.is_compiling

        def moving(original: Any, patch: Patch) -> Callable[..., Any]:
            def method(self: Any, *args: Any, **kwargs: Any) -> Any:
                if is_compiling() or not patch.active or _moving_module.get():
                    return original(self, *args, **kwargs)
                began = now_ns()
                result = original(self, *args, **kwargs)
                way = direction(self.is_cpu, result.is_cpu)
                if way is not None:
                    asynchronous = bool(kwargs.get("non_blocking")) or any(a is True for a in args[1:2])
                    _report(self if way == "h2d" else result, way, result.nbytes, began, now_ns(), non_blocking=asynchronous)
                return result

            return method

        def copying(original: Any, patch: Patch) -> Callable[..., Any]:
            def copy_(self: Any, src: Any, non_blocking: bool = False) -> Any:  # noqa: FBT001, FBT002  (torch's own signature)
                if is_compiling() or not patch.active:
                    return original(self, src, non_blocking)
                began = now_ns()
                result = original(self, src, non_blocking)
                way = direction(src.is_cpu, self.is_cpu)
                if way is not None:
                    _report(src if way == "h2d" else self, way, self.nbytes, began, now_ns(), non_blocking=non_blocking)
                return result

            return copy_

        def applying(original: Any, _patch: Patch) -> Callable[..., Any]:
            def _apply(self: Any, *args: Any, **kwargs: Any) -> Any:
                token = _moving_module.set(True)
                try:
                    return original(self, *args, **kwargs)
                finally:
                    _moving_module.reset(token)

            return _apply

        for name in ("to", "cuda", "cpu"):
            ledger.replace(torch.Tensor, name, moving)
        ledger.replace(torch.Tensor, "copy_", copying)
        ledger.replace(torch.nn.Module, "_apply", applying)
