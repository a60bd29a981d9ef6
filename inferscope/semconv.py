"""Names of metrics, attributes and events, once.

Reused names stand as OpenTelemetry's semantic conventions have them (1.44); everything of our own lies under `inferscope.`.
Units follow UCUM: seconds `s`, bytes `By`, dimensionless `1`, countables in braces.
"""

from __future__ import annotations

from typing import Final

SCOPE: Final = "inferscope"

# Metrics, with their units.
REQUEST_DURATION: Final = "inferscope.request.duration"
STAGE_DURATION: Final = "inferscope.stage.duration"
COPY_DURATION: Final = "inferscope.copy.duration"
COPY_IO: Final = "inferscope.copy.io"
LOCK_WAIT_DURATION: Final = "inferscope.lock.wait.duration"
LOCK_HOLD_DURATION: Final = "inferscope.lock.hold.duration"
QUEUE_DURATION: Final = "inferscope.queue.duration"
FIRST_BYTE: Final = "inferscope.request.first_byte"
GC_PAUSE: Final = "inferscope.gc.pause"
DEVICE_QUEUE_DURATION: Final = "inferscope.device.queue.duration"
REQUESTS: Final = "inferscope.requests"
ITEMS: Final = "inferscope.items"
SLO_VIOLATIONS: Final = "inferscope.slo.violations"
SLO_TARGET: Final = "inferscope.slo.target"
PROFILED: Final = "inferscope.profiled"
BAND_TIME: Final = "inferscope.band.time"
BAND_REQUESTS: Final = "inferscope.band.requests"
BAND_SIZES: Final = "inferscope.band.sizes"
BAND_SIZES_SQUARED: Final = "inferscope.band.sizes.squared"
CAPTURES: Final = "inferscope.captures"
CAPTURE_STALL: Final = "inferscope.capture.stall"
SELF_DROPPED: Final = "inferscope.self.dropped"
SELF_ERRORS: Final = "inferscope.self.errors"
SELF_OVERHEAD: Final = "inferscope.self.overhead"

UNITS: Final[dict[str, str]] = {
    REQUEST_DURATION: "s",
    STAGE_DURATION: "s",
    COPY_DURATION: "s",
    COPY_IO: "By",
    LOCK_WAIT_DURATION: "s",
    LOCK_HOLD_DURATION: "s",
    QUEUE_DURATION: "s",
    FIRST_BYTE: "s",
    GC_PAUSE: "s",
    DEVICE_QUEUE_DURATION: "s",
    REQUESTS: "{request}",
    ITEMS: "{item}",
    SLO_VIOLATIONS: "{request}",
    SLO_TARGET: "s",
    PROFILED: "{request}",
    BAND_TIME: "s",
    BAND_REQUESTS: "{request}",
    BAND_SIZES: "{request}",
    BAND_SIZES_SQUARED: "1",
    CAPTURES: "{capture}",
    CAPTURE_STALL: "s",
    SELF_DROPPED: "{record}",
    SELF_ERRORS: "{error}",
    SELF_OVERHEAD: "s",
}
"""Unit of each metric."""

# Attributes.
ATTR_REQUEST: Final = "inferscope.request"
ATTR_MODEL: Final = "inferscope.model"
ATTR_CLASS: Final = "inferscope.class"
ATTR_STAGE: Final = "inferscope.stage"
ATTR_CLOCK: Final = "inferscope.clock"
ATTR_BAND: Final = "inferscope.band"
ATTR_SIZE: Final = "inferscope.size"
ATTR_TAIL: Final = "inferscope.tail"
ATTR_LOCK: Final = "inferscope.lock"
ATTR_QUEUE: Final = "inferscope.queue"
ATTR_SLO: Final = "inferscope.slo"
ATTR_COPY_DIRECTION: Final = "direction"
ATTR_COPY_SYNC: Final = "inferscope.copy.sync"
ATTR_COPY_PINNED: Final = "inferscope.copy.pinned"
ATTR_GC_GENERATION: Final = "cpython.gc.generation"
ATTR_REASON: Final = "reason"
ATTR_RESULT: Final = "result"
ATTR_OVERFLOW: Final = "otel.metric.overflow"
ERROR_TYPE: Final = "error.type"
SERVICE_NAME: Final = "service.name"
SERVICE_VERSION: Final = "service.version"
SERVICE_INSTANCE_ID: Final = "service.instance.id"
PROCESS_PID: Final = "process.pid"

# Log events (`event_name`).
EVENT_BREACH: Final = "inferscope.slo.breach"
EVENT_CAPTURE: Final = "inferscope.capture"
EVENT_INCIDENT: Final = "inferscope.incident"
EVENT_REGRESSION: Final = "inferscope.regression"
