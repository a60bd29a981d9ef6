"""What is special to CUDA, tried against a stand-in for its runtime: a question that leaves the interpreter to others."""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from inferscope.device import backends

RUNTIME = r"""
#include <unistd.h>
static int last, mode;
int cudaEventQuery(void *event) {
    usleep(200000);
    return last = event == (void *)1 ? 0 : event == (void *)2 ? 600 : 700; /* done, not ready, illegal address */
}
int cudaGetLastError(void) { int was = last; last = 0; return was; }
int cudaThreadExchangeStreamCaptureMode(int *wanted) { int was = mode; mode = *wanted; *wanted = was; return 0; }
"""

CODE = """
    import ctypes, sys, threading, time
    from inferscope.device.backends import cuda_query, relax_cuda_thread
    assert cuda_query() is None and not relax_cuda_thread()  # no runtime is loaded: nothing is loaded for it
    runtime = ctypes.CDLL(sys.argv[1])
    ask = cuda_query()

    class Event:
        def __init__(self, event_id):
            self.event_id = event_id

    assert ask(Event(1)) is True
    assert ask(Event(2)) is False
    assert runtime.cudaGetLastError() == 0  # "not ready" does not stay this thread's last error
    try:
        ask(Event(3))
    except RuntimeError as error:
        assert str(error) == "cudaEventQuery: 700"
    else:
        raise AssertionError("a failure must be told from an event that is not ready")
    steps = 0
    thread = threading.Thread(target=ask, args=(Event(1),))
    sys.setswitchinterval(60.0)  # whoever has the interpreter keeps it unless it gives it away
    thread.start()
    while thread.is_alive():
        steps += 1
        time.sleep(0.001)
    assert steps > 20, steps
    assert relax_cuda_thread()
    mode = ctypes.c_int(0)
    runtime.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    assert mode.value == 2
    assert "torch" not in sys.modules
    print("done")
"""


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("gcc") or shutil.which("cc")
    assert compiler is not None, "the runtime's stand-in needs a C compiler"
    folder = tmp_path_factory.mktemp("cudart")
    (folder / "runtime.c").write_text(RUNTIME)
    path = folder / "libcudart.so.13"
    subprocess.run([compiler, "-shared", "-fPIC", str(folder / "runtime.c"), "-o", str(path)], check=True)
    return path


def test_a_query_of_cudas_own_leaves_the_interpreter_to_others(runtime) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CODE), str(runtime)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout == "done\n", done.stderr


def test_the_harvester_asks_as_the_backend_does(rooms, monkeypatch) -> None:
    asked: list[object] = []

    def queries():
        return lambda event: asked.append(event) or event.query()

    monkeypatch.setattr(rooms.channel, "backend", backends.Backend(queries=queries))
    rooms.sim.virtual_clock()
    rooms.prove()
    assert asked


def test_a_backend_whose_question_cannot_be_made_is_asked_as_torch_does(rooms, monkeypatch) -> None:
    monkeypatch.setattr(rooms.channel, "backend", backends.Backend(queries=lambda: None))
    rooms.sim.virtual_clock()
    rooms.prove()
    assert rooms.channel.off == ""
