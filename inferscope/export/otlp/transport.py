"""Sends a serialized request to a target: bounded in time, retried within the bound, behind a circuit breaker.

`Sender.send` never raises and never takes longer than it was given (plus the resolver's time when the host's name is not cached: there
is no portable way to bound getaddrinfo). One log line is written when sending starts to fail and one when it works again.
"""

from __future__ import annotations

import contextlib
import enum
import random
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from inferscope.export.otlp.target import GRPC, resolve
from inferscope.export.otlp.wire import Reply
from inferscope.guard import guard, log_once, logger

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from inferscope.export.otlp.target import Target
    from inferscope.export.otlp.wire import Wire

__all__ = ["Breaker", "Outcome", "Sender", "senders", "suppressed"]

FAILURES: Final = 3
"""Failed exports in a row after which the breaker opens."""
PAUSE_S: Final = 60.0
"""Time between tries while it is open, and the longest Retry-After that is honoured."""
BACKOFF_S: Final = 0.1
"""First pause between tries within one export; doubles, with jitter."""

_NO_SUCH_SIGNAL: Final = frozenset({"HTTP 404", "HTTP 405", "HTTP 501", "gRPC UNIMPLEMENTED"})

_RANDOM: Final = random.SystemRandom()  # the module's own generator belongs to the application, which may have seeded it


class Outcome(enum.Enum):
    """What became of a request."""

    SENT = "sent"
    FAILED = "failed"
    """Not delivered; the same data may be sent again."""
    REJECTED = "rejected"
    """The receiver does not want it; sending it again is useless."""
    SKIPPED = "skipped"
    """Not tried: the breaker is open or there was no time left."""


class Breaker:
    """Closed, or open after `FAILURES` failures in a row: then one try every `PAUSE_S`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._not_before = 0.0
        self.failures = 0

    @property
    def open(self) -> bool:
        """Whether tries are being saved."""
        return self.failures >= FAILURES

    def allows(self) -> bool:
        """Whether now is a time to try."""
        return self._clock() >= self._not_before

    def succeeded(self) -> None:
        """Close."""
        self.failures = 0
        self._not_before = 0.0

    def failed(self, retry_after_s: float | None) -> None:
        """Count a failed export; `retry_after_s` is what the receiver asked for."""
        self.failures += 1
        wait = PAUSE_S if self.open else 0.0
        self._not_before = self._clock() + min(max(wait, retry_after_s or 0.0), PAUSE_S)


class Sender:
    """Delivers requests of one signal.

    Args:
        target: Where to.
        wire: The connection; None builds that of the target's protocol.
        clock: Monotonic seconds.
    """

    def __init__(self, target: Target, wire: Wire | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.target = target
        self._clock = clock
        self._wire = wire or _build(target)
        self._stop = threading.Event()
        self.breaker = Breaker(clock)
        self.sent = 0
        self.failed = 0
        self.refused = 0
        self.rejected = 0
        """Requests in a row that the receiver did not want."""
        self.last_error = ""

    def send(self, payload: bytes, timeout_s: float | None = None, *, force: bool = False) -> Outcome:
        """Deliver `payload` within `timeout_s` (default and most: the target's own bound); `force` tries even when the breaker is open."""
        deadline = self._clock() + min(self.target.timeout_s if timeout_s is None else timeout_s, self.target.timeout_s)
        if self._stop.is_set() or deadline - self._clock() <= 0 or not (force or self.breaker.allows()):
            return Outcome.SKIPPED
        with suppressed():
            reply = self._attempts(payload, deadline)
        if reply.ok:
            self._succeeded(reply)
            return Outcome.SENT
        self._failed(reply)
        self.rejected = 0 if reply.retryable else self.rejected + 1
        return Outcome.FAILED if reply.retryable else Outcome.REJECTED

    @property
    def unknown(self) -> bool:
        """Whether the receiver has shown that it does not know this signal: it never took any of it, and says so or refused thrice."""
        return not self.sent and (self.rejected >= FAILURES or (self.rejected > 0 and self.last_error in _NO_SUCH_SIGNAL))

    def _attempts(self, payload: bytes, deadline: float) -> Reply:
        pause = BACKOFF_S
        while True:
            try:
                reply = self._wire.post(payload, max(deadline - self._clock(), 0.001))
            except Exception as error:  # noqa: BLE001  (any failure of the network stack is a failed try)
                reply = Reply(ok=False, retryable=True, reason=type(error).__name__)
            # Jitter keeps the processes of a fleet from coming back in step.
            wait = pause * _RANDOM.uniform(0.8, 1.2) if reply.retry_after_s is None else reply.retry_after_s
            if reply.ok or not reply.retryable or self._clock() + wait >= deadline or self._stop.wait(wait):
                return reply
            pause *= 2

    def _succeeded(self, reply: Reply) -> None:
        if self.breaker.failures:
            logger.warning("inferscope: %s reach %s again", self.target.signal, self.target.endpoint)
        self.breaker.succeeded()
        self.rejected = 0
        self.sent += 1
        if reply.refused:
            if not self.refused:
                logger.warning(
                    "inferscope: %s refused %d %s: %s", self.target.endpoint, reply.refused, self.target.signal, reply.reason[:200]
                )
            self.refused += reply.refused

    def _failed(self, reply: Reply) -> None:
        if not self.breaker.failures and not self._stop.is_set():
            logger.warning(
                "inferscope: %s do not reach %s (%s); requests are not affected, the export goes on trying",
                self.target.signal,
                self.target.endpoint,
                reply.reason,
            )
        self.failed += 1
        self.last_error = reply.reason
        self.breaker.failed(reply.retry_after_s)

    def status(self) -> dict[str, Any]:
        """Where it goes, what failed."""
        return {
            "endpoint": self.target.endpoint,
            "protocol": self.target.protocol,
            "sent": self.sent,
            "failed": self.failed,
            "refused": self.refused,
            "breaker_open": self.breaker.open,
            "last_error": self.last_error or None,
        }

    def interrupt(self) -> None:
        """End waiting between tries; nothing is sent afterwards."""
        self._stop.set()

    def close(self) -> None:
        """Interrupt and drop the connection."""
        self._stop.set()
        with contextlib.suppress(Exception):
            self._wire.close()

    def after_fork(self) -> Sender:
        """A fresh sender for the child. The parent's connection is left alone: closing it here would say goodbye on a shared socket."""
        _LEFT_ALONE.append(self._wire)
        return Sender(self.target, clock=self._clock)


def senders(
    signals: Sequence[str],
    *,
    endpoint: str | None,
    protocol: str | None,
    headers: Mapping[str, str] | str | None,
    environ: Mapping[str, str],
) -> dict[str, Sender]:
    """By signal, those that have a target; arguments as of `resolve`."""
    found: dict[str, Sender] = {}
    for signal in signals:
        with guard("export"):
            target = resolve(signal, endpoint=endpoint, protocol=protocol, headers=headers, environ=environ)
            if target is None:
                continue
            try:
                found[signal] = Sender(target)
            except ImportError as error:
                log_once(
                    f"otlp-{target.protocol}", f"OTLP over {target.protocol} needs {error.name}, which is not installed; nothing is sent"
                )
    return found


_LEFT_ALONE: Final[list[Wire]] = []
"""Connections of a forked child's parent, kept so that no destructor touches them."""


def _build(target: Target) -> Wire:
    """Imports everything that sending needs, so that the first export does not."""
    with suppressed():
        pass
    # The socket module imports this codec at the first connection: a fork during that import leaves its lock held in the child.
    "localhost".encode("idna")
    if target.protocol == GRPC:
        from inferscope.export.otlp.grpc_wire import GrpcWire

        return GrpcWire(target)
    from inferscope.export.otlp.http_wire import HttpWire

    return HttpWire(target)


@contextlib.contextmanager
def suppressed() -> Generator[None, None, None]:
    """Keep the application's own instrumentation of `requests` and gRPC from tracing our exports."""
    from opentelemetry import context

    marked = context.get_current()
    for name, fallback in (
        ("_SUPPRESS_INSTRUMENTATION_KEY", "suppress_instrumentation"),
        ("_SUPPRESS_HTTP_INSTRUMENTATION_KEY", "suppress_http_instrumentation"),
    ):
        marked = context.set_value(str(getattr(context, name, fallback)), value=True, context=marked)
    token = context.attach(marked)
    try:
        yield
    finally:
        context.detach(token)
