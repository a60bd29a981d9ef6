"""What the verbs that measure share: times, counts, rates and inputs as people give them, verdicts as they are written."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

from inferscope.bench import text
from inferscope.bench.compare import GATES, INCOMPARABLE, INCONCLUSIVE, INCORRECT, REGRESSED, parse_gates
from inferscope.bench.stats import LEAST_BLOCKS
from inferscope.errors import ConfigurationError, InferscopeError
from inferscope.export import announce, regression_event

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from inferscope.bench.compare import Gate, Verdict

__all__ = [
    "automatic",
    "blocks",
    "checked",
    "count",
    "gate_arguments",
    "gates",
    "ladder",
    "level",
    "lines",
    "price",
    "rate",
    "seconds",
    "usage",
    "whole",
    "write_verdicts",
]

T = TypeVar("T")
_DURATION: Final = re.compile(r"([0-9.]+)(ms|s|m)?\Z")


def checked(parse: Callable[[str], T]) -> Callable[[str], T]:
    """`parse` for argparse: what it says against a value is a usage error."""

    def value(words: str) -> T:
        try:
            return parse(words)
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


def whole(value: str) -> int:
    """A whole number from 0."""
    return 0 if value == "0" else count(value)


def blocks(value: str) -> int:
    """A number of blocks that says something about how much blocks differ."""
    found = count(value)
    if found < LEAST_BLOCKS:
        raise argparse.ArgumentTypeError(f"{value} blocks say too little about how much blocks differ; at least {LEAST_BLOCKS}")
    return found


def level(value: str) -> float:
    """The level of intervals in percent, as a share."""
    try:
        found = float(value.removesuffix("%")) / 100
    except ValueError:
        found = 0.0
    if not 0.5 <= found <= 0.999:
        raise argparse.ArgumentTypeError(f"{value!r} is no level of an interval; percent from 50 to 99.9")
    return found


def automatic(value: str) -> float | None:
    """A number from 0, or `auto`."""
    if value == "auto":
        return None
    try:
        found = float(value)
    except ValueError:
        found = -1.0
    if not 0 <= found < float("inf"):
        raise argparse.ArgumentTypeError(f"{value!r} is neither auto nor a number from 0")
    return found


def usage(verb: str, message: str) -> NoReturn:
    """Say what is wrong with the command line, and end."""
    sys.stderr.write(f"inferscope {verb}: {message}\n")
    raise SystemExit(64)


def gate_arguments(parser: argparse.ArgumentParser) -> None:
    """`--gate`, and `--metric` with `--tolerance` for a single one; see `gates`."""
    parser.add_argument("--gate", type=checked(parse_gates), metavar="GATES",
                        help=f"metrics and the difference that does not matter ({GATES})".replace("%", "%%"))  # fmt: skip
    parser.add_argument("--metric", metavar="NAME", help="judge this one only, as --gate NAME:TOLERANCE")
    parser.add_argument("--tolerance", metavar="P%", help="the difference of --metric that does not matter (5%%)")


def gates(options: argparse.Namespace, verb: str) -> tuple[Gate, ...]:
    """The gates that were asked for, else the default ones."""
    if options.gate and (options.metric or options.tolerance):
        usage(verb, "--gate says all that --metric and --tolerance say")
    if options.tolerance and not options.metric:
        usage(verb, "--tolerance belongs to --metric; --gate takes several")
    try:
        text = f"{options.metric}:{(options.tolerance or '5').removesuffix('%')}%" if options.metric else GATES
        return options.gate or parse_gates(text)
    except ConfigurationError as error:
        usage(verb, str(error))


def price(value: str) -> float:
    """Money an hour."""
    try:
        found = float(value)
    except ValueError:
        found = -1.0
    if not 0 <= found <= 1e9:
        raise argparse.ArgumentTypeError(f"{value!r} is no price of an hour")
    return found


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


def lines(path: Path) -> tuple[bytes, ...]:
    """The lines of a file of inputs, one JSON value each.

    Raises:
        InferscopeError: it cannot be read, is empty, or a line is no JSON.
    """
    try:
        found = tuple(line for line in path.read_bytes().splitlines() if line.strip())
    except OSError as error:
        raise InferscopeError(f"--inputs {path}: cannot be read ({error.strerror})") from error
    for number, line in enumerate(found, 1):
        try:
            json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InferscopeError(f"--inputs {path}: line {number} is no JSON value") from error
    if not found:
        raise InferscopeError(f"--inputs {path}: is empty")
    return found


def write_verdicts(
    options: argparse.Namespace, title: str, verdicts: Sequence[Verdict], remarks: Sequence[str], evidence: Mapping[str, Any] | None = None
) -> None:
    """Verdicts as `--md` and `--junit` ask for them; a regression is also an event for the OTLP receiver that the environment names.

    Raises:
        InferscopeError: a file cannot be written.
    """
    if any(each.word == REGRESSED for each in verdicts):
        artefacts = {} if evidence is None else {str(evidence["path"]): str(evidence["root_sha256"])}
        announce(regression_event(title, [each.to_json() for each in verdicts], time.time_ns(), artefacts), "inferscope")
    if options.md:
        text.put("--md", options.md, text.verdict_markdown(title, verdicts, remarks))
    if options.junit:
        failing = {REGRESSED, INCORRECT, INCOMPARABLE}
        outcome = {
            each.metric: "failed" if each.word in failing else "skipped" if each.word == INCONCLUSIVE else "passed" for each in verdicts
        }
        text.put("--junit", options.junit, text.junit(title, [(each.metric, outcome[each.metric], each.text()) for each in verdicts]))
