"""What `inferscope bench` says of a real card: utilisation, busy share, and static, peak and dynamic memory."""

from __future__ import annotations

import json

import pytest

from inferscope.cli import main

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
MIB = 1 << 20
MODULE = """
import torch
MIB = 1 << 20
weights = torch.zeros(256 * MIB // 4, device="cuda")
matrix = torch.randn(4096, 4096, device="cuda")
calls = 0
def score():
    global calls
    calls += 1
    batch = torch.empty((64 if calls % 10 else 512) * MIB // 4, device="cuda").fill_(1.0)
    return ((matrix @ matrix)[0, 0] + batch[0]).cpu().item()
"""


def test_a_card_shows_utilisation_busy_share_and_memory(tmp_path, monkeypatch, capsys):
    pytest.importorskip("pynvml")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "on_cuda.py").write_text(MODULE)
    words = ["bench", "on_cuda:score", "--duration", "6s", "--warmup", "0", "--report", "p50,p99,throughput,gpu_util,gpu_mem"]
    assert main([*words, "--html", "r.html", "--json", "d.json"]) in {0, 3}
    value = json.loads((tmp_path / "d.json").read_text())
    card = value["device"]
    assert card["source"] == "nvml"
    assert 0.0 < card["utilization"] <= 1.0
    assert card["busy"] > 0.3
    assert card["memory"]["static_bytes"] >= 256 * MIB  # by every process on the card
    assert card["memory"]["peak_bytes"] == card["memory"]["static_bytes"] + card["memory"]["dynamic_bytes"]
    (own,) = card["devices"]
    assert own["device"].startswith("cuda")
    assert 0.0 < own["busy_own"] <= 1.0
    assert own["static_bytes"] >= 256 * MIB
    assert own["dynamic_bytes"] >= 512 * MIB  # the largest batch
    assert own["peak_bytes"] == own["static_bytes"] + own["dynamic_bytes"]
    assert value["fingerprint"]["gpu"]["driver"]
    assert value["fingerprint"]["gpu"]["cards"][0]["name"]
    shown = capsys.readouterr().out
    assert "mean of the busiest card" in shown
    assert "cuda:0 memory" in shown
