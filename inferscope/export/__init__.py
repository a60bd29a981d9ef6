"""export: sends metrics, events and the spans of slow requests over OTLP and keeps them on disk.

`Exporter` is the whole room; `ExportBatch`, `Total` and `Event` are what it takes. Nothing here sets a global provider, starts a thread
or opens a connection when no endpoint is configured.
"""

from __future__ import annotations

from inferscope.export.announce import announce
from inferscope.export.exporter import Exporter
from inferscope.export.otlp.bands import Bands
from inferscope.export.otlp.context import application_resource, current_span
from inferscope.export.otlp.logs import Event, breach_event, capture_event, incident_event, regression_event
from inferscope.export.otlp.metrics import ExportBatch, class_attributes
from inferscope.export.otlp.series import Total
from inferscope.export.otlp.target import explicit_preferred
from inferscope.export.otlp.totals import Objective, request_totals
from inferscope.export.prometheus import prometheus_collector, publish
from inferscope.export.ring import read_ring
from inferscope.export.store import StoredEvent, StoredWindow, read_store

__all__ = [
    "Bands",
    "Event",
    "ExportBatch",
    "Exporter",
    "Objective",
    "StoredEvent",
    "StoredWindow",
    "Total",
    "announce",
    "application_resource",
    "breach_event",
    "capture_event",
    "class_attributes",
    "current_span",
    "explicit_preferred",
    "incident_event",
    "prometheus_collector",
    "publish",
    "read_ring",
    "read_store",
    "regression_event",
    "request_totals",
]
