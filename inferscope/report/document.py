"""An incident as JSON types for machines: stable keys, milliseconds, fractions."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from inferscope.report import words

if TYPE_CHECKING:
    from inferscope.types import CaptureSummary, Evidence, Finding, Incident

__all__ = ["to_json"]


def to_json(incident: Incident) -> dict[str, Any]:
    """The incident's numbers and findings; unknown values are None.

    Args:
        incident: A diagnosis.
    """
    breach, latency = incident.breach, incident.latency_ms
    return {
        "schema": 1,
        "id": incident.id,
        "state": incident.state,
        "service": incident.service,
        "slo": {
            "name": breach.slo,
            "request": breach.request,
            "quantile": breach.quantile,
            "threshold_ms": breach.threshold_ms,
            "trigger": breach.trigger,
            "exceeding": incident.exceeding,
            "broken": not words.held(incident),
        },
        "verdict": incident.verdict,
        "latency_ms": {"p50": latency.p50, "p95": latency.p95, "p99": latency.p99, "p999": latency.p999},
        "requests": incident.requests,
        "errors": incident.errors,
        "excluded": incident.excluded,
        "throughput_rps": incident.throughput_rps,
        "jitter_ms": incident.jitter_ms,
        "device_busy": incident.device_busy,
        "attribution": [
            {
                "name": share.name,
                "kind": share.kind,
                "share": share.share,
                "ci": None if share.ci is None else list(share.ci),
                "tail_ms": share.tail_ms,
                "body_ms": share.body_ms,
                "mean_share": share.mean_share,
            }
            for share in incident.attribution
        ],
        "withheld": incident.withheld,
        "what_if": [
            {
                "fix": list(entry.fix),
                "p99_ms": entry.p99_ms,
                "meets_objective": entry.meets_objective,
                "ci": None if entry.ci is None else list(entry.ci),
            }
            for entry in incident.what_if
        ],
        "stages": [dataclasses.asdict(cost) for cost in incident.stages],
        "findings": [_finding(finding) for finding in incident.findings],
        "captures": [_capture(capture) for capture in incident.captures],
        "notes": list(incident.notes),
        "incident": incident.path,
    }


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "id": finding.id,
        "class": finding.class_,
        "severity": finding.severity,
        "confidence": finding.confidence,
        "where": finding.where,
        "claim": finding.claim,
        "evidence": [_evidence(evidence) for evidence in finding.evidence],
        "share": finding.share,
        "what_if_p99_ms": finding.what_if_p99_ms,
        "refute_by": finding.refute_by,
        "fix": finding.fix,
        "rollback": finding.rollback,
    }


def _evidence(evidence: Evidence) -> dict[str, Any]:
    return {
        "metric": evidence.metric,
        "value": evidence.value,
        "unit": evidence.unit,
        "ci": None if evidence.ci is None else list(evidence.ci),
        "artefact": evidence.artefact,
    }


def _capture(capture: CaptureSummary) -> dict[str, Any]:
    return {
        "id": capture.id,
        "tier": capture.tier,
        "slow": capture.slow,
        "requests": list(capture.requests),
        "events": capture.events,
        "stall_ms": capture.stall_ms,
        "threads": list(capture.threads),
        "trace": capture.trace,
        "stages": dict(capture.stages),
    }
