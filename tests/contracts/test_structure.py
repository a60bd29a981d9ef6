"""What holds for the source tree as a whole."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted([*ROOT.glob("inferscope/**/*.py"), *ROOT.glob("integrations/inferscope_integrations/**/*.py")])
MODULE_LINES = 400
FUNCTION_LINES = 60


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def functions(tree: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]


def module_level_imports(tree: ast.Module) -> set[str]:
    """Top-level names imported when a module is loaded; imports under `if TYPE_CHECKING` never run."""
    names: set[str] = set()
    todo: list[ast.AST] = list(tree.body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            todo += node.orelse
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            todo += ast.iter_child_nodes(node)
    return names


def test_module_level_imports_are_found():
    code = "import a.b\nif TYPE_CHECKING:\n    import c\ntry:\n    from d.e import f\nexcept E: pass\ndef g():\n    import h\nclass I:\n    import j\n"
    assert module_level_imports(ast.parse(code)) == {"a", "d", "j"}


def test_there_is_something_to_check():
    assert len(SOURCES) > 10


def test_modules_are_short():
    lengths = {relative(path): len(path.read_text().splitlines()) for path in SOURCES}
    assert not {name: lines for name, lines in lengths.items() if lines > MODULE_LINES}


def test_functions_are_short():
    long = [
        f"{relative(path)}:{node.lineno} {node.name}: {length} lines"
        for path in SOURCES
        for node in functions(ast.parse(path.read_text()))
        if (length := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_LINES
    ]
    assert not long


def test_torch_is_imported_inside_functions():
    assert not [relative(path) for path in SOURCES if "torch" in module_level_imports(ast.parse(path.read_text()))]


def lets_pass(handler: ast.ExceptHandler) -> bool:
    """Whether a handler raises, or hands what it caught on to a coroutine or generator."""
    calls = {node.func.attr for node in ast.walk(handler) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)}
    return any(isinstance(node, ast.Raise) for node in ast.walk(handler)) or bool(calls & {"throw", "athrow"})


def test_no_bare_or_base_exception_handler():
    """Cancellation and interrupts pass: host safety catches `Exception`, or catches wider and lets it pass."""
    wide = [
        f"{relative(path)}:{node.lineno}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ExceptHandler) and (node.type is None or "BaseException" in ast.unparse(node.type)) and not lets_pass(node)
    ]
    assert not wide


def test_threads_start_in_runtime_only():
    """Rooms are plain objects; `testing` holds counterparts, which have threads of their own."""
    starting = [
        relative(path)
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {"Thread", "threading.Thread", "threading.Timer", "Timer"}
    ]
    assert {name for name in starting if not name.startswith("inferscope/testing/")} == {"inferscope/runtime.py"}


def test_there_is_no_drawer():
    """A module named for nothing in particular collects everything."""
    assert not [relative(path) for path in SOURCES if path.stem.strip("_") in {"utils", "util", "helpers", "common", "misc", "manager"}]


def machine_paths() -> re.Pattern[str]:
    """Paths that only exist where the project was worked on: this checkout, what lies beside it, people's homes."""
    shared = {
        Path(name) for name in ("/", "/tmp", "/var/tmp", "/opt", "/srv", "/usr", "/usr/src", "/var", "/home", "/mnt", tempfile.gettempdir())
    }
    roots = {path for path in (ROOT, ROOT.parent, Path.home()) if path not in shared}
    return re.compile(
        r"(?<![\w.~])(?:" + "|".join([*(re.escape(str(path)) for path in sorted(roots)), r"/home/\w+", r"/Users/\w+"]) + r")/"
    )


def test_tracked_files_name_no_path_of_one_machine():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    pattern = machine_paths()
    found = []
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if not path.is_file():
            continue
        text = path.read_bytes().decode("utf-8", errors="ignore")
        found += [f"{name}: {match.group()}" for match in pattern.finditer(text)]
    assert not found


def test_layers_hold():
    pytest.importorskip("importlinter")
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
