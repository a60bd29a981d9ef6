"""The service with two faults that a mean profile does not show: four copies a request, and a lock that is now and then held long.

python -m examples.risk_scoring.slow --port 8000
uvicorn --workers 4 examples.risk_scoring.slow:app
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __package__ in {None, ""}:  # run by path
    sys.path.insert(0, str(Path(__file__).parents[2]))

import inferscope as scope
from examples.risk_scoring import rules, service

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch

    from examples.risk_scoring import truth

scope.configure(service="risk-scoring", slo=scope.SLO("score", p99_ms=20))
scope.instrument("torch", "copies", "asgi", "anyio")
rules_lock = scope.lock("rules", threading.Lock())


class Slow(service.Scoring):
    """Pageable synchronous copies; rules under a lock."""

    def upload(self, columns: list[torch.Tensor]) -> list[torch.Tensor]:
        """First fault: each column is copied by itself from pageable memory, and takes its turn behind whatever is copied just then."""
        return [self.device.to_device(column) for column in columns]

    def decide(self, facts: dict[str, float], trail: truth.Trail) -> rules.Verdict:
        """Reads the rules under the lock."""
        asked = time.perf_counter_ns()
        with rules_lock:
            trail.add("lock:rules", time.perf_counter_ns() - asked)
            return rules.apply(self.rules, facts)

    def reload_rules(self, milliseconds: float) -> None:
        """Second fault: the lock is held while the store answers, and every request waits with it."""
        with rules_lock:
            self.rules = rules.parse(self.store.fetch(milliseconds))

    def queue(self) -> AbstractContextManager[Any]:
        """The queue that work goes to when nobody says anything."""
        return self.device.usual_stream()


app = service.application(Slow)

if __name__ == "__main__":
    service.run(app, "Risk scoring with two planted faults.")
