"""The application's own trace: which span is open here, if it is sampled."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["sampled_span"]


def sampled_span() -> tuple[str, str] | None:
    """Trace and span id in hex of the span that is current in this thread or task; None when there is none or it is not sampled.

    Never imports OpenTelemetry: where the application has not, there is no span, and the call costs one look into a dictionary.
    """
    trace: Any = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return None
    context = trace.get_current_span().get_span_context()
    if not context.is_valid or not context.trace_flags & 1:
        return None
    return format(context.trace_id, "032x"), format(context.span_id, "016x")
