"""What the core would count where threads run without the interpreter's lock: relaxed atomics, tried from C, because no such interpreter is
at hand. The module itself needs the lock and says so (see record/core.py)."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CORE = HERE.parents[1] / "inferscope" / "record" / "_core"

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")


def build(target: Path, *flags: str) -> list[str]:
    """The program's command, run as it is laid out in memory always, which the thread sanitizer needs."""
    include = sysconfig.get_paths()["include"]
    command = ["gcc", "-std=c11", "-O1", "-w", f"-I{CORE}", f"-I{include}", *flags, str(HERE / "counts.c"), "-o", str(target)]
    subprocess.run([*command, "-pthread"], check=True)
    return [*(["setarch", "-R"] if shutil.which("setarch") else []), str(target)]


def test_no_count_is_lost_without_the_lock(tmp_path):
    assert subprocess.run(build(tmp_path / "counts", "-DCOUNTS_ATOMIC=1"), check=False).returncode == 0


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("atomic", [1, 0])
def test_the_thread_sanitizer_finds_races_in_plain_counts_only(tmp_path, atomic):
    run = subprocess.run(
        build(tmp_path / "counts", f"-DCOUNTS_ATOMIC={atomic}", "-g", "-fsanitize=thread"), capture_output=True, text=True, check=False
    )
    if "unexpected memory mapping" in run.stderr:
        pytest.skip("the thread sanitizer does not run here")
    assert ("data race" in run.stderr) is not bool(atomic), run.stderr[-2000:]
    if atomic:
        assert run.returncode == 0, run.stderr[-2000:]
