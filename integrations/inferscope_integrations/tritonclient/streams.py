"""Requests on a stream: answers are matched by request id, and without one only while a single request is outstanding.

A decoupled model may answer many times: the first answer ends the measurement.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any, Final, cast

from inferscope.clock import now_ns
from inferscope.integration import recorder

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from inferscope_integrations.tritonclient.calls import Call, Method

__all__ = ["Outstanding", "watched_inputs"]

_LIMIT: Final = 4096
"""Requests of one stream that are waited for; a server that never answers must not make us keep more."""


class Outstanding:
    """Calls that wait for their first answer, by client and request id."""

    def __init__(self) -> None:
        self._waiting: weakref.WeakKeyDictionary[Any, dict[str, Call]] = weakref.WeakKeyDictionary()

    def forget(self, client: Any) -> None:
        """A new stream: what the old one left open has no answer."""
        self._waiting.pop(client, None)

    def sent(self, client: Any, request_id: Any, call: Call) -> None:
        """A request goes out."""
        waiting = self._waiting.setdefault(client, {})
        if len(waiting) < _LIMIT:
            waiting[request_id if isinstance(request_id, str) else ""] = call

    def answered(self, client: Any, result: Any, error: Any) -> Call | None:
        """The call that an answer ends, when that can be told."""
        waiting = self._waiting.get(client)
        if not waiting:
            return None
        identity = result.get_response().id if result is not None else ""
        if not identity and len(waiting) == 1:
            identity = next(iter(waiting))
        call = waiting.pop(identity, None)
        if call is not None:
            call.finish(failed=error is not None)
        return call

    def answering(self, client: Any, callback: Callable[..., Any]) -> Callable[..., Any]:
        """The stream's callback, which finds the request of each answer again."""
        held = weakref.ref(client)

        def answered(*args: Any, **kwargs: Any) -> Any:
            call = None
            owner = held()
            if owner is not None:
                try:
                    call = self.answered(owner, kwargs.get("result"), kwargs.get("error"))
                except Exception:  # noqa: BLE001  (the callback gets its answer)
                    call = None
            if call is None or call.request is None:
                return callback(*args, **kwargs)
            with recorder().attach(call.request):
                return callback(*args, **kwargs)

        return answered

    def reading(self, client: Any, answers: Any) -> Any:
        """The iterator that `stream_infer` returned, watched."""
        return _Answers(self, client, answers)


class _Answers:
    """Iterates as the library's own object does; everything else is that object's."""

    def __init__(self, outstanding: Outstanding, client: Any, answers: Any) -> None:
        self._outstanding, self._client, self._answers = outstanding, client, answers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._answers, name)

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        answer = await self._answers.__anext__()
        with contextlib.suppress(Exception):  # the answer is the caller's
            self._outstanding.answered(self._client, *answer)
        return answer


async def watched_inputs(client: Any, inputs: Any, method: Method, outstanding: Outstanding) -> AsyncIterator[Any]:
    """The caller's requests, noted as they go out."""
    async for each in inputs:
        if isinstance(each, dict):
            named: dict[str, Any] = cast("Any", each)
            try:
                row, stage = method.opened(client, (), named)
                call = method.begin(row, stage, (), named, elsewhere=True)
                call.built_ns = now_ns()
                outstanding.sent(client, named.get("request_id", ""), call)
            except Exception:  # noqa: BLE001  (the library will complain about it)
                pass
        yield cast("Any", each)
