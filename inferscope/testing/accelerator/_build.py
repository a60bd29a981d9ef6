"""Compiles the simulator on first use and keeps it in the user's cache, keyed by torch's version and the sources."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from inferscope.errors import InferscopeError

if TYPE_CHECKING:
    from collections.abc import Generator

__all__ = ["AcceleratorUnavailableError", "library"]

SOURCES: Final = ("simulator.cpp", "memory.cpp", "control.cpp", "backend.cpp", "operators.cpp")
_WITH_TORCH: Final = frozenset({"backend.cpp", "operators.cpp"})
_FOLDER: Final = Path(__file__).parent / "_core"


class AcceleratorUnavailableError(InferscopeError):
    """The simulated accelerator cannot be built or loaded here; the message says why."""


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "inferscope" / "accelerator"


def _compiler() -> str:
    asked = os.environ.get("CXX")
    for name in (asked,) if asked else ("g++", "clang++", "c++"):
        found = shutil.which(name)
        if found is not None:
            return found
    raise AcceleratorUnavailableError(
        f"the simulated accelerator is compiled on first use and there is no C++ compiler ({asked or 'g++, clang++, c++'} not found): "
        "install one with C++20 (g++ 10 or later), or name it in CXX"
    )


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  (our own sources, the user's compiler)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "error" in line][:5] or done.stderr.splitlines()[:5]
        raise AcceleratorUnavailableError("the simulated accelerator does not compile:\n" + "\n".join(lines))


def _compile(into: Path) -> None:
    """One source after another: a compiler that sees torch's headers takes about 1.5 GB."""
    import torch

    root = Path(torch.__file__).parent
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    compiler = _compiler()
    with tempfile.TemporaryDirectory(dir=into.parent) as folder:
        objects: list[str] = []
        for source in SOURCES:
            target = str(Path(folder) / f"{source}.o")
            headers = ["-isystem", str(root / "include")] if source in _WITH_TORCH else []
            _run([compiler, "-std=c++20", "-O1", "-fPIC", abi, *headers, "-c", str(_FOLDER / source), "-o", target])
            objects.append(target)
        built = Path(folder) / into.name
        link = ["-ltorch", "-ltorch_cpu", "-lc10"]
        _run([compiler, "-shared", *objects, f"-L{root / 'lib'}", *link, "-o", str(built)])
        built.replace(into)


@contextlib.contextmanager
def _alone(folder: Path) -> Generator[None]:
    """One compilation at a time, of all processes of this user."""
    with (folder / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def library() -> Path:
    """Path of the compiled simulator, compiled now if it was not yet.

    Raises:
        AcceleratorUnavailableError: No torch, no Linux, no compiler, or one that cannot compile it.
    """
    if not sys.platform.startswith("linux"):
        raise AcceleratorUnavailableError(f"the simulated accelerator runs on Linux, not on {sys.platform}")
    try:
        import torch
    except ImportError as error:
        raise AcceleratorUnavailableError("the simulated accelerator is a torch device, and torch is not installed") from error
    content = hashlib.sha256()
    for path in sorted(_FOLDER.iterdir()):
        if path.suffix in {".cpp", ".h"}:
            content.update(path.read_bytes())
    folder = _cache()
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"sim-{torch.__version__}-{content.hexdigest()[:16]}.so"
    if not target.exists():
        with _alone(folder):
            if not target.exists():
                _compile(target)
    return target
