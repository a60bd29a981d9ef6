"""LitServe: the wait for a worker process, the forming of a batch, and what the worker did, in the request that waited for it.

The HTTP side of LitServe and the code that decodes, predicts and encodes run in different processes. The worker packs the spans of its
work (a carrier) and sends them to the API process, beside LitServe's own answer; where one of the two processes is not instrumented they go
nowhere.

| what | where |
|---|---|
| `queue:litserve` | from the hand-over to the worker's queue until a worker took it |
| `queue:batch` | until the batch was complete |
| `decode`, `predict`, `encode` | LitServe's own callbacks before and after each; around the decoding of a stream it calls back on asyncio and in batches only |
| `stream` | of a stream, in place of `encode`: until its last part; predicting and encoding take turns there, and `predict` only made the generator |

A loop on asyncio has a task for each request, whose work is told apart by its context. What a stream took arrives with its last part; a stream
whose client went away, and what a specification of LitServe's (OpenAI) hands over by itself, count in the worker's series only.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import tempfile
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from inferscope.clock import now_ns
from inferscope.guard import guard
from inferscope.integration import Integration, record_wait, recorder
from inferscope.record.carried import Inbox, Outbox

if TYPE_CHECKING:
    from collections.abc import Callable

    from inferscope.patching import Ledger, Patch

__all__ = ["LitServeIntegration"]

_QUEUE: Final = "litserve"
_FORMING: Final = "batch"
_STAGES: Final = {"on_before_decode_request": "decode", "on_before_predict": "predict", "on_before_encode_response": "encode"}
_ENDS: Final = {"on_after_decode_request", "on_after_predict", "on_after_encode_response"}


_STREAM: Final = "stream"
_PULLED: Final = "on_before_encode_response"
"""From here on a stream's parts are pulled through encoding and predicting; what is called back after it tells nothing."""


def _directory() -> Path:
    """Where both sides look: named after the process that started them, which is this one where the API runs on threads."""
    parent = multiprocessing.parent_process()
    return Path(tempfile.gettempdir(), f"inferscope-litserve-{os.getuid()}-{os.getpid() if parent is None else parent.pid}")


def _place(number: int) -> Path:
    """Socket of an API process; `number` is its response queue, which is how LitServe's workers know it."""
    return _directory() / f"{number}.sock"


class _Work:
    """What a worker is doing: one request, or one batch."""

    def __init__(self, *, stream: bool = False) -> None:
        self.uids: dict[str, int] = {}
        self.stream = stream
        self.pulled = False
        self.stage: Any = None
        self.started = False
        self.packed: Any = None
        self.carrier = recorder().carrier(_QUEUE)
        self.carrier.__enter__()
        self.began_ns = now_ns()

    def begin(self, stage: str) -> None:
        """A step begins; the first one ends the forming of the batch."""
        if self.carrier is None or self.pulled:
            return
        if not self.started and len(self.uids) > 1:
            record_wait(_FORMING, self.began_ns, now_ns())
        self.started = True
        self.end()
        self.stage = recorder().stage(stage)
        self.stage.__enter__()

    def end(self) -> None:
        """The step is over, if one runs."""
        running, self.stage = self.stage, None
        if running is not None:
            running.__exit__(None, None, None)

    def called_back(self, event: str) -> None:
        """LitServe calls back as `event` says."""
        if event in _ENDS and not self.pulled:
            self.end()
        elif event in _STAGES:
            pulled = self.stream and event == _PULLED
            self.begin(_STREAM if pulled else _STAGES[event])
            self.pulled = self.pulled or pulled

    def close(self) -> None:
        """All is done that the requests waited for."""
        self.end()
        carrier, self.carrier = self.carrier, None
        if carrier is not None:
            carrier.__exit__(None, None, None)
            self.packed = carrier.packed


class _Worker:
    """Follows a worker's loop and sends what it packed."""

    def __init__(self) -> None:
        self.work: _Work | None = None
        self.tasks: dict[str, _Work] = {}
        self._outbox = Outbox()

    def taken(self, uid: str, number: int, *, stream: bool = False) -> None:
        """A worker took a request off the queue."""
        if self.work is None:
            self.work = _Work(stream=stream)
        self.work.uids[uid] = number

    def begun(self, uid: str, number: int, *, stream: bool) -> _Work:
        """The task of a request begins, on asyncio."""
        work = self.tasks[uid] = _Work(stream=stream)
        work.uids[uid] = number
        return work

    def answered(self, uid: str) -> None:
        """A request's answer is about to leave."""
        work = self.tasks.pop(uid, None) or self.work
        number = None if work is None else work.uids.pop(uid, None)
        if work is None or number is None:
            return
        if work.started:
            work.close()
            self._outbox.send(_place(number), uid, work.packed)
        if not work.uids:
            work.close()
            if work is self.work:
                self.work = None

    def close(self) -> None:
        """Send nothing any more."""
        self.work = None
        self.tasks.clear()
        self._outbox.close()


_task: ContextVar[_Work | None] = ContextVar("inferscope_litserve", default=None)
"""Work of the request whose task this is."""


def _interleaved() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class LitServeIntegration(Integration):
    """Both sides of LitServe; which of them a process is shows itself."""

    name: ClassVar[str] = "litserve"
    target: ClassVar[str] = "litserve"
    distribution: ClassVar[str] = "litserve"
    versions: ClassVar[tuple[tuple[int, ...], tuple[int, ...] | None]] = ((0, 2, 17), None)

    def __init__(self) -> None:
        self._inboxes: dict[int, Inbox] = {}
        self._worker = _Worker()

    def patch(self, ledger: Ledger) -> None:
        """Replace where requests are handed over and waited for, and where a worker's loop takes, calls back and answers."""
        from litserve.callbacks.base import CallbackRunner
        from litserve.loops.base import LitLoop
        from litserve.loops.simple_loops import SingleLoop
        from litserve.loops.streaming_loops import StreamingLoop
        from litserve.server import BaseRequestHandler, RegularRequestHandler

        ledger.replace(BaseRequestHandler, "_submit_request", self._submit)
        ledger.replace(RegularRequestHandler, "handle_request", self._handle)
        ledger.replace(LitLoop, "put_response", self._put)
        ledger.replace(CallbackRunner, "trigger_event", self._event)
        for loop, name in ((SingleLoop, "_process_single_request"), (StreamingLoop, "_process_streaming_request")):
            if hasattr(loop, name):
                ledger.replace(loop, name, self._process_stream if loop is StreamingLoop else self._process)

    def unpatch(self) -> None:
        """Close what was opened."""
        for inbox in self._inboxes.values():
            inbox.close()
        self._inboxes = {}
        self._worker.close()

    def _inbox(self, number: int) -> Inbox:
        inbox = self._inboxes.get(number)
        if inbox is None or inbox.pid != os.getpid():
            inbox = self._inboxes[number] = Inbox(_place(number), _QUEUE)
        return inbox

    def _collect(self) -> None:
        with guard("litserve"):
            for inbox in list(self._inboxes.values()):
                inbox.collect()

    def _submit(self, original: Any, patch: Patch) -> Callable[..., Any]:
        async def _submit_request(handler: Any, payload: Any) -> Any:
            request = recorder().current() if patch.active else None
            if request is None:
                return await original(handler, payload)
            inbox, submitted_ns = None, now_ns()
            with guard("litserve"):
                inbox = self._inbox(handler.server.app.response_queue_id)  # before the worker can answer
            answer = await original(handler, payload)
            if inbox is not None:
                inbox.waiting[answer[0]] = (request, submitted_ns)
            return answer

        return _submit_request

    def _handle(self, original: Any, patch: Patch) -> Callable[..., Any]:
        async def handle_request(handler: Any, request: Any, request_type: Any) -> Any:
            try:
                return await original(handler, request, request_type)
            finally:
                if patch.active:
                    self._collect()

        return handle_request

    def _process(self, original: Any, patch: Patch, *, stream: bool = False) -> Callable[..., Any]:
        async def process(loop: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
            work, uid = None, ""
            if patch.active:
                with guard("litserve"):
                    number, uid, *_ = request
                    work = self._worker.begun(uid, number, stream=stream)
                    _task.set(work)  # the context is the task's own
            try:
                return await original(loop, request, *args, **kwargs)
            finally:
                if work is not None:  # cancelled, or answered in a way that nobody saw
                    with guard("litserve"):
                        self._worker.tasks.pop(uid, None)
                        work.close()

        return process

    def _process_stream(self, original: Any, patch: Patch) -> Callable[..., Any]:
        return self._process(original, patch, stream=True)

    def _put(self, original: Any, patch: Patch) -> Callable[..., Any]:
        def put_response(
            loop: Any, transport: Any, response_queue_id: int, uid: str, response_data: Any, status: Any, response_type: Any
        ) -> Any:
            if patch.active:
                with guard("litserve"):
                    regular = getattr(response_type, "value", None) == "REGULAR"
                    if status != "START":
                        if regular or status in {"ERROR", "FINISH_STREAMING"}:
                            self._worker.answered(uid)
                    elif not _interleaved():
                        self._worker.taken(uid, response_queue_id, stream=not regular)
            return original(loop, transport, response_queue_id, uid, response_data, status, response_type)

        return put_response

    def _event(self, original: Any, patch: Patch) -> Callable[..., Any]:
        def trigger_event(runner: Any, event_name: str, *args: Any, **kwargs: Any) -> Any:
            if not patch.active:
                return original(runner, event_name, *args, **kwargs)
            work = _task.get()
            if work is None and not _interleaved():
                work = self._worker.work
            if work is not None and event_name in _ENDS:
                with guard("litserve"):
                    work.called_back(event_name)
            result = original(runner, event_name, *args, **kwargs)
            if work is not None and event_name in _STAGES:
                with guard("litserve"):
                    work.called_back(event_name)
            elif event_name == "on_response" and self._inboxes:
                self._collect()  # the last part of a stream arrived; its request is open yet
            return result

        return trigger_event
