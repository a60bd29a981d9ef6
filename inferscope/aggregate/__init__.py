"""aggregate: a recorder's running totals become windows, and windows become a history that fits in memory.

No thread and no loop over counts: `Aggregator.tick` gives a `Window`, `Horizon.add` takes it, `Horizon.evidence` tells what happened.
"""

from __future__ import annotations

from inferscope.aggregate.histogram import merge, percentiles
from inferscope.aggregate.horizon import Horizon
from inferscope.aggregate.reservoir import Reservoir
from inferscope.aggregate.window import Aggregator, ClassTotals

__all__ = ["Aggregator", "ClassTotals", "Horizon", "Reservoir", "merge", "percentiles"]
