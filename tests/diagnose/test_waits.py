"""Time inside stages is divided by samples and pauses, and every sum stays."""

from __future__ import annotations

import base64
import copy
import json

import numpy as np
import pytest

from inferscope.diagnose import diagnose, merge
from inferscope.diagnose.waits import GIL, RUN_QUEUE, UNNAMED_LOCK, divide
from inferscope.types import Breach, Column

MS = 1_000_000
EDGE = 20 * MS
RUNNING, GIL_STATE, LOCK, SLEEP, IO = range(5)


def rows(intervals):
    """(end ms, length ms, cpu ms, delay ms, state) as the sampler packs them."""
    packed = np.array(
        [[end * 1e3, cpu * 1e3, delay * 1e3, (int(length * 1e3) << 3) | state] for end, length, cpu, delay, state in intervals]
    )
    return base64.b64encode(packed.astype(np.uint32).tobytes()).decode()


def with_host(service, document, requests, state, *, cpu=2.0, delay=0.0, pauses=(), sampled=True):
    """Slow requests lose their time inside the stage preprocess (column 2), in 10 ms intervals of one state."""
    made = copy.deepcopy(document)
    slow = np.flatnonzero(requests.wall > EDGE)[:40].tolist()
    ordinary = np.flatnonzero(requests.wall <= EDGE)[:40].tolist()
    kept, intervals = [], []
    bands = service.band_of(requests.wall, [EDGE])
    for index in slow + ordinary:
        start, wall = int(requests.start[index]), int(requests.wall[index])
        kept.append(
            {
                "id": index, "start_ns": start, "wall_ns": wall, "band": int(bands[index]), "slow": index in slow, "thread": 7, "size": None,
                "items": 1, "error": None, "cpu_ns": 9 * MS, "voluntary": 1, "involuntary": 0, "vector": requests.vectors[index].tolist(),
                "spans": [[2, start, start + wall, -1, 7]] if index in slow else [],
            }
        )  # fmt: skip
        if index in slow:
            intervals += [((start + k * 10 * MS + 10 * MS) / MS, 10, cpu, delay, state) for k in range(wall // (10 * MS))]
    made["host"] = {
        "requests": kept,
        "first_request_ns": 0,
        "gc": [list(pause) for pause in pauses],
        "scheduling": {"reason": None, "seconds": []},
        "samples": {
            "reason": None, "from_ns": 0, "to_ns": 10**9, "samples": 1, "dropped": 0, "sites": [],
            "threads": [{"thread": 7, "name": "worker", "rows": rows(sorted(intervals))}] if sampled else [],
        },
        "cgroup": {"quota": None, "allowed_cpus": 2, "cpus": 2, "ticks": []},
    }  # fmt: skip
    return json.loads(json.dumps(made))


@pytest.fixture(scope="module")
def slow_stage(service):
    requests = service.simulate(60, 200, seed=4, copy_rate=0, lock_rate=0)
    requests.vectors[requests.start % (2 * 10**9) < 10**8, 2] += 40 * MS
    return requests, service.evidence(requests, [EDGE], keep=16)


@pytest.mark.parametrize(
    ("state", "column"), [(GIL_STATE, GIL), (LOCK, UNNAMED_LOCK), (SLEEP, Column("io", "preprocess")), (IO, Column("io", "preprocess"))]
)
def test_blocked_time_goes_to_what_was_waited_for(service, slow_stage, state, column):
    requests, document = slow_stage
    before = merge([with_host(service, document, requests, state)], "score")
    after, waits = divide(before, EDGE)
    assert waits.slow == 40
    tail = after.band_lower > EDGE
    stage, wait = after.columns.index(Column("stage", "preprocess")), after.columns.index(column)
    held, was = after.band_sums[tail], before.band_sums[tail]
    assert held[:, wait].sum() == pytest.approx(0.8 * was[:, stage].sum(), rel=0.02)
    assert after.band_sums.sum(axis=1) == pytest.approx(before.band_sums.sum(axis=1))
    assert after.blocks.tail_sums.sum(axis=1) == pytest.approx(before.blocks.tail_sums.sum(axis=1))
    assert after.reservoir.vectors.sum(axis=1) == pytest.approx(before.reservoir.vectors.sum(axis=1))
    ordinary = after.band_sums[~tail]
    assert ordinary[:, wait].sum() == 0, "nothing was sampled in ordinary requests"


def test_run_queue_delay_is_the_kernels_and_a_late_one_belongs_to_the_intervals_before(service, slow_stage):
    requests, document = slow_stage
    made = with_host(service, document, requests, RUNNING, cpu=1.0, delay=9.0)
    after, waits = divide(merge([made], "score"), EDGE)
    assert waits.slow_parts["run-queue"] == pytest.approx(0.9, abs=0.02)
    assert RUN_QUEUE in after.columns
    late = copy.deepcopy(made)
    late["host"]["samples"]["threads"][0]["rows"] = rows([(10, 10, 0, 0, RUNNING), (20, 10, 2, 15, RUNNING)])
    thread = merge([late], "score").host.threads[0]
    assert thread.delay.tolist() == pytest.approx([7 * MS, 8 * MS])


def test_others_collections_are_charged_up_to_the_time_off_the_cpu(service, slow_stage):
    requests, document = slow_stage
    slow = np.flatnonzero(requests.wall > EDGE)[:40].tolist()
    pauses = sorted((int(requests.start[i]) + MS, int(requests.start[i]) + 100 * MS, 2, 99) for i in slow)
    horizon = merge([with_host(service, document, requests, RUNNING, pauses=pauses, sampled=False)], "score")
    after, waits = divide(horizon, EDGE)
    assert waits.paused == 40
    gen2 = after.columns.index(Column("gc", "gen2"))
    tail = after.band_lower > EDGE
    stage = horizon.columns.index(Column("stage", "preprocess"))
    off_cpu = sum(requests.wall[i] - 9 * MS for i in slow) / requests.vectors[slow, stage].sum()
    assert 0.9 < off_cpu < 1.0
    assert after.band_sums[tail][:, gen2].sum() / horizon.band_sums[tail][:, stage].sum() == pytest.approx(off_cpu, abs=0.05)
    own = [(start, end, generation, 7) for start, end, generation, _ in pauses]
    same, none = divide(merge([with_host(service, document, requests, RUNNING, pauses=own, sampled=False)], "score"), EDGE)
    assert none.paused == 0
    assert Column("gc", "gen2") not in same.columns, "the recorder has charged the thread that collected"


def test_without_host_evidence_nothing_is_divided(service, slow_stage):
    _, document = slow_stage
    horizon = merge([document], "score")
    assert divide(horizon, EDGE)[0] is horizon
    assert divide(horizon, None)[0] is horizon


def test_the_diagnosis_says_how_far_it_could_look(service, slow_stage):
    requests, document = slow_stage
    incident = diagnose(Breach(**service.breach()), [with_host(service, document, requests, GIL_STATE)])
    assert incident.attribution[0].name == "cpu:gil"
    assert any("40 sampled slow requests" in note for note in incident.notes)
    blind = with_host(service, document, requests, GIL_STATE, sampled=False)
    blind["host"]["samples"]["reason"] = "nothing is allowed"
    incident = diagnose(Breach(**service.breach()), [blind])
    assert {"Not measured here: nothing is allowed.", "No slow request was sampled: waits inside stages are not told apart."} <= set(
        incident.notes
    )
