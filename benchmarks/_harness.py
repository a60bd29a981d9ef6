"""What the scripts of this folder share: interleaved timing in CPU time, bounds, the machine, the table and the JSON of rows."""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.metadata
import json
import math
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # a peers' environment measures this checkout, not an installed copy

from inferscope.bench.fingerprint import fingerprint  # noqa: E402  (the root must be on the path)
from inferscope.record import core  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

Row = dict[str, Any]


def arguments(description: str | None, extend: Callable[[argparse.ArgumentParser], object] | None = None) -> argparse.Namespace:
    """`--quick` and `--json FILE`, and what `extend` adds."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, at most 50 s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine and rows to this file")
    if extend is not None:
        extend(parser)
    return parser.parse_args()


def row(name: str, value: float, unit: str, target: str, *, holds: bool = True, **more: Any) -> Row:
    """One row; `holds` stays True for one that is only reported, a value that is not known is NaN. `more` goes into the JSON, `note` of it into
    the table too.
    """
    return {"name": name, "value": round(float(value), 4), "unit": unit, "target": target, "holds": bool(holds), **more}


def machine(*distributions: str) -> dict[str, Any]:
    """Interpreter, processor, libraries and load of this run; `distributions` are looked up beside the usual ones."""
    found = fingerprint()
    libraries = found.pop("libraries")
    for name in distributions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            libraries[name] = importlib.metadata.version(name)
    del found["sha256"]
    found["kernel"] = found["kernel"].partition("-")[0]
    return {**found, "libraries": libraries, "core": core.IMPLEMENTATION, "load": [round(each, 1) for each in os.getloadavg()]}


def table(rows: Sequence[Row]) -> None:
    """Print the rows."""
    width = max((len(each["name"]) for each in rows), default=0)
    reach = max((len(each["target"]) for each in rows), default=0)
    for each in rows:
        said = "      " if each["target"] == "reported" else "holds " if each["holds"] else "MISSED"
        value = f"{each['value']:.3f}" if math.isfinite(each["value"]) else "n/a"
        print(f"{said} {each['name']:{width}} {value:>11} {each['unit']:5} {each['target']:{reach}} {each.get('note', '')}")


def known(document: Any) -> Any:
    """The same with null for numbers that are not known: JSON has no NaN."""
    if isinstance(document, dict):
        return {key: known(value) for key, value in document.items()}
    if isinstance(document, (list, tuple)):
        return [known(value) for value in document]
    return None if isinstance(document, float) and not math.isfinite(document) else document


def finish(rows: Sequence[Row], target: Path | None, *, distributions: Sequence[str] = (), **more: Any) -> int:
    """Print the table, write the JSON when `target` is given; the exit status: 1 when a row does not hold."""
    table(rows)
    if target is not None:
        target.parent.mkdir(parents=True, exist_ok=True)
        document = known({"machine": machine(*distributions), "rows": list(rows), **more})
        target.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return 0 if all(each["holds"] for each in rows) else 1


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Without garbage collections, which would fall on whoever allocates next."""
    was = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def cpu_ns(work: Callable[[], object]) -> int:
    """CPU time of this thread in one call of `work`, ns."""
    before = time.thread_time_ns()
    work()
    return time.thread_time_ns() - before


def interleaved(cases: Mapping[str, Callable[[], object]], rounds: int, *, seed: int = 1) -> dict[str, list[int]]:
    """CPU time of each case in each round, ns; every round runs every case once, in an order of its own."""
    found: dict[str, list[int]] = {name: [] for name in cases}
    order, mixer = list(cases), random.Random(seed)
    with no_collections():
        for each in cases.values():
            each()
        for _ in range(rounds):
            mixer.shuffle(order)
            for name in order:
                found[name].append(cpu_ns(cases[name]))
            gc.collect(0)
    return found


def median_bounds(values: Sequence[float], *, level: float = 0.95) -> tuple[float, float, float]:
    """Median with a distribution-free interval from order statistics (binomial, normal approximation): (low, median, high)."""
    ordered = sorted(values)
    spread = statistics.NormalDist().inv_cdf(0.5 + level / 2) * len(ordered) ** 0.5 / 2
    low = max(0, int(len(ordered) / 2 - spread))
    high = min(len(ordered) - 1, int(len(ordered) / 2 + spread + 1) - 1)
    return ordered[low], statistics.median(ordered), ordered[high]
