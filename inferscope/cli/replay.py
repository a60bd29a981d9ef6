"""`inferscope replay`: send what services kept on disk to a collector, later."""

from __future__ import annotations

import argparse
import datetime as dt
import os
import re
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from inferscope.cli.asking import whole
from inferscope.cli.output import emit, state_argument, state_dir
from inferscope.errors import InferscopeError
from inferscope.pod import safe_name

if TYPE_CHECKING:
    from inferscope.export.otlp.target import Target
    from inferscope.export.replay import Replayed

HELP = """Send metrics, logs and traces that services kept on disk to an OTLP receiver, with the times they had, oldest first.
Repeated, it goes on where it ended: what that receiver took is not sent again. Headers and certificates come from OTEL_EXPORTER_OTLP_*.
Exit status 1 when the receiver did not take everything."""

_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_AGO: Final = re.compile(r"(\d+(?:\.\d+)?)([smhd])\Z")


def moment(text: str) -> int:
    """A time as in 90m or 2d (ago), 2026-05-01T12:00 (UTC without an offset), or seconds since 1970; Unix ns."""
    ago = _AGO.match(text)
    if ago:
        return time.time_ns() - int(float(ago[1]) * _UNITS[ago[2]] * 1e9)
    try:
        return int(float(text) * 1e9)
    except (ValueError, OverflowError):
        pass
    try:
        found = dt.datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; as in 90m, 2d, 2026-05-01T12:00 or seconds since 1970") from None
    return int((found if found.tzinfo else found.replace(tzinfo=dt.timezone.utc)).timestamp() * 1e9)


def _url(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise argparse.ArgumentTypeError(f"{text!r}: an OTLP endpoint, such as http://collector:4318")
    return text


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this verb."""
    state_argument(parser)
    parser.add_argument("--to", required=True, type=_url, metavar="URL", help="OTLP endpoint; port 4317 means gRPC, any other HTTP")
    parser.add_argument("--protocol", choices=("http/protobuf", "grpc"), help="instead of what the port says")
    parser.add_argument(
        "--since", type=moment, default=0, metavar="TIME", help="leave out what is older; as in 90m, 2d or 2026-05-01T12:00"
    )
    parser.add_argument("--until", type=moment, default=1 << 62, metavar="TIME", help="leave out what is newer")
    parser.add_argument("--service", help="only this service's")
    parser.add_argument("--slot", type=whole(0, 127), metavar="N", help="only the worker in this slot")
    parser.add_argument(
        "--signal", action="append", choices=("metrics", "logs", "traces"), help="only this; may be given again (default all)"
    )
    parser.add_argument("--again", action="store_true", help="also what this receiver took before")


def _targets(options: argparse.Namespace) -> dict[str, Target]:
    from inferscope.export.otlp.target import resolve
    from inferscope.export.replay import SIGNALS

    # Whoever types the command means it: a switch for services does not hold it up.
    environ = {key: value for key, value in os.environ.items() if key != "OTEL_SDK_DISABLED"}
    found: dict[str, Target] = {}
    for signal in options.signal or SIGNALS:
        target = resolve(signal, endpoint=options.to, protocol=options.protocol, environ=environ)
        if target is not None:
            found[signal] = target
    return found


def _line(row: Replayed) -> str:
    parts = [f"{row.sent} sent"]
    parts += [f"{count} {word}" for count, word in ((row.skipped, "left out"), (row.refused, "refused"), (row.damaged, "damaged")) if count]
    return f"{row.service}/{row.slot} {row.signal}: {', '.join(parts)}{'; ' + row.why if row.why else ''}"


def run(options: argparse.Namespace) -> int:
    """Send it."""
    from inferscope.export.replay import Ledger, replay

    root = state_dir(options)
    if options.since > options.until:
        raise InferscopeError("--since lies after --until")
    ledger = Ledger(root, options.to)
    if options.again:
        ledger.forget()
    try:
        rows = replay(
            root,
            _targets(options),
            ledger,
            since_unix_ns=options.since,
            until_unix_ns=options.until,
            service=None if options.service is None else safe_name(options.service),
            slot=options.slot,
        )
    except ImportError as error:
        raise InferscopeError(f"OTLP over gRPC needs {error.name}, which is not installed: pip install 'inferscope-sdk[grpc]'") from error
    emit(
        options, {"to": options.to, "rings": [asdict(row) for row in rows]}, "\n".join(map(_line, rows)) or f"nothing is kept under {root}"
    )
    return 1 if any(row.why or row.refused for row in rows) else 0
