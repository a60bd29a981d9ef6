"""What the inferscope in a target says: of a service on this machine, and of a function on a device."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from inferscope.bench.targets import Service, free_port
from inferscope.cli import inside, main

SERVICE = """
import json, random, sys, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
import inferscope as scope
scope.configure(service="planted", slo=scope.SLO("score", p99_ms=20))
rules, draw = scope.lock("rules", threading.Lock()), random.Random(1)
def holder():
    while True:
        time.sleep(draw.uniform(0.2, 0.5))
        with rules:
            time.sleep(0.06)
threading.Thread(target=holder, daemon=True).start()
class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        if self.path != "/healthz":
            with scope.request("score"):
                with scope.stage("forward"):
                    time.sleep(0.003)
                with rules:
                    pass
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"ok")
    def log_message(self, *_):
        pass
class Server(ThreadingHTTPServer):
    daemon_threads, request_queue_size = True, 128
Server(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""

FUNCTION = """
import torch
from inferscope.testing import accelerator
sim = accelerator.load()
sim.configure(pageable_gb_s=1.0)
torch.set_num_threads(1)
net = torch.nn.Linear(64, 64).to("sim")
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net
    def forward(self, x):
        sim.kernel(2.0)
        return self.net(x)
model = Model()
def score():
    with torch.inference_mode():
        return model(torch.ones(8, 64).to("sim")).cpu().sum().item()
"""


@pytest.mark.faults
@pytest.mark.slow
def test_a_service_says_why_its_tail_is_what_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "service.py").write_text(SERVICE)
    state, port = tmp_path / "state", free_port()
    state.mkdir()
    command = [sys.executable, str(tmp_path / "service.py"), str(port)]
    with Service(command, port, {"INFERSCOPE_STATE_DIR": str(state), "INFERSCOPE_WARMUP_S": "1"}, tmp_path, tmp_path / "log") as service:
        service.start()
        words = ["bench", f"http://127.0.0.1:{port}/", "--rate", "60", "--duration", "15s", "--max-lag", "10s", "--baseline", "0"]
        assert main([*words, "--state-dir", str(state), "--json", "d.json"]) in {0, 3}
    value = json.loads((tmp_path / "d.json").read_text())["inside"]
    assert value["attribution"], value
    assert inside.top_cause(value).startswith("lock:rules ")
    assert any(finding["id"].startswith("LOCK") for finding in value["findings"])


def test_a_service_that_says_nothing_costs_a_line(tmp_path):
    (tmp_path / "state").mkdir()
    found = inside.Inside(tmp_path / "state").ask(lambda: None, 0.1)
    assert found["verdict"].startswith("n/a: no worker answers under ")
    assert found["attribution"] == []
    assert inside.top_cause(found) == inside.top_cause(None) == ""


@pytest.mark.faults
@pytest.mark.slow
def test_a_function_on_a_device_shows_its_busy_share_and_memory(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scoring_on_sim.py").write_text(FUNCTION)
    words = ["bench", "scoring_on_sim:score", "--repeat", "200", "--warmup", "0", "--report", "p50,gpu_util,gpu_mem", "--json", "d.json"]
    assert main(words) == 0
    value = json.loads((tmp_path / "d.json").read_text())
    (device,) = value["device"]["devices"]
    assert device["device"].startswith("sim")
    assert 0.2 < device["busy_own"] <= 1.0
    assert value["device"]["utilization"] is None  # no driver tells it
    assert {"forward:Model", "copy"} & {row["name"].split(" ")[0] for row in value["stages"]} or value["stages"]


ON_A_CARD = """
import ctypes, os, time
import torch
from inferscope.testing import accelerator
driver, sim = ctypes.CDLL("libnvidia-ml.so.1"), accelerator.load()
sim.share(os.environ["CARD"])
sim.identify("00000001-aaaa-bbbb-cccc-dddddddddddd")
assert driver.fake_follow(os.environ["CARD"].encode())
MIB = 1 << 20
driver.fake_set(0, 1, 100, 0)  # the card holds 100 MiB once the model is there
torch.set_num_threads(1)
weights = torch.zeros(64 * MIB // 4, device="sim")
calls, began = 0, None
def score():
    global calls, began
    calls += 1
    if calls == 5:  # the baseline is over
        began = time.monotonic()
    if calls > 5:
        # What batches need beside it, for two seconds of the load.
        driver.fake_set(0, 1, 400 if 1.5 < time.monotonic() - began < 4.0 else 100, 0)
    batch = torch.empty((4 if calls % 20 else 12) * MIB // 4, device="sim")
    sim.kernel(6.0)
    return batch[:1].cpu().numel()
"""


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcc") is None, reason="the driver's stand-in needs a C compiler")
def test_a_card_shows_utilisation_busy_share_and_static_peak_and_dynamic_memory(tmp_path, monkeypatch, capsys):
    """The driver's library is a stand-in that takes the utilisation from the simulated accelerator's own kernels; the verbs are the real ones."""
    pytest.importorskip("torch")
    pytest.importorskip("pynvml")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "on_a_card.py").write_text(ON_A_CARD)
    source = Path(__file__).parents[1] / "device" / "fake_nvml.c"
    subprocess.run(["gcc", "-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1", source, "-o", tmp_path / "libnvidia-ml.so.1"], check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setenv("CARD", str(tmp_path / "card"))
    words = ["bench", "on_a_card:score", "--duration", "6s", "--warmup", "0", "--baseline", "5", "--report", "p50,gpu_util,gpu_mem"]
    assert main([*words, "--html", "r.html", "--json", "d.json"]) == 0
    value = json.loads((tmp_path / "d.json").read_text())
    card, mib = value["device"], 1 << 20
    assert card["source"] == "nvml"
    assert card["memory"] == {"static_bytes": 100 * mib, "peak_bytes": 400 * mib, "dynamic_bytes": 300 * mib}
    (own,) = card["devices"]
    assert own["device"].startswith("sim")
    # The driver tells of kernels, 6 ms each; our own spans are of copies, which wait for them.
    assert card["utilization"] == pytest.approx(0.006 * value["metrics"]["throughput"]["requests_per_s"], abs=0.25)
    assert 0.02 < card["utilization"] <= 1.0
    assert 0.02 < own["busy_own"] <= 1.0
    assert card["busy"] > 0.5
    assert own["static_bytes"] >= 64 * mib
    assert 12 * mib <= own["dynamic_bytes"] < 64 * mib  # the largest batch
    assert own["peak_bytes"] == own["static_bytes"] + own["dynamic_bytes"]
    assert any(row["device_utilization"] for row in value["curve"])
    shown = capsys.readouterr().out
    assert "419.4 MB peak" in shown
    assert "static 104.9 MB, dynamic 314.6 MB" in shown
    assert "mean of the busiest card" in shown
    assert "Device utilisation" in (tmp_path / "r.html").read_text()
