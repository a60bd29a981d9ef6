"""The seam: what is waited for, what is skipped and why, and imports that are under way."""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path

import pytest

from inferscope.errors import IntegrationUnavailableError
from inferscope.imports import is_loading, when_loaded
from inferscope.integration import Integration, Registry


class Noting(Integration):
    """Says when it was patched, and whether its target was complete then."""

    def __init__(self) -> None:
        self.patched: list[bool] = []

    def patch(self, ledger) -> None:
        module = sys.modules[self.target]
        self.patched.append(hasattr(module, "complete"))
        ledger.replace(module, "complete", lambda original, patch: original)


@pytest.fixture
def library(tmp_path: Path, monkeypatch):
    """Writes a module, importable until the test ends."""
    monkeypatch.syspath_prepend(str(tmp_path))
    made: list[str] = []

    def write(name: str, text: str) -> str:
        (tmp_path / f"{name}.py").write_text(text)
        importlib.invalidate_caches()
        made.append(name)
        return name

    yield write
    for name in made:
        sys.modules.pop(name, None)


def integration_of(name: str, **attributes) -> Noting:
    return type("Made", (Noting,), {"name": name, "target": name, **attributes})()


def test_a_target_is_patched_when_its_import_has_ended(library) -> None:
    name = library("seam_waited_for", "complete = len\n")
    one, registry = integration_of(name), Registry()
    registry.add(one)
    assert registry.states() == {name: "waiting"}
    importlib.import_module(name)
    assert registry.states() == {name: "active"}
    assert one.patched == [True]
    assert registry.uninstrument() == {name: "off"}


def test_switched_on_from_within_the_import_it_waits_for_the_end(library) -> None:
    name = library(
        "seam_half_way",
        "import sys\nsys.modules['seam_registry'].registry.add(sys.modules['seam_registry'].one)\ncomplete = len\n",
    )
    holder = types.ModuleType("seam_registry")
    holder.registry, holder.one = Registry(), integration_of(name)
    sys.modules["seam_registry"] = holder
    try:
        module = importlib.import_module(name)
    finally:
        del sys.modules["seam_registry"]
    assert holder.one.patched == [True]
    assert holder.registry.states() == {name: "active"}
    assert not is_loading(module)
    assert type(module.__spec__) is type(importlib.util.find_spec("json"))


def test_an_import_that_fails_patches_nothing(library) -> None:
    name = library(
        "seam_broken", "import sys\nsys.modules['seam_registry'].registry.add(sys.modules['seam_registry'].one)\nraise KeyError('theirs')\n"
    )
    holder = types.ModuleType("seam_registry")
    holder.registry, holder.one = Registry(), integration_of(name)
    sys.modules["seam_registry"] = holder
    try:
        with pytest.raises(KeyError, match="theirs"):
            importlib.import_module(name)
    finally:
        del sys.modules["seam_registry"]
    assert holder.one.patched == []
    assert holder.registry.states() == {name: "waiting"}
    library(name, "complete = len  # repaired\n")
    importlib.import_module(name)
    assert holder.one.patched == [True]


def test_the_end_of_an_import_is_told_once(library) -> None:
    name = library(
        "seam_told",
        "import sys\nfrom inferscope.imports import when_loaded\nwhen_loaded(sys.modules[__name__], lambda: sys.modules[__name__].__dict__.setdefault('told', []).append(1))\n",
    )
    assert importlib.import_module(name).told == [1]
    assert when_loaded.__module__ == "inferscope.imports"


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        ({"distribution": "no-such-distribution"}, "skipped: no-such-distribution is not installed"),
        ({"distribution": "pytest", "versions": ((99,), None)}, "is not supported: needs 99 or later"),
        ({"distribution": "pytest", "versions": ((0,), (1,))}, "is not supported: needs 0 or later and below 1"),
    ],
)
def test_a_skip_says_why(library, attributes, reason: str) -> None:
    name = library("seam_skipped", "complete = len\n")
    importlib.import_module(name)
    registry = Registry()
    one = integration_of(name, **attributes)
    registry.add(one)
    assert reason in registry.states()[name]
    assert one.patched == []


def test_an_integration_with_nothing_to_patch_gives_its_reason(library) -> None:
    class Nothing(Integration):
        name = "nothing"

        def patch(self, _ledger) -> None:
            raise IntegrationUnavailableError("there is no model here")

    registry = Registry()
    registry.add(Nothing())
    assert registry.states() == {"nothing": "skipped: there is no model here"}


def test_a_family_comes_together() -> None:
    registry = Registry()
    states = registry.instrument(["grpc"])
    assert set(states) == {"grpc", "grpc_aio"}
    registry.uninstrument()


def test_a_package_that_does_not_load_costs_itself_alone(monkeypatch, caplog) -> None:
    from importlib.metadata import EntryPoint

    monkeypatch.delenv("INFERSCOPE_STRICT")
    points = {"broken": EntryPoint("broken", "no_such_module_here:Thing", "inferscope.integrations")}
    monkeypatch.setattr(Registry, "available", staticmethod(lambda: points))
    assert Registry().instrument() == {"broken": "skipped: it cannot be loaded; see the log"}
    assert Registry().preview() == {"broken": ("broken: it cannot be loaded (ModuleNotFoundError)", "")}


def test_preview_says_what_would_happen_and_imports_nothing() -> None:
    found = Registry().preview(["torch", "executor", "triton_backend"])
    assert found["torch"] == ("waiting for torch", "torch")
    assert found["executor"] == ("waiting for concurrent.futures.thread", "")  # every program imports it: `inferscope run` waits for others
    assert found["triton_backend"] == ("ready", "")
