"""Celery: each task as a request, and the time that its message lay in the broker.

It uses Celery's own signals and patches nothing. The sender's clock and the worker's may belong to two machines: the time in the broker is
taken from the header that the sender adds (`inferscope-published`, Unix seconds), and left out where it lies in the future or over an
hour back. A task's name is the request's; its arguments and its id appear nowhere.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, ClassVar, Final

from inferscope.clock import now_ns
from inferscope.guard import guard
from inferscope.integration import Integration, recorder

if TYPE_CHECKING:
    from inferscope.patching import Ledger

__all__ = ["HEADER", "CeleryIntegration"]

HEADER: Final = "inferscope-published"
_OLDEST_S: Final = 3600.0


def _published_ns(task: Any) -> int | None:
    """When the message was sent, on the clock of `time.perf_counter_ns`; None when that is not known."""
    request: Any = getattr(task, "request", None)
    headers: dict[str, Any] = getattr(request, "headers", None) or {}
    sent: Any = headers.get(HEADER, getattr(request, HEADER, None))
    if not isinstance(sent, (int, float)):
        return None
    age = time.time() - sent
    return now_ns() - int(age * 1e9) if 0.0 <= age <= _OLDEST_S else None


class CeleryIntegration(Integration):
    """Connects to the signals of senders and workers."""

    name: ClassVar[str] = "celery"
    target: ClassVar[str] = "celery"
    distribution: ClassVar[str] = "celery"
    versions: ClassVar[tuple[tuple[int, ...], tuple[int, ...] | None]] = ((5, 3), None)

    def __init__(self) -> None:
        self._running: dict[str, Any] = {}

    def patch(self, ledger: Ledger) -> None:
        """Connect; Celery holds receivers of this object weakly, and the registry holds the object."""
        del ledger
        from celery import signals

        signals.before_task_publish.connect(self._publish)
        signals.task_prerun.connect(self._begin)
        signals.task_failure.connect(self._fail)
        signals.task_postrun.connect(self._end)

    def unpatch(self) -> None:
        """Disconnect."""
        from celery import signals

        signals.before_task_publish.disconnect(self._publish)
        signals.task_prerun.disconnect(self._begin)
        signals.task_failure.disconnect(self._fail)
        signals.task_postrun.disconnect(self._end)

    def _publish(self, headers: dict[str, Any] | None = None, **_more: Any) -> None:
        if headers is not None:
            headers.setdefault(HEADER, time.time())

    def _begin(self, task_id: str, task: Any, **_more: Any) -> None:
        with guard("celery"):
            request = recorder().request(str(task.name), started_ns=_published_ns(task))
            request.__enter__()
            self._running[task_id] = request

    def _fail(self, task_id: str, exception: BaseException | None = None, **_more: Any) -> None:
        request = self._running.get(task_id)
        if request is not None and exception is not None:
            request.error = type(exception).__qualname__

    def _end(self, task_id: str, **_more: Any) -> None:
        with guard("celery"):
            request = self._running.pop(task_id, None)
            if request is not None:
                request.__exit__(None, None, None)
