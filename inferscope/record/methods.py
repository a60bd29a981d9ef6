"""Methods that torch.compile has to see as plain functions."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from inferscope.record.compiled import at_home

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["as_function"]


def as_function(timed: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """A Python function around the C core's decorated one.

    Dynamo guards a method's default values through the class's dictionary and accepts nothing but a function there; a decorated
    function that it reaches through this closure it reads as if it were not decorated.

    Args:
        timed: What the C core made of `function`.
        function: The method, which has default values.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return timed(*args, **kwargs)

    return functools.update_wrapper(at_home(call, function), function)
