"""What a worker holds of an open incident, and what the rest of the process lends to whoever keeps it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from inferscope.capture import guards
from inferscope.capture.bundle import Bundle, write_atomic
from inferscope.capture.encode import encoded
from inferscope.capture.session import State, loaded_torch
from inferscope.clock import NS_PER_S, now_ns
from inferscope.errors import EvidenceError
from inferscope.types import Breach

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from inferscope.capture.budget import CaptureBudget
    from inferscope.capture.plan import Plan
    from inferscope.capture.request_scoped import RequestScopedCapture
    from inferscope.pod import Pod

__all__ = [
    "Open",
    "Sources",
    "is_healthy",
    "manual_refusal",
    "objective_json",
    "parts_are_there",
    "read_breach",
    "share_of",
    "shares",
    "still_wanted",
    "write_evidence",
]

_MIN_HEALTHY: Final = 200
"""Requests below which nothing is called healthy."""


@dataclass(frozen=True, slots=True)
class Sources:
    """What the keeper needs of the rest of the process."""

    pod: Pod
    budget: CaptureBudget
    evidence: Callable[[str, int, int], dict[str, Any]]
    """(request, from_ns, to_ns) to the evidence document of this worker."""
    objective: Callable[[str], Mapping[str, Any]]
    """An objective's name to its JSON form."""
    fingerprint: Callable[[], Mapping[str, Any]]
    versions: Mapping[str, str | None]
    body_ns: Callable[[str], tuple[float, float] | None]
    """A request's P40 and P60, ns."""
    emit: Callable[[str, Breach, Path, str | None], None]
    """(what, breach, directory, root hash): "opened", "diagnosed" or "closed"."""
    looks: tuple[Any, Any] = (None, None)
    """The recorder's `_open` and `_stack`, where the core has them."""
    diagnose: str = "local"
    on_incident: Callable[[Path], None] | None = None


@dataclass(slots=True)
class Open:
    """The incident that this worker takes part in."""

    breach: Breach
    directory: Path
    until_ns: int
    bundle: Bundle | None = None
    """None in a worker that does not own it, and before it is made."""
    owned: bool = False
    armed: bool = False
    collected: bool = False
    asked: bool = False
    settled_ns: int = 0
    """When the owner stops waiting for the other workers' parts."""
    complete: bool = False
    """Whether those parts are there."""
    closing: bool = False
    ended: bool = False
    """Whether the owner's last manifest is on its way."""
    plan: Plan | None = None
    """What a manual capture asked for; None for a breach."""
    asked_by: Mapping[str, Any] | None = None
    """Who asked for a manual capture, and why."""

    def adopt(self) -> None:
        """Continue the chain of manifests of an owner that is gone."""
        self.bundle = Bundle.open(self.directory)
        self.asked = self.asked or any(self.directory.glob("diagnosis-*.json"))

    def seal(self) -> None:
        """List what lies there and publish it."""
        if self.bundle is not None:
            self.bundle.add_rest()
            self.bundle.publish("captured")


def share_of(total: int, rank: int, workers: int) -> int:
    """Part of a pod's budget that the worker with that rank, from 0, has."""
    return total // workers + (rank < total % workers)


def shares(budget: CaptureBudget, pod: Pod) -> tuple[int, int]:
    """Slow and ordinary profiles that this worker may keep, so that the pod as a whole keeps to its budget."""
    workers = pod.workers(now_ns())
    rank, many = (workers.index(pod.slot.index), len(workers)) if pod.slot.index in workers else (0, 1)
    return share_of(budget.slow, rank, many), share_of(budget.body, rank, many)


def manual_refusal(capture: RequestScopedCapture | None, root: Path, budget: CaptureBudget, plan: Plan) -> str | None:
    """Why a capture that somebody asks for is denied at present, in words; None when it is not."""
    if capture is None:
        return "captures are off (INFERSCOPE_CAPTURE=0 or capture=False)"
    if capture.state in {State.DISABLED, State.TRIPPED}:
        return f"{guards.REASONS[capture.state.value]} ({capture.recording.machine.reason or 'no reason given'})"
    reason = guards.arm_refusal(root, age_ns=0, ttl_ns=NS_PER_S, free_memory_bytes=budget.free_memory_mb << 20)
    if reason is None and plan.windows:
        reason = capture.windows.refusal(loaded_torch(), budget)
    return None if reason is None else guards.REASONS[reason]


def is_healthy(document: Mapping[str, Any], breach: Breach) -> bool:
    """Whether the objective held in what `document` covers, with enough requests to say so."""
    counted = sum(row["count"] for row in document["classes"])
    exceeding = sum(row["violations"][0] for row in document["classes"] if row["violations"])
    return bool(counted >= _MIN_HEALTHY and exceeding <= (1 - breach.quantile) * counted)


def parts_are_there(pod: Pod, directory: Path) -> bool:
    """Whether every live worker's evidence lies in the incident."""
    there = {path.name.split("-")[1] for path in directory.glob("evidence-*-1.json")}
    return all(str(index) in there for index in pod.workers(now_ns()))


def still_wanted(pod: Pod, directory: Path) -> bool:
    """Whether the owner has not closed the incident: what comes after that would look like tampering."""
    word = pod.announcement()
    return word is not None and word.open and word.directory == str(directory)


def write_evidence(path: Path, document: Mapping[str, Any]) -> None:
    """Write a document beside the others, in small slices.

    Raises:
        EvidenceError: It cannot be written.
    """
    write_atomic(path, encoded(document))


def read_breach(directory: Path) -> Breach:
    """The breach of an incident that another worker opened.

    Raises:
        EvidenceError: It is damaged or from another version.
    """
    try:
        document = json.loads((directory / "breach.json").read_text(encoding="utf-8"))
        return Breach(**{name: document[name] for name in Breach.__dataclass_fields__})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EvidenceError(f"breach.json of {directory.name} cannot be used: {type(error).__name__}") from error


def objective_json(slo: Any) -> dict[str, Any]:
    """An objective as JSON types."""
    return {
        "name": slo.name,
        "quantile": slo.quantile,
        "threshold_ms": slo.threshold_ms,
        **{k: v for k, v in asdict(slo).items() if k != "_"},
    }
