"""What a real OTLP receiver is told by a whole process: exact percentiles, exact counts, the breach."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np

from inferscope.testing.receiver import OtlpReceiver, percentile

SERVICE = """
import json, random, sys, time
import inferscope as scope

scope.configure(service="receiver", slo=scope.SLO("score", p99_ms=20), endpoint=sys.argv[1], tick_s=0.05, warmup_requests=200, warmup_s=0.2)
draw = random.Random(7)
durations = []
now = time.perf_counter_ns
for n in range(9000):
    # The start lies back by the wanted time, so that thousands of requests of milliseconds take seconds and not minutes.
    slow = n > 1500 and draw.random() < 0.08
    wanted = int((draw.uniform(22, 60) if slow else draw.lognormvariate(2.2, 0.3)) * 1e6)
    request = scope.request("score", started_ns=now() - wanted)
    with request:
        start = request.start_ns
        with scope.stage("forward"):
            pass
    durations.append(now() - start)
    if n % 100 == 0:
        time.sleep(0.12)
time.sleep(0.3)
print(json.dumps({"durations": durations, "flushed": scope.flush(5.0)}))
scope.shutdown()
"""


def test_percentiles_counts_and_the_breach_arrive(tmp_path: Path) -> None:
    with OtlpReceiver() as receiver:
        done = subprocess.run(
            [sys.executable, "-c", SERVICE, receiver.url],
            env={"INFERSCOPE_STATE_DIR": str(tmp_path), "INFERSCOPE_STRICT": "1", "PATH": "/usr/bin"},
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout)
        assert told["flushed"]
        exact = np.array(told["durations"]) / 1e9
        point = receiver.last("inferscope.request.duration", **{"inferscope.request": "score"})
        assert point.buckets is not None
        assert point.buckets.count == len(exact)
        for quantile in (0.5, 0.95, 0.99):
            value = percentile(point.buckets, quantile)
            assert abs(value / float(np.quantile(exact, quantile, method="inverted_cdf")) - 1) < 0.012
        assert sum(p.value for p in receiver.metrics("inferscope.requests")[-1:]) == len(exact)
        violations = receiver.last("inferscope.slo.violations", **{"inferscope.slo": "score"}).value
        assert abs(violations - int((exact > 0.020).sum())) <= 2  # our second clock read comes a microsecond later
        (breach,) = receiver.logs("inferscope.slo.breach")
        assert breach.attributes["inferscope.slo.threshold"] == 0.020
        assert breach.attributes["inferscope.request"] == "score"
        assert receiver.spans()
