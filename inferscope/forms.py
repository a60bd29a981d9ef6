"""What each setting accepts: from code a value, from a TOML file a value or a table, from the environment text."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from inferscope.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["KEYS", "flag", "parse_slo", "read"]

_TRUE: Final = frozenset({"1", "true", "yes", "on"})
_FALSE: Final = frozenset({"0", "false", "no", "off"})


def flag(text: str) -> bool:
    """Parse a boolean as people write it in environments."""
    lowered = text.strip().lower()
    if lowered in _TRUE:
        return True
    if lowered in _FALSE:
        return False
    raise ValueError(text)


def _number(kind: Callable[[Any], Any], low: float, high: float) -> Callable[[Any], Any]:
    def parse(value: Any) -> Any:
        if isinstance(value, bool):
            raise TypeError(value)
        number = kind(value)
        if not low <= number <= high:
            raise ValueError(value)
        return number

    return parse


def _choice(*accepted: str) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        if value not in accepted:
            raise ValueError(value)
        return str(value)

    return parse


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(value)
    return value.strip()


def _boolean(value: Any) -> bool:
    return value if isinstance(value, bool) else flag(value)


def _mapping(value: Any) -> dict[str, Any]:
    """A table, or text such as "slow=4,max_share=0.1"."""
    if isinstance(value, str):
        pairs = [pair.partition("=") for pair in value.split(",") if pair.strip()]
        if not all(equals for _, equals, _ in pairs):
            raise ValueError(value)
        return {name.strip(): _plain(text.strip()) for name, _, text in pairs}
    return {str(name): item for name, item in cast("Mapping[object, Any]", value).items()}


def _plain(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _budget(value: Any) -> Any:
    return _mapping(value) if isinstance(value, (str, dict)) else value


def _sampling(value: Any) -> dict[str, int]:
    found = _mapping(value)
    for name, number in found.items():
        if name not in {"breaching", "reservoir", "slowest"} or not isinstance(number, int) or not 0 <= number <= 8192:
            raise ValueError(value)
    return found


def _listening(value: Any) -> tuple[str, int]:
    """[HOST:]PORT."""
    host, _, port = str(value).strip().rpartition(":")
    if isinstance(value, bool) or not (port.isascii() and port.isdigit() and int(port) <= 65535):
        raise ValueError(value)
    return host.strip("[]") or "127.0.0.1", int(port)


def _names(value: Any) -> tuple[str, ...]:
    parts = value.split(",") if isinstance(value, str) else list(value)
    return tuple(_text(part) for part in parts if part != "")


def _path(value: Any) -> Path:
    return Path(_text(os.fspath(value))).expanduser()


def _callable(value: Any) -> Any:
    if not callable(value):
        raise TypeError(value)
    return value


def parse_slo(value: Any) -> tuple[Any, ...]:
    """Objectives from any source: `SLO` values, mappings, or text such as `score:p99_ms=20,min_requests=100; rank:p95_ms=5`."""
    if isinstance(value, str):
        return tuple(_parse_one_slo(part) for part in value.split(";") if part.strip())
    items = tuple(cast("list[Any]", value)) if isinstance(value, (list, tuple)) else (value,)
    for item in items:
        if not (isinstance(item, dict) or hasattr(item, "threshold_ns")):
            raise TypeError(item)
    return items


_WORDS: Final = frozenset({"model", "cls", "size", "request", "until"})
"""Keywords of an objective that are no numbers."""


def _parse_one_slo(text: str) -> dict[str, Any]:
    name, _, rest = text.partition(":")
    keywords: dict[str, Any] = {"name": _text(name)}
    for pair in rest.split(","):
        key, equals, number = pair.partition("=")
        if not equals:
            raise ValueError(text)
        keywords[key.strip()] = number.strip() if key.strip() in _WORDS else float(number)
    return keywords


KEYS: Final[Mapping[str, tuple[Callable[[Any], Any], str]]] = {
    "service": (_text, "a name, such as 'risk-scoring'"),
    "version": (_text, "the service's version, such as '1.4.2'"),
    "slo": (parse_slo, "an SLO, a list of them, or text such as 'score:p99_ms=20'"),
    "state_dir": (_path, "a directory that this user can write"),
    "endpoint": (_text, "an OTLP endpoint, such as 'http://127.0.0.1:4318'"),
    "protocol": (_choice("http/protobuf", "grpc"), "'http/protobuf' or 'grpc'"),
    "headers": (_text, "'key=value,key2=value2'"),
    "export_interval_s": (_number(float, 0.1, 3600.0), "seconds between 0.1 and 3600"),
    "otlp_scale": (_number(int, 3, 8), "an integer from 3 to 8"),
    "series_limit": (_number(int, 1, 500), "an integer from 1 to 500"),
    "export_bands": (_boolean, "true or false"),
    "budget": (_budget, "a CaptureBudget, or a table or text with its keywords, such as 'slow=4,max_share=0.1'"),
    "warmup_s": (_number(float, 0.0, 86400.0), "seconds from 0 to 86400"),
    "warmup_requests": (_number(int, 0, 10_000_000), "an integer from 0 to 10000000"),
    "fleet_size": (_number(int, 1, 1_000_000), "an integer from 1 to 1000000"),
    "trigger": (_choice("e_detector", "burn_rate"), "'e_detector' or 'burn_rate'"),
    "triggers": (_mapping, "limits by trigger, such as {'lock_wait_ms': 50} or 'lock_wait_ms=50,error_rate=0.01'"),
    "sampling": (_sampling, "some of breaching, reservoir and slowest, each 0 to 8192, such as 'reservoir=32'"),
    "diagnose": (_choice("local", "deferred", "off"), "'local', 'deferred' or 'off'"),
    "capture": (_boolean, "true or false"),
    "export": (_boolean, "true or false"),
    "enabled": (_boolean, "true or false"),
    "integrations": (_names, "names separated by commas, such as 'torch,asgi'"),
    "tick_s": (_number(float, 0.05, 60.0), "seconds between 0.05 and 60"),
    "on_incident": (_callable, "a callable that takes the incident's path"),
    "watch": (_boolean, "true or false"),
    "host_lock": (_path, "a file that this user can write"),
    "control": (_boolean, "true or false; false switches all channels off"),
    "control_http": (_listening, "a port or 127.0.0.1:PORT; 0 takes any free port"),
    "control_signal": (_text, "SIGUSR1, SIGUSR2 or SIGHUP"),
    "control_opamp": (_text, "the URL of an OpAMP server"),
    "control_token_file": (_path, "a file that only this user can read"),
}
"""Parser and accepted form of each key."""


def read(key: str, value: Any, source: str) -> Any:
    """Parse one value as it may come from anywhere.

    Raises:
        ConfigurationError: It cannot be used; `source` is what the message names.
    """
    parse, accepted = KEYS[key]
    try:
        return parse(value)
    except ConfigurationError:
        raise
    except Exception as error:
        raise ConfigurationError(source, value, f"expected {accepted}") from error
