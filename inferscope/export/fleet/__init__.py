"""fleet: what a whole fleet did, read back from where its replicas export to.

A `Source` asks one backend and lets it add up: Prometheus, VictoriaMetrics, ClickHouse, or the rings that replicas kept on disk.
`summarise` makes of its answers what a report shows: percentiles, exact shares above the objectives, and whose time the tail is.
"""

from __future__ import annotations

from inferscope.export.fleet.mix import Comparison, compare
from inferscope.export.fleet.source import Scope, Source, connect
from inferscope.export.fleet.summary import FleetRow, Judged, summarise
from inferscope.export.fleet.tail import FleetShare, Tail, attribute

__all__ = ["Comparison", "FleetRow", "FleetShare", "Judged", "Scope", "Source", "Tail", "attribute", "compare", "connect", "summarise"]
