"""The checks that any integration can run against itself: ours pass them, and each finds what it is for."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
import types
from pathlib import Path

import pytest

from inferscope.integration import GROUP, Integration
from inferscope.record import core
from inferscope.testing.integration_checks import problems


class Ranker:
    def rank(self, values: list[int], *, reverse: bool = False) -> list[int]:
        """Sorted."""
        return sorted(values, reverse=reverse)


library = types.ModuleType("ranking_library")
library.Ranker = Ranker
sys.modules["ranking_library"] = library


class Good(Integration):
    name = "ranking"
    target = "ranking_library"

    def patch(self, ledger) -> None:
        def make(original, patch):
            def rank(self, *args, **kwargs):
                if not patch.active:
                    return original(self, *args, **kwargs)
                with core.default.stage("rank"):
                    return original(self, *args, **kwargs)

            return rank

        ledger.replace(Ranker, "rank", make)


def use():
    return Ranker().rank([3, 1, 2])


def test_a_good_one_has_no_problems(seen) -> None:
    before = dict(vars(Ranker))
    assert problems(Good(), use=use) == []
    assert problems(Good(), use=lambda: Ranker().rank()) == []
    assert dict(vars(Ranker)) == before
    assert seen.requests() == []


class Nameless(Good):
    name = ""


class Backwards(Good):
    distribution = "pytest"
    versions = ((3,), (2,))


class Idle(Good):
    def patch(self, ledger) -> None:
        pass


class PastTheLedger(Good):
    """Sets the attribute itself, each time anew."""

    def patch(self, ledger) -> None:
        super().patch(ledger)
        before = Ranker.rank
        Ranker.rank = lambda self, *args, **kwargs: before(self, *args, **kwargs)


class Disguised(Good):
    def patch(self, ledger) -> None:
        async def rank(self, *args, **kwargs):
            return []

        ledger.replace(Ranker, "rank", lambda original, patch: rank)


class Meddling(Good):
    def patch(self, ledger) -> None:
        ledger.replace(Ranker, "rank", lambda original, patch: lambda self, *args, **kwargs: [*original(self, *args, **kwargs), 0])


class Never(Good):
    """Forgets that it may be undone under somebody else's patch."""

    def patch(self, ledger) -> None:
        def make(original, patch):
            def rank(self, *args, **kwargs):
                if not patch.active:
                    raise RuntimeError("undone")
                return original(self, *args, **kwargs)

            return rank

        ledger.replace(Ranker, "rank", make)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Nameless, "name is empty"),
        (Backwards, "before it begins"),
        (Idle, "replaced nothing"),
        (PastTheLedger, "could not be undone"),
        (Disguised, "another coroutine function"),
        (Meddling, "outcome differs while it is instrumented"),
        (Never, "ask `patch.active` first"),
    ],
)
def test_each_check_finds_what_it_is_for(kind, said: str, monkeypatch) -> None:
    monkeypatch.setattr(Ranker, "rank", Ranker.rank)
    assert any(said in problem for problem in problems(kind(), use=use)), problems(kind(), use=use)


def test_an_integration_that_imports_its_library_is_told(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "eager_library.py").write_text("class Model:\n    def run(self):\n        return 1\n")
    (tmp_path / "eager_integration.py").write_text(
        "import eager_library\nfrom inferscope.integration import Integration\n\n\n"
        "class Eager(Integration):\n    name = 'eager'\n    target = 'eager_library'\n\n"
        "    def patch(self, ledger):\n        ledger.replace(eager_library.Model, 'run', lambda original, patch: lambda self: original(self))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = problems(importlib.import_module("eager_integration").Eager())
    assert [problem for problem in found if "imports eager_library" in problem]


def test_the_template_passes_and_records(seen) -> None:
    import importlib.util
    import json

    spec = importlib.util.spec_from_file_location("integration_template", Path(__file__).parents[2] / "integrations" / "template.py")
    template = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(template)
    assert problems(template.JsonIntegration(), use=lambda: json.JSONEncoder().encode({"a": 1})) == []
    from inferscope.integration import Registry

    registry = Registry()
    registry.add(template.JsonIntegration())
    with core.default.request("answer"):
        json.JSONEncoder().encode({"a": 1})
    registry.uninstrument()
    assert "json" in seen.columns(seen.requests()[0])


OURS = sorted(point.name for point in importlib.metadata.entry_points(group=GROUP) if point.value.startswith("inferscope_integrations."))


HEAVY = {"aotinductor": [pytest.mark.servers, pytest.mark.slow]}  # what it waits for imports torch's compilers


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=HEAVY.get(name, ())) for name in OURS if name != "triton_backend"]
)  # that one patches the model of its process alone
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_our_own_pass(name: str) -> None:
    if name == "copies" and core.IMPLEMENTATION != "native":
        pytest.skip("a plain closure cannot pass for a built-in method; the core's callables do")
    (point,) = importlib.metadata.entry_points(group=GROUP, name=name)
    integration = point.load()()
    pytest.importorskip(integration.target or "inferscope", reason=f"{integration.target} is not installed", exc_type=ImportError)
    assert problems(integration) == []
