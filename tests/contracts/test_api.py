"""The public names: what a user may rely on."""

from __future__ import annotations

import inspect
import pkgutil
from importlib import metadata

import pytest

import inferscope

PUBLIC = {
    "SLO",
    "CaptureBudget",
    "Incident",
    "InferscopeError",
    "Snapshot",
    "attach",
    "batch",
    "capture_now",
    "configure",
    "flush",
    "instrument",
    "lock",
    "ready",
    "request",
    "shutdown",
    "snapshot",
    "stage",
    "status",
    "uninstrument",
    "watch",
}


def test_public_names_are_these():
    """Adding or removing one is a decision: change this list, CHANGELOG.md and the docs together."""
    assert set(inferscope.__all__) == PUBLIC


def test_no_public_name_equals_a_submodule():
    """`from inferscope import x` would otherwise depend on what was imported before."""
    assert not PUBLIC & {module.name for module in pkgutil.iter_modules(inferscope.__path__)}


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_public_name_is_there_and_documented(name):
    assert inspect.getdoc(getattr(inferscope, name))


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nonsense"):
        _ = inferscope.nonsense


def test_dir_lists_what_is_public():
    assert set(dir(inferscope)) >= PUBLIC


def test_entry_points_load():
    points = metadata.entry_points(group="inferscope.integrations")
    assert {point.name for point in points} >= {"anyio", "asgi", "copies", "executor", "torch"}
    assert all(inspect.isclass(point.load()) for point in points)
