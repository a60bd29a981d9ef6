"""One event from the command line, where no service runs: to the receiver that the standard variables name, or to nobody."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from inferscope import semconv
from inferscope.export.otlp.target import resolve
from inferscope.guard import guard

if TYPE_CHECKING:
    from collections.abc import Mapping

    from inferscope.export.otlp.logs import Event

__all__ = ["announce"]


def announce(event: Event, service: str, *, environ: Mapping[str, str] | None = None) -> bool | None:
    """Send one event; never raises.

    Args:
        event: What to say.
        service: `service.name`.
        environ: Default `os.environ`.

    Returns:
        Whether a receiver took it; None when none is named (OTEL_EXPORTER_OTLP_ENDPOINT).
    """
    environ = os.environ if environ is None else environ
    sent = False
    with guard("export.logs"):
        target = resolve("logs", environ=environ)
        if target is None:
            return None
        from inferscope.export.otlp import protobuf
        from inferscope.export.otlp.transport import Outcome, Sender

        sender = Sender(target)
        try:
            sent = sender.send(protobuf.logs_request([event], {semconv.SERVICE_NAME: service}), force=True) is Outcome.SENT
        finally:
            sender.close()
    return sent
