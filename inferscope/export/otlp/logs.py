"""Breaches, captures and incidents as OTLP log events.

An incident's event carries the diagnosis and the root hash of its evidence, so that whoever can write on the box cannot rewrite what
happened. Events hold names, numbers, paths and hashes; never payloads, tensor values or messages of exceptions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from inferscope import semconv
from inferscope.clock import NS_PER_MS
from inferscope.triggers import told

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from inferscope.types import Breach, CaptureSummary, Incident, Share

__all__ = ["INFO", "WARN", "Event", "breach_event", "capture_event", "incident_event", "regression_event"]

INFO: Final = 9
"""OTLP severity number INFO."""
WARN: Final = 13
"""OTLP severity number WARN."""

_SHARES: Final = 8


@dataclass(frozen=True, slots=True)
class Event:
    """One log record with an event name."""

    name: str
    time_unix_ns: int
    body: str
    """A sentence for people."""
    attributes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Scalars, and mappings or sequences of them; absent values are left out."""
    severity: int = INFO
    trace: tuple[str, str] | None = None
    """Trace and span id in hex."""

    @property
    def severity_text(self) -> str:
        """OTLP's short name of the severity."""
        return "WARN" if self.severity >= WARN else "INFO"


def _present(attributes: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in attributes.items() if value is not None}


def _objective(breach: Breach) -> dict[str, Any]:
    return {
        "inferscope.incident.id": breach.id,
        semconv.ATTR_REQUEST: breach.request,
        semconv.ATTR_SLO: breach.slo,
        "inferscope.slo.quantile": breach.quantile,
        "inferscope.slo.threshold": breach.threshold_ms / 1e3,
    }


def breach_event(breach: Breach, path: str | None = None, root_hash: str | None = None) -> Event:
    """Said when the evidence says that an objective does not hold; `path` and `root_hash` are those of the incident that was opened."""
    return Event(
        name=semconv.EVENT_BREACH,
        time_unix_ns=breach.detected_unix_ns,
        severity=WARN,
        body=f"{breach.request}: {told(breach)} ({breach.trigger})",
        attributes=_present(
            {
                **_objective(breach),
                "inferscope.breach.trigger": breach.trigger,
                "inferscope.breach.requests": breach.requests,
                "inferscope.breach.exceeding": breach.exceeding,
                "inferscope.breach.statistic": float(breach.statistic),
                "inferscope.breach.design_effect": float(breach.design_effect),
                "inferscope.breach.detection_delay": (breach.detected_ns - breach.onset_ns) / 1e9,
                "inferscope.artefact.path": path,
                "inferscope.artefact.sha256": root_hash,
            }
        ),
    )


def capture_event(capture: CaptureSummary, incident: str | None, time_unix_ns: int, reason: str, *, sha256: str | None = None) -> Event:
    """Said for each kept capture, with the artefact's path inside the incident and its hash."""
    return Event(
        name=semconv.EVENT_CAPTURE,
        time_unix_ns=time_unix_ns,
        body=f"capture {capture.id}: tier {capture.tier}, {'slow' if capture.slow else 'healthy'} request, stall {capture.stall_ms:g} ms",
        attributes=_present(
            {
                "inferscope.incident.id": incident,
                "inferscope.capture.id": capture.id,
                "inferscope.capture.tier": capture.tier,
                "inferscope.capture.slow": capture.slow,
                "inferscope.capture.reason": reason,
                "inferscope.capture.events": capture.events,
                semconv.CAPTURE_STALL: capture.stall_ms / 1e3,
                "inferscope.artefact.path": capture.trace,
                "inferscope.artefact.sha256": sha256,
            }
        ),
    )


def incident_event(incident: Incident, root_hash: str | None) -> Event:
    """Said when an incident's diagnosis is published; `root_hash` is the SHA-256 of the last manifest."""
    breach = incident.breach
    return Event(
        name=semconv.EVENT_INCIDENT,
        time_unix_ns=incident.closed_unix_ns or breach.detected_unix_ns,
        severity=WARN,
        body=incident.verdict,
        attributes=_present(
            {
                **_objective(breach),
                "inferscope.incident.state": incident.state,
                "inferscope.incident.verdict": incident.verdict,
                "inferscope.incident.duration": (incident.to_ns - incident.from_ns) / 1e9,
                "inferscope.incident.requests": incident.requests,
                "inferscope.incident.exceeding": incident.exceeding,
                "inferscope.incident.errors": incident.errors,
                "inferscope.incident.excluded": incident.excluded,
                "inferscope.incident.withheld": incident.withheld,
                "inferscope.latency.p50": _seconds(incident.latency_ms.p50),
                "inferscope.latency.p95": _seconds(incident.latency_ms.p95),
                "inferscope.latency.p99": _seconds(incident.latency_ms.p99),
                "inferscope.latency.p999": _seconds(incident.latency_ms.p999),
                "inferscope.incident.shares": [_share(item) for item in incident.attribution[:_SHARES]],
                "inferscope.incident.findings": [f"{item.id} ({item.confidence}): {item.claim}" for item in incident.findings],
                "inferscope.artefact.path": incident.path,
                "inferscope.artefact.sha256": root_hash,
            }
        ),
    )


def regression_event(title: str, verdicts: Sequence[Mapping[str, Any]], time_unix_ns: int, artefacts: Mapping[str, str]) -> Event:
    """Said when a comparison found a version worse.

    Args:
        title: What was compared.
        verdicts: Each with `metric`, `word`, `base`, `candidate`, `change`, `low` and `high`.
        time_unix_ns: When.
        artefacts: SHA-256 by the path of what was compared.
    """
    worse = [str(each["metric"]) for each in verdicts if each["word"] == "REGRESSED"]
    kept = ("metric", "word", "base", "candidate", "change", "low", "high")
    return Event(
        name=semconv.EVENT_REGRESSION,
        time_unix_ns=time_unix_ns,
        severity=WARN,
        body=f"{title}: {', '.join(worse)} regressed",
        attributes=_present(
            {
                "inferscope.regression.title": title,
                "inferscope.regression.metrics": worse,
                "inferscope.regression.verdicts": [_present({name: each.get(name) for name in kept}) for each in verdicts],
                "inferscope.artefact.path": ", ".join(artefacts) or None,
                "inferscope.artefact.sha256": ", ".join(artefacts.values()) or None,
            }
        ),
    )


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds * NS_PER_MS / 1e9


def _share(share: Share) -> dict[str, Any]:
    low, high = share.ci or (None, None)
    return _present({"name": share.name, "kind": share.kind, "share": float(share.share), "ci_low": low, "ci_high": high})
