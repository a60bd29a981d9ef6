"""ASGI: what a request is named, asked again and after the routes changed."""

from __future__ import annotations

import functools

import pytest

pytest.importorskip("starlette")
from starlette.applications import Starlette
from starlette.routing import Host, Mount, Route, Router

from inferscope_integrations import asgi


async def answer(_request):
    """Never called."""


def name(app, path, method="GET", host=b"a"):
    scope = {"type": "http", "path": path, "method": method, "headers": [(b"host", host)], "root_path": ""}
    first = asgi._route_name(app, dict(scope))
    assert asgi._route_name(app, dict(scope)) == first
    return first


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    monkeypatch.setattr(asgi, "_fixed", {})


def test_templates_name_requests_and_what_has_no_route_has_one_name():
    inner = [Route("/score", answer), Route("/{id}", answer)]
    app = Starlette(routes=[Route("/", answer), Route("/score", answer), Route("/items/{id}", answer), Mount("/v1", routes=inner)])
    assert [name(app, path) for path in ("/", "/score", "/items/7", "/items/8", "/v1/score", "/v1/9", "/no", "/score/")] == [
        "root", "score", "items/{id}", "items/{id}", "v1/score", "v1/{id}", "unmatched", "unmatched",
    ]  # fmt: skip
    assert name(app, "/score", "DELETE") == "unmatched"
    assert {key[1] for key in asgi._fixed} == {"/", "/score"}  # one for each route without parameters, never one for each URL


def test_routes_that_change_are_asked_again():
    app = Starlette(routes=[Route("/first", answer), Route("/score", answer)])
    assert name(app, "/score") == "score"
    app.router.routes.insert(0, Route("/{any}", answer))
    assert name(app, "/score") == "{any}"
    del app.router.routes[0]
    assert name(app, "/score") == "score"
    app.router.routes[1] = Mount("/score", routes=[Route("/", answer)])
    assert name(app, "/score/") == "score"
    app.router.routes.clear()
    assert name(app, "/score") == "unmatched"


def test_routes_that_look_at_more_than_the_path_are_asked_each_time():
    class Beta(Route):
        def matches(self, scope):
            found = super().matches(scope)
            return found if (b"beta", b"1") in scope["headers"] else (type(found[0]).NONE, {})

    app = Starlette(routes=[Beta("/{beta}", answer), Route("/score", answer)])
    assert name(app, "/score") == "score"
    scope = {"type": "http", "path": "/score", "method": "GET", "headers": [(b"beta", b"1")], "root_path": ""}
    assert asgi._route_name(app, scope) == "{beta}"
    hosts = Starlette(routes=[Host("b", Router([Route("/{other}", answer)])), Route("/score", answer)])
    assert [name(hosts, "/score"), name(hosts, "/score", host=b"b")] == ["score", "{other}"]


def test_a_route_whose_own_matching_was_replaced_is_asked_each_time():
    app = Starlette(routes=[Route("/score", answer)])
    app.router.routes[0].matches = functools.partial(Route.matches, app.router.routes[0])
    assert name(app, "/score") == "score"
    assert not asgi._fixed


def test_no_more_are_kept_than_the_limit(monkeypatch):
    monkeypatch.setattr(asgi, "_FIXED_LIMIT", 2)
    app = Starlette(routes=[Route(f"/{number}", answer) for number in range(4)])
    assert [name(app, f"/{number}") for number in range(4)] == ["0", "1", "2", "3"]
    assert len(asgi._fixed) == 2
