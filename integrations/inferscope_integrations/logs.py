"""Ids in log records: a filter that joins a service's log lines with its requests, traces and incidents.

Add `IdsFilter` to a handler; each record then has these attributes, empty strings where there is nothing to say:

- `inferscope_request`: name of the request that is served;
- `inferscope_request_id`: its number in this process, as captures and incidents print it;
- `inferscope_incident`: id of the incident that is being written, for `inferscope explain ID`;
- `trace_id`, `span_id`: the application's OpenTelemetry span in hexadecimal, when the OpenTelemetry API is loaded and a span is current.

With the standard library's configuration, writing JSON lines through python-json-logger:

    {"version": 1,
     "filters": {"ids": {"()": "inferscope_integrations.logs.IdsFilter"}},
     "formatters": {"json": {"()": "pythonjsonlogger.json.JsonFormatter",
                             "format": "%(asctime)s %(levelname)s %(message)s %(inferscope_request_id)s %(inferscope_incident)s %(trace_id)s"}},
     "handlers": {"out": {"class": "logging.StreamHandler", "filters": ["ids"], "formatter": "json"}},
     "root": {"level": "INFO", "handlers": ["out"]}}

There is no patch and nothing to instrument: log records are the application's, and it says where it wants ids.
"""

from __future__ import annotations

import logging
import sys
from typing import Final

from inferscope.integration import recorder
from inferscope.slots import slots

__all__ = ["KEYS", "IdsFilter"]

KEYS: Final = ("inferscope_request", "inferscope_request_id", "inferscope_incident", "trace_id", "span_id")
"""The attributes that the filter sets."""


class IdsFilter(logging.Filter):
    """Sets `KEYS` on every record and lets all of them pass; attributes that the record has already are left alone."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the ids.

        Args:
            record: The record, changed in place.

        Returns:
            True.
        """
        known = vars(record)
        try:
            found = _ids()
        except Exception:  # noqa: BLE001  (a line is logged with or without ids)
            found = dict.fromkeys(KEYS, "")
        for key, value in found.items():
            known.setdefault(key, value)
        return True


def _ids() -> dict[str, str]:
    request = recorder().current()
    trace_id, span_id = _span()
    return {
        "inferscope_request": request.name if request is not None else "",
        "inferscope_request_id": str(request.id) if request is not None else "",
        "inferscope_incident": slots.open_incident or "",
        "trace_id": trace_id,
        "span_id": span_id,
    }


def _span() -> tuple[str, str]:
    """Ids of the current OpenTelemetry span; never the reason that the API is imported."""
    trace = sys.modules.get("opentelemetry.trace")
    context = trace.get_current_span().get_span_context() if trace is not None else None
    return (format(context.trace_id, "032x"), format(context.span_id, "016x")) if context is not None and context.is_valid else ("", "")
