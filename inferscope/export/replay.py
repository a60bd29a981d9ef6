"""What the rings keep, sent to a receiver later: after an outage, or where a service ran without one.

Every request goes out as it was written, with its own times, oldest first. What a receiver took is remembered under the state directory by
target, worker and signal, so that a replay that is repeated or was interrupted goes on where it ended.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

from inferscope.export.otlp.transport import Outcome, Sender
from inferscope.export.ring import read_ring

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from inferscope.export.otlp.target import Target

__all__ = ["SIGNALS", "Ledger", "Replayed", "newest_unix_ns", "replay", "to_protobuf"]

SIGNALS: Final = ("metrics", "logs", "traces")
_TRIES: Final = 5
"""Tries of one request, each within the target's own bound, before the replay ends."""
_PAUSE_S: Final = 1.0
_REFUSALS: Final = 3
"""Requests in a row that a receiver does not want, after which the signal is given up."""
_IDS: Final = frozenset({"traceId", "spanId", "parentSpanId"})
_TIMES: Final = frozenset({"timeUnixNano", "endTimeUnixNano"})
_INSIDE: Final = frozenset({"exemplars", "events"})
"""What has times of its own inside a point or span."""


@dataclass(slots=True)
class Replayed:
    """What became of one worker's ring of one signal."""

    service: str
    slot: int
    signal: str
    sent: int = 0
    skipped: int = 0
    """Outside the asked time, or sent by an earlier replay."""
    refused: int = 0
    damaged: int = 0
    """Lines and parts that could not be read."""
    why: str | None = None
    """Why it ended early."""


class Ledger:
    """Until when each ring was taken by one target.

    Args:
        state_dir: The state directory; one that cannot be written is no error, nothing is remembered then.
        url: The target.
    """

    def __init__(self, state_dir: Path, url: str) -> None:
        self._path = state_dir / ".replayed" / f"{hashlib.sha256(url.encode()).hexdigest()[:16]}.json"
        self._taken: dict[str, int] = {}
        with contextlib.suppress(OSError, ValueError):
            held: Any = json.loads(self._path.read_bytes())
            if isinstance(held, dict):
                self._taken = {str(key): value for key, value in cast("dict[str, Any]", held).items() if isinstance(value, int)}

    def until(self, ring: str) -> int:
        """Newest time that was taken, Unix ns; 0 for none."""
        return self._taken.get(ring, 0)

    def took(self, ring: str, unix_ns: int) -> None:
        """Remember."""
        self._taken[ring] = max(unix_ns, self.until(ring))

    def forget(self) -> None:
        """Begin anew."""
        self._taken = {}

    def save(self) -> None:
        """Write it down, whole or not at all."""
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            beside = self._path.with_suffix(".tmp")
            beside.write_text(json.dumps(self._taken, indent=1, sort_keys=True), encoding="utf-8")
            beside.chmod(0o600)
            beside.replace(self._path)


def newest_unix_ns(value: Any) -> int:
    """The newest time of a point, record or span in a request; 0 when it has none."""
    newest = 0
    stack: list[Any] = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            for key, held in cast("dict[str, Any]", item).items():
                if key in _TIMES:
                    with contextlib.suppress(TypeError, ValueError):
                        newest = max(newest, int(held))
                elif isinstance(held, (dict, list)) and key not in _INSIDE:
                    stack.append(held)
        elif isinstance(item, list):
            stack.extend(item)  # pyright: ignore[reportUnknownArgumentType]
    return newest


def to_protobuf(signal: str, value: dict[str, Any]) -> bytes:
    """A request as OTLP/JSON has it, serialized.

    Raises:
        ValueError: It is no request of that signal.
    """
    from google.protobuf import json_format

    from inferscope.export.otlp import protobuf

    try:
        return json_format.ParseDict(_with_base64(value), protobuf.request_message(signal), ignore_unknown_fields=True).SerializeToString()
    except (json_format.ParseError, TypeError) as error:
        raise ValueError(str(error)) from error


def _with_base64(value: Any) -> Any:
    """OTLP writes ids in hex where protobuf's JSON has base64."""
    if isinstance(value, dict):
        return {
            key: base64.b64encode(bytes.fromhex(held)).decode() if key in _IDS and isinstance(held, str) else _with_base64(held)
            for key, held in cast("dict[str, Any]", value).items()
        }
    return [_with_base64(item) for item in value] if isinstance(value, list) else value  # pyright: ignore[reportUnknownVariableType]


def _rings(state_dir: Path, service: str | None, slot: int | None, signals: tuple[str, ...]) -> Iterator[tuple[Path, str]]:
    for directory in sorted(state_dir.glob(f"{service or '*'}/*"), key=lambda path: (path.parent.name, path.name.zfill(4))):
        if directory.is_dir() and directory.name.isdecimal() and slot in {None, int(directory.name)}:
            for signal in signals:
                if any(directory.glob(f"{signal}*.jsonl*")):
                    yield directory, signal


def replay(
    state_dir: Path,
    targets: Mapping[str, Target],
    ledger: Ledger,
    *,
    since_unix_ns: int = 0,
    until_unix_ns: int = 1 << 62,
    service: str | None = None,
    slot: int | None = None,
    pause: Callable[[float], object] = time.sleep,
) -> list[Replayed]:
    """Send what lies between the times and was not sent before.

    Args:
        state_dir: Holds the workers' directories.
        targets: Receiver by signal; signals without one are left out.
        ledger: What was sent before; saved after each ring and when a receiver goes away.
        since_unix_ns: Oldest request that is sent, by its newest time.
        until_unix_ns: Newest.
        service: Directory name of one service; None is all.
        slot: One worker; None is all.
        pause: Waits between tries.
    """
    senders = {signal: Sender(target) for signal, target in targets.items()}
    rows: list[Replayed] = []
    away: dict[str, str] = {}
    try:
        for directory, signal in _rings(state_dir, service, slot, tuple(signal for signal in SIGNALS if signal in senders)):
            row = Replayed(directory.parent.name, int(directory.name), signal, why=away.get(signal))
            rows.append(row)
            if row.why is None:
                why = row.why = _ring(directory, row, senders[signal], ledger, (since_unix_ns, until_unix_ns), pause)
                ledger.save()
                if why is not None:
                    away[signal] = why
    finally:
        ledger.save()
        for sender in senders.values():
            sender.close()
    return rows


def _ring(
    directory: Path, row: Replayed, sender: Sender, ledger: Ledger, between: tuple[int, int], pause: Callable[[float], object]
) -> str | None:
    """Send one ring; why it ended early."""
    why: str | None = None
    ring = f"{row.service}/{row.slot}/{row.signal}"
    taken, in_a_row = ledger.until(ring), 0
    damaged: list[Path] = []
    for value in read_ring(directory, row.signal, damaged):
        newest = newest_unix_ns(value)
        if newest <= taken or not between[0] <= newest <= between[1]:
            row.skipped += 1
            continue
        try:
            payload = to_protobuf(row.signal, value)
        except ValueError:
            damaged.append(directory)
            continue
        outcome = _deliver(sender, payload, pause)
        if outcome is Outcome.SENT:
            row.sent, in_a_row = row.sent + 1, 0
            ledger.took(ring, newest)
        elif outcome is Outcome.REJECTED:
            row.refused, in_a_row = row.refused + 1, in_a_row + 1
            if in_a_row >= _REFUSALS:
                why = f"the receiver does not take {row.signal} ({sender.last_error})"
                break
        else:
            why = f"the receiver does not answer ({sender.last_error})"
            break
    row.damaged = len(damaged)
    return why


def _deliver(sender: Sender, payload: bytes, pause: Callable[[float], object]) -> Outcome:
    outcome = Outcome.FAILED
    for attempt in range(_TRIES):
        if attempt:
            pause(_PAUSE_S * attempt)
        outcome = sender.send(payload, force=True)
        if outcome in {Outcome.SENT, Outcome.REJECTED}:
            break
    return outcome
