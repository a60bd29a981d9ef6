"""CPU, bytes and device memory by stage, from retained requests, thread samples and the allocator's evidence."""

from __future__ import annotations

import base64
import json
import struct

import pytest

from inferscope.diagnose import diagnose
from inferscope.diagnose.incident import from_dict, to_dict
from inferscope.types import Breach

MS = 1_000_000
S = 1_000_000_000


@pytest.fixture(scope="module")
def document(service):
    """Retained requests whose model copies 4 KiB; slow ones spend 40 ms in it, half of that on a CPU, at one line."""
    requests = service.simulate(40, 100, seed=4, copy_rate=0, lock_rate=0)
    requests.vectors[requests.start % (2 * S) < 100 * MS, 4] += 35 * MS
    document = service.evidence(requests, [20 * MS], keep=16)
    bands, rows, samples = service.band_of(requests.wall, [20 * MS]), [], []
    chosen = [i for i in range(len(requests.wall)) if requests.wall[i] > 20 * MS] + list(range(0, len(requests.wall), 40))
    for index in dict.fromkeys(chosen):
        start, wall, spent = int(requests.start[index]), int(requests.wall[index]), int(requests.vectors[index][4])
        spans = [[4, start, start + spent, -1, 1000 + index, 0], [3, start + 1000, start + 2000, 0, 1000 + index, 4096]]
        rows.append(
            {
                "id": index, "start_ns": start, "wall_ns": wall, "band": int(bands[index]), "slow": wall > 20 * MS, "thread": 1000 + index,
                "size": None, "items": 1, "error": None, "cpu_ns": None, "voluntary": None, "involuntary": None,
                "vector": requests.vectors[index].tolist(), "spans": spans,
            }
        )  # fmt: skip
        if wall > 20 * MS:
            # four intervals inside the stage, each half of it on a CPU; the rest is blocked without a name
            part = spent // 4 // 1000
            packed = b"".join(struct.pack("<IIII", (start // 1000) + part * (n + 1), part // 2, 0, part << 3 | 0) for n in range(4))
            places = struct.pack("<4H", 1, 1, 1, 2)
            samples.append({"thread": 1000 + index, "name": f"serve-{index}", "rows": text(packed), "places": text(places)})
    document["host"] = {
        "requests": rows,
        "samples": {
            "reason": None,
            "from_ns": 0,
            "to_ns": 40 * S,
            "threads": samples,
            "places": ["", "pad (serve.py:12)", ""],
            "sites": [],
        },
        "cgroup": {},
    }
    document["device"] = {"busy": None, "memory_by_stage": [{"stage": "forward", "dynamic_bytes": 3 << 20}]}
    return json.loads(json.dumps(document))


def text(data):
    return base64.b64encode(data).decode()


def test_stages_say_what_they_cost(service, document):
    incident = diagnose(Breach(**service.breach()), [document])
    cost = next(cost for cost in incident.stages if cost.name == "forward")
    assert cost.slow_ms == pytest.approx(40.3, abs=0.5)
    assert cost.slow_cpu_ms == pytest.approx(cost.slow_ms / 2, rel=0.05)
    assert cost.ordinary_cpu_ms is None, "ordinary requests were not sampled"
    assert (cost.slow_bytes, cost.ordinary_bytes, cost.device_bytes) == (4096.0, 4096.0, 3 << 20)
    assert from_dict(to_dict(incident)).stages == incident.stages
    earlier = to_dict(incident)
    del earlier["stages"]
    assert from_dict(earlier).stages == ()


def test_the_line_of_the_application_is_named(service, document):
    finding = next(finding for finding in diagnose(Breach(**service.breach()), [document]).findings if finding.id == "MODEL_SLOW")
    assert finding.where == "forward at pad (serve.py:12)"
    assert {e.metric: e.value for e in finding.evidence}["sampled time of slow requests at pad (serve.py:12)"] == 75.0


def test_nothing_is_said_of_stages_without_retained_requests(service, document):
    blind = {**document, "host": None}
    assert diagnose(Breach(**service.breach()), [blind]).stages == ()
