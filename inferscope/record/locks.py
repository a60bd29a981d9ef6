"""asyncio's locks, instrumented over either core: they are awaited, so nothing here is as hot as a thread's lock."""

from __future__ import annotations

import asyncio
import time
import types
from typing import TYPE_CHECKING, Any, Final, cast

from inferscope.record.sites import UNKNOWN, request_label, site_of_frame
from inferscope.types import SpanFlag

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator
    from types import FrameType

__all__ = ["InstrumentedAsyncLock", "site_of_task", "wrap_async"]

_DEPTH: Final = 64


def site_of_task(task: asyncio.Task[Any] | None) -> str:
    """The site where a task is suspended: the innermost frame of the coroutines it awaits that is not asyncio's."""
    if task is None:
        return UNKNOWN
    awaited: Any = task.get_coro()
    site = UNKNOWN
    for _ in range(_DEPTH):
        frame: FrameType | None = (
            getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None) or getattr(awaited, "ag_frame", None)
        )
        if frame is None:
            break
        name = str(frame.f_globals.get("__name__"))
        if not name.startswith(("asyncio.", "inferscope.record")):
            site = site_of_frame(frame)
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None) or getattr(awaited, "ag_await", None)
    return site


@types.coroutine
def _drive(coroutine: Coroutine[Any, Any, Any], suspended: Callable[[], None], resumed: Callable[[], None]) -> Generator[Any, Any, Any]:
    """Await a coroutine and tell when it really had to wait, and when that wait ended well."""
    try:
        waiting = coroutine.send(None)
    except StopIteration as done:
        return done.value
    suspended()
    try:
        while True:
            try:
                sent = yield waiting
            except GeneratorExit:
                coroutine.close()
                raise
            except BaseException as error:  # noqa: BLE001 - handed on, as `yield from` does
                waiting = coroutine.throw(error)
            else:
                waiting = coroutine.send(sent)
    except StopIteration as done:
        resumed()
        return done.value


class _Hold:
    """A task's hold and, when somebody waits for it, its site."""

    __slots__ = ("held_ns", "request", "root_id", "site_id", "start_ns", "task", "waited_ns")

    def __init__(self, task: asyncio.Task[Any] | None, request: Any, start_ns: int, waited_ns: int, root_id: int) -> None:
        self.task = task
        self.request = request
        self.start_ns = start_ns
        self.waited_ns = waited_ns
        self.root_id = root_id
        self.site_id = 0
        self.held_ns = -1

    def root(self) -> int:
        """Whom to blame: who waited over twice as long as it then held only passed its own wait on."""
        return self.root_id if self.root_id and self.waited_ns > 2 * self.held_ns >= 0 else self.site_id


class InstrumentedAsyncLock:
    """Delegates to `asyncio.Lock`, `Semaphore`, `BoundedSemaphore` or `Condition` and times waits and holds.

    Args:
        recorder: A recorder of either core.
        name: As people see it.
        wrapped: The lock.
    """

    __slots__ = ("__weakref__", "_clock", "_holds", "_recorder", "name", "wrapped")

    def __init__(self, recorder: Any, name: str, wrapped: Any) -> None:
        self.name = name
        self.wrapped = wrapped
        self._recorder = recorder
        self._clock: Callable[[], int] = getattr(recorder, "clock", time.perf_counter_ns)
        self._holds: list[_Hold] = []

    async def acquire(self) -> bool:
        """As the wrapped lock's own; only a wait that suspends the task is timed."""
        start = 0
        watched: _Hold | None = None

        def suspended() -> None:
            nonlocal start, watched
            start = self._clock()
            watched = self._look()

        def resumed() -> None:
            self._waited(start, watched)

        taken = cast(bool, await _drive(self.wrapped.acquire(), suspended, resumed))
        if not start:
            self._recorder.interval("lock", self.name, 0, 0)
            self._taken(0, 0)
        return taken

    async def __aenter__(self) -> Any:
        await self.acquire()
        return None

    async def __aexit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """As the wrapped lock's own."""
        hold = self._given()
        self.wrapped.release()
        if hold is not None:
            self._recorder.interval("lock.hold", self.name, hold.start_ns, hold.start_ns + hold.held_ns)

    def _look(self) -> _Hold | None:
        """The hold that the caller has to wait for, with its site read once."""
        hold = self._holds[-1] if self._holds else None
        if hold is not None and not hold.site_id:
            stage_of = getattr(self._recorder, "_stage_of", None)
            stage = stage_of(hold.request) if stage_of is not None else None
            hold.site_id = self._recorder._site(self.name, site_of_task(hold.task), stage, request_label(hold.request))  # noqa: SLF001 - both cores offer it to this module
        return hold

    def _taken(self, waited_ns: int, root_id: int) -> None:
        """The current task holds the lock now."""
        self._holds.append(_Hold(_current_task(), self._recorder.current(), self._clock(), waited_ns, root_id))

    def _waited(self, start: int, watched: _Hold | None) -> None:
        """Count a wait that ended with the lock held."""
        end = self._clock()
        root = 0 if watched is None else watched.root()
        self._taken(end - start, root)
        if root:
            self._recorder._blame(root, end - start, 0)  # noqa: SLF001 - as above
        self._recorder.interval("lock", self.name, start, end, flags=SpanFlag.CONTENDED, aux=root)

    def _given(self) -> _Hold | None:
        """End the current task's hold; None when another task took what this one releases."""
        task = _current_task()
        for index in range(len(self._holds) - 1, -1, -1):
            hold = self._holds[index]
            if hold.task is task:
                del self._holds[index]
                hold.held_ns = self._clock() - hold.start_ns
                if hold.site_id:
                    self._recorder._blame(hold.site_id, -1, hold.held_ns)  # noqa: SLF001 - as above
                return hold
        if self._holds:
            del self._holds[0]
        return None

    async def wait(self) -> Any:
        """As `asyncio.Condition.wait`: no hold while it waits."""
        hold = self._given()
        try:
            return await self.wrapped.wait()
        finally:
            if hold is not None:
                self._recorder.interval("lock.hold", self.name, hold.start_ns, hold.start_ns + hold.held_ns)
                self._taken(0, 0)

    async def wait_for(self, predicate: Callable[[], Any]) -> Any:
        """As `asyncio.Condition.wait_for`."""
        result = predicate()
        while not result:
            await self.wait()
            result = predicate()
        return result

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride] - nobody sets it
        """The wrapped lock's class, so that `isinstance` holds as before."""
        kind: Any = self.wrapped.__class__
        return kind

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle, or refuse to, as the wrapped lock does."""
        return self.wrapped.__reduce_ex__(protocol)

    def __getattr__(self, name: str) -> Any:
        if name == "wrapped":
            raise AttributeError(name)
        return getattr(self.wrapped, name)

    def __setattr__(self, name: str, value: object) -> None:
        """Set on the lock itself what is not ours."""
        if name in InstrumentedAsyncLock.__slots__:
            object.__setattr__(self, name, value)
        else:
            setattr(self.wrapped, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.wrapped, name)

    def __repr__(self) -> str:
        return f"<instrumented {self.name!r} of {self.wrapped!r}>"


def _current_task() -> asyncio.Task[Any] | None:
    """The running task; None outside an event loop."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


def wrap_async(recorder: Any, name: str, lock: Any) -> InstrumentedAsyncLock:
    """Instrument an asyncio lock over a recorder of either core; one that is instrumented already is returned as it is."""
    if isinstance(lock, InstrumentedAsyncLock):
        return lock
    return InstrumentedAsyncLock(recorder, name, lock)
