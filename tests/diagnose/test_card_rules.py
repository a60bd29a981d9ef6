"""Rules about cards, loaders, new shapes and lost workers, on hand-made host and device evidence."""

from __future__ import annotations

import copy
import json

import pytest

from inferscope.diagnose import diagnose
from inferscope.types import Breach

MS = 1_000_000
S = 1_000_000_000
CARD = "GPU-1"


@pytest.fixture(scope="module")
def slow_model(service):
    """A minute in which the model is slow during 100 ms of every other second; its slow and some ordinary requests are retained."""
    requests = service.simulate(60, 100, seed=4, copy_rate=0, lock_rate=0)
    requests.vectors[requests.start % (2 * S) < 100 * MS, 4] += 35 * MS
    document = service.evidence(requests, [20 * MS], keep=16)
    wall = requests.wall
    chosen = [*[i for i in range(len(wall)) if wall[i] > 20 * MS], *range(0, len(wall), 40)]
    bands = service.band_of(wall, [20 * MS])
    document["host"] = {
        "requests": [retained(requests, i, int(bands[i])) for i in dict.fromkeys(chosen)], "first_request_ns": -100 * S, "gc": [],
        "scheduling": {"reason": None, "seconds": []}, "samples": {"reason": None, "from_ns": None, "to_ns": None, "threads": [], "sites": []},
        "cgroup": {"quota": None, "allowed_cpus": 2, "cpus": 2, "ticks": []},
    }  # fmt: skip
    return json.loads(json.dumps(document))


def retained(requests, index, band):
    wall = int(requests.wall[index])
    return {
        "id": index, "start_ns": int(requests.start[index]), "wall_ns": wall, "band": band, "slow": wall > 20 * MS, "thread": 7, "size": 1.0,
        "items": 1, "error": None, "cpu_ns": None, "voluntary": None, "involuntary": None, "vector": requests.vectors[index].tolist(), "spans": [],
        "shape": [8, 16], "new_shape": False,
    }  # fmt: skip


def found(service, document):
    return {finding.id: finding for finding in diagnose(Breach(**service.breach()), [document]).findings}


def values(finding):
    return {evidence.metric: evidence.value for evidence in finding.evidence}


def looks(document, what):
    """One look a second, `what(second)` gives clock, reasons and allocator."""
    made = copy.deepcopy(document)
    rows = []
    for second in range(60):
        hz, why, memory = what(second)
        rows.append([second * S + S // 5, {CARD: hz}, {CARD: why}, {"cuda:0": memory}])
    made["device"] = {"busy": None, "source": None, "looks": rows, "spans": []}
    return made


def test_clocks_that_are_slow_when_requests_are(service, slow_model):
    hot = looks(slow_model, lambda second: (600_000_000, ["sw_thermal"], {}) if second % 2 == 0 else (1_980_000_000, [], {}))
    finding = found(service, hot)["CLOCK_THROTTLE"]
    assert (finding.severity, finding.confidence, finding.where) == ("high", "high", "clocks: sw_thermal")
    assert values(finding)["lowest clock meanwhile"] == 600
    capped = looks(slow_model, lambda second: (1_900_000_000, ["sw_power_cap"] if second % 2 == 0 else [], {}))
    assert "CLOCK_THROTTLE" not in found(service, capped), "a reason without a lower clock"
    always = looks(slow_model, lambda _: (600_000_000, ["sw_thermal"], {}))
    assert "CLOCK_THROTTLE" not in found(service, always), "ordinary requests ran so too"
    assert "CLOCK_THROTTLE" not in found(service, slow_model)


@pytest.mark.parametrize(("split", "id_"), [(1 << 28, "OOM_NEAR"), (30 << 30, "MEM_FRAGMENTATION")])
def test_allocations_that_flush_the_cache(service, slow_model, split, id_):
    def memory(second):
        row = {
            "retries": 3 * (second // 2),
            "reserved_bytes": 74 << 30,
            "inactive_split_bytes": split,
            "total_bytes": 80 << 30,
            "free_bytes": 2 << 30,
        }
        return 1_980_000_000, [], row

    assert id_ not in found(service, looks(slow_model, lambda second: memory(second + 1))), "they rise in the seconds in between"
    finding = found(service, looks(slow_model, memory))[id_]
    assert (finding.class_, finding.severity) == ("memory", "high")
    assert values(finding)["of the card's memory in use"] == 97.5


def test_work_that_stands_in_the_devices_queue(service, slow_model):
    made = copy.deepcopy(slow_model)
    rows = [
        [r["id"], "forward", r["start_ns"], r["start_ns"] + (34 * MS if r["slow"] else 20_000), 5 * MS, 34 * MS if r["slow"] else 20_000]
        for r in made["host"]["requests"]
    ]
    made["device"] = {"busy": 0.9, "source": "nvml", "looks": [], "spans": rows}
    finding = found(service, made)["GPU_QUEUE_CONTENTION"]
    assert (finding.severity, finding.where) == ("high", "device queue, foreign work")
    assert values(finding)["wait in the device's queue, slow requests, median"] == 34.0
    for row in rows:
        row[5] = 20_000
    assert "GPU_QUEUE_CONTENTION" not in found(service, made)


def test_waiting_for_other_requests_work_is_a_queue_of_our_own(service, document):
    made = copy.deepcopy(document)
    made["columns"][5] = ["gpu-queue", ""]
    finding = found(service, made)["GPU_QUEUE_CONTENTION"]
    assert (finding.where, finding.what_if_p99_ms is not None) == ("device queue, own work", True)
    assert "other requests of this process" in finding.claim


def test_new_shapes_are_told_by_the_model(service, slow_model):
    made = copy.deepcopy(slow_model)
    for number, row in enumerate(made["host"]["requests"]):
        if row["slow"]:
            row["shape"], row["new_shape"] = [8, 16 + number], True
    finding = found(service, made)["DYNAMIC_SHAPES"]
    assert (finding.severity, values(finding)["slow requests with a shape new to the process"]) == ("high", 100.0)
    for row in made["host"]["requests"]:
        row["new_shape"] = None
    assert "DYNAMIC_SHAPES" not in found(service, made)
    assert "DYNAMIC_SHAPES" not in found(service, slow_model)


def test_processes_that_load_data_compete(service, slow_model):
    made = copy.deepcopy(slow_model)
    made["columns"][4] = ["cpu", "run-queue"]
    made["host"]["children"] = [[second * S + S // 2, S, (1600 if second % 2 == 0 else 0) * MS] for second in range(60)]
    finding = found(service, made)["LOADER_COMPETES"]
    assert finding.where == "processes that this one started on the service's CPUs"
    assert values(finding)["CPUs used by processes that this one started meanwhile"] == 1.6
    made["host"]["children"] = [[second * S + S // 2, S, 10 * MS] for second in range(60)]
    assert "LOADER_COMPETES" not in found(service, made)


def test_a_worker_that_stopped_is_counted_out(service):
    requests = service.simulate(60, 150, seed=5, copy_rate=0, lock_rate=0)
    requests.vectors[:, 4] = 16 * MS
    late = requests.start > 30 * S
    requests.vectors[late, 6] += 60 * MS * (requests.start[late] % (2 * S) < S)
    document = service.evidence(requests, [40 * MS], keep=16)
    document["columns"][6] = ["queue", "backlog"]
    bands = service.band_of(requests.wall, [40 * MS])
    rows, workers = [], {False: (1, 2, 3, 4), True: (1, 2, 3)}
    for number, index in enumerate(range(0, len(requests.wall), 8)):
        row = retained(requests, index, int(bands[index]))
        gone = bool(late[index])
        # each worker serves its requests one after another
        row |= {"thread": workers[gone][number % len(workers[gone])], "cpu_ns": 1, "slow": row["wall_ns"] > 40 * MS}
        rows.append(row)
    document["host"] = {"requests": rows, "cgroup": {}}
    incident = diagnose(Breach(**service.breach(40.0)), [json.loads(json.dumps(document))])
    finding = next(finding for finding in incident.findings if finding.id == "SATURATION")
    assert finding.where == "queue:backlog, 1 of 4 workers stopped serving"
    assert values(finding)["workers"] == 3
    assert "Find out why the worker stopped" in finding.fix


def test_a_device_that_idles_is_said_from_its_driver_alone(service, slow_model):
    made = copy.deepcopy(slow_model)
    made["device"] = {"busy": 0.31, "source": "nvml", "looks": [], "spans": []}
    finding = found(service, made)["LOW_DEVICE_UTIL"]
    assert (finding.severity, values(finding)["device busy, from its driver"]) == ("info", 31.0)
    made["device"]["busy"] = 0.8
    assert "LOW_DEVICE_UTIL" not in found(service, made)
    made["device"]["busy"] = None  # our own spans say nothing of what others do with the card
    assert "LOW_DEVICE_UTIL" not in found(service, made)


def test_profiles_that_were_taken_while_threads_lacked_cpus_are_marked(service, slow_model):
    made = copy.deepcopy(slow_model)
    side = {"id": "1", "tier": 1, "request_id": 1, "slow": True, "events": 3, "stall_ms": {}, "threads": [7], "trace": "", "spans": []}

    def judged(waited_ns):
        made["host"]["scheduling"]["seconds"] = [[second * S, S, 600 * MS, waited_ns, 0, 0, 0, 9, 5, 5] for second in range(60)]
        return {f.id: f for f in diagnose(Breach(**service.breach()), [made], [(side, None)]).findings}

    finding = judged(400 * MS)["CAPTURE_UNDER_OVERLOAD"]
    assert (finding.severity, finding.where) == ("info", "1 captures")
    assert values(finding)["run-queue delay of all threads"] == 24.0
    assert "CAPTURE_UNDER_OVERLOAD" not in judged(60 * MS)
