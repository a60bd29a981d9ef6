"""Requests at the WSGI edge of Flask applications, and of any other through `WsgiMiddleware`.

A request runs from the call of the application until the server closes the response's iterable (PEP 3333 has it do so in any case), which
is after the last byte of a stream was handed over. Bodies that are complete when the application returns (lists, tuples, the server's
file wrapper) are returned as they are, because servers treat those types in ways of their own; the request ends with the return.

The time before the application was called is invisible from inside: a proxy that sets `X-Request-Start` makes it visible as `queue:backlog`.
"""

from __future__ import annotations

import ipaddress
import time
from typing import TYPE_CHECKING, Any, ClassVar, Final

from inferscope.clock import now_ns
from inferscope.integration import EXCLUDED_PATHS, Integration, record_first_byte, recorder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from inferscope.patching import Ledger, Patch

    _Environ = dict[str, Any]
    _StartResponse = Callable[..., Any]
    _App = Callable[[_Environ, _StartResponse], Iterable[bytes]]

__all__ = ["FlaskIntegration", "WsgiMiddleware", "arrival_ns"]

_MARK: Final = "inferscope.request"
_UNMATCHED: Final = "unmatched"
_SERVER_ERROR: Final = "5"
_OLDEST_S: Final = 60.0
"""An arrival further back is a clock that differs, not a queue."""
_UNITS: Final = ((1e17, 1e9), (1e14, 1e6), (1e11, 1e3), (1e8, 1.0))
"""Smallest value and divisor for Unix times in nanoseconds, microseconds, milliseconds, seconds: proxies send any of them."""


def arrival_ns(environ: _Environ) -> int | None:
    """When the proxy in front received the request, from `X-Request-Start`, on the clock of `time.perf_counter_ns`.

    Args:
        environ: The WSGI environment.

    Returns:
        None without the header, when it is not a time of the last 60 s, or when the peer is not a proxy on this machine or on a private
        network: a client must not be able to invent a queue.
    """
    text = environ.get("HTTP_X_REQUEST_START")
    if not text or not _near(environ.get("REMOTE_ADDR") or ""):
        return None
    try:
        value = float(text.removeprefix("t="))
    except ValueError:
        return None
    seconds = next((value / divisor for least, divisor in _UNITS if value >= least), 0.0)
    age = time.time() - seconds
    return now_ns() - int(age * 1e9) if 0.0 <= age <= _OLDEST_S else None


def _near(address: str) -> bool:
    try:
        return not address or ipaddress.ip_address(address).is_private
    except ValueError:
        return False


class _Body:
    """The response's iterable, ending the request when the server closes it."""

    __slots__ = ("_body", "_request")

    def __init__(self, body: Iterable[bytes], request: Any) -> None:
        self._body = body
        self._request = request

    def __iter__(self) -> Iterator[bytes]:
        begun = False
        try:
            for part in self._body:
                if part and not begun:
                    begun = True
                    record_first_byte(self._request)
                yield part
        except Exception as error:
            self._request.error = type(error).__qualname__
            raise

    def close(self) -> None:
        try:
            close = getattr(self._body, "close", None)
            if close is not None:
                close()
        finally:
            self._request.__exit__(None, None, None)


def _serve(app: Callable[..., Iterable[bytes]], environ: _Environ, start_response: _StartResponse, name: str) -> Iterable[bytes]:
    environ[_MARK] = True
    request = recorder().request(name, started_ns=arrival_ns(environ))
    request.__enter__()

    def started(status: str, *rest: Any, **named: Any) -> Any:
        if status[:1] == _SERVER_ERROR:
            request.error = status[:3]
        return start_response(status, *rest, **named)

    try:
        body = app(environ, started)
    except BaseException as error:
        request.__exit__(type(error), error, error.__traceback__)
        raise
    wrapper = environ.get("wsgi.file_wrapper")
    if isinstance(body, (list, tuple)) or (isinstance(wrapper, type) and isinstance(body, wrapper)):
        if not isinstance(body, (list, tuple)) or any(body):
            record_first_byte(request)
        request.__exit__(None, None, None)
        return body
    return _Body(body, request)


def _unmeasured(environ: _Environ) -> bool:
    return _MARK in environ or environ.get("PATH_INFO", "") in EXCLUDED_PATHS


class WsgiMiddleware:
    """Opens a request around any WSGI application.

    Args:
        app: The application.
        name: The request's name, or a function that gives it from the environment. It must be a route's template or the like: names make
            series, so a URL with ids in it must not become one.
    """

    def __init__(self, app: _App, name: str | Callable[[_Environ], str]) -> None:
        self._app = app
        self._name = name

    def __call__(self, environ: _Environ, start_response: _StartResponse) -> Iterable[bytes]:
        """Serve one request."""
        if _unmeasured(environ):
            return self._app(environ, start_response)
        try:
            name = self._name if isinstance(self._name, str) else self._name(environ)
        except Exception:  # noqa: BLE001  (a name that cannot be found must not fail the request)
            name = _UNMATCHED
        return _serve(self._app, environ, start_response, name)


class FlaskIntegration(Integration):
    """Opens a request around `Flask.__call__`, named by the rule that matches."""

    name: ClassVar[str] = "flask"
    target: ClassVar[str] = "flask"
    distribution: ClassVar[str] = "flask"
    versions: ClassVar[tuple[tuple[int, ...], tuple[int, ...] | None]] = ((2, 2), None)

    def patch(self, ledger: Ledger) -> None:
        """Replace `flask.Flask.__call__`."""
        from flask import Flask

        def make(original: Any, patch: Patch) -> Callable[..., Any]:
            def __call__(self: Any, environ: _Environ, start_response: _StartResponse) -> Any:  # noqa: N807  (the class's own method)
                if not patch.active or _unmeasured(environ):
                    return original(self, environ, start_response)

                def app(environ: _Environ, started: _StartResponse) -> Iterable[bytes]:
                    served: Iterable[bytes] = original(self, environ, started)
                    return served

                return _serve(app, environ, start_response, _rule(self, environ))

            return __call__

        ledger.replace(Flask, "__call__", make)


def _rule(app: Any, environ: _Environ) -> str:
    """The template that will serve the request (`/items/<int:id>` gives `items/<int:id>`); one name for all that match none."""
    try:
        rule, _ = app.url_map.bind_to_environ(environ).match(return_rule=True)
    except Exception:  # noqa: BLE001  (werkzeug says "no such page" and "go elsewhere" by raising, and a foreign rule may raise anything)
        return _UNMATCHED
    return rule.rule.strip("/") or "root"
