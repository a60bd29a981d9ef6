"""Real counterparts of integrations for tests and benchmarks: client libraries in an environment of their own, and a Triton server.

`build/integrations-venv` stands on `.venv` (a .pth file shows it what is installed there) and adds the dependency group `integrations`,
so that a client library's pins never move what the default tests run with. The Triton server is the program inside the wheel of
nvidia-pytriton, unpacked into `build/triton`; its models run in Triton's own Python with NumPy 1 (with NumPy 2 the wheel's stub answers
with empty tensors). Nothing is fetched unless `fetch` says so; what cannot be had raises `ServerAbsentError` with the reason.
"""

from __future__ import annotations

import contextlib
import ctypes.util
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / "build" / "integrations-venv"
OLDEST_VENV = ROOT / "build" / "integrations-oldest-venv"
OLDEST = ROOT / "tests" / "integrations" / "oldest.txt"
TRITON = ROOT / "build" / "triton"
PYTRITON = "nvidia-pytriton==0.7.0"
NUMPY = "numpy<2"
_MINOR = f"{sys.version_info.major}.{sys.version_info.minor}"


class ServerAbsentError(Exception):
    """A counterpart cannot be had here; the message says why."""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _run(command, timeout_s, **more):
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, cwd=ROOT, **more)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ServerAbsentError(f"{Path(command[0]).name} {command[1]}: {type(error).__name__}") from error
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
        raise ServerAbsentError(f"{' '.join(map(str, command[1:4]))}: {last}")


FRAMEWORKS = {"ray": "ray[serve]==2.60.0", "bentoml": "bentoml==1.4.40", "kserve": "kserve==0.21.0"}
"""Frameworks whose pins fit nobody else's, each in an environment of its own."""


def _stacked(venv, timeout_s, *between):
    """An environment that stands on `between` and on this one; returns the start of a pip command for it."""
    python = venv / "bin" / "python"
    if not python.exists():
        _run([sys.executable, "-m", "venv", "--without-pip", str(venv)], timeout_s)
        below = venv / "lib" / f"python{_MINOR}" / "site-packages" / "below.pth"
        packages = [str(each / "lib" / f"python{_MINOR}" / "site-packages") for each in between]
        below.write_text("\n".join([*packages, sysconfig.get_paths()["purelib"], str(ROOT), str(ROOT / "integrations")]) + "\n")
    return [sys.executable, "-m", "pip", "--quiet", "--python", str(python), "install"]


def environment(*, fetch, timeout_s=300.0):
    """The interpreter that has the client libraries.

    Raises:
        ServerAbsentError: It is not here, or the package index cannot be reached.
    """
    python, stamp = VENV / "bin" / "python", VENV / ".installed"
    wanted = (ROOT / "pyproject.toml").stat().st_mtime
    if stamp.exists() and (not fetch or stamp.stat().st_mtime >= wanted):
        return python
    if not fetch:
        raise ServerAbsentError("the client libraries are not here; 'make test-integrations' installs them")
    _run([*_stacked(VENV, timeout_s), "--group", "integrations"], timeout_s)
    stamp.touch()
    return python


def oldest(*, fetch, timeout_s=600.0):
    """The interpreter that has the oldest releases which the integrations declare (`tests/integrations/oldest.txt`).

    Raises:
        ServerAbsentError: It is not here, or the package index cannot be reached.
    """
    environment(fetch=fetch, timeout_s=timeout_s)
    stamp, wanted = OLDEST_VENV / ".installed", OLDEST.read_text()
    if not stamp.exists() or stamp.read_text() != wanted:
        if not fetch:
            raise ServerAbsentError("the oldest libraries are not here; 'make test-integrations OLDEST=1' installs them")
        # Without dependencies: those come from the newest environment below it, and ours from the one below that.
        _run([*_stacked(OLDEST_VENV, timeout_s, VENV), "--no-deps", "--requirement", str(OLDEST)], timeout_s)
        stamp.write_text(wanted)
    return OLDEST_VENV / "bin" / "python"


def framework(name, *, fetch, timeout_s=600.0):
    """The interpreter that has one of `FRAMEWORKS`.

    Raises:
        ServerAbsentError: It is not here, or the package index cannot be reached.
    """
    venv = ROOT / "build" / f"{name}-venv"
    stamp = venv / ".installed"
    if not stamp.exists() or stamp.read_text() != FRAMEWORKS[name]:
        if not fetch:
            raise ServerAbsentError(f"{name} is not here; 'make test-frameworks' installs it")
        _run([*_stacked(venv, timeout_s), FRAMEWORKS[name]], timeout_s)
        stamp.write_text(FRAMEWORKS[name])
    return venv / "bin" / "python"


PYTRITON_NEEDS = (PYTRITON, NUMPY, "wrapt!=2.2.0,<3", "hdrhistogram>=0.10.3,<0.11")
"""What serves with pytriton, and what recording needs beside it."""


def pytriton(*, fetch, timeout_s=300.0):
    """The interpreter whose `Triton().run()` serves: the system's own, since the wheel's stub runs a callable on the system's libpython.

    Raises:
        ServerAbsentError: It is not here, cannot be fetched in time, or the system has no such Python.
    """
    venv, system = ROOT / "build" / "pytriton-venv", Path("/usr/bin/python3")
    python, stamp = venv / "bin" / "python", venv / ".installed"
    if stamp.exists() and stamp.read_text() == "\n".join(PYTRITON_NEEDS):
        return python
    if not fetch:
        raise ServerAbsentError("pytriton is not here; 'make test-integrations' installs it")
    if sys.platform != "linux" or os.uname().machine != "x86_64" or not system.exists():
        raise ServerAbsentError("pytriton serves on x86-64 Linux with the system's own Python")
    if not python.exists():
        _run([str(system), "-m", "venv", str(venv)], timeout_s)
    _run([str(python), "-m", "pip", "--quiet", "install", *PYTRITON_NEEDS], timeout_s)
    stamp.write_text("\n".join(PYTRITON_NEEDS))
    return python


def triton(*, fetch, timeout_s=300.0):
    """Folder of the unpacked server.

    Raises:
        ServerAbsentError: It is not here, cannot be fetched in time, or this machine lacks the libraries that it needs.
    """
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        raise ServerAbsentError("the Triton server of nvidia-pytriton is built for x86-64 Linux")
    if ctypes.util.find_library(f"python{_MINOR}") is None:
        raise ServerAbsentError(f"Triton's Python backend needs libpython{_MINOR}.so.1.0 (Debian package libpython{_MINOR})")
    site = TRITON / "site"
    if (TRITON / ".unpacked").exists():
        return TRITON
    if not fetch:
        raise ServerAbsentError("the Triton server is not here; 'make test-integrations' unpacks it")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:", "--target"]
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(TRITON)
    _run([*pip, str(site), PYTRITON, NUMPY], timeout_s)
    inside = site / "pytriton" / "tritonserver"
    backend = TRITON / "backends" / "python"
    shutil.copytree(inside / "backends" / "python", backend)
    stub = inside / "python_backend_stubs" / _MINOR / "triton_python_backend_stub"
    if not stub.exists():
        raise ServerAbsentError(f"the wheel has no stub for Python {_MINOR}")
    shutil.copy2(stub, backend / stub.name)
    (TRITON / ".unpacked").touch()
    return TRITON


class Triton:
    """A running server."""

    def __init__(self, child, http, grpc, metrics, log):
        self.child, self.http, self.grpc, self.metrics, self.log = (
            child,
            f"127.0.0.1:{http}",
            f"127.0.0.1:{grpc}",
            f"127.0.0.1:{metrics}",
            log,
        )


def _answers(url):
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=1) as response:
            return response.status == 200
    except (OSError, urllib.error.URLError):
        return False


@contextlib.contextmanager
def serving(repository, *, fetch, traces=None, timeout_s=60.0):
    """A Triton server over a model repository, until the block ends.

    Args:
        repository: Folder of models.
        fetch: Whether the server may be fetched first.
        traces: OTLP/HTTP address for Triton's own spans; rate 0, so that only requests with a traceparent make any.
        timeout_s: For its start.

    Raises:
        ServerAbsentError: There is none, or it does not start.
    """
    place = triton(fetch=fetch)
    inside = place / "site" / "pytriton" / "tritonserver"
    http, grpc, metrics = free_port(), free_port(), free_port()
    # Triton's embedded interpreter ignores PYTHONPATH: the models put it on sys.path themselves.
    ours = [entry for entry in sys.path if entry.endswith("site-packages")]
    paths = [str(place / "site"), *ours, str(ROOT), str(ROOT / "integrations")]
    own = {"PYTHONPATH": ":".join(paths), "LD_LIBRARY_PATH": str(place / "site" / "nvidia_pytriton.libs")}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("INFERSCOPE_", "OTEL_", "PYTHON"))}
    command = [inside / "bin" / "tritonserver", f"--model-repository={repository}", f"--backend-directory={place / 'backends'}"]
    for name, port in (("http", http), ("grpc", grpc), ("metrics", metrics)):
        command += [f"--{name}-address=127.0.0.1", f"--{name}-port={port}"]
    if traces:
        command += ["--trace-config", "mode=opentelemetry", "--trace-config", "level=TIMESTAMPS", "--trace-config", "rate=0"]
        command += ["--trace-config", f"opentelemetry,url={traces}", "--trace-config", "opentelemetry,bsp_schedule_delay=200"]
    with tempfile.NamedTemporaryFile("w+", suffix=".log") as log:
        child = subprocess.Popen(list(map(str, command)), env={**kept, **own}, stdout=log, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + timeout_s
            while not _answers(f"http://127.0.0.1:{http}/v2/health/ready"):
                if child.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    said = [line for line in log.read().splitlines() if line.strip()]
                    why = [line for line in said if "rror" in line or "failed" in line]
                    raise ServerAbsentError(f"tritonserver did not start: {' / '.join((why or said or ['no message'])[:3])}")
                time.sleep(0.1)
            yield Triton(child, http, grpc, metrics, Path(log.name))
        finally:
            child.terminate()
            try:
                child.wait(15)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


MODEL = """
import os
import sys
import time

for path in reversed(os.environ["PYTHONPATH"].split(":")):
    sys.path.insert(0, path)

import numpy as np
import torch
import triton_python_backend_utils as pb_utils

import inferscope
from inferscope_integrations.triton_backend import measured


@measured
class TritonPythonModel:
    def initialize(self, args):
        torch.manual_seed(0)
        torch.set_num_threads(1)
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)).eval()
        inferscope.watch(self.net, "risk")

    @torch.inference_mode()
    def execute(self, requests):
        answers = []
        time.sleep({delay_s})
        for request in requests:
            rows = torch.from_numpy(pb_utils.get_input_tensor_by_name(request, "ROWS").as_numpy())
            score = self.net(rows).numpy()
            answers.append(pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("SCORE", score)]))
        return answers
"""

CONFIG = """
name: "{name}"
backend: "python"
max_batch_size: 64
input [ {{ name: "ROWS" data_type: TYPE_FP32 dims: [ 16 ] }} ]
output [ {{ name: "SCORE" data_type: TYPE_FP32 dims: [ 1 ] }} ]
instance_group [ {{ kind: KIND_CPU count: {instances} }} ]
dynamic_batching {{ max_queue_delay_microseconds: {queue_us} }}
"""


def repository(folder, *, name="risk", delay_s=0.002, queue_us=500, instances=1):
    """Add a torch model behind Triton's Python backend to a model repository: FP32[16] rows give FP32[1] scores."""
    place = Path(folder) / name
    (place / "1").mkdir(parents=True)
    (place / "1" / "model.py").write_text(MODEL.replace("{delay_s}", repr(delay_s)))
    (place / "config.pbtxt").write_text(CONFIG.format(name=name, instances=instances, queue_us=queue_us))
    return Path(folder)


if __name__ == "__main__":
    # The interpreter for tests that need other people's libraries; the one in use, with the reason on stderr, where they cannot be had.
    try:
        print(oldest(fetch=True) if os.environ.get("OLDEST") == "1" else environment(fetch=True))
    except ServerAbsentError as absent:
        print(f"client libraries cannot be installed, their tests are skipped: {absent}", file=sys.stderr)
        print(sys.executable)
    try:
        triton(fetch=True)
    except ServerAbsentError as absent:
        print(f"no Triton server, its tests are skipped: {absent}", file=sys.stderr)
