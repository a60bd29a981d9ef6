"""What the process may use, as the kernel and the libraries say it."""

from __future__ import annotations

import os
import sys
import types

from inferscope.host import process


def test_facts_name_cpus_threads_and_pools(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(get_num_threads=lambda: 5))
    found = process.facts()
    assert found["cpus"] == len(os.sched_getaffinity(0))
    assert found["threads"] >= 1
    assert (found["torch_threads"], found["omp_threads"]) == (5, "3")


def test_what_nobody_says_is_none(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(process, "cpu_quota", lambda: None)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace())  # still being imported
    found = process.facts()
    assert (found["torch_threads"], found["omp_threads"], found["cpu_quota"]) == (None, None, None)
    monkeypatch.delitem(sys.modules, "torch")
    assert process.facts()["torch_threads"] is None
