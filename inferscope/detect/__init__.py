"""detect: windows and objectives in, breaches out; fires on evidence and not on noise, and never pages anybody."""

from __future__ import annotations

from inferscope.detect.counting import Counts, count
from inferscope.detect.detector import Detector
from inferscope.detect.phases import Firing
from inferscope.detect.signals import Facts
from inferscope.detect.slo import SLO, check_objectives, edges_by_request
from inferscope.detect.trigger import ObjectiveState, Trigger, breach_id

__all__ = [
    "SLO",
    "Counts",
    "Detector",
    "Facts",
    "Firing",
    "ObjectiveState",
    "Trigger",
    "breach_id",
    "check_objectives",
    "count",
    "edges_by_request",
]
