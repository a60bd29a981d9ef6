"""valgrind watches the C core run everything it has: no read or write outside its memory, nothing uninitialised, no leak."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

pytest.importorskip("inferscope.record._native", reason="the C core was not built")

EXERCISE = Path(__file__).with_name("exercise.py")
ROOT = EXERCISE.parents[2]


def ours(report: Path) -> list[str]:
    """Errors that have the core among their callers; CPython's own are its own."""
    found = []
    for error in ET.parse(report).getroot().iter("error"):
        frames = [(frame.findtext("fn", "?"), frame.findtext("obj", "")) for frame in error.iter("frame")]
        if any("/_native." in obj for _, obj in frames):
            what = error.findtext("what") or error.findtext("xwhat/text") or ""
            found.append(f"{error.findtext('kind')}: {what}\n  " + "\n  ".join(name for name, _ in frames[:12]))
    return found


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind is not installed")
def test_valgrind_finds_nothing(tmp_path):
    report = tmp_path / "report.xml"
    checker = ["valgrind", "--xml=yes", f"--xml-file={report}", "--leak-check=full", "--show-leak-kinds=definite", "--track-origins=yes"]
    checker.append("--num-callers=30")
    environment = {**os.environ, "PYTHONMALLOC": "malloc", "INFERSCOPE_STRICT": "0", "PYTHONPATH": str(ROOT)}
    run = subprocess.run([*checker, sys.executable, str(EXERCISE), "2"], env=environment, capture_output=True, text=True, check=False)
    assert run.stdout.strip() == "done", run.stderr[-2000:]
    assert ours(report) == []


def library(name: str) -> str | None:
    """Path of one of the compiler's libraries, None without it."""
    compiler = shutil.which("gcc")
    if compiler is None:
        return None
    found = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=False).stdout.strip()
    return found if "/" in found and Path(found).exists() else None


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.skipif(library("libasan.so") is None or library("libubsan.so") is None, reason="no sanitizers for gcc")
def test_sanitizers_find_nothing(tmp_path):
    """The same built with AddressSanitizer and UndefinedBehaviorSanitizer, which also see the stack and overflows."""
    package = tmp_path / "inferscope"
    shutil.copytree(ROOT / "inferscope", package, ignore=shutil.ignore_patterns("*.so", "__pycache__", "_core"))
    sources = [str(source) for source in (ROOT / "inferscope" / "record" / "_core").glob("*.c")]
    target = package / "record" / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"
    flags = ["-std=c11", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer"]
    include = f"-I{sysconfig.get_paths()['include']}"
    subprocess.run(["gcc", *flags, "-shared", "-fPIC", include, *sources, "-o", str(target)], check=True)
    preload = f"{library('libasan.so')} {library('libubsan.so')}"
    environment = {**os.environ, "LD_PRELOAD": preload, "ASAN_OPTIONS": "detect_leaks=0", "PYTHONMALLOC": "malloc"}
    environment |= {"PYTHONPATH": str(tmp_path), "INFERSCOPE_STRICT": "0"}
    run = subprocess.run([sys.executable, str(EXERCISE), "20"], env=environment, capture_output=True, text=True, check=False)
    assert run.stdout.strip() == "done", run.stderr[-3000:]
    assert "runtime error" not in run.stderr


def test_the_exercise_runs():
    """What valgrind watches works at all."""
    run = subprocess.run([sys.executable, str(EXERCISE), "1"], capture_output=True, text=True, check=False)
    assert run.stdout.strip() == "done", run.stderr
