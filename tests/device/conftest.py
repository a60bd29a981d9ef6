"""The simulated accelerator, fresh for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from inferscope.testing import accelerator
from inferscope.testing.accelerator import Accelerator


@pytest.fixture(scope="session")
def loaded_accelerator() -> Accelerator:
    return accelerator.load()


@pytest.fixture
def sim(loaded_accelerator: Accelerator) -> Iterator[Accelerator]:
    loaded_accelerator.reset()
    yield loaded_accelerator
    loaded_accelerator.reset()
