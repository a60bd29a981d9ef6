"""detect: windows and objectives in, breaches out; fires on evidence and not on noise, and never pages anybody."""

from __future__ import annotations

from inferscope.detect.detector import Detector, Firing
from inferscope.detect.slo import SLO, Counts, check_objectives, count, edges_by_request
from inferscope.detect.trigger import ObjectiveState, Trigger, breach_id

__all__ = ["SLO", "Counts", "Detector", "Firing", "ObjectiveState", "Trigger", "breach_id", "check_objectives", "count", "edges_by_request"]
