"""What every backend can be asked, and how one is named on the command line."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol
from urllib.parse import urlsplit

import urllib3

from inferscope.errors import InferscopeError
from inferscope.export.otlp.target import parse_headers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from inferscope.export.otlp.buckets import Buckets

__all__ = ["BACKENDS", "Key", "Scope", "Source", "ask", "connect"]

BACKENDS: Final = ("prometheus", "victoriametrics", "clickhouse", "ring")
LOOKBACK_S: Final = 3600
"""How far before an interval a counter's value at its beginning is looked for; a series without one began inside."""
HEADERS: Final = "INFERSCOPE_FROM_HEADERS"
_TIMEOUT_S: Final = 60.0

Key = tuple[str, ...]
"""Values of the attributes that were asked for, in that order; empty where a series has none."""


@dataclass(frozen=True, slots=True)
class Scope:
    """Which part of a fleet, and when."""

    from_unix_s: float
    to_unix_s: float
    where: Mapping[str, str] = field(default_factory=dict[str, str])
    """Values that attributes must have, by their OpenTelemetry names."""

    @property
    def seconds(self) -> int:
        """Length of the interval, at least 1."""
        return max(1, round(self.to_unix_s - self.from_unix_s))

    def only(self, attribute: str, value: str) -> Scope:
        """The part of it where an attribute has a value."""
        return Scope(self.from_unix_s, self.to_unix_s, {**self.where, attribute: value})


class Source(Protocol):
    """One backend; attributes have their OpenTelemetry names in and out."""

    name: str
    """As in `connect`."""
    notes: list[str]
    """What a reader should know of the answers so far."""

    def counters(self, metric: str, by: Sequence[str], scope: Scope) -> dict[Key, float]:
        """What a counter gained in the interval, added over all series of a group."""
        ...

    def gauges(self, metric: str, by: Sequence[str], scope: Scope) -> dict[Key, float]:
        """The largest last value of a group."""
        ...

    def distributions(self, metric: str, by: Sequence[str], scope: Scope) -> dict[Key, Buckets]:
        """What a histogram gained in the interval, merged over all series of a group."""
        ...


def connect(text: str) -> Source:
    """The source that `text` names, such as `prometheus=http://prometheus:9090` or `ring=DIR`.

    `INFERSCOPE_FROM_HEADERS` (`key=value,key2=value2`) adds headers, for a bearer token say; user and password may stand in the URL.

    Raises:
        InferscopeError: It names none.
    """
    kind, equals, where = text.partition("=")
    if not equals or kind not in BACKENDS or not where:
        raise InferscopeError(
            f"--from {text}: expected one of " + ", ".join(f"{each}={'DIR' if each == 'ring' else 'URL'}" for each in BACKENDS)
        )
    if kind == "ring":
        from inferscope.export.fleet.rings import Rings

        return Rings([Path(part) for part in where.split(os.pathsep)])
    if urlsplit(where).scheme not in {"http", "https"}:
        raise InferscopeError(f"--from {text}: expected a URL that begins with http:// or https://")
    if kind == "clickhouse":
        from inferscope.export.fleet.clickhouse import ClickHouse

        return ClickHouse(where)
    from inferscope.export.fleet.promql import Prometheus, VictoriaMetrics

    return Prometheus(where) if kind == "prometheus" else VictoriaMetrics(where)


def ask(url: str, *, fields: Mapping[str, Any] | None = None, body: bytes | None = None, headers: Mapping[str, str] | None = None) -> bytes:
    """One request, by POST; the answer's body.

    Raises:
        InferscopeError: It failed; the message says how, without credentials.
    """
    parts = urlsplit(url)
    host = f"{parts.hostname}:{parts.port}" if parts.port else str(parts.hostname)
    sent = {**parse_headers(os.environ.get(HEADERS, "")), **(headers or {})}
    if parts.username:
        sent |= urllib3.make_headers(basic_auth=f"{parts.username}:{parts.password or ''}")
    plain = parts._replace(netloc=host).geturl()
    options: dict[str, Any] = {"body": body} if fields is None else {"fields": dict(fields), "encode_multipart": False}
    try:
        with urllib3.PoolManager() as pool:
            answer = pool.request("POST", plain, headers=sent, timeout=_TIMEOUT_S, retries=False, **options)
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise InferscopeError(f"{plain} does not answer ({type(error).__name__})") from error
    if answer.status >= 300:
        said = bytes(answer.data)[:300].decode(errors="replace").strip()
        raise InferscopeError(f"{plain} answers HTTP {answer.status}: {said}")
    return bytes(answer.data)
