"""What `stage` and `request` are inside code that torch.compile, torch.export or torch.jit.script turns into a graph: nothing.

A graph holds tensor operations alone; a clock reading in it would break it in two, and a context manager that dynamo cannot trace makes it
give up the whole function without a word. So dynamo is shown these stand-ins instead. It finds them by the attribute `_torchdynamo_inline`,
which it reads from functions of its own too: no import hook, and torch is never imported for it. The name is private to
torch; tests/record/test_compile.py tells when it stops working. torch.jit.script takes them for the functions themselves.
"""

from __future__ import annotations

from types import FunctionType
from typing import TYPE_CHECKING, Any, Optional, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self

    F = TypeVar("F", bound=Callable[..., Any])

__all__ = [
    "Scripted",
    "Silent",
    "at_home",
    "recorder_request",
    "recorder_stage",
    "request",
    "seen_as",
    "stage",
    "traced_opening",
    "traced_request",
    "traced_stage",
]


class Silent:
    """A span and a request that record nothing, plain enough for dynamo to trace and to leave nothing of in the graph.

    Args:
        name: Stage or request.
        size: As given.
        items: As given.
        model: As given.
        cls: As given.
    """

    def __init__(self, name: str, size: float | None = None, items: int = 1, model: str | None = None, cls: str | None = None) -> None:
        self.name = name
        self.size = size
        self.items = items
        self.model = model
        self.cls = cls
        self.id = 0
        self.start_ns = 0
        self.open = False
        self.wanted = False
        self.profiled = False
        self.error: str | None = None
        self.trace: tuple[str, str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def __call__(self, function: F) -> F:
        """The function itself."""
        return function

    def finish(self, error: str | None = None) -> None:
        """Nothing to close."""

    def discard(self) -> None:
        """Nothing to close."""


class Scripted:
    """The same for torch.jit.script, which compiles the class and knows old annotations only.

    Args:
        name: Stage or request.
        size: As given.
        items: As given.
    """

    def __init__(self, name: str, size: Optional[float], items: int) -> None:  # noqa: UP045 - TorchScript reads no `float | None`
        self.name = name
        self.size = size
        self.items = items

    def __enter__(self) -> Scripted:  # noqa: PYI034 - TorchScript knows no Self
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:  # noqa: PYI036 - as TorchScript wants them
        pass


def stage(name: str) -> Scripted:
    """Time a region of a request under a name: `with inferscope.stage("x"):` or `@inferscope.stage("x")`.

    Functions, coroutine functions, generators and asynchronous generators can be decorated; `with` is right around `await` too. Inside
    compiled code it records nothing.

    Args:
        name: Low cardinality: each name owns a histogram.
    """
    return Scripted(name, None, 1)


def request(
    name: str,
    size: Optional[float] = None,  # noqa: UP045 - TorchScript reads no `float | None`, nor `*` before arguments with defaults
    items: int = 1,
    model: Optional[str] = None,  # noqa: ARG001, UP045
    cls: Optional[str] = None,  # noqa: ARG001, UP045
    started_ns: Optional[int] = None,  # noqa: ARG001, UP045
) -> Scripted:
    """The unit that an objective judges: `with inferscope.request("score") as request:` or `@inferscope.request("score")`.

    Inside compiled code it records nothing.

    Args:
        name: Low cardinality.
        size: Whatever makes work larger (tokens, rows, pixels); may be set later, `request.size = …`.
        items: Things done, for throughput; may be set later.
        model: Model name.
        cls: A bounded class, such as a tenant tier.
        started_ns: True arrival (`time.perf_counter_ns`); the time up to here is the queue `backlog`.
    """
    return Scripted(name, size, items)


stage.__module__ = request.__module__ = "inferscope"  # where pickle finds what passes for them


def traced_stage(name: str) -> Silent:
    """Stands for `inferscope.stage` in a trace."""
    return Silent(name)


def traced_request(
    name: str,
    *,
    size: float | None = None,
    items: int = 1,
    model: str | None = None,
    cls: str | None = None,
    started_ns: int | None = None,
) -> Silent:
    """Stands for `inferscope.request` in a trace."""
    del started_ns
    return Silent(name, size, items, model, cls)


def recorder_stage(_: object, name: str) -> Silent:
    """Stands for `Recorder.stage` in a trace."""
    return Silent(name)


def recorder_request(
    _: object,
    name: str,
    *,
    size: float | None = None,
    items: int = 1,
    model: str | None = None,
    cls: str | None = None,
    started_ns: int | None = None,
) -> Silent:
    """Stands for `Recorder.request` in a trace."""
    del started_ns
    return Silent(name, size, items, model, cls)


def traced_opening(kind: str) -> Silent:
    """Stands for what opens a span at each call of a decorated function."""
    return Silent(kind)


def seen_as(stand_in: Callable[..., Any]) -> Callable[[F], F]:
    """Decorates a function for which dynamo traces another one."""

    def mark(function: F) -> F:
        function._torchdynamo_inline = stand_in  # type: ignore[attr-defined]  # noqa: SLF001 - torch's name for it
        return function

    return mark


def at_home(wrapper: F, function: Callable[..., Any]) -> F:
    """The same wrapper in the globals of the function that it wraps, where torch.jit.script looks up the names in that one's source.

    Args:
        wrapper: Uses no globals itself.
        function: What it wraps; when it has no globals, the wrapper stays as it is.
    """
    home: dict[str, Any] | None = getattr(function, "__globals__", None)
    if home is None:
        return wrapper
    return cast("F", FunctionType(wrapper.__code__, home, wrapper.__name__, wrapper.__defaults__, wrapper.__closure__))
