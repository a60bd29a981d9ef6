"""What integrations cost, and whether anything of the application's changes with them: a row for each target.

Patched and unpatched calls take turns in slices, in CPU time of the thread; a difference is taken within a round and holds on the bound of
its 95 % interval that is worse for us. The service runs twice, under `inferscope run` and with its stages written by hand, and is asked in
turns; its figures are wall time of one connection. The ratio of two medians differs by 2 to 3 % from one pair of processes to the next, about
as much as everything of ours costs, so that each pair of the full run has two new processes; `--quick` has two for all. Triton is the real
server where it is unpacked (`make test-integrations` does that).
"""

from __future__ import annotations

import contextlib
import copy
import http.client
import importlib.util
import inspect
import io
import json
import os
import pickle
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _harness import ROOT, arguments, finish, median_bounds, no_collections, row

FAIL = float("nan")


# -- calls: patched against unpatched -------------------------------------------------------------------------------------------------


def registry():
    from inferscope.integration import Registry

    return Registry()


def toggled(pairs, make, *, rounds, loops):
    """CPU time of a call with and without our patches: two lists of ns, one entry a round, taken in turns.

    Args:
        pairs: {(owner, attribute): ours} of every patch that the case touches.
        make: Returns the call, after the patches stand as they should.
        rounds: Rounds.
        loops: Calls in a slice.
    """
    originals = {(owner, name): vars(owner).get(name, FAIL) for owner, name in pairs}

    def place(*, ours):
        for (owner, name), wrapper in pairs.items():
            if ours:
                setattr(owner, name, wrapper)
            elif originals[owner, name] is FAIL:
                if name in vars(owner):
                    delattr(owner, name)
            else:
                setattr(owner, name, originals[owner, name])

    found = {True: [], False: []}
    call = make()
    with no_collections():
        for number in range(rounds):
            for ours in (number % 2 == 0, number % 2 == 1):
                place(ours=ours)
                for _ in range(3):
                    call()
                began = time.thread_time_ns()
                for _ in range(loops):
                    call()
                found[ours].append((time.thread_time_ns() - began) / loops)
    place(ours=False)
    return found[True], found[False]


def taken(*names):
    """Our wrappers by place, taken from a registry that patches and is undone again."""
    import torch

    owners = (torch.nn.Module, torch.Tensor)
    before = [dict(vars(owner)) for owner in owners]
    one = registry()
    one.instrument(names)
    found = {
        (owner, name): value
        for owner, was in zip(owners, before, strict=True)
        for name, value in vars(owner).items()
        if was.get(name, FAIL) is not value
    }
    for owner, name in found:  # not undone through the ledger: that would leave the wrappers dormant
        was = before[owners.index(owner)].get(name, FAIL)
        delattr(owner, name) if was is FAIL else setattr(owner, name, was)
    return found


def calls(rounds):
    import torch

    from inferscope.record import core

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [layer for _ in range(24) for layer in (torch.nn.Linear(64, 64), torch.nn.ReLU())]
    net, single, value = torch.nn.Sequential(*layers).eval(), torch.nn.Linear(16, 16).eval(), torch.ones(1, 64)
    small, other, scalar = torch.ones(1, 16), torch.ones(1, 16), torch.ones(())
    ours = taken("torch", "copies")
    forward = {place: wrapper for place, wrapper in ours.items() if place[0] is torch.nn.Module}

    def inside(call):
        def run():
            with core.default.request("benchmark"):
                call()

        return run

    cases = {
        "net": (forward, lambda: lambda: net(value), 60),
        "single": (forward, lambda: lambda: single(small), 600),
        "single in a request": (forward, lambda: inside(lambda: single(small)), 400),
        "to": (ours, lambda: lambda: small.to(torch.float32), 1500),
        "item": (ours, lambda: lambda: scalar.item(), 1500),  # noqa: PLW0108  (looked up at each call)
        "add": (ours, lambda: lambda: small + other, 1500),
    }
    found = {}
    with torch.inference_mode():
        for name, (pairs, make, loops) in cases.items():
            found[name] = toggled(pairs, make, rounds=rounds, loops=loops)
    return [
        bounded("forward patch, 49 modules", [100 * (a / b - 1) for a, b in zip(*found["net"], strict=True)], "%", 5),
        bounded("forward patch, single Linear", less(found["single"]), "us", 1.0),
        bounded("forward patch, single Linear inside a request", less(found["single in a request"]), "us", 1.0),
        bounded("patched Tensor.to with nothing to copy", less(found["to"]), "us", 0.3),
        reported("patched Tensor.item on the host", less(found["item"]), "us"),
        nothing("x + y with everything patched", less(found["add"]), "us"),
    ]


def less(pair):
    return [(a - b) / 1000 for a, b in zip(*pair, strict=True)]


def bounded(name, values, unit, target, **more):
    low, middle, high = median_bounds(values)
    return row(name, middle, unit, f"<= {target}", holds=high <= target, note=f"[{low:.3f}, {high:.3f}]", **more)


def reported(name, values, unit):
    low, middle, high = median_bounds(values)
    return row(name, middle, unit, "reported", note=f"[{low:.3f}, {high:.3f}]")


def nothing(name, values, unit):
    """A cost of 0: the interval holds 0, or its middle is below 10 ns, which is where code lies in memory."""
    low, middle, high = median_bounds(values)
    return row(name, middle, unit, "0", holds=low <= 0 <= high or abs(middle) < 0.01, note=f"[{low:.4f}, {high:.4f}]")


# -- graphs and identity --------------------------------------------------------------------------------------------------------------


def graphs(*, inductor_too):
    """Differences that our patches make to compiled, exported and scripted models; each case is told by name."""
    import torch

    names = ("torch", "copies", "dataloader")

    def compiled(backend_graphs):
        torch._dynamo.reset()

        def backend(graph, _inputs):
            backend_graphs.append([(node.op, str(node.target)) for node in graph.graph.nodes])
            return graph.forward

        return backend

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)

        def forward(self, value):
            return self.last(torch.relu(self.first(value.to(torch.float32)))).cpu() + 1

    value = torch.ones(3, 8)

    def compile_(how):
        seen = []
        net = Net().eval()
        if how == "module":
            net.compile(backend=compiled(seen), fullgraph=True)
            fast = net
        else:
            fast = torch.compile(net, backend=compiled(seen), fullgraph=True)
        return fast(value), seen

    def function():
        seen = []
        fast = torch.compile(lambda x: x.to(torch.float64).cpu() + x.copy_(x).sum(), backend=compiled(seen), fullgraph=True)
        return fast(torch.ones(3)), seen

    def export(strict):
        program = torch.export.export(Net().eval(), (value,), strict=strict)
        return program.module()(value), [(node.op, str(node.target)) for node in program.graph.nodes]

    def script():
        made = torch.jit.script(Net().eval())
        return made(value), str(made.graph)

    def trace():
        made = torch.jit.trace(Net().eval(), value)
        return made(value), [node.kind() for node in made.graph.nodes()]

    def inductor():
        torch._dynamo.reset()
        return torch.compile(Net().eval(), fullgraph=True)(value), None

    cases = {
        "torch.compile": lambda: compile_("function"),
        "Module.compile": lambda: compile_("module"),
        "compiled copies": function,
        "export": lambda: export(strict=False),
        "strict export": lambda: export(strict=True),
        "script": script,
        "trace": trace,
        **({"inductor": inductor} if inductor_too else {}),
    }
    wrong = []
    with torch.inference_mode():
        plain = {name: attempt(case) for name, case in cases.items()}
        one = registry()
        one.instrument(names)
        for name, case in cases.items():
            output, graph = attempt(case)
            if graph != plain[name][1] or not same(output, plain[name][0]):
                wrong.append(name)
        one.uninstrument()
    said = f"{len(cases)} ways" + (f", differs: {', '.join(wrong)}" if wrong else "")
    return [row("graphs and outputs that differ, everything patched", len(wrong), "", "0", holds=not wrong, note=said)]


def attempt(case):
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return case()
        except Exception as error:  # noqa: BLE001  (what it raises is the answer)
            return None, f"{type(error).__name__}"


def same(left, right):
    import torch

    return left is right if left is None or right is None else torch.equal(left, right)


def identity():
    """What pickle, deepcopy, torch.save, isinstance, signature and exceptions say, patched against unpatched."""
    import torch

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).eval()
    value = torch.ones(2, 4)

    def raised(call):
        try:
            call()
        except Exception as error:  # noqa: BLE001  (what it raises is the answer)
            return type(error), str(error)
        return None

    def saved():
        buffer = io.BytesIO()
        torch.save(net, buffer)
        return len(buffer.getvalue())

    def look():
        seen = {
            "pickle": pickle.dumps(net),
            "unpickled": pickle.loads(pickle.dumps(net))(value).tolist(),
            "deepcopy": copy.deepcopy(net)(value).tolist(),
            "torch.save": saved(),
            "isinstance": (type(net), isinstance(net, torch.nn.Module), isinstance(value, torch.Tensor), list(vars(net))),
            "call signature": inspect.signature(torch.nn.Module.__call__),
            "model signature": inspect.signature(net),
            "wrong shape": raised(lambda: net(torch.ones(2, 5))),
            "wrong type": raised(lambda: net(3)),
            "to of nothing": raised(lambda: value.to("nowhere")),
            "to without": raised(torch.Tensor.to),
            "item of many": raised(value.item),
            "bool of many": raised(lambda: bool(value)),
            "numpy of grad": raised(net[0].weight.numpy),
        }
        for name in ("to", "cuda", "cpu", "copy_", "item", "tolist", "numpy", "nonzero", "pin_memory"):
            method = getattr(torch.Tensor, name)
            seen[f"names of {name}"] = (method.__name__, method.__doc__, raised(lambda m=method: inspect.signature(m)))
            seen[f"pickled {name}"] = raised(lambda m=method: pickle.loads(pickle.dumps(m)))
        return seen

    plain = look()
    one = registry()
    one.instrument(("torch", "copies", "dataloader"))
    patched = look()
    one.uninstrument()
    wrong = [name for name, said in plain.items() if patched[name] != said]
    note = f"{len(plain)} questions" + (f", differs: {', '.join(wrong)}" if wrong else "")
    return [
        row(
            "answers that differ: pickle, deepcopy, save, isinstance, signature, exceptions",
            len(wrong),
            "",
            "0",
            holds=not wrong,
            note=note,
        )
    ]


# -- start-up -------------------------------------------------------------------------------------------------------------------------


def start_up(pairs):
    """CPU time of `python -c pass` with and without our import hooks, ms."""
    import argparse

    from inferscope.cli.run import environment

    clean = {name: value for name, value in os.environ.items() if not name.startswith("INFERSCOPE_")}
    nothing_asked = argparse.Namespace(service=None, slo=None, integrations=None, state_dir=None)
    kinds = {"with": {**clean, **environment(nothing_asked)}, "without": clean}

    def spent(kind):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", "pass"], env=kinds[kind], check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return 1000 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)

    values = []
    for kind in ("with", "without", "with"):
        spent(kind)
    for number in range(pairs):
        order = ("with", "without") if number % 2 else ("without", "with")
        found = {kind: spent(kind) for kind in order}
        values.append(found["with"] - found["without"])
    return [bounded("import hooks at start-up, torch not imported", values, "ms", 20)]


# -- the service ----------------------------------------------------------------------------------------------------------------------


class Service:
    """A process of `_service.py` with one connection to it."""

    def __init__(self, kind, port, directory):
        environment = {**os.environ, "INFERSCOPE_STATE_DIR": str(directory / kind), "INFERSCOPE_SERVICE": kind}
        program = [sys.executable, str(ROOT / "benchmarks" / "_service.py"), kind, str(port)]
        if kind == "auto":
            program = [sys.executable, "-m", "inferscope", "run", "--", *program]
        self.process = subprocess.Popen(program, env=environment, cwd=ROOT)
        self.port, self.connection = port, None

    def ready(self, timeout_s=60):
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(OSError):
                self.connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
                self.ask("/healthz")
                return True
            time.sleep(0.1)
        return False

    def ask(self, path):
        self.connection.request("GET", path)
        return self.connection.getresponse().read()

    def slice(self, seconds):
        """Wall times of one request after the other, ms."""
        until, found = time.perf_counter() + seconds, []
        while (began := time.perf_counter()) < until:
            self.ask("/score")
            found.append(1000 * (time.perf_counter() - began))
        return found

    def end(self):
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def quantile(values, q):
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]


COMPARED = ("request ", "stage ", "queue threadpool")
"""Series of the requests' own; how late the event loop runs is the process's."""


LIMITS = ((0.5, 1.05), (0.99, 1.25))


@contextlib.contextmanager
def served():
    """Both services, warm; None when one of them did not start."""
    from _servers import free_port

    with tempfile.TemporaryDirectory() as scratch:
        both = {kind: Service(kind, free_port(), Path(scratch)) for kind in ("auto", "hand")}
        try:
            ready = all(each.ready() for each in both.values())
            for each in both.values() if ready else ():
                each.slice(0.5)
            yield both if ready else None
        finally:
            for each in both.values():
                each.end()


def compared(ratios, said, pairs, seconds):
    """So many pairs of slices with one pair of processes, whose names are noted; False when they did not start."""
    with served() as both:
        if both is None:
            return False
        for _ in range(pairs):
            number = len(ratios[0.5])
            order = ("auto", "hand") if number % 2 else ("hand", "auto")
            found = {"auto": [], "hand": []}
            for kind in (*order, *reversed(order)):
                found[kind] += both[kind].slice(seconds / 2)
            for q, values in ratios.items():
                values.append(quantile(found["auto"], q) / quantile(found["hand"], q))
        for kind, each in both.items():
            said[kind] |= {name for name in json.loads(each.ask("/stages"))["seen"] if name.startswith(COMPARED)}
    return True


def service(looks, seconds, *, pairs_a_process):
    """The shortest run that can decide: after each number of pairs in `looks` the intervals are read, at a level that allows for all of the
    readings, and the run is over once both quantiles hold or one of them cannot any more.
    """
    ratios, said, bounds = {q: [] for q, _ in LIMITS}, {"auto": set(), "hand": set()}, {}
    while len(ratios[0.5]) < looks[-1]:
        if not compared(ratios, said, pairs_a_process, seconds):
            return [row("service under `inferscope run`", FAIL, "", "started", holds=False, note="it did not start")]
        if len(ratios[0.5]) in looks:
            bounds = {q: median_bounds(values, level=1 - 0.05 / len(looks)) for q, values in ratios.items()}
            if all(decided(*bounds[q], limit) for q, limit in LIMITS):
                break
    differ = sorted(said["auto"] ^ said["hand"])
    note = ", ".join(sorted(said["auto"])) if not differ else f"differ: {', '.join(differ)}"
    rows = [row("stages under `inferscope run` that differ from those by hand", len(differ), "", "0", holds=not differ, note=note)]
    for q, limit in LIMITS:
        low, middle, high = bounds[q]
        rows.append(
            row(
                f"P{round(100 * q)} under `inferscope run` over by hand",
                middle,
                "x",
                f"interval holds 1, ends < {limit}",
                holds=low <= 1 <= high < limit,
                note=f"[{low:.3f}, {high:.3f}] of {len(ratios[q])} pairs, {pairs_a_process} with the same two processes",
            )
        )
    return rows


def decided(low, _middle, high, limit):
    """Whether more pairs would change nothing: the interval holds 1 and ends below the limit, or lies on one side of 1."""
    return low <= 1 <= high < limit or low > 1 or high < 1


# -- Triton ---------------------------------------------------------------------------------------------------------------------------


def triton_rows(rounds, *, fetch):
    """In an interpreter that has the clients: `--triton` prints the rows as JSON."""
    import _servers

    targets = (
        ("tritonclient infer, unsampled", "us", "<= 5"),
        ("split of one Triton request: what its parts miss of the wall time", "%", "<= 2"),
    )
    try:
        python = _servers.environment(fetch=fetch)
    except _servers.ServerAbsentError as error:
        return [row(name, FAIL, unit, target, holds=False, note=str(error)) for name, unit, target in targets]
    command = [str(python), str(ROOT / "benchmarks" / "_triton.py"), str(rounds), "fetch" if fetch else "found"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT / "benchmarks")
    if done.returncode:
        last = (done.stderr.strip() or "no message").splitlines()[-1]
        return [row(name, FAIL, unit, target, holds=False, note=last) for name, unit, target in targets]
    rows = []
    for each in json.loads(done.stdout.splitlines()[-1]):
        if "values" in each:
            rows.append(bounded(each["name"], each["values"], each["unit"], each["limit"]))
        else:
            rows.append(row(each["name"], FAIL, each["unit"], each["target"], holds=False, note=each["note"]))
    return rows


def main():
    options = arguments(__doc__)
    quick = options.quick
    rows = []
    if importlib.util.find_spec("torch") is not None:
        rows += calls(41 if quick else 201)
        rows += graphs(inductor_too=not quick)
        rows += identity()
    rows += triton_rows(41 if quick else 201, fetch=not quick)
    rows += start_up(15 if quick else 60)
    rows += service((20,), 0.35, pairs_a_process=20) if quick else service((20, 40), 1.0, pairs_a_process=1)
    return finish(rows, options.json, distributions=("tritonclient",))


if __name__ == "__main__":
    sys.exit(main())
