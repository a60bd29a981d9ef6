"""Requests at the ASGI edge of Starlette and FastAPI applications.

A request runs from the moment the application is called until the last byte of its response was handed to the server: background tasks
come after it. Its name is the route's template (`/score` gives `score`, `/items/{id}` gives `items/{id}`), never the URL.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final

from inferscope.guard import guard
from inferscope.integration import EXCLUDED_PATHS, Integration, record_first_byte, recorder
from inferscope.slots import slots

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, MutableMapping

    from inferscope.patching import Ledger, Patch

__all__ = ["AsgiIntegration"]

_MARK: Final = "inferscope.request"
_UNMATCHED: Final = "unmatched"
_SERVER_ERROR: Final = 500
_FULL: Final = 2
"""Value of `starlette.routing.Match.FULL`."""


_FIXED_LIMIT: Final = 512
_fixed: dict[tuple[int, str, str, str], tuple[int, Any, str]] = {}
"""Of paths without parameters: which route of which list serves them, and its name; to ask all routes before it costs as much as a request."""


def _route_name(app: Any, scope: MutableMapping[str, Any]) -> str:
    """The template of the route that will serve `scope`; one name for all that match none, so that scanners make no series."""
    routes = app.router.routes
    key = (id(routes), scope["path"], scope["method"], scope.get("root_path", ""))
    known = _fixed.get(key)
    if known is not None and known[0] < len(routes) and routes[known[0]] is known[1]:
        return known[2]
    template = _template(routes, scope)
    name = _UNMATCHED if template is None else template.strip("/") or "root"
    _fixed.pop(key, None)
    if template is not None and "{" not in template and scope["path"].endswith(template) and len(_fixed) < _FIXED_LIMIT:
        index = _fixed_by(routes, scope)
        if index is not None:
            _fixed[key] = index, routes[index], name
    return name


def _fixed_by(routes: Any, scope: MutableMapping[str, Any]) -> int | None:
    """Where the route stands that serves this path whatever else the request holds; None when that depends on more than path and method."""
    from starlette.routing import Route

    for index, route in enumerate(routes):
        if not isinstance(route, Route):
            return None
        own: Any = route.matches
        if getattr(own, "__func__", None) is not Route.matches and not str(getattr(own, "__module__", "")).startswith("fastapi."):
            return None
        if route.matches(scope)[0].value == _FULL:
            return None if route.param_convertors else index
    return None


def _template(routes: Iterable[Any], scope: MutableMapping[str, Any]) -> str | None:
    """The template, through routers that FastAPI includes and applications that are mounted; None when no route matches."""
    for route in routes:
        match, child = route.matches(scope)
        if match.value != _FULL:
            continue
        if hasattr(route, "effective_candidates"):  # a router that newer releases of FastAPI include as one route
            found = _template(route.effective_candidates(), scope)
            return found if found is not None else _template(route.effective_low_priority_routes(), scope)
        inner = _template(getattr(route, "routes", None) or (), {**scope, **child})  # of a mounted application
        if inner is not None:
            return f"{getattr(route, 'path', '')}{inner}"  # what a host's name chooses has no path
        plain = getattr(route, "starlette_route", None) or route
        return getattr(plain, "path_format", None) or getattr(plain, "path", "") or ""
    return None


class AsgiIntegration(Integration):
    """Opens a request around `Starlette.__call__`; FastAPI inherits it."""

    name: ClassVar[str] = "asgi"
    target: ClassVar[str] = "starlette.applications"
    distribution: ClassVar[str] = "starlette"
    versions: ClassVar[tuple[tuple[int, ...], tuple[int, ...] | None]] = ((0, 27), None)

    def patch(self, ledger: Ledger) -> None:
        """Replace `starlette.applications.Starlette.__call__`."""
        from starlette.applications import Starlette

        def make(original: Any, patch: Patch) -> Callable[..., Any]:
            async def __call__(  # noqa: N807  (stands in for the class's own method)
                self: Any, scope: MutableMapping[str, Any], receive: Any, send: Any
            ) -> None:
                if patch.active and scope["type"] == "lifespan":
                    await _live(original, self, scope, receive, send)
                    return
                if not patch.active or scope["type"] != "http" or _MARK in scope or scope["path"] in EXCLUDED_PATHS:
                    await original(self, scope, receive, send)
                    return
                scope[_MARK] = True
                try:
                    name = _route_name(self, scope)
                except Exception:  # noqa: BLE001  (a foreign route class must not fail the request)
                    name = _UNMATCHED
                await _serve(original, self, scope, receive, send, name)

            return __call__

        ledger.replace(Starlette, "__call__", make)


async def _live(original: Callable[..., Awaitable[None]], app: Any, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
    """A server that was told to end by a signal often raises that signal again once the application is down, and no exit handler runs."""

    async def watched(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "lifespan.shutdown.complete" and slots.on_stop is not None:
            with guard("lifespan"):
                slots.on_stop()
        await send(message)

    await original(app, scope, receive, watched)


async def _serve(
    original: Callable[..., Awaitable[None]], app: Any, scope: MutableMapping[str, Any], receive: Any, send: Any, name: str
) -> None:
    begun = False
    with recorder().request(name) as request:

        async def watched(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start" and message["status"] >= _SERVER_ERROR:
                request.error = str(message["status"])
            await send(message)
            if message["type"] == "http.response.body":
                nonlocal begun
                if not begun and message.get("body"):
                    begun = True
                    record_first_byte(request)
                if not message.get("more_body", False):
                    request.finish()

        await original(app, scope, receive, watched)
