"""Which recorder is used where, and what is said about it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from inferscope.record import core

built = importlib.util.find_spec("inferscope.record._native") is not None


def run(code: str, **environment: str) -> str:
    """What a fresh interpreter prints."""
    clean = {name: value for name, value in os.environ.items() if name not in {"INFERSCOPE_PURE", "INFERSCOPE_DISABLED"}}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**clean, **environment})
    return done.stdout.strip()


@pytest.mark.skipif(not built, reason="the C core was not built")
def test_the_core_is_the_choice_and_the_environment_overrides_it():
    told = "from inferscope.record import core; print(core.IMPLEMENTATION, core.REASON)"
    assert run(told) == "native"
    assert run(told, INFERSCOPE_PURE="1") == "pure INFERSCOPE_PURE=1"
    assert run(told, INFERSCOPE_DISABLED="1") == "disabled INFERSCOPE_DISABLED=1"


@pytest.mark.parametrize("pure", ["", "1"])
def test_without_the_interpreters_lock_it_is_the_twin_and_says_that_counts_may_miss_some(monkeypatch, pure):
    """Importing the core would switch the lock on, for everybody in the process."""
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    monkeypatch.setenv("INFERSCOPE_PURE", pure)
    name, reason, recorder = core._choose()
    assert (name, recorder.__module__) == ("pure", "inferscope.record.pure.recorder")
    assert "counts may miss some" in reason
    assert ("switch the interpreter's lock on" in reason) is not bool(pure)
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: True, raising=False)
    assert "miss" not in core._choose()[1]


def test_the_reason_is_in_the_status():
    said = run("import sys; sys._is_gil_enabled = lambda: False\nimport inferscope; print(inferscope.status()['core_note'])")
    assert "counts may miss some" in said


SUBINTERPRETER = """
import sys
try:
    import _interpreters as interpreters
    legacy = {"config": "legacy"}
except ImportError:
    import _xxsubinterpreters as interpreters
    legacy = {}
code = '''
from inferscope.record import core
assert core.IMPLEMENTATION == "pure", core.IMPLEMENTATION
assert "interpreter" in core.REASON, core.REASON
with core.default.request("r"), core.stage("s"):
    pass
assert len(core.default.drain()) == 1
'''
made = interpreters.create() if not legacy else interpreters.create("legacy")
failed = interpreters.run_string(made, code)
assert failed is None, failed
interpreters.destroy(made)
from inferscope.record import core
with core.default.request("r"):
    pass
print(core.IMPLEMENTATION, len(core.default.drain()))
"""


@pytest.mark.skipif(not built, reason="the C core was not built")
@pytest.mark.parametrize("first", ["", "import inferscope.record._native\n"])
def test_a_sub_interpreter_gets_the_twin_and_a_reason(first):
    """Whichever interpreter asks first; the main one keeps the core."""
    assert run(first + SUBINTERPRETER) == "native 1"
