"""A named lock that tells what it cost: every wait, every hold, and who was to blame."""

from __future__ import annotations

import time
from operator import attrgetter
from threading import TIMEOUT_MAX, get_ident
from typing import TYPE_CHECKING, Any, ClassVar, Final

from inferscope.record.pure.hold import Holds, PermitHolds

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferscope.record.pure.recorder import Recorder

__all__ = ["InstrumentedCondition", "InstrumentedLock", "InstrumentedSemaphore", "instrument"]

_UNSET: Final[Any] = object()
"""A timeout that was not given."""


class InstrumentedLock:
    """Delegates to a lock and times what it must: a free lock is taken at once, only a held one is waited for by the clock.

    Instances are of a subclass made for the wrapped lock's class, which hands every other attribute on. Where the lock can have
    attributes of its own, that is `__getattr__`, which makes every attribute of ours slower to read; else properties do.

    Args:
        recorder: Where waits and holds are counted.
        name: As people see it.
        wrapped: `threading.Lock` or `RLock`, or anything with their `acquire` and `release`.
    """

    __slots__ = ("__weakref__", "_holds")

    _holds: Holds

    FOREVER: ClassVar[int | None] = -1
    """The timeout that means none."""

    _HOLDS: ClassVar[type[Holds]] = Holds

    def __init__(self, recorder: Recorder, name: str, wrapped: Any) -> None:
        object.__setattr__(self, "_holds", self._HOLDS(recorder, name, wrapped))

    @property
    def name(self) -> str:
        """As people see it."""
        return self._holds.name

    @property
    def wrapped(self) -> Any:
        """The lock itself."""
        return self._holds.wrapped

    def acquire(self, blocking: bool = True, timeout: Any = _UNSET) -> bool:  # noqa: FBT001, FBT002 - threading's signature
        """As the wrapped lock's own, with the same errors."""
        holds = self._holds
        if timeout is _UNSET or (timeout is not None and timeout == self.FOREVER and blocking):
            if holds.acquire(False):  # noqa: FBT003 - threading's signature
                holds.taken()
                return True
            return bool(blocking) and holds.wait(holds.acquire)
        waits = blocking and isinstance(timeout, (int, float)) and 0 <= timeout <= TIMEOUT_MAX
        if waits and holds.acquire(False):  # noqa: FBT003 - threading's signature
            holds.taken()
            return True
        if waits:
            return holds.wait(lambda: holds.acquire(blocking, timeout))
        taken = holds.acquire(blocking, timeout)  # most likely raises
        if taken:
            holds.taken()
        return taken

    def __enter__(self) -> bool:
        holds = self._holds
        if holds.acquire(False):  # noqa: FBT003 - threading's signature
            holds.taken()
            return True
        return holds.wait(holds.acquire)

    def __exit__(self, *_: object) -> None:
        holds = self._holds
        held = holds.given()
        holds.release()
        if held >= 0:
            holds.count(held)

    def release(self, *args: Any) -> None:
        """As the wrapped lock's own; a hold counts when its holder ends it."""
        holds = self._holds
        held = holds.given()
        holds.release(*args)
        if held >= 0:
            holds.count(held)

    def locked(self) -> bool:
        """Whether anybody holds the lock."""
        holds = self._holds
        locked = getattr(holds.wrapped, "locked", None)
        return bool(holds.holder) if locked is None else bool(locked())

    def _is_owned(self) -> bool:
        """What `threading.Condition` asks: for an `RLock` whether the caller holds it, for others whether anybody does."""
        holds = self._holds
        owned = getattr(holds.wrapped, "_is_owned", None)
        if owned is not None:
            return bool(owned())
        if holds.acquire(False):  # noqa: FBT003 - threading's signature
            holds.release()
            return False
        return True

    def _release_save(self) -> int:
        """Release all levels, for `threading.Condition.wait`; gives how many there were."""
        holds = self._holds
        depth = max(holds.depth, 1) if holds.holder == get_ident() else 1
        for _ in range(depth):
            self.release()
        return depth

    def _acquire_restore(self, depth: int) -> None:
        """Take as many levels again."""
        for _ in range(depth):
            self.acquire()

    def _at_fork_reinit(self) -> None:
        """In a forked child: a free lock again."""
        holds = self._holds
        holds.wrapped._at_fork_reinit()  # noqa: SLF001 - threading's own protocol
        holds.forget()

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride] - nobody sets it
        """The wrapped lock's class, so that `isinstance` holds as before."""
        kind: Any = self._holds.wrapped.__class__
        return kind

    def __setattr__(self, name: str, value: object) -> None:
        """Set on the lock itself, as everything that is not ours is read from it."""
        setattr(self._holds.wrapped, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._holds.wrapped, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle, or refuse to, as the wrapped lock does."""
        return self._holds.wrapped.__reduce_ex__(protocol)

    def __repr__(self) -> str:
        return f"<instrumented {self.name!r} of {self.wrapped!r}>"


class InstrumentedSemaphore(InstrumentedLock):
    """A semaphore has as many holders as permits, and releases several at once."""

    __slots__ = ()

    FOREVER: ClassVar[int | None] = None
    _HOLDS: ClassVar[type[Holds]] = PermitHolds

    def release(self, *args: Any, **kwargs: Any) -> None:
        """As the wrapped semaphore's own."""
        holds = self._holds
        count = args[0] if args else kwargs.get("n", 1)
        held = [holds.given() for _ in range(count)] if isinstance(count, int) else []
        holds.release(*args, **kwargs)
        for each in held:
            if each >= 0:
                holds.count(each)


class InstrumentedCondition(InstrumentedLock):
    """A condition gives its lock up while it waits: that is no hold."""

    __slots__ = ()

    def wait(self, timeout: float | None = None) -> bool:
        """As `threading.Condition.wait`."""
        holds = self._holds
        held, depth = -1, holds.depth
        owned = holds.holder == get_ident()
        if owned:
            holds.depth = 1
            held = holds.given()
        try:
            return bool(holds.wrapped.wait(timeout))
        finally:
            if held >= 0:
                holds.count(held)
            if owned:
                holds.taken()
                holds.depth = depth

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        """As `threading.Condition.wait_for`."""
        end: float | None = None
        left = timeout
        result = predicate()
        while not result:
            if left is not None:
                now = time.monotonic()
                end = now + left if end is None else end
                left = end - now
                if left <= 0:
                    break
            self.wait(left)
            result = predicate()
        return result


def instrument(recorder: Recorder, name: str, lock: Any) -> InstrumentedLock:
    """The wrapper for a lock's kind."""
    kind: type[InstrumentedLock] = InstrumentedLock
    if hasattr(lock, "notify") and hasattr(lock, "wait"):
        kind = InstrumentedCondition
    elif hasattr(lock, "_value") or hasattr(lock, "counter"):
        kind = InstrumentedSemaphore
    return _delegating(kind, lock)(recorder, name, lock)


def _attribute_of_wrapped(lock: Any, name: str) -> Any:
    """What the wrapper does not have, the lock may: also attributes that it got later."""
    if name == "_holds":
        raise AttributeError(name)
    return getattr(lock._holds.wrapped, name)  # noqa: SLF001 - this module's own


def _delegating(kind: type[InstrumentedLock], lock: Any) -> type[InstrumentedLock]:
    """A subclass of `kind` that hands on what else the lock's class offers."""
    wrapped: Any = lock.__class__
    key = (kind, wrapped)
    made = _KINDS.get(key)
    if made is None:
        if hasattr(lock, "__dict__"):
            members: dict[str, Any] = {"__getattr__": _attribute_of_wrapped}
        else:
            others = [name for name in dir(lock) if not name.startswith("__") and not hasattr(kind, name)]
            members = {name: property(attrgetter(f"_holds.wrapped.{name}")) for name in others}
        made = _KINDS.setdefault(key, type(kind.__name__, (kind,), {"__slots__": (), "__module__": __name__, **members}))
    return made


_KINDS: Final[dict[tuple[type[InstrumentedLock], Any], type[InstrumentedLock]]] = {}
