"""What is seen of a process, the machine and the cards while a load runs, and warm-up work."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from inferscope.bench import hardware, metrics, resources, steady, text
from inferscope.bench.load import LoadPlan, LoadResult
from inferscope.bench.process import host_cpu_s, listening
from inferscope.device.memory import Memory
from inferscope.device.nvml import Card


def card(share, used, clock=1_000_000_000, slowed=()):
    return Card("GPU-1", share, used, 80_000_000_000, clock, slowed, lost=False)


BUSY = """
import select, sys, time
held = [b"x" * 30_000_000]
spent, began = time.process_time(), time.perf_counter()
print("begun", flush=True)
while time.perf_counter() < began + 0.5 or not select.select([sys.stdin], [], [], 0)[0]:
    held.append(b"x" * 20_000)
print((time.process_time() - spent) / (time.perf_counter() - began), flush=True)
"""


def test_a_busy_process_shows_as_cores_and_memory():
    # A process of its own, as a target is: one that keeps the sampler's own interpreter busy is seen once or twice and no oftener.
    with subprocess.Popen([sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "begun\n"
        with resources.Sampler(child.pid, None, 0.02) as sampler:
            while len(sampler.samples) < 8:
                time.sleep(0.02)
            child.stdin.close()
            cores = float(child.stdout.readline())  # less than one where the machine is busy
    found = resources.summary(sampler.samples)
    assert found["cpu_cores"] == pytest.approx(cores, rel=0.3, abs=0.1)  # /proc counts in ticks of 10 ms
    assert found["host_cpu_cores"] > 0.8 * found["cpu_cores"]
    assert found["memory"]["peak_bytes"] >= found["memory"]["static_bytes"] > 1e7
    assert found["memory"]["dynamic_bytes"] == found["memory"]["peak_bytes"] - found["memory"]["static_bytes"]
    assert found["device"] is None
    assert len(found["curve"]) > 5
    assert [row["at_s"] for row in found["curve"]] == sorted(row["at_s"] for row in found["curve"])


def test_cards_become_utilisation_busy_fraction_and_memory():
    seen = iter([(card(0.0, 10),), (card(0.8, 30),), (card(0.4, 20, 900_000_000, ("sw_thermal",)),), (card(0.0, 20),)])
    samples = [resources.look(None, lambda: next(seen), 0.0) for _ in range(4)]
    found = resources.summary(samples)
    assert found["device"]["utilization"] == pytest.approx(0.3)
    assert found["device"]["busy"] == 0.5
    assert found["device"]["memory"] == {"static_bytes": 10, "peak_bytes": 30, "dynamic_bytes": 20}
    assert (found["device"]["clock_hz"], found["device"]["slowed"]) == (900_000_000, ["sw_thermal"])
    assert found["cpu_cores"] is None
    assert found["memory"] is None


def test_what_the_driver_does_not_tell_is_unknown_and_not_nothing():
    found = resources.summary([resources.look(None, lambda: (card(None, None),), 0.0) for _ in range(2)])
    assert found["device"] is None
    rows = text.run_lines({**RUN, "device": {**NOTHING, "utilization": 0.25, "busy": 0.5}}, ["gpu_util", "gpu_mem", "cost"])
    assert any("GPU utilisation" in line and "25 %" in line and "busy 50 %" in line for line in rows)
    assert any("GPU memory" in line and "n/a" in line for line in rows)
    assert any("cost" in line and "--price" in line for line in rows)
    own = {"device": "sim:0", "busy_own": 0.4, "static_bytes": 1_000_000, "peak_bytes": 3_000_000, "dynamic_bytes": 2_000_000}
    rows = text.run_lines({**RUN, "device": {**NOTHING, "devices": [own]}, "cost_per_million": 12.5}, ["gpu_util", "gpu_mem", "cost"])
    assert any("sim:0 busy" in line and "40 %" in line for line in rows)
    assert any("sim:0 memory" in line and "3.0 MB peak" in line and "static 1.0 MB" in line for line in rows)
    assert any("12.5" in line and "a million requests, at 3 an hour" in line for line in rows)


NOTHING = {"utilization": None, "busy": None, "memory": None, "source": None, "devices": []}
RUN = {
    "settings": {"target": "m:f", "mode": "open", "rate": 1.0, "process": "poisson", "price_per_hour": 3.0},
    "metrics": {"latency": {}, "little": None, "lag_p99_ms": None},
    "problems": [],
    "warmup": {"cut": 0, "method": "none"},
    "fingerprint": {"sha256": "0" * 64},
}


def test_the_cost_of_a_million_requests_follows_the_price():
    assert metrics.cost_per_million(3.6, 100.0) == pytest.approx(10.0)
    assert metrics.cost_per_million(None, 100.0) is None
    assert metrics.cost_per_million(3.6, None) is None


def test_the_process_that_listens_is_found():
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert listening(server.getsockname()[1]) == os.getpid()
        port = server.getsockname()[1]
    assert listening(port) is None
    assert host_cpu_s() > 0


def test_warm_up_work_is_read_from_counters_that_are_there(monkeypatch):
    assert steady.counts()["allocation"] == 0
    dynamo = type(sys)("torch._dynamo.utils")
    dynamo.counters = {"frames": {"total": 3, "ok": 2}, "inductor": {"select_algorithm_autotune": 4, "fxgraph_cache_miss": 9}}
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", dynamo)
    row = Memory(**{**dict.fromkeys(Memory._fields, 0), "device": "cuda:0", "driver_allocations": 7})
    assert steady.counts([row]) == {"compile": 3, "autotune": 4, "allocation": 7}


def test_events_are_noted_when_the_totals_rise():
    totals, looked = {"compile": 1}, threading.Event()
    with steady.Watch(lambda: dict(totals), 0.01, looked.set) as watch:
        assert looked.wait(5)
        totals["compile"] = 4
        time.sleep(0.05)
    assert [(kind, count) for _, kind, count in watch.events] == [("compile", 3)]


def run_of(count=1000, rate=100.0):
    rng = np.random.default_rng(0)
    intended = (np.arange(count) * (1e9 / rate)).astype(np.int64) + 1
    done = intended + (rng.normal(10, 0.3, count) * 1e6).astype(np.int64)
    return LoadResult(LoadPlan("", rate, count / rate), intended, intended, intended, done, np.full(count, 200))


def test_the_warm_up_lasts_as_long_as_something_is_compiled():
    result = run_of()
    plain, _ = metrics.warm_up(result, None)
    cut, how = metrics.warm_up(result, None, [(3_000_000_000, "compile", 2), (2_000_000_000, "allocation", 5)])
    assert plain < 300
    assert cut == 300
    assert "5 allocations, 2 compiles until request 300" in how
    late, how = metrics.warm_up(result, None, [(9_000_000_000, "compile", 1)])
    assert late == plain
    assert "no steady state: 1 compiles until request 900 of 1000" in how
    assert "warm-up work went on after that" in metrics.warm_up(result, 100, [(3_000_000_000, "compile", 2)])[1]
    assert metrics.warm_up(result, None, [(0, "compile", 2)])[0] == plain


@pytest.mark.skipif(shutil.which("gcc") is None, reason="the driver's stand-in needs a C compiler")
def test_a_run_beside_a_driver_shows_its_cards(command, functions, tmp_path):
    """The driver is a stand-in that nvidia-ml-py loads in the verb's own process."""
    source = Path(__file__).parents[1] / "device" / "fake_nvml.c"
    subprocess.run(["gcc", "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1", source, "-o", tmp_path / "libnvidia-ml.so.1"], check=True)
    words = [sys.executable, "-m", "inferscope", "bench", "functions:score", "--inputs", "inputs.jsonl", "--repeat", "30", "--warmup", "0"]
    done = subprocess.run(
        [*words, "--report", "gpu_util,gpu_mem", "--json"], cwd=functions, capture_output=True, text=True, timeout=60,
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    value = json.loads(done.stdout)
    assert value["device"]["memory"] == {"static_bytes": 0, "peak_bytes": 0, "dynamic_bytes": 0}  # told, so not unknown
    assert value["device"]["utilization"] == 0
    assert value["device"]["source"] == "nvml"
    assert value["fingerprint"]["gpu"]["cards"]
    assert len(value["fingerprint"]["gpu"]["cards"][0]["uuid_sha256"]) == 12
    assert value["conditions"]["cards"]


def test_a_machine_without_a_driver_has_no_cards():
    parts = hardware.machine_parts()
    assert parts["threads"].keys() == {"omp", "torch"}
    assert hardware.conditions()["load_average"] is not None
    assert parts["gpu"] is None or parts["gpu"]["driver"]
