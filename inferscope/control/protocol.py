"""What may be asked of a running service, whichever way it arrives: one line of JSON, checked field by field.

    {"schema": 1, "id": "a1", "op": "capture", "args": {"reason": "slow since the release", "requests": 8}}
    {"schema": 1, "id": "a1", "op": "capture", "state": "queued", "why": null, "result": null, "repeat": false}

Reads (`status`, `snapshot`, `ticket`) are answered at once. Changes (`capture`, `enable`, `disable`, `set_slo`) get a ticket under the
caller's id, "queued", then "done" or "denied" with the reason; the same id asked again gives the same ticket and changes nothing.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, is_dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeGuard, cast

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "CHANGES",
    "LINE_BYTES",
    "PARTS",
    "READS",
    "SCHEMA",
    "Actor",
    "Operations",
    "Request",
    "RequestError",
    "Wanted",
    "check",
    "encode",
    "load",
    "parse",
    "plain",
    "reply",
]

SCHEMA: Final = 1
OLDEST_SCHEMA: Final = 1
LINE_BYTES: Final = 16_384
"""Longest request, with its newline."""
READS: Final = ("status", "snapshot", "ticket")
CHANGES: Final = ("capture", "enable", "disable", "set_slo")
PARTS: Final = ("recording", "capture", "export")
"""What can be switched in a running service."""

_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,63}\Z")
_TEXT_LENGTH: Final = 200
_DEPTH: Final = 16


@dataclass(frozen=True, slots=True)
class Actor:
    """Who asked, as far as the channel can tell."""

    channel: str
    """`socket`, `http`, `signal` or `opamp`."""
    uid: int | None = None
    pid: int | None = None
    """None when it is unknown, or of another pid namespace."""
    peer: str | None = None
    """A network address, the name of a signal or that of a server."""

    def __str__(self) -> str:
        """One phrase for logs and audit trails."""
        parts = [self.channel]
        parts += [f"uid {self.uid}"] if self.uid is not None else []
        parts += [f"pid {self.pid}"] if self.pid is not None else []
        return " ".join(parts + ([self.peer] if self.peer else []))


@dataclass(frozen=True, slots=True)
class Wanted:
    """A capture that somebody asks for."""

    reason: str
    requests: int = 8
    """Profiles to keep, of the next requests; with a window only the largest number of windows."""
    window_ms: float | None = None
    """Record all threads for this long instead of single requests; needs tier 2 or 3."""
    tier: int = 1
    """1: single requests, one thread each. 2: short windows of all threads. 3: whatever can hold the whole process up for a moment."""
    shapes: bool = False
    """Dimensions of operators' inputs; tier 3."""
    stacks: bool = False
    """Python functions with file and line; tier 3."""
    allow_stall_ms: float | None = None
    """How long the service may be held up in all; tier 3 needs it."""


@dataclass(frozen=True, slots=True)
class Operations:
    """What this room may do; the rest of the process lends it. A refusal is raised as `InferscopeError`, its message goes to whoever asked."""

    status: Callable[[], Mapping[str, Any]]
    snapshot: Callable[[], Any]
    """Current numbers as a dataclass or a mapping."""
    capture: Callable[[Wanted, Actor], str]
    """(what, who) to the incident's id."""
    enable: Callable[[str], None]
    """Switch one of `PARTS` on."""
    disable: Callable[[str], None]
    set_slo: Callable[[str, Mapping[str, Any]], None]
    """(name of the objective, the keywords of `SLO` to change)."""
    audit: Callable[[Mapping[str, Any]], None]
    """Called once for each change that was done or denied: JSON types with `op`, `id`, `args`, `state`, `why`, `actor`, `at_unix_ns`."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request that passed every check."""

    id: str
    op: str
    args: Mapping[str, Any]


class RequestError(Exception):
    """A request that cannot be understood; the message says what is accepted.

    Args:
        why: One sentence.
        id: The request's id where it was readable.
        op: Its operation where that was readable.
    """

    def __init__(self, why: str, id: str | None = None, op: str | None = None) -> None:  # noqa: A002  (the field's name)
        super().__init__(why)
        self.why, self.id, self.op = why, id, op


def _text(value: Any) -> str:
    if not isinstance(value, str) or not 1 <= len(value.strip()) <= _TEXT_LENGTH or not value.strip().isprintable():
        raise ValueError(f"1 to {_TEXT_LENGTH} printable characters")
    return value.strip()


def _identifier(value: Any) -> str:
    if not isinstance(value, str) or not _ID.match(value):
        raise ValueError("1 to 64 letters, digits and . _ : - that begin with a letter or digit")
    return value


def _whole(low: int, high: int) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise ValueError(f"an integer from {low} to {high}")
        return value

    return read


def _number(value: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or abs(value) > 1e15 or not math.isfinite(value):
        raise ValueError("a number")
    return value


def _between(low: float, high: float, unit: str) -> Callable[[Any], float]:
    def read(value: Any) -> float:
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:
            raise ValueError(f"{unit} from {low:g} to {high:g}")
        return float(value)

    return read


def _or_none(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """None takes a promise back."""
    return lambda value: None if value is None else read(value)


def _switch(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")  # noqa: TRY004  (as the others here)
    return value


def _part(value: Any) -> str:
    if value not in PARTS:
        raise ValueError("one of " + ", ".join(PARTS))
    return str(value)


_Checks = dict[str, "Callable[[Any], Any]"]
_CHECKS: Final[dict[str, tuple[_Checks, _Checks]]] = {
    "status": ({}, {}),
    "snapshot": ({}, {}),
    "ticket": ({"id": _identifier}, {}),
    "capture": (
        {"reason": _text},
        {
            "requests": _whole(1, 64),
            "window_ms": _between(1.0, 10_000.0, "milliseconds"),
            "tier": _whole(1, 3),
            "shapes": _switch,
            "stacks": _switch,
            "allow_stall_ms": _between(1.0, 60_000.0, "milliseconds"),
            "expires_unix_s": _number,
        },
    ),
    "enable": ({"part": _part}, {}),
    "disable": ({"part": _part}, {}),
    "set_slo": (
        {"name": _text},
        {
            **dict.fromkeys(("p99_ms", "p95_ms", "p999_ms", "window_s"), _number),
            **dict.fromkeys(("max_error_rate", "min_throughput", "jitter_ms", "max_gpu_mem"), _or_none(_number)),
            **dict.fromkeys(("model", "cls", "size", "request"), _or_none(_text)),
            "until": _text,
            "min_requests": _whole(1, 1_000_000),
        },
    ),
}
"""Required and optional arguments of each operation; nothing else is accepted."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def load(data: bytes) -> dict[str, Any]:
    """A JSON object, read strictly: no key twice, no NaN.

    Args:
        data: At most `LINE_BYTES` bytes of UTF-8.

    Raises:
        RequestError: It is none.
    """
    if len(data) > LINE_BYTES:
        raise RequestError(f"a request is at most {LINE_BYTES} bytes")
    try:
        value: Any = json.loads(data.decode("utf-8"), object_pairs_hook=_once, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise RequestError("not JSON, or a key occurs twice in it") from error
    if not isinstance(value, dict):
        raise RequestError("a JSON object is expected")
    return cast("dict[str, Any]", value)


def parse(line: bytes) -> Request:
    """Check one line.

    Raises:
        RequestError: It is not a request; says what is.
    """
    try:
        message = load(line)
    except RequestError as error:
        raise RequestError(f'{error.why}; a request is one line such as {{"schema": 1, "id": "a1", "op": "status"}}') from error
    return check(message)


def check(message: Mapping[str, Any]) -> Request:
    """Check a message that was parsed already.

    Raises:
        RequestError: A field is missing, unknown or unusable; says what is accepted.
    """
    id_: Any = message.get("id")
    known_id = id_ if isinstance(id_, str) and _ID.match(id_) else None
    op: Any = message.get("op")
    known_op = op if isinstance(op, str) and op in _CHECKS else None

    def wrong(why: str) -> RequestError:
        return RequestError(why, known_id, known_op)

    schema: Any = message.get("schema")
    if not isinstance(schema, int) or isinstance(schema, bool) or not OLDEST_SCHEMA <= schema <= SCHEMA:
        raise wrong(f"schema: expected {OLDEST_SCHEMA} to {SCHEMA}")
    if known_id is None:
        raise wrong("id: expected 1 to 64 letters, digits and . _ : - that begin with a letter or digit")
    if known_op is None:
        raise wrong("op: expected one of " + ", ".join(_CHECKS))
    unknown = sorted(set(message) - {"schema", "id", "op", "args"})
    if unknown:
        raise wrong(f"{unknown[0][:40]!r}: unknown field")
    args: Any = message.get("args", {})
    if not isinstance(args, dict):
        raise wrong("args: expected an object")
    return Request(known_id, known_op, _arguments(known_op, cast("dict[str, Any]", args), wrong))


def _arguments(op: str, args: Mapping[str, Any], wrong: Callable[[str], RequestError]) -> dict[str, Any]:
    required, optional = _CHECKS[op]
    known = {**required, **optional}
    for name in required:
        if name not in args:
            raise wrong(f"args.{name}: missing")
    found: dict[str, Any] = {}
    for name, value in args.items():
        if name not in known:
            raise wrong(f"args.{name[:40]}: unknown; {op} takes {', '.join(known) or 'none'}")
        try:
            found[name] = known[name](value)
        except (ValueError, TypeError) as error:
            raise wrong(f"args.{name}: expected {error}") from error
    return found


State = Literal["queued", "done", "denied"]


def reply(
    id: str | None,  # noqa: A002  (the field's name)
    op: str | None,
    state: State,
    *,
    why: str | None = None,
    result: Any = None,
    repeat: bool = False,
) -> dict[str, Any]:
    """An answer: `state` is `queued`, `done` or `denied`; `why` explains a denial; `repeat` tells a ticket that existed already."""
    return {"schema": SCHEMA, "id": id, "op": op, "state": state, "why": why, "result": result, "repeat": repeat}


def _is_mapping(value: Any) -> TypeGuard[Mapping[Any, Any]]:
    return isinstance(value, Mapping)


def plain(value: Any, depth: int = 0) -> Any:
    """JSON types of any value that the rest of the process hands over; what JSON cannot say (NaN, say) becomes null."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if depth >= _DEPTH:
        return "…"
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value), depth)
    if _is_mapping(value):
        return {str(key): plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item, depth + 1) for item in cast("list[Any]", value)]
    return str(value)


def encode(message: Mapping[str, Any]) -> bytes:
    """One line."""
    return json.dumps(plain(message), ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n"
