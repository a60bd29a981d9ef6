"""Settings: keyword > `INFERSCOPE_*` environment > `[tool.inferscope]` or inferscope.toml > default.

Only keyword arguments raise. A bad value from the environment or a file, an unwritable state directory and a file from a newer version
cost one clear line and fall back to the default, so that a rollout never crash-loops because of us; `INFERSCOPE_STRICT=1` raises.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from inferscope import guard
from inferscope.errors import ConfigurationError
from inferscope.forms import KEYS, read

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["UNNAMED", "Settings", "load", "read_table"]

FILE_SCHEMA: Final = 1
PREFIX: Final = "INFERSCOPE_"
UNNAMED: Final = "unknown_service"  # what OpenTelemetry calls a service that nobody named


@dataclass(frozen=True, slots=True)
class Settings:
    """What the runtime is built from; every field has its default here and its accepted form in `KEYS`."""

    service: str = UNNAMED
    version: str | None = None
    slo: tuple[Any, ...] = ()
    """`SLO` values from code, mappings of its keywords from the environment or a file."""
    state_dir: Path | None = None
    endpoint: str | None = None
    protocol: str | None = None
    headers: str | None = None
    export_interval_s: float = 10.0
    otlp_scale: int = 5
    series_limit: int = 100
    export_bands: bool = False
    budget: Any = None
    """A `CaptureBudget`; None is its default."""
    warmup_s: float = 300.0
    warmup_requests: int = 2000
    fleet_size: int = 1
    trigger: str = "e_detector"
    triggers: Any = None
    """Limits of triggers beside the objectives, by name; see `detect.signals.LIMITS`."""
    sampling: Any = None
    """Requests kept whole in ten seconds, by `breaching`, `reservoir` (a latency band) and `slowest`; None is the recorder's default."""
    diagnose: str = "local"
    capture: bool = True
    export: bool = True
    enabled: bool = True
    integrations: tuple[str, ...] = ()
    tick_s: float = 1.0
    on_incident: Any = None
    """Called with the incident's path after each diagnosis, on our own thread."""
    watch: bool = True
    """Whether the settings file is read again when it changes."""
    host_lock: Path | None = None
    """The file by which all processes of a host capture one at a time; None is `capture.lock` in the state directory."""
    control: bool = True
    control_http: tuple[str, int] | None = None
    control_signal: str | None = None
    control_opamp: str | None = None
    control_token_file: Path | None = None
    sources: Mapping[str, str] = field(default_factory=dict[str, str], compare=False)
    """Where a value came from: `keyword`, `environment` or `file`, by key."""
    file: Path | None = field(default=None, compare=False)
    """The settings file that was read; the first one that would be, when there was none."""
    problems: tuple[str, ...] = field(default=(), compare=False)
    """One line for each setting that could not be used."""


def load(keywords: Mapping[str, Any], *, environ: Mapping[str, str] | None = None, directory: Path | None = None) -> Settings:
    """Merge all sources.

    Args:
        keywords: What the user passed to `configure()`; None means "not given".
        environ: The environment; default `os.environ`.
        directory: Where inferscope.toml and pyproject.toml are looked for; default the working directory.

    Raises:
        ConfigurationError: A keyword is unknown or has an unusable value; under `INFERSCOPE_STRICT=1` the same for other sources.
    """
    environ = os.environ if environ is None else environ
    problems: list[str] = []
    values: dict[str, Any] = {}
    table, file = _file_table(environ, directory, problems)
    for key, value in table.items():
        _take(values, key, value, f"{key} in {file.name}", problems)
    sources = dict.fromkeys(values, "file")
    _from_otel(values, environ)
    for key in KEYS:
        name = PREFIX + key.upper()
        if environ.get(name, "") != "" and key != "on_incident":
            _take(values, key, environ[name], name, problems)
            sources[key] = "environment"
    for key, value in keywords.items():
        if key not in KEYS:
            raise ConfigurationError(key, value, f"unknown keyword; known are {', '.join(KEYS)}")
        if value is not None:
            values[key], sources[key] = read(key, value, key), "keyword"
    values["state_dir"] = _state_dir(values.get("state_dir"), environ, problems)
    settings = Settings(**values, problems=tuple(problems), sources=sources, file=file)
    for line in problems:
        guard.log_once(line, line)
    return settings


def _take(values: dict[str, Any], key: str, value: Any, source: str, problems: list[str]) -> None:
    try:
        if key not in KEYS:
            raise ConfigurationError(source, value, f"unknown setting; known are {', '.join(KEYS)}")  # noqa: TRY301
        values[key] = read(key, value, source)
    except ConfigurationError as error:
        if guard.strict():
            raise
        if key == "control":  # who meant to close a door must not find it open
            values[key] = False
        problems.append(f"{error}; {'control stays off' if key == 'control' else 'the default is used'}")


def _from_otel(values: dict[str, Any], environ: Mapping[str, str]) -> None:
    attributes = dict(part.split("=", 1) for part in environ.get("OTEL_RESOURCE_ATTRIBUTES", "").split(",") if "=" in part)
    name = environ.get("OTEL_SERVICE_NAME") or attributes.get("service.name")
    if name:
        values.setdefault("service", name)
    if attributes.get("service.version"):
        values.setdefault("version", attributes["service.version"])


def _file_table(environ: Mapping[str, str], directory: Path | None, problems: list[str]) -> tuple[dict[str, Any], Path]:
    """Settings of the first file that has some, and which file that is; where none has, the first that would be read."""
    explicit = environ.get(PREFIX + "CONFIG")
    base = Path() if directory is None else directory
    candidates = [Path(explicit)] if explicit else [base / "inferscope.toml", base / "pyproject.toml"]
    try:
        candidates = [path.absolute() for path in candidates]
        for path in candidates:
            if not path.is_file():
                if explicit:
                    problems.append(f"{PREFIX}CONFIG={explicit!r} is not a file; settings come from the environment alone")
                continue
            table = read_table(path)
            if table:
                return _checked(table, path, problems), path
    except Exception as error:
        if guard.strict():
            raise ConfigurationError("settings file", str(error), "a TOML file") from error
        problems.append(f"the settings file cannot be read ({type(error).__name__}); it is ignored")
    return {}, candidates[0]


def read_table(path: Path) -> dict[str, Any]:
    """The settings of one file: all of it, or `[tool.inferscope]` of a pyproject.toml.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no TOML.
    """
    table = _parse_toml(path)
    return dict(table.get("tool", {}).get("inferscope", {})) if path.name == "pyproject.toml" else table


def _checked(table: dict[str, Any], path: Path, problems: list[str]) -> dict[str, Any]:
    schema = table.pop("schema", FILE_SCHEMA)
    if not isinstance(schema, int) or schema > FILE_SCHEMA:
        line = f"{path.name} has schema {schema!r}, this version reads up to {FILE_SCHEMA}; the file is ignored"
        if guard.strict():
            raise ConfigurationError("schema", schema, f"at most {FILE_SCHEMA}")
        problems.append(line)
        return {}
    return table


def _parse_toml(path: Path) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    with path.open("rb") as file:
        return tomllib.load(file)


def _state_dir(asked: Path | None, environ: Mapping[str, str], problems: list[str]) -> Path | None:
    """The first directory that can be made and written; None means memory only."""
    candidates = [asked] if asked is not None else []
    if asked is None:
        home = environ.get("HOME")
        base = environ.get("XDG_STATE_HOME") or (Path(home) / ".local" / "state" if home else None)
        candidates += [Path(base) / "inferscope"] if base else []
        candidates.append(Path(environ.get("TMPDIR") or "/tmp") / f"inferscope-{os.getuid() if hasattr(os, 'getuid') else 0}")  # noqa: S108
    for path in candidates:
        if _writable(path, ours_only=asked is None):
            return path
    tried = " or ".join(str(path) for path in candidates)
    line = (
        f"state_dir {tried} cannot be written; evidence stays in memory, OTLP still works; set INFERSCOPE_STATE_DIR to a writable directory"
    )
    if asked is not None and guard.strict():
        raise ConfigurationError("state_dir", str(asked), "a directory that this user can write")
    problems.append(line)
    return None


def _writable(path: Path, *, ours_only: bool) -> bool:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if ours_only and path.stat().st_uid != os.getuid():
            # Another user's directory under a shared temporary directory could be read or replaced under us.
            return False
        probe = path / f".probe-{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()
    except Exception:  # noqa: BLE001  (any reason it cannot be written has the same consequence)
        return False
    return True


assert {f.name for f in fields(Settings)} == {*KEYS, "problems", "sources", "file"}  # noqa: S101  (a key without a parser is a programming error)
