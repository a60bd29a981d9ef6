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
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np

from inferscope.bench.golden import plain
from inferscope.bench.load import LoadPlan, LoadResult, arrivals
from inferscope.bench.process import usage
from inferscope.errors import InferscopeError
from inferscope.record import core

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["GOLDEN", "MOST_REQUESTS", "Outcome", "bind", "find", "measure"]

GOLDEN: Final = 64
"""So many inputs are answered once before the load, for the check of outputs."""
MOST_REQUESTS: Final = 2_000_000
_LEAD_NS: Final = 50_000_000
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
    cpu_cores: float | None
    """CPU seconds a second, of the whole process."""
    memory: dict[str, int] | None
    """`static_bytes` before the load, `peak_bytes`, `dynamic_bytes` = peak - static."""


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


def bind(function: Callable[..., Any], settings: dict[str, Any], *, with_input: bool) -> Callable[[Any], Any]:
    """The function with what it asks for by name; the result takes the input, or ignores it when there is none.

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
    if with_input:
        return lambda value: function(value, **keywords)
    return lambda _: function(**keywords)


def _requests(call: Callable[[Any], Any], inputs: Sequence[Any], size: int, seed: int) -> Callable[[int], Any]:
    """The n-th request: an input, or a list of `size`, drawn in seeded order."""
    if not inputs:
        return lambda _: call(None)
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
    limit: int
    start_ns: int
    end_ns: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    next: int = 0
    rows: list[tuple[int, int, int, int, int, int]] = field(default_factory=list[tuple[int, int, int, int, int, int]])
    errors: Counter[str] = field(default_factory=Counter[str])

    def take(self) -> int | None:
        """The next request, None when there are no more."""
        with self.lock:
            if self.next >= self.limit or (self.offsets is None and time.perf_counter_ns() >= self.end_ns):
                return None
            self.next += 1
            return self.next - 1


def _work(shared: _Shared, request: Callable[[str], Any]) -> None:
    """One client: takes a request, waits until it is due, makes the call."""
    while (index := shared.take()) is not None:
        now = time.perf_counter_ns()
        due = now if shared.offsets is None else shared.start_ns + shared.offsets[index]
        # A request that was due while every thread was busy waited for the service, not for the generator.
        launched = due
        if now < due:
            time.sleep((due - now) / 1e9)
            launched = time.perf_counter_ns()
        sent, status = time.perf_counter_ns(), 200
        try:
            with request("bench"):
                shared.call(index)
        except Exception as error:  # noqa: BLE001  (what fails is counted, and the run goes on)
            status = 500
            shared.errors[type(error).__qualname__] += 1
        shared.rows.append((index, due, launched, sent, time.perf_counter_ns(), status))


def measure(plan: LoadPlan, target: str, settings: dict[str, Any], inputs: Sequence[Any], *, golden: bool) -> Outcome:
    """Run the plan on the function, in this process.

    Args:
        plan: `connections` is the number of threads; `url` is ignored.
        target: `module:function`.
        settings: values for the names that the function may ask for.
        inputs: what it is given.
        golden: whether to keep its outputs for the first inputs.

    Raises:
        InferscopeError: the target cannot be called as asked, or fails for the inputs of the check.
    """
    size = int(settings.get("batch_size") or 1)
    call = bind(find(target), settings, with_input=bool(inputs))
    outputs: list[Any] = []
    if golden:
        try:
            outputs = _golden(call, inputs, size)
        except InferscopeError:
            raise
        except Exception as error:
            raise InferscopeError(f"{target} fails: {type(error).__name__}: {error}") from error
    offsets: list[int] | None = None
    limit = plan.requests or MOST_REQUESTS
    if plan.mode == "open":
        due = arrivals(plan.rate, plan.seconds, plan.seed, plan.process)[: plan.requests or None]
        offsets, limit = [int(each) for each in due], due.size
    before = usage(os.getpid(), children=False)
    cpu, start = time.process_time(), time.perf_counter_ns() + (_LEAD_NS if offsets is not None else 0)
    shared = _Shared(_requests(call, inputs, size, plan.seed), offsets, limit, start, start + int(plan.seconds * 1e9))
    with ThreadPoolExecutor(plan.connections) as pool:
        for client in [pool.submit(_work, shared, core.default.request) for _ in range(plan.connections)]:
            client.result()
    spent, lasted = time.process_time() - cpu, (time.perf_counter_ns() - start) / 1e9
    after = usage(os.getpid(), children=False)
    shared.rows.sort()
    rows = np.reshape(np.array(shared.rows, dtype=np.int64), (-1, 6))
    load = LoadResult(plan, *(rows[:, column] for column in range(1, 6)))
    memory = None
    if before is not None and after is not None:
        memory = {
            "static_bytes": before.resident_bytes,
            "peak_bytes": after.peak_bytes,
            "dynamic_bytes": max(after.peak_bytes - before.resident_bytes, 0),
        }
    return Outcome(load, outputs, dict(shared.errors), spent / lasted if lasted > 0 else None, memory)
