"""A capture by signal, for containers without a shell: `kill -USR2 PID`. Off unless a signal is named.

The handler only counts and wakes the thread that serves; a handler that was there before is called afterwards as if we were not.
"""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING, Any, Final

from inferscope.errors import InferscopeError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

__all__ = ["ACCEPTED", "SignalSource"]

ACCEPTED: Final = ("SIGUSR1", "SIGUSR2", "SIGHUP")
"""Signals that have no meaning of their own to the interpreter."""


class SignalSource:
    """Listens for one signal.

    Args:
        name: One of `ACCEPTED`; "USR2" and "usr2" are understood as well.
        wake: Called in the handler: must neither block nor take a lock.

    Raises:
        InferscopeError: It is no such signal, this is not the main thread, or its handler was installed by C code and cannot be chained.
    """

    def __init__(self, name: str, wake: Callable[[], None]) -> None:
        upper = name.strip().upper()
        self.name = upper if upper.startswith("SIG") else f"SIG{upper}"
        if self.name not in ACCEPTED:
            raise InferscopeError(f"control signal {name!r}: expected one of {', '.join(ACCEPTED)}")
        if threading.current_thread() is not threading.main_thread():
            raise InferscopeError(f"control signal {self.name}: only the main thread can listen; call configure() there")
        self._number = signal.Signals[self.name]
        self._wake = wake
        self._count = 0
        self._seen = 0
        self._previous: Any = signal.getsignal(self._number)
        if self._previous is None:
            raise InferscopeError(f"control signal {self.name}: a handler outside Python has it; choose another")
        self._own = self._handle  # one bound method: each access would make another
        signal.signal(self._number, self._own)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        try:
            self._wake()
        finally:
            if callable(self._previous):
                self._previous(number, frame)

    @property
    def active(self) -> bool:
        """Whether the signal still comes to us, or to somebody who might pass it on."""
        return signal.getsignal(self._number) is self._own

    def take(self) -> bool:
        """Whether it came since the last call; several count as one."""
        count = self._count
        new, self._seen = count != self._seen, count
        return new

    def restore(self) -> None:
        """Put the previous handler back, if nobody replaced ours meanwhile; does nothing outside the main thread."""
        if threading.current_thread() is threading.main_thread() and self.active:
            signal.signal(self._number, self._previous)
        else:
            self._wake = _nothing


def _nothing() -> None:
    """What a handler wakes when nobody serves any more."""
