"""What one timed stage, and a request of 8 stages on a torch MLP of 100 us, cost here and with what else one could use.

    python benchmarks/peers.py [--quick] [--json FILE] [--venv DIR]

The peers of peers-requirements.txt are installed into an environment of their own on first use (build/peers-venv; minutes, and torch's
size); a peer that cannot be installed or started is skipped with the reason. All run in one process, in CPU time of the calling thread:
what a peer's own threads burn later is not counted. A stage's cost is measured inside an open request, 32 stages a request, against the
same loop without stages. Cases take turns slice by slice; a figure is a median over rounds, a target holds on the bound of its interval.
"""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
import textwrap
import time
import venv
from itertools import repeat
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from _harness import ROOT, Row, arguments, finish, median_bounds, no_collections, row
from _peers import DISTRIBUTIONS, NAMES, OTEL, SOURCES, STAGES, Recipe

from inferscope.record import core

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping, Sequence

REQUIREMENTS = Path(__file__).with_name("peers-requirements.txt")
OURS, DECORATED = "inferscope, with", "inferscope, decorator"
INNER = 32
SLICE_NS = 2_000_000
BATCH = 10
LIMIT_PERCENT, LIMIT_ALONE_US, LIMIT_PART, LIMIT_RATIO = 4.5, 1.5, 1 / 50, 150


# -- the environment ------------------------------------------------------------------------------------------------------------------


def enter(folder: Path) -> None:
    """Make the peers' environment when it is not there or its requirements changed, and go on in it."""
    if Path(sys.prefix).resolve() == folder.resolve():
        return
    python, stamp = folder / "bin" / "python", folder / "requirements.sha256"
    wanted = hashlib.sha256(REQUIREMENTS.read_bytes() + sys.version.encode()).hexdigest()
    if not stamp.exists() or stamp.read_text(encoding="ascii") != wanted:
        if folder.exists() and any(folder.iterdir()) and not (folder / "pyvenv.cfg").exists():
            raise SystemExit(f"{folder} is not empty and no environment: it is not overwritten")
        print(f"installing the peers into {folder}", file=sys.stderr)
        venv.create(folder, with_pip=True, clear=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        if subprocess.run([*pip, "-r", str(REQUIREMENTS)], check=False, stderr=subprocess.DEVNULL).returncode:
            for line in REQUIREMENTS.read_text(encoding="utf-8").splitlines():
                if line and not line.startswith("#") and subprocess.run([*pip, line], check=False).returncode:
                    print(f"{line} cannot be installed", file=sys.stderr)
        stamp.write_text(wanted, encoding="ascii")
    os.execv(python, [str(python), *sys.argv])


def recipes() -> tuple[dict[str, Recipe], dict[str, str]]:
    """All that start here, and why others do not."""
    found: dict[str, Recipe] = {}
    skipped: dict[str, str] = {}
    for source, make in SOURCES.items():
        try:
            found |= {each.name: each for each in make()}
        except Exception as error:  # noqa: BLE001  (whatever a peer raises costs its own rows alone)
            skipped[source] = f"{type(error).__name__}: {error}"
    return found, skipped


# -- generated loops ------------------------------------------------------------------------------------------------------------------


def around(template: str, body: str, index: object = 0) -> str:
    """`body` inside the template, each line at the placeholder's depth."""
    lines = []
    for line in template.replace("{i}", str(index)).split("\n"):
        depth, mark, _ = line.partition("{body}")
        lines.append(textwrap.indent(body, depth) if mark else line)
    return "\n".join(lines)


def loop(body: str, env: dict[str, Any]) -> Callable[[int], object]:
    """`def run(n)`: the body n times."""
    scope = {"repeat": repeat, "INNER": range(INNER), **{f"N{index}": name for index, name in enumerate(NAMES)}, **env}
    exec(f"def run(n):\n    for _ in repeat(None, n):\n{textwrap.indent(body, ' ' * 8)}", scope)
    run: Callable[[int], object] = scope["run"]
    return run


def nothing() -> None:
    """The call that a wrapper wraps."""


class Case:
    """Loops of one recipe: with and without what is measured."""

    def __init__(self, recipe: Recipe, with_stages: Callable[[int], object], without: Callable[[int], object]) -> None:
        self.recipe, self.with_stages, self.without = recipe, with_stages, without
        self.count = 1

    def timed(self, run: Callable[[int], object], count: int) -> int:
        """CPU time of `count` turns, ns."""
        self.recipe.before()
        before = time.thread_time_ns()
        run(count)
        spent = time.thread_time_ns() - before
        self.recipe.after()
        return spent

    def calibrate(self) -> None:
        """Set `count` so that a slice takes about 2 ms."""
        self.timed(self.with_stages, 3)
        self.count = max(1, min(3000, SLICE_NS * 5 // max(1, self.timed(self.with_stages, 5))))

    def cost(self) -> float:
        """One slice with stages less one without, ns a turn."""
        return (self.timed(self.with_stages, self.count) - self.timed(self.without, self.count)) / self.count


def stage_case(recipe: Recipe) -> Case:
    """One stage, 32 in each open request."""
    if recipe.wrap is None:
        bare, timed, env = "pass", around(recipe.stage, "pass"), recipe.env
    else:
        bare, timed, env = "bare()", "work()", {**recipe.env, "bare": nothing, "work": recipe.wrap(nothing, 0)}
    inner = "for _ in INNER:\n    {body}"
    return Case(recipe, *(loop(around(recipe.root, around(inner, each), "r"), env) for each in (timed, bare)))


def scopes_case(recipe: Recipe) -> Case:
    """A request and its 8 stages around nothing."""
    body = "\n".join(around(recipe.stage, "pass", index) for index in range(STAGES))
    return Case(recipe, loop(around(recipe.root, body, "r"), recipe.env), loop("pass", {}))


def layers() -> tuple[list[Callable[[Any], Any]], Any]:
    """Eight layers whose CPU time together is nearest to 100 us here, and their input."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(1)
    relu, linear = torch.relu, torch.nn.functional.linear

    def layer(width: int) -> Callable[[Any], Any]:
        weight, bias = torch.randn(width, width) / width, torch.randn(width)
        return lambda h: relu(linear(h, weight, bias))

    offered = []
    for width in range(96, 217, 8):
        functions, x = [layer(width) for _ in range(STAGES)], torch.randn(16, width)
        run = mlp(Recipe("", ""), functions, x)
        offered.append((Case(Recipe("", ""), run, run), functions, x))
    spent: list[list[float]] = [[] for _ in offered]
    for _ in range(41):  # in turns: a machine that is slow for a moment is slow for all of them
        for each, (case, _, _) in zip(spent, offered, strict=True):
            case.timed(case.with_stages, 4)
            each.append(case.timed(case.with_stages, BATCH) / BATCH / 1e3)
    nearest = min(range(len(offered)), key=lambda index: abs(median(spent[index]) - 100))
    return offered[nearest][1:]


def mlp(recipe: Recipe, functions: Sequence[Callable[[Any], Any]], x: Any) -> Callable[[int], object]:
    """The MLP service: a request around 8 layers, each a stage."""
    wrap = recipe.wrap or (lambda function, _: function)
    env = {**recipe.env, "x": x, **{f"f{index}": wrap(function, index) for index, function in enumerate(functions)}}
    body = "h = x\n" + "\n".join(around(recipe.stage, f"h = f{index}(h)", index) for index in range(STAGES))
    return loop(around(recipe.root, body, "r"), env)


# -- measurements ---------------------------------------------------------------------------------------------------------------------


def measure_stages(found: dict[str, Recipe], rounds: int) -> dict[str, list[float]]:
    """ns a stage, by recipe and round."""
    cases = {name: stage_case(recipe) for name, recipe in found.items()}
    for case in cases.values():
        case.calibrate()
    costs: dict[str, list[float]] = {name: [] for name in cases}
    order, mixer = list(cases), random.Random(1)
    with no_collections():
        for _ in range(rounds):
            mixer.shuffle(order)
            for name in order:
                costs[name].append(cases[name].cost() / INNER)
    return costs


def measure_scopes(recipe: Recipe, rounds: int) -> list[float]:
    """ns of a request and 8 stages around nothing."""
    case = scopes_case(recipe)
    case.calibrate()
    with no_collections():
        return [case.cost() for _ in range(rounds)]


def pair(case: Case, *, bare_first: bool) -> tuple[float, float]:
    """us that the recipe added to a request, and us of the bare one."""
    without = case.timed(case.without, BATCH) if bare_first else 0
    timed = case.timed(case.with_stages, BATCH)
    without = without or case.timed(case.without, BATCH)
    return (timed - without) / BATCH / 1e3, without / BATCH / 1e3


def measure_pairs(cases: Mapping[str, Case], rounds: int, shares: Mapping[str, int]) -> dict[str, list[tuple[float, float]]]:
    """Pairs by recipe: in each round every one has its turn, `shares` pairs long (default 1); the order within a pair alternates."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    with no_collections():
        for case in cases.values():
            for number in range(4):
                pair(case, bare_first=number % 2 == 0)
        for turn in range(rounds):
            for name, case in cases.items():
                found[name] += [pair(case, bare_first=(turn + number) % 2 == 0) for number in range(shares.get(name, 1))]
    return found


def target_rows(costs: dict[str, list[float]], alone: list[float], pairs: dict[str, list[tuple[float, float]]]) -> list[Row]:
    added, bare = zip(*pairs[OURS], strict=True)
    base = median(bare)
    low, middle, high = median_bounds(added)
    share = 100 * high / base
    upper = median_bounds(alone)[2] / 1e3
    rows = [
        row(
            "request and 8 stages on the MLP, upper bound",
            share,
            "%",
            f"<= {LIMIT_PERCENT} %",
            holds=share <= LIMIT_PERCENT,
            note=f"{middle:+.2f} us ({low:+.2f} to {high:+.2f}) on {base:.1f} us, {len(added)} pairs",
        ),
        row(
            "the nine scopes alone, upper bound",
            upper,
            "us",
            f"<= {LIMIT_ALONE_US} us",
            holds=upper <= LIMIT_ALONE_US,
            note=f"median {median(alone) / 1e3:.3f} us, {len(alone)} rounds",
        ),
    ]
    if OTEL in pairs:
        otel = [each for each, _ in pairs[OTEL]]
        floor = median_bounds(otel)[0]
        part = high / floor
        note = f"upper bound of ours over lower bound of theirs: {high:.2f} us over {floor:.0f} us; medians 1/{median(otel) / max(middle, 0.01):.0f}"
        rows.append(row("part of what OpenTelemetry spans add", part, "", "<= 1/50", holds=part <= LIMIT_PART, note=note))
        ratios = [theirs / mine for theirs, mine in zip(costs[OTEL], costs[OURS], strict=True)]
        low, middle, high = median_bounds(ratios)
        note = f"median {middle:.0f}, {low:.0f} to {high:.0f}; {median(costs[OTEL]):.0f} ns over {median(costs[OURS]):.1f} ns"
        rows.append(
            row("OpenTelemetry span over our stage, lower bound", low, "x", f">= {LIMIT_RATIO}", holds=low >= LIMIT_RATIO, note=note)
        )
    return rows


def measure(*, quick: bool) -> tuple[list[Row], dict[str, str]]:
    found, skipped = recipes()
    functions, x = layers()
    costs = measure_stages(found, 25 if quick else 101)
    alone = measure_scopes(found[OURS], 101 if quick else 401)
    bare = mlp(Recipe("bare", ""), functions, x)
    cases = {name: Case(recipe, mlp(recipe, functions, x), bare) for name, recipe in found.items()}
    chosen = {name: cases[name] for name in (OURS, DECORATED, OTEL) if name in cases}
    pairs = measure_pairs(chosen, 150 if quick else 600, {OURS: 10, DECORATED: 3})
    rows = target_rows(costs, alone, pairs)
    mine = median(costs[OURS])
    for name, spent in sorted(costs.items(), key=lambda item: median(item[1])):
        note = f"{median(spent) / mine:7.1f} x ours; {found[name].buys}"
        rows.append(row(f"stage: {name}", median(spent), "ns", "reported", note=note))
    pairs |= measure_pairs({name: case for name, case in cases.items() if name not in pairs}, 60 if quick else 300, {})
    for name, each in sorted(pairs.items(), key=lambda item: median(added for added, _ in item[1])):
        low, middle, high = median_bounds([added for added, _ in each])
        base = median(bare for _, bare in each)
        note = f"{100 * middle / base:+7.1f} %; {low:+.1f} to {high:+.1f} us on {base:.0f} us"
        rows.append(row(f"MLP, 9 scopes: {name}", middle, "us", "reported", note=note))
    return rows, skipped


def main() -> int:
    def extend(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--venv", type=Path, default=ROOT / "build" / "peers-venv", metavar="DIR", help="the peers' environment")

    asked = arguments(__doc__, extend)
    enter(asked.venv)
    if core.IMPLEMENTATION != "native":
        print(f"the C core is not in use ({core.IMPLEMENTATION}: {core.REASON}); `make native` builds it", file=sys.stderr)
    rows, skipped = measure(quick=asked.quick)
    status: int = finish(rows, asked.json, distributions=DISTRIBUTIONS, skipped=skipped)
    for source, reason in skipped.items():
        print(f"skipped {source}: {reason}")
    return status


if __name__ == "__main__":
    sys.exit(main())
