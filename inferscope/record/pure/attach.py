"""Carrying a request to another thread or task."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from contextvars import Token

    from inferscope.record.pure.request import Request
    from inferscope.record.pure.state import Shared

__all__ = ["Attachment"]


class Attachment:
    """Makes a request current while the `with` block runs; None means none.

    Args:
        shared: The recorder's state.
        request: What becomes current. When it closed already, spans inside are late.
    """

    __slots__ = ("_request", "_shared", "_token")

    def __init__(self, shared: Shared, request: Request | None) -> None:
        self._shared = shared
        self._request = request
        self._token: Token[Request | None] | None = None

    def __enter__(self) -> Request | None:
        self._token = self._shared.context.set(self._request)
        return self._request

    def __exit__(self, *_: object) -> None:
        token, self._token = self._token, None
        if token is not None:
            try:
                self._shared.context.reset(token)
            except (ValueError, RuntimeError):  # another context than the entry's runs this
                if self._shared.context.get() is self._request:
                    self._shared.context.set(None)
