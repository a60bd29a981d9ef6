"""Patch and unpatch are the identity, whoever else patches."""

from __future__ import annotations

from typing import Any

import pytest

from inferscope.errors import IntegrationUnavailableError
from inferscope.patching import Ledger, Patch


class Base:
    def inherited(self) -> str:
        return "base"


class Thing(Base):
    def own(self, value: int = 1) -> int:
        """Doc."""
        return value


def doubling(original: Any, patch: Patch) -> Any:
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        return result * 2 if patch.active else result

    return wrapper


def test_patch_then_undo_is_the_identity() -> None:
    before, before_own = dict(vars(Thing)), Thing.__dict__["own"]
    ledger = Ledger()
    assert ledger.replace(Thing, "own", doubling)
    assert ledger.replace(Thing, "inherited", doubling)
    assert (Thing().own(3), Thing().inherited()) == (6, "basebase")
    assert (Thing.own.__name__, Thing.own.__doc__, Thing.own.__qualname__) == ("own", "Doc.", "Thing.own")
    assert ledger.undo() == 0
    assert dict(vars(Thing)) == before
    assert Thing.__dict__["own"] is before_own


def test_patching_twice_is_a_no_op() -> None:
    ledger = Ledger()
    assert ledger.replace(Thing, "own", doubling)
    assert not ledger.replace(Thing, "own", doubling)
    assert Thing().own(3) == 6
    ledger.undo()


def test_a_missing_attribute_is_skipped() -> None:
    assert not Ledger().replace(Thing, "absent", doubling)


def test_under_another_vendors_patch_ours_goes_dormant_and_theirs_survives() -> None:
    before = Thing.__dict__["own"]
    ours = Ledger()
    ours.replace(Thing, "own", doubling)
    on_top = Thing.own

    def theirs(self: Thing, value: int = 1) -> int:
        return on_top(self, value) + 1

    Thing.own = theirs  # type: ignore[method-assign]
    try:
        assert Thing().own(3) == 7
        assert ours.undo() == 1
        assert Thing.__dict__["own"] is theirs
        assert Thing().own(3) == 4
    finally:
        Thing.own = before  # type: ignore[method-assign]


def test_a_type_of_c_is_said_to_be_one() -> None:
    with pytest.raises(IntegrationUnavailableError, match=r"builtins\.dict is a type that cannot be changed"):
        Ledger().replace(dict, "get", doubling)
    assert {"a": 1}.get("a") == 1
