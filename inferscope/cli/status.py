"""`inferscope status`: which services run here, and how they stand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from inferscope.cli.asking import whole
from inferscope.cli.output import emit, state_argument, state_dir
from inferscope.control import workers
from inferscope.errors import InferscopeError

if TYPE_CHECKING:
    import argparse

HELP = "Ask all running workers on this machine how they stand. Exit status 2 when an objective is broken, 1 when nobody answers."

_TIMEOUT_S = 3.0


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this verb."""
    state_argument(parser)
    parser.add_argument("--service", help="only this service's")
    parser.add_argument("--slot", type=whole(0, 127), metavar="N", help="only the worker in this slot")
    parser.add_argument("--pid", type=whole(1, 1 << 31), metavar="PID", help="only the worker with this process id")


def _ask(worker: workers.Worker) -> dict[str, Any]:
    row: dict[str, Any] = {"service": worker.service, "slot": worker.slot, "pid": worker.pid, "status": None, "why": worker.refusal}
    if worker.refusal is not None:
        return row
    try:
        answer = workers.request(worker, "status", "status", {}, _TIMEOUT_S)
    except InferscopeError as error:
        return {**row, "why": str(error)}
    return {**row, "status": answer["result"], "why": answer["why"]}


def _table(value: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _open(status: dict[str, Any]) -> list[str]:
    """Names of the objectives that are broken at present."""
    return [name for name, state in _table(status.get("objectives")).items() if _table(state).get("phase") == "open"]


def _short(value: Any) -> str:
    """A room's state in one word or phrase."""
    return str(_table(value).get("state", "on")) if isinstance(value, dict) else str(value)


def counted(held: dict[str, Any]) -> str:
    """How much of what was judged was bad."""
    share = f"{held.get('exceeding', 'n/a')} of {held.get('requests', 'n/a')}"
    return f"{share} seconds bad" if held.get("unit") == "seconds" else f"{share} above the objective"


def _lines(row: dict[str, Any]) -> list[str]:
    head = f"{row['service']}/{row['slot']}  pid {row['pid'] or 'n/a'}"
    if row["status"] is None:
        return [f"{head}  does not answer: {row['why']}"]
    status = _table(row["status"])
    words = ["ready" if status.get("ready") else "warming up"]
    words += ["leads the pod"] if status.get("leads") else []
    words += [f"captures {_short(status.get('capture', 'n/a'))}", f"export {_short(status.get('export', 'n/a'))}"]
    lines = [f"{head}  {', '.join(words)}"]
    for name, state in _table(status.get("objectives")).items():
        held = _table(state)
        lines.append(f"  {name}: {held.get('phase', 'n/a')}, {counted(held)}")
    lines += [f"  incident {status['incident']}"] if status.get("incident") else []
    lines += [f"  {part} was switched off on demand" for part in cast("list[object]", status.get("switched_off_on_demand") or [])]
    file = _table(status.get("settings_file"))
    lines += [f"  settings file: {file['latest']}"] if file.get("latest") not in {None, "", "off"} else []
    lines += [f"  {part} is off: {why}" for part, why in _table(status.get("switched_off")).items()]
    problems: list[object] = status.get("problems") or []
    lines += [f"  {line}" for line in problems]
    return lines


def run(options: argparse.Namespace) -> int:
    """Ask all of them."""
    root = state_dir(options)
    rows = [_ask(worker) for worker in workers.find(root, options.service, options.slot, options.pid)]
    text = "\n".join(line for row in rows for line in _lines(row))
    emit(options, {"workers": rows}, text or f"no worker answers under {root}")
    if not any(row["status"] is not None for row in rows):
        return 1
    return 2 if any(_open(_table(row["status"])) for row in rows) else 0
