"""Load on a Python function in the process that holds it: `module:function`, called from threads.

The function gets what it asks for by name (`batch_size`, `input_len`, `precision`, `model`, `seed`) and, when it takes another
argument, one of the inputs, or a list of `batch_size` of them.
"""

from __future__ import annotations

import importlib
import inspect
import os
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np

from inferscope.bench.golden import plain
from inferscope.bench.load import schedule
from inferscope.bench.precision import rounds
from inferscope.bench.resources import Sampler, look, summary
from inferscope.bench.result import ARRAYS, LoadPlan, LoadResult
from inferscope.bench.steady import Watch, counts
from inferscope.errors import InferscopeError
from inferscope.record import core

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from inferscope.bench.steady import Event
    from inferscope.device.memory import Memory
    from inferscope.device.nvml import Card

__all__ = ["GOLDEN", "MOST_REQUESTS", "Outcome", "Surroundings", "bind", "find", "measure", "recovered"]

GOLDEN: Final = 64
"""So many inputs are answered once before the load, for the check of outputs."""
MOST_REQUESTS: Final = 2_000_000
_LEAD_NS: Final = 50_000_000
IDLE_S: Final = 0.5
SINGLE_S: Final = 5.0
"""One at a time takes no longer than that."""
_INPUTS: Final = "give --inputs FILE, one JSON value a line"
_ORDER: Final = 65_536
_NAMES: Final = ("batch_size", "input_len", "precision", "model", "seed")


@dataclass(slots=True)
class Outcome:
    """What came of it."""

    load: LoadResult
    outputs: list[Any]
    """Of the first inputs, as JSON types; empty when they were not asked for."""
    errors: dict[str, int]
    """Exceptions by type."""
    resources: dict[str, Any]
    """See `resources.summary`."""
    baseline: dict[str, Any] | None
    """Idle and one request at a time, before the load; None when it was not asked for."""
    events: list[Event]
    """Compilations, tunings and driver allocations under load."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the process around the function lends to its measurement.

    Args:
        cards: what tells of the cards.
        allocators: what torch's allocators hold, of each device in use.
        spool: where finished requests are kept as they come, so that they survive the process; None keeps none.
        hangs: called when no call returned for the plan's `drain_s`; may end the process.
        enough: whether to stop, asked after each round; None measures one round.
        max_s: further rounds end by then.
    """

    cards: Callable[[], Sequence[Card]] | None = None
    allocators: Callable[[], Sequence[Memory]] = tuple
    spool: Path | None = None
    hangs: Callable[[str], object] | None = None
    enough: Callable[[LoadResult, Sequence[Event]], bool] | None = None
    max_s: float = 600.0


def find(target: str) -> Callable[..., Any]:
    """The function that `module:function` names.

    Raises:
        InferscopeError: there is no such module or function, importing it fails, or it is a coroutine function.
    """
    module_name, _, path = target.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for name in path.split("."):
            found = getattr(found, name)
    except Exception as error:
        raise InferscopeError(f"{target} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise InferscopeError(f"{target} is {type(found).__name__}, not a function")
    if inspect.iscoroutinefunction(found):
        raise InferscopeError(f"{target} is a coroutine function; serve it and measure its address")
    return cast("Callable[..., Any]", found)


def bind(function: Callable[..., Any], settings: dict[str, Any], *, with_input: bool) -> Callable[..., Any]:
    """The function with what it asks for by name; the result takes the input, or ignores it when there is none, and an `input_len` of its own.

    Args:
        function: what is measured.
        settings: values for the names it may ask for; None is left to the function's own default.
        with_input: whether there are inputs.

    Raises:
        InferscopeError: it needs an input and there is none, takes none and there are some, or needs more than that.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = [inspect.Parameter("input", inspect.Parameter.POSITIONAL_ONLY)] if with_input else []  # a built-in that does not say
    keywords = {each.name: settings[each.name] for each in parameters if settings.get(each.name) is not None and each.name in _NAMES}
    positional = {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}
    free = [each for each in parameters if each.name not in _NAMES and each.kind in positional]
    needed = [each.name for each in parameters if each.default is each.empty and each.kind not in {each.VAR_POSITIONAL, each.VAR_KEYWORD}]
    needed = [name for name in needed if name not in keywords]
    if len(needed) > 1:
        raise InferscopeError(f"it needs {', '.join(needed)}: one input and {', '.join(_NAMES)} can be given")
    if needed and not with_input:
        raise InferscopeError(f"it needs {needed[0]}: " + (f"give --{needed[0].replace('_', '-')}" if needed[0] in _NAMES else _INPUTS))
    if with_input and not free:
        raise InferscopeError("it takes no input, so --inputs is of no use")

    def call(value: Any, **own: Any) -> Any:
        named = {**keywords, **own} if own and "input_len" in keywords else keywords
        return function(value, **named) if with_input else function(**named)

    return call


def _requests(call: Callable[..., Any], inputs: Sequence[Any], size: int, seed: int, lengths: Sequence[int] = ()) -> Callable[[int], Any]:
    """The n-th request: an input, or a list of `size`, drawn in seeded order; each with a length of its own where `lengths` vary."""
    if lengths and not inputs:
        return lambda index: call(None, input_len=lengths[index % len(lengths)])
    if not inputs:
        return lambda _: call(None)
    if lengths:

        def same(value: Any) -> Any:
            return value

        found = _requests(same, inputs, size, seed)
        return lambda index: call(found(index), input_len=lengths[index % len(lengths)])
    order = [int(index) for index in np.random.default_rng((seed, 1)).integers(0, len(inputs), _ORDER)]
    if size == 1:
        return lambda index: call(inputs[order[index % _ORDER]])
    return lambda index: call([inputs[order[(index * size + step) % _ORDER]] for step in range(size)])


def _golden(call: Callable[[Any], Any], inputs: Sequence[Any], size: int) -> list[Any]:
    """Outputs in the order of the inputs, each alone or in full batches; one output of a function without inputs."""
    if not inputs:
        return [plain(call(None))]
    starts = range(0, min(len(inputs), GOLDEN), size)
    if size == 1:
        return [plain(call(inputs[start])) for start in starts]
    return [plain(call([inputs[(start + step) % len(inputs)] for step in range(size)])) for start in starts]


@dataclass(slots=True)
class _Shared:
    """What the threads share; `lock` guards `next`."""

    call: Callable[[int], Any]
    offsets: list[int] | None
    """When each request is due; None in a closed loop."""
    lengths: Sequence[int]
    """How long each request is, over and over; empty where all are alike."""
    limit: int
    start_ns: int
    end_ns: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    next: int = 0
    under_way: int = 0
    kept: int = 0
    """Rows that lie in the spool."""
    rows: list[tuple[int, int, int, int, int, int]] = field(default_factory=list[tuple[int, int, int, int, int, int]])
    errors: Counter[str] = field(default_factory=Counter[str])

    def take(self) -> int | None:
        """The next request, None when there are no more."""
        with self.lock:
            if self.next >= self.limit or (self.offsets is None and time.perf_counter_ns() >= self.end_ns):
                return None
            self.next += 1
            return self.next - 1


def _work(shared: _Shared, request: Callable[..., Any]) -> None:
    """One client: takes a request, waits until it is due, makes the call."""
    while (index := shared.take()) is not None:
        now = time.perf_counter_ns()
        due = now if shared.offsets is None else shared.start_ns + shared.offsets[index]
        # A request that was due while every thread was busy waited for the service, not for the generator.
        launched = due
        if now < due:
            time.sleep((due - now) / 1e9)
            launched = time.perf_counter_ns()
        with shared.lock:
            shared.under_way += 1
        sent, status = time.perf_counter_ns(), 200
        try:
            with request("bench", size=shared.lengths[index % len(shared.lengths)]) if shared.lengths else request("bench"):
                shared.call(index)
        except Exception as error:  # noqa: BLE001  (what fails is counted, and the run goes on)
            status = 500
            shared.errors[type(error).__qualname__] += 1
        done = time.perf_counter_ns()
        with shared.lock:
            shared.under_way -= 1
        shared.rows.append((index, due, launched, sent, done, status))


def _baseline(call: Callable[[int], Any], most: int, cards: Callable[[], Sequence[Card]] | None) -> dict[str, Any]:
    """The process at rest, and requests one at a time, unseen by inferscope."""
    with Sampler(os.getpid(), cards, 0.1) as idle:
        time.sleep(IDLE_S)
    core.default.enabled, was = False, core.default.enabled
    latency: list[float] = []
    end = time.perf_counter() + SINGLE_S
    try:
        while len(latency) < most and (began := time.perf_counter()) < end:
            call(len(latency))
            latency.append((time.perf_counter() - began) * 1e3)
    except Exception:  # noqa: BLE001  (a function that fails is found out by the load)
        latency = []
    finally:
        core.default.enabled = was
    return baseline_of(summary(idle.samples), latency)


def baseline_of(idle: dict[str, Any], latency_ms: Sequence[float]) -> dict[str, Any]:
    """Both baselines as data; None where nothing was measured."""
    ordered = sorted(latency_ms)
    single = {
        "requests": len(ordered),
        "p50_ms": ordered[(len(ordered) - 1) // 2] if ordered else None,
        "min_ms": min(ordered, default=None),
    }
    return {"idle": {name: idle[name] for name in ("cpu_cores", "host_cpu_cores", "memory", "device")}, "single": single}


def _keep(spool: Path, shared: _Shared) -> None:
    """Append the rows that are new since the last time."""
    rows = shared.rows[shared.kept :]
    if rows:
        with spool.open("ab") as file:
            file.write(np.array(rows, dtype=np.int64).tobytes())
        shared.kept += len(rows)


def recovered(plan: LoadPlan, spool: Path, stopped: str) -> LoadResult | None:
    """What a process that died had measured; None when that is nothing."""
    try:
        content = spool.read_bytes()
    except OSError:
        return None
    rows = np.reshape(np.frombuffer(content[: len(content) // 48 * 48], dtype=np.int64), (-1, 6))
    if not rows.size:
        return None
    rows = rows[np.argsort(rows[:, 1], kind="stable")]
    return LoadResult(plan, **{name: rows[:, column] for column, name in enumerate(ARRAYS, 1)}, stopped=stopped)


class _Look:
    """What is done beside the load, ten times a second: keep what is finished, notice that nothing finishes."""

    def __init__(self, shared: _Shared, around: Surroundings, patience_s: float) -> None:
        self._shared, self._around, self._patience_s = shared, around, patience_s
        self._rows, self._since = 0, max(time.perf_counter(), shared.start_ns / 1e9)

    def __call__(self) -> None:
        shared, now = self._shared, time.perf_counter()
        if self._around.spool is not None:
            _keep(self._around.spool, shared)
        if len(shared.rows) != self._rows or not shared.under_way:
            self._rows, self._since = len(shared.rows), now
        elif self._around.hangs is not None and now - self._since > self._patience_s:
            self._around.hangs(f"{shared.under_way} calls are under way and none returned for {now - self._since:.1f} s")


def _schedule(plan: LoadPlan) -> tuple[list[int] | None, int]:
    if plan.mode == "open":
        due = schedule(plan).tolist()
        return due, len(due)
    return None, plan.requests or MOST_REQUESTS


def measure(
    plan: LoadPlan,
    target: str,
    settings: dict[str, Any],
    inputs: Sequence[Any],
    *,
    golden: bool,
    baseline: int = 0,
    around: Surroundings | None = None,
) -> Outcome:
    """Run the plan on the function, in this process.

    Args:
        plan: `connections` is the number of threads; `url` is ignored.
        target: `module:function`.
        settings: values for the names that the function may ask for.
        inputs: what it is given.
        golden: whether to keep its outputs for the first inputs.
        baseline: how many requests to make one at a time first, after a look at the idle process; 0 leaves both out.
        around: what the process lends.

    Raises:
        InferscopeError: the target cannot be called as asked, or fails for the inputs of the check.
    """
    around = around or Surroundings()
    size = int(settings.get("batch_size") or 1)
    lengths: list[int] = [int(each) for each in settings.get("input_lens") or ()]
    call = bind(find(target), settings, with_input=bool(inputs))
    outputs: list[Any] = []
    if golden:
        try:
            outputs = _golden(call, inputs, size)
        except InferscopeError:
            raise
        except Exception as error:
            raise InferscopeError(f"{target} fails: {type(error).__name__}: {error}") from error
    requests = _requests(call, inputs, size, plan.seed, lengths)
    before = _baseline(requests, baseline, around.cards) if baseline else None
    static = look(os.getpid(), around.cards, 0.0)
    errors: Counter[str] = Counter()
    events: list[Event] = []
    latest: list[Event] = []

    def one(each: LoadPlan) -> LoadResult:
        events.extend(latest)
        load, latest[:] = _load(each, requests, lengths, around, errors)
        return load

    def moved(back: int) -> None:
        latest[:] = [(at - back, kind, count) for at, kind, count in latest]

    with Sampler(os.getpid(), around.cards) as sampler:
        enough = around.enough
        load = (
            one(plan) if enough is None else rounds(one, plan, lambda found: enough(found, [*events, *latest]), around.max_s, moved=moved)
        )
    resources = {**summary(sampler.samples, static), "began_ns": sampler.began_ns}
    return Outcome(replace(load, plan=plan), outputs, dict(errors), resources, before, [*events, *latest])


def _load(
    plan: LoadPlan, requests: Callable[[int], Any], lengths: Sequence[int], around: Surroundings, errors: Counter[str]
) -> tuple[LoadResult, list[Event]]:
    """One round, and the warm-up work that was seen in it."""
    offsets, limit = _schedule(plan)
    start = time.perf_counter_ns() + (_LEAD_NS if offsets is not None else 0)
    shared = _Shared(requests, offsets, lengths, limit, start, start + int(plan.seconds * 1e9), errors=errors)
    with (
        Watch(lambda: counts(around.allocators()), also=_Look(shared, around, plan.drain_s)) as watch,
        ThreadPoolExecutor(plan.connections) as pool,
    ):
        for client in [pool.submit(_work, shared, core.default.request) for _ in range(plan.connections)]:
            client.result()
    rows = np.reshape(np.array(sorted(shared.rows), dtype=np.int64), (-1, 6))
    return LoadResult(plan, **{name: rows[:, column] for column, name in enumerate(ARRAYS, 1)}, stopped=""), watch.events
