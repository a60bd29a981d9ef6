"""Who this process is, in OpenTelemetry's words."""

from __future__ import annotations

import os

from inferscope import semconv
from inferscope.version import __version__

__all__ = ["resource"]


def resource(service: str, version: str | None, instance_id: str) -> dict[str, str | int]:
    """Resource attributes of this process; what OTEL_RESOURCE_ATTRIBUTES says beyond them stays.

    Args:
        service: `service.name`.
        version: `service.version`; None leaves it to the environment.
        instance_id: `service.instance.id`, which outlives a recycled worker.
    """
    named = dict(part.split("=", 1) for part in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "").split(",") if "=" in part)
    own: dict[str, str | int] = {
        semconv.SERVICE_NAME: service,
        semconv.SERVICE_INSTANCE_ID: instance_id,
        semconv.PROCESS_PID: os.getpid(),
        "telemetry.sdk.name": "inferscope",
        "telemetry.sdk.language": "python",
        "telemetry.sdk.version": __version__,
    }
    if version:
        own[semconv.SERVICE_VERSION] = version
    return {**named, **own}
