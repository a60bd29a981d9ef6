"""Contains our own errors, away from the hot path (which has its try/except inline).

`with guard("export"):` swallows an `Exception`, logs the first of each component with its traceback, counts the rest, and switches
the component off after three failures within a minute. `INFERSCOPE_STRICT=1` re-raises instead: our test suite runs with it.
`BaseException` (KeyboardInterrupt, CancelledError, SystemExit) always passes.
"""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from typing_extensions import Self

__all__ = [
    "Guard",
    "contained",
    "counts",
    "disabled",
    "failed",
    "guard",
    "is_off",
    "log_once",
    "observe",
    "rearm",
    "reset",
    "strict",
    "tally",
]

T = TypeVar("T")

logger = logging.getLogger("inferscope")

LIMIT: Final = 3
"""Failures within `PERIOD_S` after which a component is switched off."""
PERIOD_S: Final = 60.0

_failures: dict[str, int] = {}
_recent: dict[str, list[float]] = {}
_disabled: dict[str, str] = {}
_said: set[str] = set()
_observed: dict[str, int] = {}


def strict() -> bool:
    """Whether our own errors are raised (`INFERSCOPE_STRICT=1`)."""
    return os.environ.get("INFERSCOPE_STRICT", "") == "1"


def counts() -> dict[str, int]:
    """Failures by component since start."""
    return dict(_failures)


def disabled() -> dict[str, str]:
    """Components that were switched off, with the reason."""
    return dict(_disabled)


def reset() -> None:
    """Forget all failures: at start-up, in a forked child and in tests."""
    _failures.clear()
    _recent.clear()
    _disabled.clear()
    _said.clear()


def rearm(component: str | None = None) -> None:
    """Switch a component on again, or all for a new start; what was counted stays."""
    for name in [component] if component is not None else [*_recent, *_disabled]:
        _recent.pop(name, None)
        _disabled.pop(name, None)


def log_once(key: str, message: str) -> None:
    """Write one warning line for `key`, once a process."""
    if key not in _said:
        _said.add(key)
        logger.warning("inferscope: %s", message)


def failed(component: str, error: Exception) -> None:
    """Count a contained failure; switches the component off at the third within a minute."""
    tally(component, type(error).__name__, error=error)


def tally(component: str, kind: str, times: int = 1, *, error: Exception | None = None) -> None:
    """Count failures that somebody else contained: in the core's hooks, say, or in a callback that must not log.

    Args:
        component: What failed.
        kind: The exception's type, or another word for what happened.
        times: How often.
        error: The exception, when there is one to show under `INFERSCOPE_DEBUG=1`.
    """
    first = component not in _failures
    _failures[component] = _failures.get(component, 0) + times
    now = time.monotonic()
    recent = [moment for moment in _recent.get(component, ()) if now - moment < PERIOD_S]
    recent += [now] * min(times, LIMIT)
    _recent[component] = recent
    if first:
        # The message of an exception can hold user data; the type and our own frames are what we need.
        logger.warning(
            "inferscope: %s failed (%s); your service is not affected, some telemetry is missing",
            component,
            kind,
            exc_info=error if os.environ.get("INFERSCOPE_DEBUG") == "1" else None,
        )
    if len(recent) >= LIMIT and component not in _disabled:
        _disabled[component] = f"{len(recent)} failures within a minute, last {kind}"
        logger.warning("inferscope: %s is switched off after %d failures", component, len(recent))


def observe(component: str, total: int) -> bool:
    """Count the growth of a total of failures that is kept where nothing may be logged; True when that switched the component off."""
    grown = total - _observed.get(component, 0)
    _observed[component] = total
    if grown <= 0 or component in _disabled:
        return False
    tally(component, "contained error", grown)
    return component in _disabled


class Guard:
    """Context manager that contains the errors of one component; falsy `ok` afterwards means it failed or was off."""

    __slots__ = ("component", "ok")

    def __init__(self, component: str) -> None:
        self.component = component
        self.ok = True

    def __enter__(self) -> Self:
        """Nothing to set up."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        """Swallow an `Exception` unless strict; let everything else pass."""
        if error is None or not isinstance(error, Exception):
            return False
        self.ok = False
        if strict():
            return False
        failed(self.component, error)
        return True


def guard(component: str) -> Guard:
    """Contain the errors of `component` in a with-block."""
    return Guard(component)


def contained(component: str, call: Callable[[], T], otherwise: T) -> T:
    """What `call` returns; `otherwise` when it fails or when the breaker switched `component` off."""
    if component not in _disabled:
        with guard(component):
            return call()
    return otherwise


def is_off(component: str) -> bool:
    """Whether the breaker switched `component` off."""
    return component in _disabled
