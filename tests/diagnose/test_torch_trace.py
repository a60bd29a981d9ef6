"""A trace that torch itself wrote, joined with our stages by thread and wall clock."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest

PROFILED = """
import json, sys, threading, time
import torch
from inferscope.clock import now_ns, unix_offset_ns
layers = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)])
x = torch.randn(256, 256)
with torch.inference_mode():
    layers(x)
    with torch.autograd.profiler.profile() as profile:
        a = now_ns(); layers(x); b = now_ns(); time.sleep(0.002); c = now_ns(); torch.softmax(x, 1); d = now_ns()
profile.export_chrome_trace(sys.argv[1])
print(json.dumps([[a, b, c, d], unix_offset_ns(), threading.get_native_id()]))
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_operators_of_torch_join_our_stages(tmp_path):
    from inferscope.diagnose.trace import StageSpan, read_trace

    path = tmp_path / "torch.json"
    done = subprocess.run([sys.executable, "-c", PROFILED, str(path)], capture_output=True, text=True, check=True, timeout=100)
    (a, b, c, d), offset, thread = json.loads(done.stdout.splitlines()[-1])
    spans = [
        StageSpan(name, start + offset, end + offset, thread) for name, start, end in (("request", a, d), ("forward", a, b), ("post", c, d))
    ]
    found = read_trace(path, spans)
    assert found.threads == (thread,)
    names = {row.name for row in found.operators}
    assert {"aten::addmm", "aten::_softmax"} <= names
    assert set(found.stages_ms) <= {"forward", "post", "request"}
    assert 0 < found.stages_ms["forward"] <= (b - a) / 1e6
    assert 0 < found.stages_ms["post"] <= (d - c) / 1e6
    assert sum(found.stages_ms.values()) == pytest.approx(sum(row.self_ms for row in found.operators), rel=0.05)
