"""What the application's own tracing says here: which span is open, and who the process is. Nothing of OpenTelemetry is imported or set."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final, cast

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["UNSAMPLED", "application_resource", "current_span"]

UNSAMPLED: Final = "unsampled"
"""Third item of the ids of a span that exists but is kept nowhere."""


def current_span() -> tuple[str, ...] | None:
    """Trace and span id in hex of the span that is current in this thread or task, with a third item `unsampled` when it is not kept.

    None when there is no span. Never imports OpenTelemetry: where the application has not, the call costs one look into a dictionary.
    """
    trace: Any = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return None
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return None
    ids = format(context.trace_id, "032x"), format(context.span_id, "016x")
    return ids if context.trace_flags & 1 else (*ids, UNSAMPLED)


def application_resource() -> dict[str, str | bool | int | float]:
    """Resource attributes of the application's tracer provider; empty when it has set none.

    The provider is read from where the API keeps it: asking the API for it may build and set one.
    """
    trace: Any = sys.modules.get("opentelemetry.trace")
    provider = getattr(trace, "_TRACER_PROVIDER", None)
    attributes = getattr(getattr(provider, "resource", None), "attributes", None)
    if attributes is None:
        return {}
    held = cast("Mapping[str, Any]", attributes)
    return {str(key): value for key, value in held.items() if isinstance(value, (str, bool, int, float))}
