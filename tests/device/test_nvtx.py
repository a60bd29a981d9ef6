"""Stages as NVTX ranges: what a tool is told through the real library, from a stand-in for the tool that is compiled here."""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from inferscope.device.nvtx import Ranges, attached

WITH_RANGES = """
    import asyncio, threading
    from inferscope.device.nvtx import Ranges
    from inferscope.record.core import Recorder
    recorder, ranges = Recorder(), Ranges()
    ranges.start()
    assert ranges.on, ranges.off
    recorder.armed = True
    recorder.set_hooks(on_start=lambda _: True, on_enter=ranges.on_enter, on_exit=ranges.on_exit, on_finish=ranges.on_finish)
"""


@pytest.fixture(scope="module")
def tool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("nvtx", reason="needs nvtx")
    compiler = shutil.which("gcc") or shutil.which("cc")
    assert compiler is not None, "the tool's stand-in needs a C compiler"
    path = tmp_path_factory.mktemp("nvtx") / "libtool.so"
    subprocess.run([compiler, "-shared", "-fPIC", str(Path(__file__).parent / "fake_nvtx.c"), "-o", str(path)], check=True)
    return path


def told(tool: Path, folder: Path, code: str, **more: str) -> list[str]:
    """What the tool heard while a program of its own ran."""
    log = folder / "log"
    environ = {"NVTX_INJECTION64_PATH": str(tool), "FAKE_NVTX_LOG": str(log), "INFERSCOPE_STRICT": "1", **more}
    command = [sys.executable, "-c", textwrap.dedent(WITH_RANGES) + textwrap.dedent(code)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return log.read_text().splitlines()


def test_stages_nest_in_a_domain_of_their_own_with_registered_names(tool, tmp_path) -> None:
    heard = told(
        tool,
        tmp_path,
        """
        with recorder.request("predict"):
            with recorder.stage("preprocess"):
                pass
            with recorder.stage("forward"), recorder.stage("inner"):
                pass
        with recorder.request("predict"):
            pass
        """,
    )
    assert heard == [
        "push inferscope registered predict",
        "push inferscope registered preprocess",
        "pop inferscope",
        "push inferscope registered forward",
        "push inferscope registered inner",
        "pop inferscope",
        "pop inferscope",
        "pop inferscope",
        "push inferscope registered predict",
        "pop inferscope",
    ]


def test_tasks_that_take_turns_have_ranges_that_may_overlap(tool, tmp_path) -> None:
    heard = told(
        tool,
        tmp_path,
        """
        async def serve(name):
            with recorder.request(name):
                with recorder.stage("wait"):
                    await asyncio.sleep(0.01)

        async def main():
            await asyncio.gather(serve("first"), serve("second"))

        asyncio.run(main())
        """,
    )
    assert [line for line in heard if line.startswith("start")] == [
        "start inferscope registered first 1",
        "start inferscope registered wait 2",
        "start inferscope registered second 3",
        "start inferscope registered wait 4",
    ]
    assert sorted(line for line in heard if line.startswith("end")) == [f"end inferscope {number}" for number in (1, 2, 3, 4)]


def test_a_request_that_goes_to_another_thread_does_not_pop_its_ranges_there(tool, tmp_path) -> None:
    heard = told(
        tool,
        tmp_path,
        """
        with recorder.request("predict") as request:
            def work():
                with recorder.attach(request), recorder.stage("elsewhere"):
                    pass
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        """,
    )
    assert heard == [
        "push inferscope registered predict",
        "start inferscope registered elsewhere 1",
        "end inferscope 1",
        "pop inferscope",
    ]


def test_ranges_are_wanted_when_a_tool_is_attached_or_somebody_asks() -> None:
    assert not attached({})
    assert attached({"NVTX_INJECTION64_PATH": "/opt/nsight/lib.so"})
    assert attached({"NSYS_PROFILING_SESSION_ID": "1"})
    assert attached({"INFERSCOPE_NVTX": "1"})
    assert not attached({"INFERSCOPE_NVTX": "0", "NSYS_PROFILING_SESSION_ID": "1"})


def test_without_the_library_there_are_none_and_the_reason_is_said(monkeypatch) -> None:
    ranges = Ranges()
    ranges.start({})
    assert ranges.off.startswith("no tool is attached")
    monkeypatch.setitem(sys.modules, "nvtx", None)
    ranges.start({"INFERSCOPE_NVTX": "1"})
    assert ranges.off == "the package nvtx is not installed"


def test_a_configured_process_shows_its_stages(tool, tmp_path) -> None:
    heard = told(
        tool,
        tmp_path,
        """
        import inferscope
        inferscope.configure(service="ranges")
        assert inferscope.status()["nvtx"] == "on"
        with inferscope.request("predict"), inferscope.stage("forward"):
            pass
        inferscope.shutdown()
        with inferscope.request("late"):
            pass
        """,
        INFERSCOPE_STATE_DIR=str(tmp_path / "state"),
        HOME=str(tmp_path),
    )
    assert heard == ["push inferscope registered predict", "push inferscope registered forward", "pop inferscope", "pop inferscope"]
