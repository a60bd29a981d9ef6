"""The pure-Python twin under one name, as `core` imports it."""

from __future__ import annotations

from inferscope.record.pure.noop import NOOP, Noop
from inferscope.record.pure.recorder import Recorder
from inferscope.record.pure.request import Request
from inferscope.record.pure.span import Span

__all__ = ["NOOP", "Noop", "Recorder", "Request", "Span"]
