"""CPU time of processes that this one started."""

from __future__ import annotations

import subprocess
import sys

import pytest

from inferscope.clock import now_ns
from inferscope.host.children import Children

BURN = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass\nprint('done', flush=True)\nimport sys; sys.stdin.read()"


def test_a_child_that_burns_is_seen():
    watch = Children()
    watch.tick(now_ns())
    with subprocess.Popen([sys.executable, "-c", BURN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        watch.tick(now_ns())
        assert child.stdout.readline() == "done\n"
        watch.tick(now_ns())
        child.stdin.close()
    rows = watch.evidence(0, now_ns())
    if not rows:
        pytest.skip("this kernel does not list children")
    assert sum(row[2] for row in rows) >= 250_000_000
    watch.tick(now_ns())
    later = watch.evidence(0, now_ns())[len(rows) :]  # other tests may have left a child that rests, such as a resource tracker
    assert sum(row[2] for row in later) < 50_000_000
    watch.reset()
    assert not watch.evidence(0, now_ns())


def test_a_made_tree_is_read(tmp_path):
    task = tmp_path / "task" / "1"
    task.mkdir(parents=True)
    (task / "children").write_text("7 8 ")
    stat = "{} (a) b) S 1 1 1 0 -1 4194304 100 0 0 0 {} {} 0 0 20 0 1 0 5 0 0"
    for pid, user, system in ((7, 100, 20), (8, 0, 0)):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(stat.format(pid, user, system))
    watch = Children(tmp_path / "task", tmp_path)
    watch.tick(1_000)
    (tmp_path / "7" / "stat").write_text(stat.format(7, 150, 20))
    watch.tick(2_000)
    ((end, length, spent),) = watch.evidence(0, 5_000)
    assert (end, length) == (2_000, 1_000)
    assert spent == 50 * 1_000_000_000 // watch._hz
    (task / "children").write_text("")
    watch.tick(3_000)
    assert len(watch.evidence(0, 5_000)) == 1, "no children, no tick"
