"""Times, counts and rates as people write them on the command line."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, Final, TypeVar

from inferscope.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["checked", "count", "ladder", "rate", "seconds"]

T = TypeVar("T")
_DURATION: Final = re.compile(r"([0-9.]+)(ms|s|m)?\Z")


def checked(parse: Callable[[str], T]) -> Callable[[str], T]:
    """`parse` for argparse: what it says against a value is a usage error."""

    def value(text: str) -> T:
        try:
            return parse(text)
        except ConfigurationError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return value


def seconds(value: str) -> float:
    """A time as in 30s, 250ms or 2m; without a unit, seconds."""
    match = _DURATION.match(value)
    try:
        found = float(match[1]) * {"ms": 1e-3, "s": 1.0, "m": 60.0, None: 1.0}[match[2]] if match else 0.0
    except ValueError:
        found = 0.0
    if not 0 < found <= 86_400:
        raise argparse.ArgumentTypeError(f"{value!r} is no time; as in 30s or 2m")
    return found


def count(value: str) -> int:
    """A whole number from 1."""
    if not value.isascii() or not value.isdigit() or not 0 < int(value) <= 10_000_000:
        raise argparse.ArgumentTypeError(f"{value!r} is no whole number from 1 to 10 000 000")
    return int(value)


def rate(value: str) -> float:
    """Requests a second."""
    try:
        found = float(value)
    except ValueError:
        found = 0.0
    if not 0 < found <= 1e6:
        raise argparse.ArgumentTypeError(f"{value!r} is no rate; requests a second, above 0")
    return found


def ladder(value: str) -> list[int]:
    """Rising whole numbers."""
    rungs = [count(each.strip()) for each in value.split(",")]
    if rungs != sorted(set(rungs)):
        raise argparse.ArgumentTypeError(f"{value!r} does not rise from rung to rung")
    return rungs
