"""`inferscope doctor`: what can be measured here, and why not."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inferscope import guard, settings
from inferscope.cli.output import emit
from inferscope.errors import ConfigurationError
from inferscope.export.otlp.target import resolve
from inferscope.host import process
from inferscope.integration import Registry
from inferscope.record import core

if TYPE_CHECKING:
    import argparse

HELP = "Check the installation, the settings and what this machine lets inferscope see. Exit status 64 when a setting cannot be used."

Row = tuple[str, str, str]


def arguments(_parser: argparse.ArgumentParser) -> None:
    """This verb has no options of its own."""


def _core() -> Row:
    return (
        "core",
        "ok" if core.IMPLEMENTATION == "native" else "note",
        f"{core.IMPLEMENTATION}{': ' + core.REASON if core.REASON else ''}",
    )


def _state(loaded: settings.Settings) -> Row:
    if loaded.state_dir is None:
        return ("state directory", "problem", "none is writable: evidence stays in memory; set INFERSCOPE_STATE_DIR")
    free = os.statvfs(loaded.state_dir)
    return ("state directory", "ok", f"{loaded.state_dir} ({free.f_bavail * free.f_frsize / 1e9:.1f} GB free)")


def _torch() -> Row:
    if importlib.util.find_spec("torch") is None:
        return ("torch", "note", "not installed: no profiles, everything else works")
    version = importlib.metadata.version("torch")
    release = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if release < (2, 4):
        return ("torch", "problem", f"{version}: captures need 2.4 or later")
    return ("torch", "ok", f"{version}: request-scoped captures")


def _otlp(loaded: settings.Settings) -> list[Row]:
    rows: list[Row] = []
    for signal in ("metrics", "logs"):
        target = resolve(signal, endpoint=loaded.endpoint, protocol=loaded.protocol, headers=loaded.headers)
        rows.append(
            (
                f"OTLP {signal}",
                "ok",
                f"{target.endpoint} over {target.protocol}" if target else "no endpoint: kept locally, nothing is sent",
            )
        )
    return rows


def _host() -> list[Row]:
    facts = process.facts()
    rows: list[Row] = [("CPUs", "ok", f"{facts['cpus']} usable, quota {facts['cpu_quota'] or 'none'}, load {facts['load_average']}")]
    for label, path, what in (
        ("run-queue delay", "/proc/self/task/{}/schedstat", "waiting for a CPU"),
        ("system calls", "/proc/self/task/{}/syscall", "GIL told from locks"),
        ("pressure", "/proc/pressure/cpu", "CPU pressure of the machine"),
    ):
        place = path.format(os.getpid())
        try:
            Path(place).read_bytes()
            rows.append((label, "ok", what))
        except OSError as error:
            rows.append((label, "note", f"unavailable ({error.strerror}): {what} cannot be measured here"))
    return rows


def _integrations() -> list[Row]:
    """What `instrument()` would do: each integration is ready, waits for an import, or is skipped, with the reason."""
    verdicts = {"skipped": "note", "broken": "problem"}
    return [
        (f"integration {name}", verdicts.get(state.partition(":")[0], "ok"), state if state != "ready" else "ready: nothing to wait for")
        for name, (state, _) in Registry().preview().items()
    ]


def run(options: argparse.Namespace) -> int:
    """Check everything."""
    try:
        loaded = settings.load({})
        bad = list(loaded.problems)
    except ConfigurationError as error:
        loaded, bad = settings.Settings(), [str(error)]
    rows: list[Row] = [("python", "ok", sys.version.split()[0]), _core(), *(("settings", "problem", line) for line in bad)]
    if not bad:
        rows.append(("settings", "ok", f"service {loaded.service}, {len(loaded.slo)} objectives from environment and file"))
    rows += [_state(loaded), _torch(), *_otlp(loaded), *_host(), *_integrations()]
    if guard.strict():
        rows.append(("strict", "note", "INFERSCOPE_STRICT=1: our own errors are raised into the application; for tests only"))
    width = max(len(row[0]) for row in rows)
    checks: list[dict[str, Any]] = [{"check": name, "result": result, "detail": detail} for name, result, detail in rows]
    emit(options, {"checks": checks}, "\n".join(f"{result:<8} {name:<{width}}  {detail}" for name, result, detail in rows))
    return 64 if bad else 0
