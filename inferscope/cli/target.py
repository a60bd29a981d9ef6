"""The process that holds a function under load: `python -m inferscope.cli.target ASK ANSWER STATE_DIR` (started by `bench`, no verb)."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from inferscope import api, integration
from inferscope.bench import child, inprocess, metrics
from inferscope.bench.precision import parse_precision
from inferscope.bench.resources import Cards
from inferscope.bench.result import LoadPlan
from inferscope.detect.slo import SLO
from inferscope.device.events import timer
from inferscope.device.memory import AllocatorMonitor
from inferscope.diagnose.incident import diagnose, to_dict
from inferscope.errors import EvidenceError, InferscopeError
from inferscope.report import perfetto
from inferscope.types import Breach

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from inferscope.bench.result import LoadResult
    from inferscope.bench.steady import Event
    from inferscope.device.memory import Memory

__all__ = ["main"]

REQUEST = "bench"


def _stages() -> list[dict[str, Any]]:
    """What inferscope measured inside: stages, locks, copies, queues, collections."""
    series = [each for each in api.snapshot().series if each.kind != "request" and each.count]
    return [
        {
            "name": " ".join([*([] if each.kind == "stage" else [each.kind]), *filter(None, each.labels)]),
            "count": each.count,
            "p50_ms": None if each.p50_s is None else each.p50_s * 1e3,
            "p99_ms": None if each.p99_s is None else each.p99_s * 1e3,
        }
        for each in series
    ]


def _rooms() -> Any:
    running = api._current()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]  (our own command line looks inside its own process)
    return None if running is None else running.rooms


def _breach(load: LoadResult, objective: dict[str, float] | None, to_ns: int) -> Breach:
    """The question for the diagnosis: why is the tail of this run what it is?"""
    from_ns = int(load.intended_ns[0])
    slo = SLO(REQUEST, **objective) if objective else None  # type: ignore[arg-type]
    threshold, quantile = (slo.threshold_ms, slo.quantile) if slo is not None else (0.0, 0.99)
    return Breach("bench", REQUEST, REQUEST, threshold, quantile, from_ns, to_ns, time.time_ns(), load.status.size, 0, "manual", 0.0, 1.0)


def _evidence(rooms: Any, breach: Breach) -> dict[str, Any]:
    """What inferscope kept of the load."""
    document: dict[str, Any] = rooms.horizon.evidence(REQUEST, breach.onset_ns, breach.detected_ns)
    document["copies"], document["gc"] = integration.copies(), rooms.gc.evidence()
    document["device"] = rooms.device.evidence(breach.onset_ns, breach.detected_ns)
    return document


def _inside(breach: Breach, document: dict[str, Any]) -> dict[str, Any]:
    """Why the tail is what it is: the diagnosis, without captures."""
    found = to_dict(diagnose(breach, [document], service="inferscope-bench"))
    return {name: found[name] for name in ("verdict", "attribution", "withheld", "what_if", "findings", "notes")}


def _device(rooms: Any, load: LoadResult, static: list[Memory]) -> dict[str, Any] | None:
    """Of each device that the function used: its own busy share and what torch's allocator held; None when it used none."""
    found = rooms.device.evidence(int(load.intended_ns[0]), int(load.done_ns.max()))
    before = {row.device: row for row in static}
    rows: list[dict[str, Any]] = []
    for row in found["memory"]:
        first = before.get(row["device"])
        start = None if first is None else first.allocated_bytes
        peak = row["allocated_peak_bytes"]
        rows.append(
            {
                "device": row["device"],
                "busy_own": found["own_spans"].get(row["device"]),
                "static_bytes": start,
                "peak_bytes": peak,
                "dynamic_bytes": None if peak is None or start is None else max(peak - start, 0),
                "reserved_bytes": row["reserved_bytes"],
            }
        )
    return {"busy": found["busy"], "source": found["source"], "devices": rows} if rows or found["busy"] is not None else None


def _enough(until: dict[str, Any] | None) -> Callable[[LoadResult, Sequence[Event]], bool] | None:
    """Whether a percentile is known closely enough; None when that was not asked."""
    if until is None:
        return None
    precision = replace(parse_precision(until["text"]), level=until["level"])

    def enough(load: LoadResult, events: Sequence[Event]) -> bool:
        return precision.reached(load, metrics.warm_up(load, until["warmup"], events)[0], until["blocks"])

    return enough


class _Seen(NamedTuple):
    """Stands for a timer that has timed these devices."""

    channels: tuple[Any, ...]


def _current() -> list[Memory]:
    """The allocator of the device that the function uses already, although nothing was timed on it yet; empty when torch is not at work on one."""
    torch: Any = sys.modules.get("torch")
    try:
        found = torch.accelerator.current_accelerator()
        if found is None or (found.type == "cuda" and not torch.cuda.is_initialized()):
            return []
        device = torch.device(found.type, torch.accelerator.current_device_index())
    except Exception:  # noqa: BLE001  (no torch, or one that does not tell)
        return []
    return AllocatorMonitor(cast("Any", _Seen((device,)))).sample()


def _measure(asked: dict[str, Any]) -> dict[str, Any]:
    plan, objective = LoadPlan(**asked["plan"]), asked["objective"]
    cards, allocators = Cards(), AllocatorMonitor(timer)
    looks: list[list[Memory]] = []

    def rows() -> list[Memory]:
        now = allocators.sample()
        if not looks:
            looks.append(now or _current())  # before the load; a device that is first used under load has no static size
        return now

    def hangs(why: str) -> None:
        sys.stdout.write(f"\n{why}\n")
        sys.stdout.flush()
        os._exit(child.HANGS)  # the threads that hang would keep the process alive

    around = inprocess.Surroundings(cards, rows, Path(asked["spool"]), hangs, _enough(asked["until"]), asked["max_s"])
    inputs, baseline = asked["inputs"], asked["baseline"]
    found = inprocess.measure(plan, asked["target"], asked["settings"], inputs, golden=asked["golden"], baseline=baseline, around=around)
    ended_ns = time.perf_counter_ns()
    cards.close()
    api.flush(2.0)
    rooms = _rooms()
    value: dict[str, Any] = {
        "load": found.load.to_json(),
        "outputs": found.outputs,
        "errors": found.errors,
        "resources": found.resources,
        "baseline": found.baseline,
        "events": found.events,
        "stages": _stages(),
        "device": None,
        "inside": None,
        "trace": [],
    }
    if rooms is not None and found.load.fine.any():
        rooms.device.monitor()
        value["device"] = _device(rooms, found.load, looks[0] if looks else [])
        api.shutdown(2.0)  # nobody adds to the evidence while it is read
        try:
            breach = _breach(found.load, objective, ended_ns)
            document = _evidence(rooms, breach)
            value["trace"] = json.loads(perfetto.render([document]))["traceEvents"] if asked["trace"] else []
            value["inside"] = _inside(breach, document)
        except EvidenceError as error:
            value["inside"] = {
                "verdict": f"n/a: {error}",
                "attribution": [],
                "withheld": str(error),
                "what_if": [],
                "findings": [],
                "notes": [],
            }
    return value


def main(arguments: list[str]) -> int:
    """Measure what ASK says and write ANSWER; an error of the target's is an answer too."""
    ask, answer, state = (Path(each) for each in arguments)
    asked = json.loads(ask.read_text("utf-8"))
    sys.path.insert(0, os.getcwd())  # noqa: PTH109  (what `python -m` puts there is lost when PYTHONSAFEPATH is set)
    objective = asked["objective"]
    slo = SLO(REQUEST, **objective) if objective else None
    api.configure(service="inferscope-bench", slo=slo, state_dir=state, capture=False, export=False, diagnose="off")
    with contextlib.suppress(InferscopeError):
        api.instrument("torch", "copies")
    try:
        found = _measure(asked)
    except (InferscopeError, ValueError) as error:
        found = {"error": f"{asked['target']}: {error}" if asked["target"] not in str(error) else str(error)}
    finally:
        api.shutdown(1.0)
    temporary = answer.with_suffix(".tmp")
    temporary.write_text(json.dumps(found), "utf-8")
    temporary.rename(answer)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
