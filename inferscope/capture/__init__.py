"""Bounded profiles of single requests while an objective is broken, and the directory that keeps them."""

from __future__ import annotations

from inferscope.capture.budget import CaptureBudget
from inferscope.capture.bundle import Bundle, list_incidents, prune, verify
from inferscope.capture.request_scoped import RequestScopedCapture, Target
from inferscope.capture.session import State

__all__ = ["Bundle", "CaptureBudget", "RequestScopedCapture", "State", "Target", "list_incidents", "prune", "verify"]
