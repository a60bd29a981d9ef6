"""What Triton's own spans say of one request: exact, where the statistics extension gives means.

Triton in OpenTelemetry mode exports spans whose events are the instants at which a request passed its stages. It writes OTLP/JSON; ids are hex.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["PARTS", "split"]

PARTS: Final = {
    "queue_ns": ("QUEUE_START", "COMPUTE_START"),
    "input_ns": ("COMPUTE_START", "COMPUTE_INPUT_END"),
    "infer_ns": ("COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START"),
    "output_ns": ("COMPUTE_OUTPUT_START", "COMPUTE_END"),
}
"""Parts of a request by the events that they lie between."""


def split(spans: Iterable[Mapping[str, Any]], trace_id: str) -> dict[str, int] | None:
    """Queue, input, infer and output time of the request that carried a trace id.

    Args:
        spans: Spans of OTLP/JSON (`resourceSpans[].scopeSpans[].spans[]`), of any traces.
        trace_id: 32 hex digits, as the client sent them in `traceparent`.

    Returns:
        Nanoseconds by part as in `PARTS`; None while an event is missing: Triton drops a context now and then, and exports in batches.
    """
    wanted = trace_id.lower()
    moments: dict[str, int] = {}
    for span in spans:
        if str(span.get("traceId", "")).lower() == wanted:
            events: list[Mapping[str, Any]] = span.get("events") or []
            for event in events:
                moments.setdefault(str(event["name"]), int(event["timeUnixNano"]))
    if any(name not in moments for pair in PARTS.values() for name in pair):
        return None
    return {part: moments[end] - moments[start] for part, (start, end) in PARTS.items()}
