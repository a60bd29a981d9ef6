"""`inferscope doctor`: what can be measured here, and why not."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inferscope import guard, settings
from inferscope.cli.asking import whole
from inferscope.cli.output import emit, state_argument, state_dir
from inferscope.errors import ConfigurationError
from inferscope.export.otlp.target import resolve
from inferscope.host import process
from inferscope.integration import Registry
from inferscope.record import core

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

HELP = """Check the installation, the settings and what this machine lets inferscope see. Exit status 64 when a setting cannot be used.
--cost counts what a backend would hold of a fleet; --endpoint sends a probe and names the setting of the backend that is missing (status 1)."""

Row = tuple[str, str, str]


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this verb."""
    state_argument(parser)
    parser.add_argument("--cost", action="store_true", help="what a backend would hold of the services that keep their state here")
    parser.add_argument("--replicas", type=whole(1, 1_000_000), default=1, metavar="N", help="of each service, with --cost (default 1)")
    parser.add_argument("--endpoint", metavar="URL", help="send a probe to this OTLP endpoint and say what is missing there")
    parser.add_argument("--protocol", choices=("http/protobuf", "grpc"), help="with --endpoint, instead of what the port says")


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
    for signal in ("metrics", "logs", "traces"):
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
    """Check everything, or what was asked for."""
    if options.cost:
        return _cost(options)
    if options.endpoint:
        return _endpoint(options)
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
    _show(options, rows)
    return 64 if bad else 0


def _show(options: argparse.Namespace, rows: Sequence[Row]) -> None:
    width = max(len(row[0]) for row in rows)
    checks: list[dict[str, Any]] = [{"check": name, "result": result, "detail": detail} for name, result, detail in rows]
    emit(options, {"checks": checks}, "\n".join(f"{result:<8} {name:<{width}}  {detail}" for name, result, detail in rows))


def _endpoint(options: argparse.Namespace) -> int:
    """Send a probe; 1 when something is missing."""
    from inferscope.export.probe import probe

    rows = probe(options.endpoint, protocol=options.protocol)
    _show(options, rows)
    return 1 if any(row.result == "problem" for row in rows) else 0


def _cost(options: argparse.Namespace) -> int:
    """What a backend would hold; 1 when no service keeps anything here."""
    from inferscope.export.cost import costs

    found, times = costs(state_dir(options)), options.replicas
    value = {
        "replicas": times,
        "services": [{**asdict(each), "series": each.series, "victoriametrics_series": each.victoriametrics_series} for each in found],
    }
    lines: list[str] = []
    for each in found:
        minutes = "n/a" if each.interval_s is None else f"{times * each.sent_bytes * 60 / each.interval_s / 1e3:,.1f} kB/min"
        rows = "n/a" if each.interval_s is None else f"{times * each.points * 86_400 / each.interval_s:,.0f} rows/day"
        about = f"{each.histograms} histograms with {each.buckets} buckets, {each.counters} counters, {each.gauges} gauges"
        lines += [
            f"{each.service}: {times} x {each.workers} workers, {about}",
            f"  Prometheus, native histograms  {times * each.series:>12,} series",
            f"  VictoriaMetrics                {times * each.victoriametrics_series:>12,} series (scale 4 instead of 5 halves the buckets)",
            f"  ClickHouse                     {rows:>12}",
            f"  sent, OTLP and gzip            {minutes:>12}",
        ]
    emit(options, value, "\n".join(lines) or "no service has kept an export here; let one run for a while, or name its --state-dir")
    return 0 if found else 1
