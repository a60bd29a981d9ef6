"""torch's DataLoader: what `next()` on it costs the request that waits for its batch, as stage `dataloader`.

Copies into pinned memory on the way are copies of kind `pin`: in the caller's thread without workers, in the loader's own thread otherwise,
where they belong to no request and only count.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

from inferscope.clock import now_ns
from inferscope.integration import Integration, record_copy, recorder

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferscope.patching import Ledger, Patch

__all__ = ["FETCH", "DataLoaderIntegration"]

FETCH: Final = "dataloader"
_inside: ContextVar[bool] = ContextVar("inferscope_pinning", default=False)


class DataLoaderIntegration(Integration):
    """Patches `__next__` of DataLoader's iterators and the function that pins a batch."""

    name: ClassVar[str] = "dataloader"
    serves: ClassVar[bool] = False
    target: ClassVar[str] = "torch"
    distribution: ClassVar[str] = "torch"
    versions: ClassVar[tuple[tuple[int, ...], tuple[int, ...] | None]] = ((2, 4), None)

    def patch(self, ledger: Ledger) -> None:
        """Replace `_BaseDataLoaderIter.__next__` and `pin_memory.pin_memory`; both are looked up at each call."""
        dataloader: Any = importlib.import_module("torch.utils.data.dataloader")
        ledger.replace(dataloader._BaseDataLoaderIter, "__next__", _fetching)  # noqa: SLF001
        ledger.replace(importlib.import_module("torch.utils.data._utils.pin_memory"), "pin_memory", _pinning)


def _fetching(original: Any, patch: Patch) -> Callable[..., Any]:
    def __next__(self: Any) -> Any:  # noqa: N807  (stands in for the class's own method)
        if not patch.active:
            return original(self)
        with recorder().stage(FETCH):
            return original(self)

    return __next__


def _nbytes(data: Any) -> int:
    """Bytes of the tensors in a batch: tensors, sequences and mappings of them."""
    size = getattr(data, "nbytes", None)
    if isinstance(size, int):
        return size
    parts: Any = ()
    if isinstance(data, Mapping):
        parts = cast("Any", data).values()
    elif isinstance(data, (list, tuple)):
        parts = cast("Any", data)
    return sum(_nbytes(part) for part in parts)


def _pinning(original: Any, patch: Patch) -> Callable[..., Any]:
    """Pins a batch; it calls itself for the parts, which are the whole's and not counted twice."""

    def pin_memory(data: Any, *args: Any, **kwargs: Any) -> Any:
        if not patch.active or _inside.get():
            return original(data, *args, **kwargs)
        token = _inside.set(True)
        began = now_ns()
        try:
            result = original(data, *args, **kwargs)
        finally:
            _inside.reset(token)
        with contextlib.suppress(Exception):  # the batch is pinned
            record_copy("pin", _nbytes(data), began, now_ns(), sync=True, pageable=True)
        return result

    return pin_memory
