from __future__ import annotations

import pytest

from inferscope.capture import light


@pytest.fixture(autouse=True)
def torch_is_whole(monkeypatch):
    """A test that breaks torch's older recorder does not take it from the others."""
    monkeypatch.setattr(light, "_gone", "")
