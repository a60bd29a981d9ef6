"""What `import inferscope` and the command line may load."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

HEAVY = {"asyncio", "grpc", "numpy", "opentelemetry", "torch", "wrapt"}


def loaded_by(code: str) -> set[str]:
    """Top-level names in `sys.modules` after `code` ran in a fresh interpreter."""
    script = f"{code}\nimport json, sys\nprint(json.dumps(sorted({{name.partition('.')[0] for name in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_import_loads_nothing_heavy():
    assert not loaded_by("import inferscope") & HEAVY


def test_pure_import_loads_nothing_heavy(monkeypatch):
    monkeypatch.setenv("INFERSCOPE_PURE", "1")
    assert not loaded_by("import inferscope; inferscope.stage") & HEAVY


def test_hot_path_loads_nothing_heavy():
    code = "import inferscope as scope\nwith scope.request('score'), scope.stage('forward'): pass"
    assert not loaded_by(code) & HEAVY


def test_import_is_quick():
    def seconds(code: str) -> float:
        begun = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        return time.perf_counter() - begun

    bare = min(seconds("pass") for _ in range(3))
    ours = min(seconds("import inferscope") for _ in range(3))
    assert ours - bare < 0.25


@pytest.mark.parametrize("room", ["diagnose", "report"])
def test_offline_rooms_never_load_torch(room):
    assert "torch" not in loaded_by(
        f"import importlib, pkgutil, inferscope.{room} as room\n"
        "for module in pkgutil.walk_packages(room.__path__, room.__name__ + '.'):\n"
        "    if not module.name.endswith('__main__'):\n"
        "        importlib.import_module(module.name)"
    )


def test_command_line_help_loads_no_torch():
    code = (
        "import contextlib, io, inferscope.cli as cli\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()): cli.main(['--help'])"
    )
    assert "torch" not in loaded_by(code)
