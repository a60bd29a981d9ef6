"""Every allocation and every internal call of the C core fails once: the host's results, exceptions and signatures stay what they are."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
def test_the_host_does_not_notice(tmp_path):
    package = tmp_path / "inferscope"
    shutil.copytree(ROOT / "inferscope", package, ignore=shutil.ignore_patterns("*.so", "__pycache__", "_core"))
    sources = [str(source) for source in (ROOT / "inferscope" / "record" / "_core").glob("*.c")]
    target = package / "record" / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"
    flags = ["-std=c11", "-O1", "-w", "-fvisibility=hidden", "-shared", "-fPIC", "-include", str(HERE / "inject.h"), f"-I{HERE}"]
    include = f"-I{sysconfig.get_paths()['include']}"
    subprocess.run(["gcc", *flags, include, *sources, str(HERE / "inject.c"), "-o", str(target)], check=True)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "INFERSCOPE_STRICT": "0"}
    run = subprocess.run([sys.executable, str(HERE / "injected.py")], env=environment, capture_output=True, text=True, check=False)
    planted, done = run.stdout.split("\n")[-3:-1] if run.stdout.count("\n") > 1 else ("", "")
    assert done == "done", run.stdout + run.stderr[-3000:]
    assert int(planted.split()[0]) > 300
