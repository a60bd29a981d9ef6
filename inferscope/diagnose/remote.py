"""What clients and inference servers counted, merged over the slots of a pod."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from inferscope.remote import Calls, ServerTotals

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["merge_calls", "merge_servers"]


def _known(kind: type[Calls | ServerTotals], row: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that this version knows; newer ones are left out."""
    names = {field.name for field in dataclasses.fields(kind)}
    return {name: value for name, value in row.items() if name in names}


def _rows(document: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    remote: dict[str, list[dict[str, Any]]] = document.get("remote") or {}
    return remote.get(name) or []


def merge_calls(documents: Sequence[Mapping[str, Any]]) -> tuple[Calls, ...]:
    """Rows of the same calls added, the largest call kept."""
    found: dict[tuple[str, str, str, str], Calls] = {}
    for document in documents:
        for row in _rows(document, "calls"):
            new = Calls(**_known(Calls, row))
            held = found.get((new.system, new.method, new.model, new.server))
            if held is None:
                found[new.system, new.method, new.model, new.server] = new
                continue
            for field in dataclasses.fields(Calls):
                ours, theirs = getattr(held, field.name), getattr(new, field.name)
                if isinstance(theirs, int):
                    setattr(held, field.name, max(ours, theirs) if field.name == "largest_bytes" else (ours or 0) + theirs)
    return tuple(found.values())


def merge_servers(documents: Sequence[Mapping[str, Any]]) -> tuple[ServerTotals, ...]:
    """A server counts for all its clients, so that of the slots which asked it the longest look is kept; own requests are added."""
    found: dict[tuple[str, str, str], ServerTotals] = {}
    for document in documents:
        for row in _rows(document, "servers"):
            new = ServerTotals(**_known(ServerTotals, row))
            held = found.get((new.system, new.server, new.model))
            if held is None:
                found[new.system, new.server, new.model] = new
                continue
            longest, other = (held, new) if held.window_ns >= new.window_ns else (new, held)
            longest.own += other.own
            found[new.system, new.server, new.model] = longest
    return tuple(found.values())
