"""Our errors stay ours."""

from __future__ import annotations

import asyncio
import logging

import pytest

from inferscope import guard


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERSCOPE_STRICT", "0")
    guard.reset()


def fail(component: str) -> guard.Guard:
    with guard.guard(component) as contained:
        raise ValueError("user data in a message")
    return contained


def test_an_error_is_swallowed_counted_and_logged_once_without_its_message(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="inferscope"):
        assert not fail("export").ok
        assert not fail("export").ok
    assert guard.counts() == {"export": 2}
    assert [record.getMessage().count("export failed") for record in caplog.records] == [1]
    assert "user data" not in caplog.text


def test_three_failures_in_a_minute_switch_the_component_off() -> None:
    for _ in range(3):
        assert not guard.is_off("capture")
        fail("capture")
    assert guard.is_off("capture")
    assert "ValueError" in guard.disabled()["capture"]
    assert not guard.is_off("export")


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, asyncio.CancelledError, GeneratorExit])
def test_what_is_not_an_exception_of_ours_passes(error: type[BaseException]) -> None:
    with pytest.raises(error), guard.guard("anything"):
        raise error
    assert guard.counts() == {}


def test_strict_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INFERSCOPE_STRICT", "1")
    with pytest.raises(ValueError, match="user data"):
        fail("export")
