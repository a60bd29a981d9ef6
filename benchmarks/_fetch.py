"""Programs of other projects for tests and benchmarks: found where they are, or unpacked into build/backends.

A program comes from its variable (BACKEND_PROMETHEUS=/path, say), the PATH, or what is unpacked already. `python benchmarks/_fetch.py` unpacks
all: Debian's packages with an apt state of its own (the machine's is not touched) from the mirror that the machine is configured with, Python's
by pip from the dependency group `backends`. What cannot be had is said, kept as the reason for skipping, and no failure.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLACE = ROOT / "build" / "backends"
PYTHON = PLACE / "python"
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
SUITE = "trixie"
PACKAGES = {"victoria-metrics": "victoria-metrics", "vmalert": "victoria-metrics", "prometheus": "prometheus", "promtool": "promtool"}
"""Debian's package of each program."""
COLLECTOR = "golang-opentelemetry-collector-dev"
TIMEOUT_S = 240.0


class BackendAbsentError(Exception):
    """A backend cannot be had here; the message says why."""


def program(name, *, fetch=False, timeout_s=TIMEOUT_S):
    """Path of a Debian program.

    Raises:
        BackendAbsentError: It is not here, and was not to be or could not be unpacked.
    """
    package = PACKAGES[name]
    unpacked = PLACE / package / "usr" / "bin" / name
    found = _found(f"BACKEND_{name.upper().replace('-', '_')}", shutil.which(name), unpacked)
    if found is None and fetch:
        _debian(package, time.monotonic() + timeout_s)
        found = _found("", unpacked)
    if found is None:
        raise BackendAbsentError(_reason(package) or f"{name} is not here; 'make test-backends' unpacks it")
    return found


def rotel(*, fetch=False, timeout_s=TIMEOUT_S):
    """Path of rotel's agent.

    Raises:
        BackendAbsentError: As for `program`.
    """
    agent = PYTHON / "rotel" / "rotel-agent"
    _python(agent, fetch=fetch, timeout_s=timeout_s)
    agent.chmod(0o755)
    return agent


def chdb(*, fetch=False, timeout_s=TIMEOUT_S):
    """Directory for PYTHONPATH that has ClickHouse's engine.

    Raises:
        BackendAbsentError: As for `program`.
    """
    _python(PYTHON / "chdb", fetch=fetch, timeout_s=timeout_s)
    return PYTHON


def grafana(*, fetch=False, timeout_s=TIMEOUT_S):
    """Directory for the path that has Grafana's own models of its dashboards.

    Raises:
        BackendAbsentError: As for `program`.
    """
    _python(PYTHON / "grafana_foundation_sdk", fetch=fetch, timeout_s=timeout_s)
    return PYTHON


def kubernetes(*, fetch=False, timeout_s=TIMEOUT_S):
    """Directory for the path that has Kubernetes' schemas and what validates against them.

    Raises:
        BackendAbsentError: As for `program`.
    """
    _python(PYTHON / "kubernetes_validate", fetch=fetch, timeout_s=timeout_s)
    return PYTHON


def otelcol(*, fetch=False, timeout_s=1800.0):
    """Path of the OpenTelemetry Collector core, which is built: some 300 MB of packages and minutes of compiling, kept in build/backends.

    Raises:
        BackendAbsentError: As for `program`; fetched only with BACKENDS_COLLECTOR=1.
    """
    built = PLACE / "otelcol" / "otelcol"
    found = _found("BACKEND_OTELCOL", shutil.which("otelcol"), built)
    if found is None and fetch and os.environ.get("BACKENDS_COLLECTOR") == "1":
        try:
            _build(built, time.monotonic() + timeout_s)
        except BackendAbsentError as error:
            (PLACE / "otelcol.absent").write_text(f"otelcol: {error}\n")
            raise
        found = _found("", built)
    if found is None:
        raise BackendAbsentError(
            _reason("otelcol") or "the collector is not here; 'BACKENDS_COLLECTOR=1 make test-backends' builds it, in minutes"
        )
    return found


def _build(target, deadline):
    root = PLACE / "otelcol-sources"
    options = _apt(deadline, suite="sid")
    asked = [
        "depends",
        "--recurse",
        *(f"--no-{each}" for each in ("recommends", "suggests", "conflicts", "breaks", "replaces", "enhances")),
    ]
    listed = subprocess.run(["apt-cache", *options, *asked, COLLECTOR], capture_output=True, text=True, check=False).stdout
    packages = sorted({line for line in listed.splitlines() if line.startswith("golang-")})
    if COLLECTOR not in packages:
        raise BackendAbsentError(f"{COLLECTOR} is not in Debian sid of this mirror")
    debs = root / "debs"
    debs.mkdir(parents=True, exist_ok=True)
    _run(["apt-get", *options, "download", *packages], deadline, cwd=debs)
    for package in sorted(debs.glob("*.deb")):
        _run(["dpkg", "-x", str(package), str(root / "files")], deadline)
        package.unlink()
    usr = root / "files" / "usr"
    goroot = next(iter(sorted((usr / "lib").glob("go-*"), reverse=True)), None)
    if goroot is None:
        raise BackendAbsentError("the packages have no Go compiler")
    for name in ("src", "api", "test", "misc"):  # links to absolute places, which lie elsewhere here
        if not (goroot / name / ".").exists():
            (goroot / name).unlink(missing_ok=True)
            (goroot / name).symlink_to(usr / "share" / goroot.name / name)
    place = root / "go" / "src" / "otelcol"
    shutil.copytree(Path(__file__).resolve().parent / "_otelcol", place, dirs_exist_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    environ = {
        "GOROOT": str(goroot), "GOPATH": f"{root / 'go'}:{usr / 'share' / 'gocode'}", "GOCACHE": str(root / "cache"),
        "GO111MODULE": "off", "CGO_ENABLED": "0", "GOTOOLCHAIN": "local", "HOME": str(root), "PATH": os.environ["PATH"],
    }  # fmt: skip
    _run([str(goroot / "bin" / "go"), "build", "-ldflags", "-s -w", "-o", str(target), "."], deadline, cwd=place, env=environ)
    shutil.rmtree(root, ignore_errors=True)


def _found(variable, *candidates):
    named = os.environ.get(variable) if variable else None
    if named:
        if not os.access(named, os.X_OK):
            raise BackendAbsentError(f"{variable}={named} cannot be run")
        return Path(named)
    return next((Path(path) for path in candidates if path and os.access(path, os.X_OK)), None)


def _reason(package):
    with contextlib.suppress(OSError):
        return (PLACE / f"{package}.absent").read_text().strip()
    return None


def _run(command, deadline, **more):
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=max(deadline - time.monotonic(), 0.1), check=False, **more)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BackendAbsentError(f"{command[0]}: {type(error).__name__}") from error
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
        raise BackendAbsentError(f"{command[0]}: {last}")


def _mirror():
    """The Debian mirror in the machine's own configuration."""
    base = Path("/etc/apt")
    files = [base / "sources.list", *sorted((base / "sources.list.d").glob("*"))] if base.is_dir() else []
    for file in files:
        with contextlib.suppress(OSError):
            match = re.search(r"^(?:URIs:\s*|deb\s+(?:\[[^\]]*\]\s+)?)(\S+/debian/?)(?:\s|$)", file.read_text(), re.MULTILINE)
            if match:
                return match[1].rstrip("/")
    raise BackendAbsentError("apt knows no Debian mirror here")


def _apt(deadline, *, suite=SUITE):
    """Options of an apt whose state lies below build; its lists are had once for a suite."""
    if not (shutil.which("apt-get") and shutil.which("dpkg") and KEYRING.exists()):
        raise BackendAbsentError("it is not on the PATH, and this machine has no apt with Debian's keys to unpack it with")
    base = PLACE / f"apt-{suite}"
    for part in ("etc/preferences.d", "state/lists/partial", "cache/archives/partial"):
        (base / part).mkdir(parents=True, exist_ok=True)
    (base / "etc" / "sources.list").write_text(f"deb [signed-by={KEYRING}] {_mirror()} {suite} main\n")
    (base / "status").touch()
    own = {"Etc": "etc", "Etc::sourceparts": "none", "State": "state", "State::status": "status", "Cache": "cache"}
    options = [word for key, part in own.items() for word in ("-o", f"Dir::{key}={base / part}")]
    options += [
        "-o",
        "APT::Sandbox::User=root",
        "-o",
        "Acquire::Languages=none",
        "-o",
        "Acquire::Retries=1",
        "-o",
        "APT::Update::Error-Mode=any",
    ]
    if not any((base / "state" / "lists").glob("*_Packages*")):
        _run(["apt-get", *options, "update"], deadline)
    return options


def _debian(package, deadline):
    scratch = PLACE / f".{package}.{os.getpid()}"
    try:
        scratch.mkdir(parents=True, exist_ok=True)
        _run(["apt-get", *_apt(deadline), "download", f"{package}/{SUITE}"], deadline, cwd=scratch)
        _run(["dpkg", "-x", str(next(scratch.glob("*.deb"))), str(scratch / "files")], deadline)
        with contextlib.suppress(OSError):  # somebody else was quicker
            (scratch / "files").rename(PLACE / package)
    except BackendAbsentError as error:
        (PLACE / f"{package}.absent").write_text(f"{package}: {error}\n")
        raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    (PLACE / f"{package}.absent").unlink(missing_ok=True)


def _python(wanted, *, fetch, timeout_s):
    """Packages of the dependency group, beside the environment and not in it: one of them is half a gigabyte."""
    if wanted.exists():
        return
    if not fetch:
        raise BackendAbsentError(_reason("python") or f"{wanted.name} is not here; 'make test-backends' unpacks it")
    scratch = PLACE / f".python.{os.getpid()}"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:", "--target", str(scratch)]
    try:
        PLACE.mkdir(parents=True, exist_ok=True)
        _run([*command, "--group", f"{ROOT / 'pyproject.toml'}:backends"], time.monotonic() + timeout_s)
        shutil.rmtree(PYTHON, ignore_errors=True)  # of an older group
        with contextlib.suppress(OSError):
            scratch.rename(PYTHON)
    except BackendAbsentError as error:
        (PLACE / "python.absent").write_text(f"dependency group backends: {error}\n")
        raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    (PLACE / "python.absent").unlink(missing_ok=True)


def main():
    for name, find in (
        *((each, lambda each=each: program(each, fetch=True)) for each in PACKAGES),
        ("rotel", lambda: rotel(fetch=True)),
        ("clickhouse", lambda: chdb(fetch=True)),
        ("grafana's models", lambda: grafana(fetch=True)),
        ("kubernetes' schemas", lambda: kubernetes(fetch=True)),
        ("otelcol", lambda: otelcol(fetch=True)),
    ):
        begun = time.monotonic()
        try:
            where = find()
            print(f"{name:20} {where.relative_to(ROOT) if where.is_relative_to(ROOT) else where} ({time.monotonic() - begun:.1f} s)")
        except BackendAbsentError as error:
            print(f"{name:20} absent: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
