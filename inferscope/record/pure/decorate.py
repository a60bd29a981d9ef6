"""Decorators that time every call and change nothing else: signature, kind, pickling by name, methods."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TypeVar, cast

from inferscope.record.compiled import at_home, seen_as, traced_opening

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Generator
    from contextlib import AbstractContextManager

    from inferscope.record.pure.state import Shared

    Opening = Callable[[str], AbstractContextManager[object]]

__all__ = ["decorate"]

F = TypeVar("F", bound="Callable[..., Any]")


def decorate(function: F, opening: Opening, shared: Shared) -> F:
    """Wrap a function so that each call runs inside what `opening` makes.

    Args:
        function: Function, coroutine function, generator, asynchronous generator, or a `staticmethod` or `classmethod` of one.
        opening: Makes a context manager for one call; told `call` for a plain function, else nothing.
        shared: Its `enabled` is asked at every call.

    Returns:
        A function of the same kind. A class, or what cannot be wrapped, is returned as it is.
    """
    given: Any = function
    try:
        if isinstance(given, (staticmethod, classmethod)):
            bound: Any = cast(Any, given)
            return cast(F, type(bound)(decorate(bound.__func__, opening, shared)))
        if isinstance(given, type) or not callable(given):
            return function
        return cast(F, functools.wraps(given)(_wrapper(given, seen_as(traced_opening)(opening), shared)))
    except Exception:  # noqa: BLE001 - nothing of ours reaches the application
        shared.failed()
        return function


def _is(test: Callable[[object], bool], function: Callable[..., Any]) -> bool:
    """Whether a test of `inspect` holds for a function or an object's `__call__`."""
    return test(function) or test(getattr(function, "__call__", None))  # noqa: B004 - asked for what it is, not whether it is


def _wrapper(function: Callable[..., Any], opening: Opening, shared: Shared) -> Callable[..., Any]:
    """The wrapper for the function's kind."""
    import inspect  # twice as dear as all of ours, and not every application decorates

    if _is(inspect.iscoroutinefunction, function):
        return _coroutine(function, opening, shared)
    if _is(inspect.isasyncgenfunction, function):
        return _async_generator(function, opening, shared)
    if _is(inspect.isgeneratorfunction, function):
        return _generator(function, opening, shared)
    return at_home(_plain(function, opening, shared), function)


def _plain(function: Callable[..., Any], opening: Opening, shared: Shared) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not shared.enabled:
            return function(*args, **kwargs)
        with opening("call"):
            return function(*args, **kwargs)

    return wrapper


def _coroutine(function: Callable[..., Any], opening: Opening, shared: Shared) -> Callable[..., Any]:
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not shared.enabled:
            return await function(*args, **kwargs)
        with opening(""):
            return await function(*args, **kwargs)

    return wrapper


def _generator(function: Callable[..., Generator[Any, Any, Any]], opening: Opening, shared: Shared) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        if not shared.enabled:
            return (yield from function(*args, **kwargs))
        with opening("") as opened:
            began = getattr(opened, "began", None)  # a request's
            if began is None:
                return (yield from function(*args, **kwargs))
            return (yield from cast("Generator[Any, Any, Any]", _Telling(function(*args, **kwargs), began)))

    return wrapper


class _Telling:
    """A generator that tells when it hands out its first value."""

    __slots__ = ("_inner", "_told", "close", "send", "throw")

    def __init__(self, inner: Generator[Any, Any, Any], told: Callable[[], None]) -> None:
        self._inner, self._told = inner, told
        self.close, self.send, self.throw = inner.close, inner.send, inner.throw

    def __iter__(self) -> _Telling:
        return self

    def __next__(self) -> Any:
        item = next(self._inner)
        self._told()
        return item


def _async_generator(function: Callable[..., Any], opening: Opening, shared: Shared) -> Callable[..., Any]:
    async def wrapper(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        # `yield from` for asynchronous generators, spelled out: sent values, exceptions and closing reach the inner one.
        inner: AsyncGenerator[Any, Any] = function(*args, **kwargs)
        with opening("") if shared.enabled else nullcontext() as opened:
            began = getattr(opened, "began", None)  # a request's
            step = inner.asend(None)
            while True:
                try:
                    item = await step
                except StopAsyncIteration:
                    return
                if began is not None:
                    began()
                try:
                    sent = yield item
                except GeneratorExit:
                    await inner.aclose()
                    raise
                except BaseException as error:  # noqa: BLE001 - handed on to the inner generator
                    step = inner.athrow(error)
                else:
                    step = inner.asend(sent)

    return wrapper
