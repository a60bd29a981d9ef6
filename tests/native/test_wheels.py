"""Which wheels there are, what they are called, which one an installer takes, and that the core for all versions is one."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

pytest.importorskip("hatchling", reason="the build back end is not installed")
from packaging import tags

ROOT = Path(__file__).parents[2]
CORE = ROOT / "inferscope" / "record" / "_core"


@pytest.fixture
def hook(monkeypatch):
    """The build hook's module, compiling nothing."""
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("INFERSCOPE_ABI3", "INFERSCOPE_NO_COMPILE", "INFERSCOPE_REQUIRE_COMPILE"):
        monkeypatch.delenv(name, raising=False)
    return module


def build_data(hook):
    """What the hook tells hatchling of a wheel."""
    from hatchling.builders.wheel import WheelBuilder

    builder = WheelBuilder(str(ROOT))
    made = hook.CoreBuildHook(str(ROOT), {}, builder.config, builder.metadata, str(ROOT / "dist"), "wheel")
    data = {"force_include": {}, "pure_python": True, "infer_tag": False}
    made.initialize("standard", data)
    return data


def test_a_wheel_for_one_interpreter_has_its_tag_and_one_for_all_has_abi3(hook, monkeypatch):
    own = Path("inferscope", "record", "_native" + sysconfig.get_config_var("EXT_SUFFIX"))
    monkeypatch.setattr(hook, "compile_core", lambda _: own)
    data = build_data(hook)
    assert (data["infer_tag"], data["pure_python"], list(data["force_include"].values())) == (True, False, [own.as_posix()])
    monkeypatch.setenv("INFERSCOPE_ABI3", "1")
    monkeypatch.setattr(hook, "compile_core", lambda _: hook.ABI3_FOLDER / "_native.abi3.so")
    data = build_data(hook)
    assert data["tag"].startswith("cp312-abi3-")
    assert data["tag"].rpartition("-")[2] in {tag.platform for tag in tags.sys_tags()}
    assert list(data["force_include"].values()) == ["inferscope/record/_native.abi3.so"]
    assert not data["infer_tag"]


def test_an_older_interpreter_cannot_build_the_one_for_all(hook, monkeypatch):
    monkeypatch.setenv("INFERSCOPE_ABI3", "1")
    monkeypatch.setattr(sys, "version_info", (3, 11, 0))
    with pytest.raises(hook.NoCoreError, match=r"3\.12"):
        hook.compile_core(ROOT)


@pytest.mark.parametrize("version", [(3, 12), (3, 13), (3, 14), (3, 15)])
def test_an_installer_takes_the_interpreters_own_then_the_one_for_all_then_the_pure_one(version):
    names = [str(tag) for tag in [*tags.cpython_tags(version, platforms=["linux_x86_64"]), *tags.compatible_tags(version)]]
    own = "cp{0}{1}-cp{0}{1}-linux_x86_64".format(*version)
    assert names.index(own) < names.index("cp312-abi3-linux_x86_64") < names.index("py3-none-any")


@pytest.mark.parametrize("version", [(3, 10), (3, 11)])
def test_an_older_interpreter_never_gets_the_one_for_all(version):
    assert "cp312-abi3-linux_x86_64" not in {str(tag) for tag in tags.cpython_tags(version, platforms=["linux_x86_64"])}


@pytest.mark.skipif(importlib.util.find_spec("cibuildwheel") is None, reason="cibuildwheel is not installed")
@pytest.mark.parametrize(
    ("config", "interpreters"), [("pyproject.toml", ["310", "311", "312", "313", "314"]), (".ci/abi3.toml", ["312", "313", "314"])]
)
def test_cibuildwheel_reads_its_configuration(config, interpreters):
    command = [sys.executable, "-m", "cibuildwheel", "--print-build-identifiers", "--platform", "linux", "--archs", "x86_64"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CIBW_")}
    said = subprocess.run(
        [*command, "--config-file", str(ROOT / config), str(ROOT)], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    expected = {f"cp{version}-{system}_x86_64" for version in interpreters for system in ("manylinux", "musllinux")}
    assert set(said.stdout.split()) == expected


def interpreter():
    """Python 3.12 or later with its headers, and where those are; this one or one that is installed beside it."""
    beside = sorted(Path.home().glob(".pyenv/versions/3.1[2-9]*/bin/python"))
    for candidate in (sys.executable, *(f"python3.{minor}" for minor in (12, 13, 14)), *map(str, beside)):
        ask = "import sys, sysconfig; print(sys.version_info >= (3, 12), sysconfig.get_paths()['include'])"
        if shutil.which(candidate) is None:
            continue
        said = subprocess.run([candidate, "-S", "-c", ask], capture_output=True, text=True, check=False).stdout.split()
        if said[:1] == ["True"] and Path(said[1], "Python.h").exists():
            return candidate, said[1]
    return None


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
def test_the_core_for_all_versions_runs_everything(tmp_path):
    """Built with nothing but the limited API: an undeclared function is an error."""
    found = interpreter()
    if found is None:
        pytest.skip("no Python 3.12 or later with headers")
    python, include = found
    package = tmp_path / "inferscope"
    shutil.copytree(ROOT / "inferscope", package, ignore=shutil.ignore_patterns("*.so", "__pycache__", "_core"))
    flags = ["-std=c11", "-O0", "-w", "-Werror=implicit-function-declaration", "-shared", "-fPIC", "-DINFERSCOPE_ABI3"]
    target = package / "record" / "_native.abi3.so"
    subprocess.run(["gcc", *flags, f"-I{include}", *map(str, sorted(CORE.glob("*.c"))), "-o", str(target)], check=True)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "INFERSCOPE_STRICT": "0"}
    exercise = str(Path(__file__).with_name("exercise.py"))
    run = subprocess.run([python, exercise, "1"], env=environment, capture_output=True, text=True, check=False)
    assert run.stdout.strip() == "done", run.stderr[-3000:]
