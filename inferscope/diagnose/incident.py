"""One incident: from breach, evidence and captures to the diagnosis, and the diagnosis on disk."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from inferscope.costs import StageCost
from inferscope.diagnose.attribution import attribute
from inferscope.diagnose.costs import stage_costs
from inferscope.diagnose.evidence import Document, Horizon, quantile_ns, read_documents, read_json
from inferscope.diagnose.findings import Context, evaluate, model_label
from inferscope.diagnose.merging import merge
from inferscope.diagnose.rules import ALL
from inferscope.diagnose.rules.scheduling import consequences
from inferscope.diagnose.trace import StageSpan, TraceSummary, read_trace
from inferscope.diagnose.waits import divide
from inferscope.diagnose.whatif import plan
from inferscope.errors import EvidenceError
from inferscope.triggers import LATENCY, told
from inferscope.types import Breach, CaptureSummary, Evidence, Finding, Incident, Latency, Share, WhatIf

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from inferscope.diagnose.attribution import Attribution
    from inferscope.diagnose.waits import Waits

__all__ = ["SCHEMA", "breach_of", "diagnose", "from_dict", "load", "load_directory", "save", "to_dict"]

SCHEMA: Final = 1
_MS: Final = 1e6
_Value = TypeVar("_Value")


def diagnose(
    breach: Breach,
    evidence: Sequence[Document],
    captures: Sequence[tuple[Mapping[str, Any], Path | None]] = (),
    *,
    healthy: Sequence[Document] = (),
    service: str = "",
    path: str = "",
    state: str = "diagnosed",
    notes: Sequence[str] = (),
) -> Incident:
    """Explain a breach.

    Args:
        breach: What broke.
        evidence: The horizon of each slot.
        captures: Side file and trace of each kept capture; a damaged trace costs a note, not the diagnosis.
        healthy: The last healthy horizon of each slot, if kept.
        service: The service's name.
        path: Where the incident lies.
        state: The incident's state.
        notes: What the caller could not read.

    Raises:
        EvidenceError: The evidence is damaged or says nothing about the request.
    """
    horizon = original = merge(evidence, breach.request)
    base = merge(healthy, breach.request) if healthy else None
    threshold = round(breach.threshold_ms * _MS)
    horizon, waits = divide(horizon, _edge(horizon, threshold))
    base = None if base is None else divide(base, _edge(base, threshold))[0]
    attribution = attribute(horizon, _edge(horizon, threshold), base)
    model = model_label(horizon.labels, attribution.shares)
    what_if = plan(horizon, attribution, breach.threshold_ms, breach.quantile, () if model is None else (model,))
    exceeding = _exceeding(horizon, threshold, breach)
    kept, left_out = _captures(captures)
    broken = breach.threshold_ms > 0 and exceeding > (1.0 - breach.quantile) * horizon.count
    context = Context(breach, horizon, attribution, what_if, broken, kept, waits)
    findings = evaluate(context, ALL)
    latency = Latency(*(_ms(quantile_ns(horizon.latency, q)) for q in (0.50, 0.95, 0.99, 0.999)))
    span = (int(evidence[0]["from_ns"]), int(evidence[0]["to_ns"]))
    return Incident(
        *(breach.id, service, path, breach.detected_unix_ns, None, state, breach, *span),
        latency_ms=latency,
        requests=horizon.count,
        errors=horizon.errors,
        exceeding=exceeding,
        excluded=horizon.excluded,
        throughput_rps=horizon.count / horizon.seconds if horizon.seconds > 0 else 0.0,
        jitter_ms=_jitter(latency),
        device_busy=horizon.device_busy,
        verdict=_verdict(context, latency, findings),
        attribution=attribution.shares,
        withheld=attribution.withheld,
        what_if=what_if.entries,
        findings=findings,
        captures=tuple(summary for summary, _ in kept),
        notes=(*_basis(attribution), *attribution.notes, *what_if.notes, *_merged(horizon), *_divided(waits, horizon), *left_out, *notes),
        stages=stage_costs(context, original),
    )


def _jitter(latency: Latency) -> float | None:
    return None if latency.p99 is None or latency.p50 is None else latency.p99 - latency.p50


def _ms(value_ns: float | None) -> float | None:
    return None if value_ns is None else value_ns / _MS


def _edge(horizon: Horizon, threshold_ns: int) -> int | None:
    """The edge that the breach is about; without a threshold (a manual capture) the first one."""
    return threshold_ns if threshold_ns > 0 else (horizon.edges_ns[0] if horizon.edges_ns else None)


def _exceeding(horizon: Horizon, threshold_ns: int, breach: Breach) -> int:
    if threshold_ns in horizon.edges_ns:
        return horizon.violations[horizon.edges_ns.index(threshold_ns)]
    return breach.exceeding


def _basis(attribution: Attribution) -> tuple[str, ...]:
    if not attribution.shares:
        return ()
    tail = f"Tail: {attribution.tail} ({attribution.tail_requests}, mean {attribution.tail_ms:.1f} ms, {attribution.episodes} slow seconds)"
    return (f"{tail}; body: {attribution.body} (mean {attribution.body_ms:.2f} ms).",)


def _merged(horizon: Horizon) -> tuple[str, ...]:
    notes = [f"Evidence of {horizon.slots} workers is added."] if horizon.slots > 1 else []
    if horizon.classes > horizon.slots:
        notes.append(f"{horizon.classes} request classes are added.")
    if horizon.excluded:
        notes.append(
            f"{horizon.excluded} profiled requests ({100 * horizon.excluded / horizon.count:.2g} %) are counted but not in percentiles or shares."
        )
    return tuple(notes)


def _divided(waits: Waits, horizon: Horizon) -> tuple[str, ...]:
    """How far stages could be divided into work and waits."""
    if not horizon.host.requests:
        return ()
    unknown = tuple(f"Not measured here: {reason}." for reason in horizon.host.reasons)
    if not waits.slow:
        return (*unknown, "No slow request was sampled: waits inside stages are not told apart.")
    parts = ", ".join(f"{name} {100 * part:.0f} %" for name, part in waits.slow_parts.items() if part >= 0.02)
    return (*unknown, f"Time inside the stages of {waits.slow} sampled slow requests, taken for all of them: {parts}.")


def _verdict(context: Context, latency: Latency, findings: Sequence[Finding]) -> str:
    horizon, failed = context.horizon, ""
    if context.breach.trigger == "error_rate" and horizon.count:
        failed = f"{horizon.errors} of {horizon.count} requests failed ({100 * horizon.errors / horizon.count:.2g} %): the objective on errors is broken. "
    elif context.breach.trigger not in {*LATENCY, "manual"}:
        failed = f"Opened because of {told(context.breach)}. "
    return failed + _latency_verdict(context, latency, findings)


def _latency_verdict(context: Context, latency: Latency, findings: Sequence[Finding]) -> str:
    breach, attribution, what_if = context.breach, context.attribution, context.plan
    p99 = "P99 n/a" if latency.p99 is None else f"P99 {latency.p99:.1f} ms"
    objective = f"objective P{100 * breach.quantile:g} of {breach.threshold_ms:g} ms"
    if breach.threshold_ms <= 0:
        return f"{p99}: no objective is set for {breach.request}."
    if not context.objective_broken:
        return f"{p99}: the {objective} holds over this horizon."
    head = f"{p99}: the {objective} is broken"
    if attribution.withheld is not None:
        return f"{head}; {attribution.withheld}."
    causes = [share for share in attribution.shares if share.share >= 0.10 or share is attribution.shares[0]]
    named = ", ".join(f"{share.name} {100 * share.share:.0f} %" for share in causes)
    parts = [f"{head}; the tail's excess is {named}."]
    steps = [(label, what_if.p99_ms(*what_if.greedy[: position + 1])) for position, label in enumerate(what_if.greedy)]
    if steps:
        said = "; then ".join(f"{label} fixed: about {value:.1f} ms" for label, value in steps if value is not None)
        final = next((entry for entry in what_if.entries if set(entry.fix) == set(what_if.greedy)), None)
        parts.append(f"{said}{', which meets the objective' if final is not None and final.meets_objective else ''}.")
    parts += [f"The wait in {queue} follows from {cause}, which occupies the workers." for queue, cause in consequences(context)]
    if any(finding.id == "MODEL_NOT_THE_CAUSE" for finding in findings):
        parts.append("The model is not the cause.")
    return " ".join(parts)


def _captures(
    captures: Sequence[tuple[Mapping[str, Any], Path | None]],
) -> tuple[tuple[tuple[CaptureSummary, TraceSummary], ...], tuple[str, ...]]:
    """Kept captures with what their traces say, and a note for each that cannot be read."""
    kept: list[tuple[CaptureSummary, TraceSummary]] = []
    notes: list[str] = []
    for side, path in captures:
        try:
            summary = _summary(side)
            trace = read_trace(path, _spans(side)) if path is not None else TraceSummary(0, (), 0.0, 0, (), (), (), 0, 0, 0, None)
        except EvidenceError as error:
            notes.append(f"Capture left out: {error}.")
            continue
        except (KeyError, TypeError, ValueError) as error:
            notes.append(f"Capture {side.get('id', '?')} left out: damaged side file ({type(error).__name__}: {error}).")
            continue
        events = summary.events if path is None else trace.events
        kept.append((replace(summary, events=events, stages={label: round(ms, 3) for label, ms in trace.stages_ms.items()}), trace))
    return tuple(kept), tuple(notes)


def _summary(side: Mapping[str, Any]) -> CaptureSummary:
    stall: Mapping[str, float] = side.get("stall_ms") or {}
    request = side.get("request_id")
    return CaptureSummary(
        id=str(side["id"]),
        tier=int(side.get("tier") or 1),
        requests=tuple(int(each) for each in side.get("requests") or (() if request is None else (request,))),
        slow=bool(side.get("slow")),
        events=side.get("events"),
        stall_ms=round(float(stall.get("start") or 0.0) + float(stall.get("stop") or 0.0), 3),
        threads=tuple(int(thread) for thread in side.get("threads") or ()),
        trace=str(side.get("trace") or ""),
    )


def _spans(side: Mapping[str, Any]) -> list[StageSpan]:
    offset = int(side.get("unix_offset_ns") or 0)
    spans = [StageSpan(str(s["column"]), s["start_ns"] + offset, s["end_ns"] + offset, int(s["thread"])) for s in side.get("spans") or ()]
    region = side.get("region")
    if not spans and region and region.get("end_ns") is not None:
        spans = [StageSpan(str(region["name"]), region["start_ns"] + offset, region["end_ns"] + offset, int(region["thread"]))]
    return spans


def load_directory(directory: Path) -> Incident:
    """Read breach, evidence and captures of an incident directory and diagnose them.

    Raises:
        EvidenceError: The directory lacks `breach.json` or evidence, or they are damaged.
    """
    if not directory.is_dir():
        msg = f"{directory}: no such incident"
        raise EvidenceError(msg)
    breach = breach_of(read_json(directory / "breach.json"))
    evidence = read_documents(directory)
    if not evidence:
        msg = f"{directory.name}: no evidence-*.json"
        raise EvidenceError(msg)
    captures: list[tuple[Document, Path | None]] = []
    notes: list[str] = []
    for path in sorted((directory / "captures").glob("*.json")):
        if not path.name.endswith(".trace.json"):
            try:
                side = read_json(path)
            except EvidenceError as error:
                notes.append(f"Capture left out: {error}.")
            else:
                captures.append((side, directory / str(side["trace"]) if side.get("trace") else None))
    service = directory.resolve().parent.parent.parent.name
    healthy = read_documents(directory, "healthy")
    return diagnose(breach, evidence, captures, healthy=healthy, service=service, path=str(directory), notes=notes)


def breach_of(document: Document) -> Breach:
    """The breach of a `breach.json`.

    Raises:
        EvidenceError: A key is missing.
    """
    try:
        return Breach(**{field.name: document[field.name] for field in fields(Breach)})
    except KeyError as error:
        msg = f"breach.json: {error} is missing"
        raise EvidenceError(msg) from error


def to_dict(incident: Incident) -> Document:
    """The incident as JSON types, with the schema's number."""
    return {"schema": SCHEMA, **cast("Document", json.loads(json.dumps(asdict(incident))))}


def from_dict(document: Document) -> Incident:
    """The inverse of `to_dict`; keys that a later version added are ignored.

    Raises:
        EvidenceError: A key is missing, or the schema is newer.
    """
    if document.get("schema", SCHEMA) > SCHEMA:
        msg = f"diagnosis of schema {document['schema']}: this version reads {SCHEMA}"
        raise EvidenceError(msg)
    try:
        known = {field.name: document[field.name] for field in fields(Incident) if field.name != "stages"}
        known["stages"] = tuple(_build(StageCost, row) for row in document.get("stages") or ())  # diagnoses of earlier versions have none
        known["breach"] = _build(Breach, document["breach"])
        known["latency_ms"] = _build(Latency, document["latency_ms"])
        known["attribution"] = tuple(_build(Share, row) for row in document["attribution"])
        known["what_if"] = tuple(_build(WhatIf, row) for row in document["what_if"])
        known["findings"] = tuple(_finding(row) for row in document["findings"])
        known["captures"] = tuple(_build(CaptureSummary, row) for row in document["captures"])
        known["notes"] = tuple(document["notes"])
        return Incident(**known)
    except (KeyError, TypeError) as error:
        msg = f"damaged diagnosis: {type(error).__name__}: {error}"
        raise EvidenceError(msg) from error


def _finding(row: Document) -> Finding:
    return _build(Finding, {**row, "evidence": tuple(_build(Evidence, item) for item in row["evidence"])})


def _build(cls: type[_Value], row: Document) -> _Value:
    """Construct a dataclass from JSON: lists become tuples, unknown keys are dropped."""
    names = {field.name for field in fields(cast(Any, cls))}
    return cls(**{name: _frozen(value) for name, value in row.items() if name in names})


def _frozen(value: object) -> object:
    return tuple(cast("list[object]", value)) if isinstance(value, list) else value


def save(incident: Incident, directory: Path) -> Path:
    """Write `diagnosis-<n>.json` with the next free n, atomically, readable by the owner only."""
    numbers = [int(match[1]) for path in directory.glob("diagnosis-*.json") if (match := re.fullmatch(r"diagnosis-(\d+)\.json", path.name))]
    target = directory / f"diagnosis-{max(numbers, default=0) + 1}.json"
    partial = target.with_suffix(".json.partial")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(to_dict(incident), file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(target)
    return target


def load(directory: Path) -> Incident:
    """The newest diagnosis of an incident directory.

    Raises:
        EvidenceError: There is none, or it is damaged.
    """
    found = [
        (int(match[1]), path) for path in directory.glob("diagnosis-*.json") if (match := re.fullmatch(r"diagnosis-(\d+)\.json", path.name))
    ]
    if not found:
        msg = f"{directory}: not diagnosed yet"
        raise EvidenceError(msg)
    return from_dict(read_json(max(found)[1]))
