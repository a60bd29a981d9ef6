"""The planted service, loaded by path: test folders are no packages."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def service():
    """The module `service.py` beside this file."""
    spec = importlib.util.spec_from_file_location("diagnose_service", Path(__file__).with_name("service.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def requests(service):
    """Five minutes at 200 requests/s."""
    return service.simulate(300, 200, seed=3)


@pytest.fixture(scope="session")
def document(service, requests):
    """Its evidence, as read from disk."""
    return json.loads(json.dumps(service.evidence(requests, [20 * service.MS])))


@pytest.fixture
def directory(tmp_path, service, document):
    """An incident with breach and evidence."""
    path = tmp_path / "score" / "0" / "incidents" / "20240101T000000Z-score-abcd"
    (path / "captures").mkdir(parents=True)
    (path / "breach.json").write_text(json.dumps(service.breach()))
    (path / "evidence-0-1.json").write_text(json.dumps(document))
    return path
