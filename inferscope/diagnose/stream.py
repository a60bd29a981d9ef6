"""JSON of any size, one event at a time: the decoder of the standard library on a sliding window over the file."""

from __future__ import annotations

import gzip
import io
import json
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any, Final, cast

from inferscope.errors import EvidenceError

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from pathlib import Path

__all__ = ["open_trace", "stream"]

_CHUNK: Final = 1 << 20
_LARGEST_VALUE: Final = 64 << 20
_WHITESPACE: Final = " \t\r\n"


@contextmanager
def open_trace(path: Path) -> Generator[IO[str], None, None]:
    """Open a plain or gzip file as text; bytes that are no UTF-8 become replacement characters."""
    with path.open("rb") as raw:
        magic = raw.read(2)
        raw.seek(0)
        binary: IO[bytes] = cast("IO[bytes]", gzip.GzipFile(fileobj=raw)) if magic == b"\x1f\x8b" else raw
        with io.TextIOWrapper(binary, encoding="utf-8", errors="replace") as text:
            yield text


class _Buffer:
    """A sliding window over the text with the position of the next character."""

    def __init__(self, text: IO[str]) -> None:
        self.text = text
        self.data = ""
        self.position = 0
        self.ended = False
        self.decoder = json.JSONDecoder(strict=False)

    def fill(self) -> bool:
        """Drop what was read and append a chunk; False at the end."""
        chunk = "" if self.ended else self.text.read(_CHUNK)
        self.ended = not chunk
        self.data = self.data[self.position :] + chunk
        self.position = 0
        return bool(chunk)

    def peek(self) -> str:
        """The next character that is no white space, or an empty string at the end."""
        while True:
            data, position, end = self.data, self.position, len(self.data)
            while position < end and data[position] in _WHITESPACE:
                position += 1
            self.position = position
            if position < end:
                return data[position]
            if not self.fill():
                return ""

    def expect(self, character: str) -> None:
        """Consume one character."""
        found = self.peek()
        if found != character:
            msg = f"damaged: expected {character!r}, found {found!r}" if found else "truncated"
            raise EvidenceError(msg)
        self.position += 1

    def value(self) -> object:
        """Decode the next JSON value, reading on as long as it is incomplete."""
        if not self.peek():
            msg = "truncated"
            raise EvidenceError(msg)
        while True:
            try:
                value, end = self.decoder.raw_decode(self.data, self.position)
            except ValueError as error:
                if len(self.data) - self.position > _LARGEST_VALUE:
                    msg = "damaged: a value of more than 64 MiB"
                    raise EvidenceError(msg) from error
                incomplete = getattr(error, "pos", 0) >= len(self.data) - 1 or "Unterminated" in str(error)
                if not self.fill():
                    msg = "truncated" if incomplete else f"damaged JSON ({error})"
                    raise EvidenceError(msg) from error
                continue
            if end == len(self.data) and not isinstance(value, (dict, list, str)) and self.fill():
                continue  # a number could go on in the next chunk
            self.position = end
            return cast("object", value)


def stream(text: IO[str], header: dict[str, object]) -> Iterator[dict[str, Any]]:
    """Yield the events of a trace one by one; other top-level values go to `header`.

    Args:
        text: The trace, either an object with `traceEvents` or a bare array of events.
        header: Filled while reading; complete only at the end, since keys may follow the events.

    Raises:
        EvidenceError: As `read_trace`, without the file's name.
    """
    buffer = _Buffer(text)
    first = buffer.peek()
    if not first:
        msg = "empty file"
        raise EvidenceError(msg)
    if first == "[":
        yield from _array(buffer)
        return
    if first != "{":
        msg = "not a trace: neither a JSON object nor an array"
        raise EvidenceError(msg)
    buffer.expect("{")
    found = False
    while buffer.peek() != "}":
        key = buffer.value()
        buffer.expect(":")
        if key == "traceEvents" and buffer.peek() == "[":
            found = True
            yield from _array(buffer)
        else:
            header[str(key)] = buffer.value()
        if buffer.peek() != "}":
            buffer.expect(",")
    if not found:
        msg = "not a trace: no traceEvents array"
        raise EvidenceError(msg)


def _array(buffer: _Buffer) -> Iterator[dict[str, Any]]:
    buffer.expect("[")
    while buffer.peek() != "]":
        event = buffer.value()
        if not isinstance(event, dict):
            msg = f"not a trace: an event is a {type(event).__name__}"
            raise EvidenceError(msg)
        yield cast("dict[str, Any]", event)
        if buffer.peek() != "]":
            buffer.expect(",")
    buffer.expect("]")
