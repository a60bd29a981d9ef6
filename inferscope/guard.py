"""Contains our own errors, away from the hot path (which has its try/except inline).

`with guard("export"):` swallows an `Exception`, logs the first of each component with its traceback, counts the rest, and switches
the component off after three failures within a minute. `INFERSCOPE_STRICT=1` re-raises instead: our test suite runs with it.
`BaseException` (KeyboardInterrupt, CancelledError, SystemExit) always passes.
"""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

__all__ = ["Guard", "counts", "disabled", "failed", "guard", "is_off", "log_once", "reset", "strict"]

logger = logging.getLogger("inferscope")
logger.addHandler(logging.NullHandler())

LIMIT: Final = 3
"""Failures within `PERIOD_S` after which a component is switched off."""
PERIOD_S: Final = 60.0

_failures: dict[str, int] = {}
_recent: dict[str, list[float]] = {}
_disabled: dict[str, str] = {}
_said: set[str] = set()


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


def log_once(key: str, message: str) -> None:
    """Write one warning line for `key`, once a process."""
    if key not in _said:
        _said.add(key)
        logger.warning("inferscope: %s", message)


def failed(component: str, error: Exception) -> None:
    """Count a contained failure; switches the component off at the third within a minute."""
    _failures[component] = _failures.get(component, 0) + 1
    now = time.monotonic()
    recent = [moment for moment in _recent.get(component, ()) if now - moment < PERIOD_S]
    recent.append(now)
    _recent[component] = recent
    if _failures[component] == 1:
        # The message of an exception can hold user data; the type and our own frames are what we need.
        logger.warning(
            "inferscope: %s failed (%s); your service is not affected, some telemetry is missing",
            component,
            type(error).__name__,
            exc_info=error if os.environ.get("INFERSCOPE_DEBUG") == "1" else None,
        )
    if len(recent) >= LIMIT and component not in _disabled:
        _disabled[component] = f"{len(recent)} failures within a minute, last {type(error).__name__}"
        logger.warning("inferscope: %s is switched off after %d failures", component, len(recent))


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


def is_off(component: str) -> bool:
    """Whether the breaker switched `component` off."""
    return component in _disabled
