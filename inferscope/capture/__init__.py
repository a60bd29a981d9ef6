"""Bounded profiles of single requests while an objective is broken, and the directory that keeps them."""

from __future__ import annotations

from inferscope.capture.budget import CaptureBudget
from inferscope.capture.bundle import Bundle, list_incidents, verify
from inferscope.capture.plan import Plan
from inferscope.capture.request_scoped import RequestScopedCapture
from inferscope.capture.retention import prune
from inferscope.capture.session import State
from inferscope.capture.target import Target

__all__ = ["Bundle", "CaptureBudget", "Plan", "RequestScopedCapture", "State", "Target", "list_incidents", "prune", "verify"]
