"""Models of a real Triton server's Python backend, measured in both forms; what they recorded comes back as an output of theirs."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from pathlib import Path

import pytest

pytestmark = [pytest.mark.servers, pytest.mark.slow]

MODEL = """
import os, sys
for path in reversed(os.environ["PYTHONPATH"].split(":")):
    sys.path.insert(0, path)

import json
import numpy as np
import torch
import triton_python_backend_utils as pb_utils

import inferscope
from inferscope.aggregate.window import decode
from inferscope.record import core
from inferscope.types import ClassKey, Column
{before}

{decorator}
class TritonPythonModel:
    def initialize(self, args):
        torch.set_num_threads(1)
        self.net = torch.nn.Linear(4, 1).eval()
        {initialize}
        core.default.begin_epoch()
        self.seen = []

    @torch.inference_mode()
    def execute(self, requests):
        told = json.dumps(self.told())
        answers = []
        for request in requests:
            rows = torch.from_numpy(pb_utils.get_input_tensor_by_name(request, "ROWS").as_numpy())
            with inferscope.stage("model"):
                score = self.net(rows).sum().item()
            if rows.sum() < 0:
                answers.append(pb_utils.InferenceResponse(error=pb_utils.TritonError("private")))
                continue
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("TOLD", np.array([[told]], dtype=object))]))
        return answers

    def told(self):
        keys = {{entry[0]: ClassKey(*entry[1:4]) for entry in core.default.classes()}}
        labels = [Column(*column).label for column in core.default.columns()]
        found = self.seen
        for kept in core.default.drain():
            record = decode(kept, keys[kept[1]])
            found.append([record.key.request, record.items, record.error, record.wall_ns == sum(record.vector),
                          sorted(labels[index] for index, value in enumerate(record.vector) if value)])
        return found
"""

CONFIG = """
name: "{name}"
backend: "python"
max_batch_size: 8
input [ {{ name: "ROWS" data_type: TYPE_FP32 dims: [ 4 ] }} ]
output [ {{ name: "TOLD" data_type: TYPE_STRING dims: [ 1 ] }} ]
instance_group [ {{ kind: KIND_CPU count: 1 }} ]
"""

FORMS = {
    "decorated": {
        "before": "from inferscope_integrations.triton_backend import measured",
        "decorator": "@measured",
        "initialize": 'inferscope.instrument("torch")',
    },
    "instrumented": {"before": "", "decorator": "", "initialize": 'inferscope.instrument("triton_backend", "torch")'},
}


def ask(server, name: str, value: float) -> list | None:
    body = {"inputs": [{"name": "ROWS", "shape": [1, 4], "datatype": "FP32", "data": [value] * 4}]}
    request = urllib.request.Request(f"http://{server.http}/v2/models/{name}/infer", json.dumps(body).encode())
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30) as answer:
            return json.loads(json.loads(answer.read())["outputs"][0]["data"][0])
    except urllib.error.HTTPError:
        return None


@pytest.fixture
def server(counterparts, tmp_path: Path):
    for name, parts in FORMS.items():
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "1" / "model.py").write_text(MODEL.format(**parts))
        (tmp_path / name / "config.pbtxt").write_text(CONFIG.format(name=name))
    try:
        with counterparts.serving(tmp_path, fetch=os.environ.get("SERVERS_FETCH") == "1") as running:
            yield running
    except counterparts.ServerAbsentError as error:
        pytest.skip(str(error))


def test_each_execute_is_a_request_in_either_form(server) -> None:
    for name in FORMS:
        assert ask(server, name, 1.0) == []
        assert ask(server, name, -1.0) is None
        told = ask(server, name, 1.0)
        assert [row[:4] for row in told] == [[name, 1, None, True], [name, 1, "triton", True]], name
        assert all({"model", "forward"} <= set(row[4]) for row in told), name
