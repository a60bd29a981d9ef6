"""gzip pprof (profile.proto), written field by field: viewers and `go tool pprof` read it, and no package is needed here."""

from __future__ import annotations

import gzip
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from inferscope.diagnose.profiles.folded import Folded, Frame

__all__ = ["encode"]

# Fields of profile.proto.
_SAMPLE_TYPE, _SAMPLE, _LOCATION, _FUNCTION, _STRINGS, _TIME, _DURATION, _PERIOD_TYPE, _PERIOD, _COMMENT = 1, 2, 4, 5, 6, 9, 10, 11, 12, 13
_VALUE_TYPE_TYPE: Final = 1
_VALUE_TYPE_UNIT: Final = 2


def encode(folded: Folded) -> bytes:
    """One profile, compressed; the same input gives the same bytes.

    Args:
        folded: Stacks with a value each.
    """
    strings: dict[str, int] = {"": 0}
    frames: dict[Frame, int] = {}

    def text(value: str) -> int:
        return strings.setdefault(value, len(strings))

    kind = _number(_VALUE_TYPE_TYPE, text(folded.kind)) + _number(_VALUE_TYPE_UNIT, text(folded.unit))
    out = [_bytes(_SAMPLE_TYPE, kind)]
    for stack, value in folded.values.items():
        locations = (frames.setdefault(frame, len(frames) + 1) for frame in stack)
        out.append(_bytes(_SAMPLE, _packed(1, locations) + _packed(2, [value])))
    for (name, file, line), index in frames.items():
        out.append(_bytes(_LOCATION, _number(1, index) + _bytes(4, _number(1, index) + _number(2, line))))
        out.append(_bytes(_FUNCTION, _number(1, index) + _number(2, text(name)) + _number(3, text(name)) + _number(4, text(file))))
    out += [_number(_TIME, folded.time_unix_ns), _number(_DURATION, folded.duration_ns)]
    if folded.period_ns:
        out += [_bytes(_PERIOD_TYPE, kind), _number(_PERIOD, folded.period_ns)]
    if folded.truncated:
        out.append(_number(_COMMENT, text("not everything was folded")))
    out += [_bytes(_STRINGS, value.encode()) for value in strings]
    return gzip.compress(b"".join(out), 6, mtime=0)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value) if value else b""


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _packed(field: int, values: Iterable[int]) -> bytes:
    return _bytes(field, b"".join(map(_varint, values)))
