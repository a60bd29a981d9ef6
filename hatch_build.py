"""Build hook: compiles the C core in place and puts it into the wheel.

Without a compiler, without the sources, or with `INFERSCOPE_NO_COMPILE=1` the build says so once and goes on: inferscope then
runs on the core's pure-Python twin. `INFERSCOPE_REQUIRE_COMPILE=1` makes the same case an error, for builds of release wheels.
`INFERSCOPE_ABI3=1` compiles one core for every CPython from 3.12 on; its wheel is for interpreters that have none of their own, which
installers prefer. `python hatch_build.py` compiles in place and does nothing else.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

if TYPE_CHECKING:
    from collections.abc import Callable

MODULE = "inferscope.record._native"
SOURCES = Path("inferscope", "record", "_core")
TARGET = Path("inferscope", "record")
ABI3 = "cp312"  # the oldest whose limited API has vectorcalls; _core/compat.h says the same
ABI3_FOLDER = Path("build", "abi3")  # beside the tree: older interpreters would take `_native.abi3.so` in it for theirs
# Pairs of stores as one vector store: what a stage writes is read again at once, in halves, and that took 2 ns of 60.
FLAGS = ["-std=c11", "-O2", "-g0", "-Wall", "-Wextra", "-Wno-unused-parameter", "-fvisibility=hidden", "-fno-tree-slp-vectorize"]


class NoCoreError(Exception):
    """The core was not compiled; the message says why."""


def for_all_versions() -> bool:
    """Whether the core is to be built against the limited API."""
    return os.environ.get("INFERSCOPE_ABI3") == "1"


def compile_core(root: Path) -> Path:
    """Compile the C core and move the extension to its place in the source tree, one for all versions below `ABI3_FOLDER`.

    The move is atomic: a running process that has the previous extension loaded keeps it.

    Args:
        root: The project's root.

    Returns:
        The extension's path, relative to `root`.

    Raises:
        NoCoreError: Nothing was compiled.
    """
    if os.environ.get("INFERSCOPE_NO_COMPILE") == "1":
        message = "INFERSCOPE_NO_COMPILE=1"
        raise NoCoreError(message)
    abi3 = for_all_versions()
    if abi3 and sys.version_info < (3, 12):
        message = "INFERSCOPE_ABI3=1 needs Python 3.12 or later"
        raise NoCoreError(message)
    sources = sorted((root / SOURCES).glob("*.c"))
    if not sources:
        message = f"no C sources in {SOURCES}"
        raise NoCoreError(message)
    try:  # here, because a build without the core needs no setuptools
        from setuptools import Distribution, Extension
        from setuptools.command.build_ext import build_ext
    except ImportError as error:
        message = f"setuptools is missing ({error})"
        raise NoCoreError(message) from error
    extension = Extension(
        MODULE,
        [str(source) for source in sources],
        include_dirs=[str(root / SOURCES)],
        extra_compile_args=[] if sys.platform == "win32" else FLAGS,
        define_macros=[("INFERSCOPE_ABI3", "1")] if abi3 else [],
        py_limited_api=abi3,
    )
    with tempfile.TemporaryDirectory(prefix=".core-", dir=root) as scratch:
        command = build_ext(Distribution({"name": "inferscope-core", "ext_modules": [extension]}))
        command.build_lib = str(Path(scratch, "lib"))
        command.build_temp = str(Path(scratch, "objects"))
        command.ensure_finalized()
        try:
            command.run()
        except Exception as error:
            # distutils raises its own errors for a missing compiler and a failed compilation alike; a missing file is an OSError
            message = f"{type(error).__name__}: {error}"
            raise NoCoreError(message) from error
        built = Path(command.get_ext_fullpath(MODULE))
        target = (ABI3_FOLDER if abi3 else TARGET) / built.name
        (root / target).parent.mkdir(parents=True, exist_ok=True)
        built.replace(root / target)
    return target


def compile_or_say(root: Path, say: Callable[[str], object]) -> Path | None:
    """Compile the core, or say why there is none.

    Args:
        root: The project's root.
        say: Takes the one line that explains a pure build.

    Returns:
        The extension's path relative to `root`, or None for a pure build.

    Raises:
        NoCoreError: There is no core and `INFERSCOPE_REQUIRE_COMPILE=1`.
    """
    try:
        return compile_core(root)
    except NoCoreError as reason:
        if os.environ.get("INFERSCOPE_REQUIRE_COMPILE") == "1":
            raise
        say(f"inferscope: the C core was not compiled, the pure-Python twin is used ({reason})")
        return None


class CoreBuildHook(BuildHookInterface[Any]):
    """Adds the compiled core to wheels; editable installs find it in the source tree."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile before the files are collected.

        Args:
            version: `standard` for a wheel, `editable` for a development install.
            build_data: Hatchling's build data; changed in place.
        """
        if self.target_name != "wheel":
            return
        target = compile_or_say(Path(self.root), self.app.display_warning)
        if target is None or version == "editable":
            return
        build_data["force_include"][str(Path(self.root) / target)] = (TARGET / target.name).as_posix()
        build_data["pure_python"] = False
        if for_all_versions():
            platform = self.build_config.builder.get_best_matching_tag().rpartition("-")[2]
            build_data["tag"] = f"{ABI3}-abi3-{platform}"
        else:
            build_data["infer_tag"] = True


if __name__ == "__main__":
    compiled = compile_or_say(Path(__file__).resolve().parent, print)
    if compiled is not None:
        print(compiled)
