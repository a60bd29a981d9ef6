"""Threads are sampled now and then while all is well, and all the time while an objective burns, without any incident."""

from __future__ import annotations

import json


def test_sampling_follows_the_objective(script):
    source = """
import json, time
import inferscope as scope
scope.configure(service="sampled", slo=scope.SLO("score", p99_ms=100), tick_s=0.1)
said = []
def serve(seconds, length):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with scope.request("score"):
            time.sleep(length)
    said.append(scope.status()["host"]["sampler"])
serve(0.5, 0.01)
serve(0.9, 0.15)
said.append(scope.status()["incident"])
serve(2.5, 0.01)
print(json.dumps(said))
scope.shutdown()
"""
    done = script(source)
    assert done.returncode == 0, done.stderr
    calm, burning, incident, after = json.loads(done.stdout)
    if not calm.startswith("one part"):  # where nothing can be sampled it says why
        assert calm == burning == after
        return
    assert (calm, burning, incident, after) == ("one part in 16", "armed", None, "one part in 16")
