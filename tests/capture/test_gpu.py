"""Sessions that record a GPU, with a stand-in for torch: when they may, when they do without, and what the evidence then says."""

from __future__ import annotations

import contextlib
import json
import threading
import types
from pathlib import Path

import pytest
import torch

from inferscope.capture import CaptureBudget, RequestScopedCapture, Target, gpu, guards, saving, session
from inferscope.capture.gpu import PAUSE_NS, Gpu, injected, occupied
from inferscope.capture.session import Options
from inferscope.device.backends import captures

PROFILE = torch.autograd.profiler.profile
MS = 1_000_000
KERNEL = '{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "add", "ts": 1, "dur": 1}]}'


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    for name in gpu._INJECTION:
        monkeypatch.delenv(name, raising=False)


class Clock:
    now = 1

    def __call__(self):
        return self.now


def card(*, initialised=True, capturing=False, cuda="12.8", hip=None, reserved=1):
    return types.SimpleNamespace(
        cuda=types.SimpleNamespace(
            is_initialized=lambda: initialised,
            is_current_stream_capturing=lambda: capturing,
            device_count=lambda: 2,
            memory_reserved=lambda index: reserved if index == 1 else 0,
            device=lambda index: contextlib.nullcontext(index),
        ),
        version=types.SimpleNamespace(cuda=cuda, hip=hip),
        no_grad=contextlib.nullcontext,
        zeros=lambda count, device: torch.zeros(count),
        autograd=torch.autograd,
        __file__=torch.__file__,
    )


@pytest.fixture
def trial(monkeypatch):
    """The warm-up's own session, with what its trace holds."""
    asked = []

    class Results:
        text = KERNEL

        def save(self, path):
            Path(path).write_text(self.text)

    results = Results()

    class Profile:
        kineto_results = results

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

    monkeypatch.setattr(session, "profiler", lambda module, options: asked.append(options) or Profile())
    return types.SimpleNamespace(asked=asked, results=results)


@pytest.mark.parametrize(
    ("torch_like", "expected"),
    [
        (types.SimpleNamespace(), (None, None, None)),
        (card(initialised=False), (None, None, None)),
        (card(capturing=True), (None, "graph_capture", None)),
        (card(cuda="12.4"), (None, None, "cuda_old")),
        (card(cuda="11.8"), (None, None, "cuda_old")),
        (card(cuda="12.6"), (None, "cuda_cold", None)),
        (card(hip="6.2", cuda=None), (None, None, "rocm")),
    ],
)
def test_before_the_warm_up(torch_like, expected):
    assert Gpu(Clock()).choose(torch_like) == expected


def test_when_it_is_too_late_for_a_warm_up_the_cpu_is_recorded_alone():
    one = Gpu(Clock())
    one.expected = False
    assert one.choose(card()) == (None, None, "cuda_cold")


def test_a_graph_that_another_thread_captures_keeps_sessions_away():
    one, graph = Gpu(Clock()), types.SimpleNamespace()

    class Graph:
        pass

    graph = Graph()
    captures.begin(graph)
    try:
        assert one.choose(card()) == (None, "graph_capture", None)
        assert one.warm_up(card()) == "graph_capture"
        assert not one.warmed
    finally:
        captures.end(graph)


@pytest.mark.parametrize("name", ["CUDA_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID"])
def test_another_tool_owns_cupti_by_the_environment(monkeypatch, name, trial):
    assert not injected()
    monkeypatch.setenv(name, "x")
    one = Gpu(Clock())
    assert one.choose(card()) == (None, None, "cupti_occupied")
    assert one.warm_up(card()) == "cupti_occupied"
    assert (one.why, trial.asked) == ("cupti_occupied", [])


def test_another_tool_owns_cupti_by_its_library(tmp_path):
    maps = tmp_path / "maps"
    maps.write_bytes(b"7f00-7f01 r-xp 00000000 00:00 1 /opt/nvidia/nsight-systems/libToolsInjection64.so\n")
    assert occupied({}, maps)
    maps.write_bytes(b"7f00-7f01 r-xp 00000000 00:00 1 /usr/lib/libcupti.so.12\n")
    assert not occupied({}, maps)
    assert not occupied({}, tmp_path / "absent")


def test_a_warm_up_lets_sessions_record_the_gpu_after_a_pause(trial):
    clock = Clock()
    one = Gpu(clock)
    assert one.warm_up(card()) is None
    assert trial.asked == [Options(device="cuda")]
    assert one.warmed
    assert one.tax is not None
    assert one.choose(card()) == (None, None, "device_pause")
    clock.now += PAUSE_NS
    assert one.choose(card()) == ("cuda", None, None)
    one.closed("cuda", clock.now)
    assert one.choose(card()) == (None, None, "device_pause")
    one.closed(None, clock.now + 10 * PAUSE_NS)
    clock.now += PAUSE_NS
    assert one.choose(card()) == ("cuda", None, None), "a session of the CPU alone needs no pause"


def test_a_warm_up_makes_no_context_where_the_application_has_none(trial):
    one = Gpu(Clock())
    assert one.warm_up(card(reserved=0)) == "cuda_unused"
    assert (one.why, trial.asked) == (None, [])


@pytest.mark.parametrize(("cpu_first", "why"), [(False, "no_kernels"), (True, "kineto_cpu_only")])
def test_a_warm_up_that_sees_no_kernel_ends_it(trial, cpu_first, why):
    trial.results.text = '{"traceEvents": []}'
    one = Gpu(Clock())
    if cpu_first:
        one.opened(None)
    assert one.warm_up(card()) == why
    assert one.choose(card()) == (None, None, why)


def test_sessions_without_a_kernel_end_it_at_the_second_in_a_row():
    one = Gpu(Clock())
    assert [one.saw(kernels) for kernels in (0, 5, 0, 0, 0)] == [False, False, False, True, False]
    assert one.why == "no_kernels"


# In the captures of a process


@pytest.fixture
def capture(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "RECORD_WAIT_NS", 0)
    one = RequestScopedCapture(CaptureBudget(max_share=1.0, free_memory_mb=0, slow=9, body=0, cooldown_s=0))
    one.recording.spending.draw = lambda _now, **_: True
    assert one.arm(Target("x", tmp_path, "score", 0)) is None
    yield one
    one.disable("test over")
    assert not session.lock.locked()


class Request:
    def __init__(self, number):
        self.id, self.name, self.start_ns, self.profiled, self.open = number, "score", 1, False, True


def run(capture, number):
    request = Request(number)
    assert capture.on_start(request)
    capture.on_enter(request, "score", "call")
    torch.add(torch.ones(2), 1)
    capture.on_exit(request, "score", "call")
    capture.on_finish(request, 30 * MS)
    while len(capture.shelf):
        capture.run_once()


def side(tmp_path, number):
    return json.loads((tmp_path / "captures" / f"s0-r{number}.json").read_text())


def test_the_evidence_says_why_the_gpu_is_left_out(capture, tmp_path, monkeypatch):
    monkeypatch.setattr(capture.recording.gpu, "choose", lambda _: (None, None, "cuda_old"))
    run(capture, 1)
    said = side(tmp_path, 1)
    assert (said["device"], said["kernels"], said["device_reason"]) == (None, None, guards.REASONS["cuda_old"])


def test_a_denied_session_is_counted_by_its_reason(capture, monkeypatch):
    monkeypatch.setattr(capture.recording.gpu, "choose", lambda _: (None, "graph_capture", None))
    request = Request(1)
    capture.on_start(request)
    capture.on_enter(request, "score", "call")
    assert capture.recording.counts.refused == {"graph_capture": 1}
    assert not request.profiled


def test_lost_kernels_and_blind_sessions_are_said(capture, tmp_path, monkeypatch):
    real = session.profiler
    monkeypatch.setattr(session, "profiler", lambda module, asked: real(module, Options(shapes=asked.shapes)))
    monkeypatch.setattr(
        capture.recording.gpu, "choose", lambda _: (None, None, "no_kernels") if capture.recording.gpu.why else ("cuda", None, None)
    )
    launch = ', {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 1, "dur": 1}'
    text = KERNEL.replace("]", launch * 4 + "]")

    def save(self, path):
        Path(path).write_text(text)

    def results(profile):
        profile.results = types.SimpleNamespace(save=types.MethodType(save, profile))

    put = capture.shelf.put
    monkeypatch.setattr(capture.shelf, "put", lambda kept: results(kept.profile) or put(kept))
    run(capture, 1)
    said = side(tmp_path, 1)
    assert (said["device"], said["kernels"], said["launches"], said["lost"]) == ("cuda", 1, 4, 0.75)
    text = text.replace("kernel", "overhead")
    run(capture, 2)
    run(capture, 3)
    assert capture.recording.counts.empty == 2
    run(capture, 4)
    assert side(tmp_path, 4)["device_reason"] == guards.REASONS["no_kernels"]
    assert capture.status()["gpu"]["cpu_only"] == "no_kernels"


def test_no_synchronisation_while_another_thread_captures_a_graph(capture, tmp_path, monkeypatch):
    real, waited = session.profiler, []

    class Watched(PROFILE):
        def __exit__(self, *rest):
            waited.append(self.use_device)
            self.use_device = None
            return super().__exit__(*rest)

    def make(module, asked):
        made = real(module, Options())
        made.__class__ = Watched
        made.use_device = "cuda"
        return made

    monkeypatch.setattr(session, "profiler", make)
    monkeypatch.setattr(capture.recording.gpu, "choose", lambda _: ("cuda", None, None))

    class Graph:
        pass

    graph, request = Graph(), Request(1)
    capture.on_start(request)
    capture.on_enter(request, "score", "call")
    captures.begin(graph)
    try:
        capture.on_exit(request, "score", "call")
    finally:
        captures.end(graph)
    profile = next(iter(capture._drawn.values())).session
    assert waited == [None]
    assert profile.tail_lost
    capture.on_finish(request, 0)


# The warm-up of a process


def test_the_warm_up_comes_before_readiness_or_not_at_all(monkeypatch, capture, trial):
    monkeypatch.setattr(session, "loaded_torch", lambda: card())
    one = capture.recording.gpu
    capture.warm_up(ready=True)
    assert (one.warmed, one.expected) == (False, False)
    one.expected = True
    capture.warm_up(ready=False)
    assert one.warmed
    capture.warm_up(ready=False)
    assert len(trial.asked) == 1, "once"


def test_the_warm_up_keeps_out_of_the_way_of_the_users_profiler(monkeypatch, capture, trial):
    monkeypatch.undo()
    with PROFILE(use_kineto=True):
        monkeypatch.setattr(session, "loaded_torch", lambda: card())
        assert capture.recording.warm_up() == "user_profiler"
    assert not session.lock.locked()
    with session.lock:
        assert capture.recording.warm_up() == "busy"


def test_a_slow_down_of_launches_is_said_once(monkeypatch, capture, trial, caplog):
    monkeypatch.setattr(session, "loaded_torch", lambda: card())
    times = iter([100, 150])
    monkeypatch.setattr(gpu, "_launch_ns", lambda _: next(times))
    capture.warm_up(ready=False)
    assert capture.recording.gpu.tax == 0.5
    assert "50%" in caplog.text
    assert "TEARDOWN_CUPTI=1" in caplog.text


def test_options_that_a_torch_does_not_know_are_left_out():
    seen = {}

    class Config:
        def __init__(self, **options):
            if set(options) - {"profile_all_threads"}:
                raise TypeError
            seen["config"] = options

    old = types.SimpleNamespace(
        autograd=types.SimpleNamespace(
            profiler=types.SimpleNamespace(profile=lambda **options: seen.update(options) or types.SimpleNamespace())
        ),
        _C=types.SimpleNamespace(_profiler=types.SimpleNamespace(_ExperimentalConfig=Config)),
    )
    session.profiler(old, Options(device="cuda", shapes=True))
    assert (seen["use_kineto"], seen["use_device"], seen["record_shapes"], seen["config"]) == (True, "cuda", True, {})
    session.profiler(old, Options(all_threads=True))
    assert seen["config"] == {"profile_all_threads": True}


def test_a_torch_that_cannot_record_all_threads_says_so():
    class Config:
        def __init__(self, **options):
            if options:
                raise TypeError

    old = types.SimpleNamespace(
        autograd=types.SimpleNamespace(profiler=types.SimpleNamespace(profile=lambda **_: None)),
        _C=types.SimpleNamespace(_profiler=types.SimpleNamespace(_ExperimentalConfig=Config)),
    )
    with pytest.raises(TypeError):
        session.profiler(old, Options(all_threads=True))


def test_threads_of_tests_are_over():
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("inferscope-")]
