"""A hand-made incident: every number in it is easy to find again in a report."""

from __future__ import annotations

import pytest

from inferscope.types import Breach, CaptureSummary, Evidence, Finding, Incident, Latency, Share, WhatIf


@pytest.fixture
def incident():
    finding = Finding(
        id="H2D_SYNC_PAGEABLE",
        class_="communication",
        severity="high",
        confidence="high",
        where="score (serve.py:20)",
        claim="Requests block on h2d copies.",
        evidence=(
            Evidence("share of the tail's excess", 62.0, "%", (57.0, 67.0)),
            Evidence("copies that blocked the host", "90 of 100", "copies"),
            Evidence("pairs", 4, "pairs", None, "captures/c1.trace.json"),
        ),
        share=0.62,
        what_if_p99_ms=37.8,
        refute_by="Pin the buffer on one replica.",
        fix="Use pinned memory.",
        rollback="Use the old buffer.",
    )
    return Incident(
        id="20240101T000000Z-score-abcd",
        service="risk",
        path="state/risk/0/incidents/20240101T000000Z-score-abcd",
        opened_unix_ns=1,
        closed_unix_ns=None,
        state="diagnosed",
        breach=Breach("20240101T000000Z-score-abcd", "score", "score", 20.0, 0.99, 0, 1, 2, 1000, 60, "e_detector", 9.0, 2.0),
        from_ns=0,
        to_ns=60_000_000_000,
        latency_ms=Latency(8.72, 19.04, 48.06, None),
        requests=120_000,
        errors=3,
        exceeding=7_680,
        excluded=12,
        throughput_rps=2000.4,
        jitter_ms=39.34,
        device_busy=0.35,
        verdict="P99 48.1 ms: the objective P99 of 20 ms is broken; the tail's excess is copy:h2d 62 %, lock:rules 38 %.",
        attribution=(
            Share("copy:h2d", "copy", 0.62, (0.57, 0.67), 24.9, 0.38, 0.13),
            Share("lock:rules", "lock", 0.38, (0.33, 0.43), 15.02, 0.0, 0.10),
            Share("forward", "stage", 0.0, (-0.001, 0.001), 5.3, 5.3, 0.50),
            Share("other", "other", 0.0, (0.0, 0.0), 0.0, 0.0, 0.0),
        ),
        withheld=None,
        what_if=(WhatIf(("copy:h2d",), 37.8, False), WhatIf(("copy:h2d", "lock:rules"), 15.4, True)),
        findings=(finding,),
        captures=(CaptureSummary("c1", 1, (77,), True, 1234, 0.75, (7,), "captures/c1.trace.json", {"forward": 5.125, "rules": 30.5}),),
        notes=("Tail: requests above 20 ms.",),
    )
