"""The rooms of one process, wired: `Rooms` is the page to read; `outlet` is what it hands to export."""

from __future__ import annotations

from inferscope.rooms.process import Rooms

__all__ = ["Rooms"]
