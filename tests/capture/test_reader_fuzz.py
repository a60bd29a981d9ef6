"""Whatever lies where an incident should be: readers say what is wrong, in words, and never fail otherwise."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inferscope.capture.bundle import Bundle, verify
from inferscope.capture.diagnosing import undiagnosed
from inferscope.capture.retention import prune, tombstones
from inferscope.capture.schema import CLASSES, FIELDS, find, unlisted
from inferscope.cli import incidents
from inferscope.cli.inspect import _text, inspect
from inferscope.errors import EvidenceError
from inferscope.types import Breach

ID = "20260101T000000Z-score-00ff"
NAMES = [
    "breach.json",
    "evidence-0-1.json",
    "captures/s0-r1.json",
    "diagnosis-1.json",
    "manifest-1.json",
    "manifest-2.json",
    "stacks-0-1.json",
]
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=12))
JSON = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(
                [
                    "schema",
                    "n",
                    "artefacts",
                    "path",
                    "sha256",
                    "stacks",
                    "frames",
                    "id",
                    "window",
                    "stall_ms",
                    "region",
                    "classes",
                    "spans",
                    "request",
                    "written_unix_ns",
                    "detected_unix_ns",
                    "bytes",
                    "samples",
                ]
            ),
            inner,
            max_size=6,
        ),
    ),
    max_leaves=12,
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("state") / "svc" / "0"
    made = Bundle.create(root, Breach(ID, "score", "score", 20.0, 0.99, 1, 2, 3, 400, 12, "e_detector", 21.5, 1.4), {}, {}, {})
    for name in ("evidence-0-1.json", "diagnosis-1.json", "stacks-0-1.json", "captures/s0-r1.json"):
        made.add_json(name, {"schema": 1})
    made.publish("open")
    made.publish("captured")
    return made.path


@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(NAMES), st.one_of(st.binary(max_size=60), JSON.map(lambda value: json.dumps(value).encode())))
def test_any_content_is_survived(place, name, content):
    path = place / name
    before = path.read_bytes()
    try:
        path.write_bytes(content)
        assert isinstance(_text(inspect(place, 3)), str)
        assert isinstance(incidents._row(place)["verdict"], str)
        assert isinstance(unlisted(place), list)
        verify(place)
        with contextlib.suppress(EvidenceError):
            Bundle.open(place)
    finally:
        path.write_bytes(before)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200))
def test_any_tombstones_are_survived(tmp_path, content):
    base = tmp_path / "incidents"
    base.mkdir(exist_ok=True)
    (base / ".tombstones.jsonl").write_bytes(content)
    assert isinstance(tombstones(tmp_path), list)
    assert prune(tmp_path, max_bytes=0, max_count=0) == []
    assert undiagnosed(tmp_path, None, 0.0) == []


def test_links_and_pipes_are_not_followed(place, tmp_path):
    target = tmp_path / "secret.json"
    target.write_text('{"a": "canary"}')
    (place / "linked.json").symlink_to(target)
    os.mkfifo(place / "pipe.json")
    try:
        assert unlisted(place) == []
        assert any("linked.json" in problem for problem in verify(place))
    finally:
        (place / "linked.json").unlink()
        (place / "pipe.json").unlink()


def test_the_schema_knows_its_own_fields():
    assert find("breach.json", "slo") == "name"
    assert find("captures/s0-r1.json", "device_reason") == "text"
    assert find("captures/s0-r1.json", "headers.cookie") is None
    assert find("captures/s0-r1.trace.json", "traceEvents[].args.Input Dims[][]") == "shape"
    assert find("manifest-3.json", "objective.asked_by.reason") == "audit"
    assert find("evidence-0-1.json", "payload") is None
    assert {kind for _, _, kind in FIELDS} <= set(CLASSES)


def test_the_published_schema_is_the_one_in_force():
    page = (Path(__file__).parents[2] / "docs" / "incidents.md").read_text()
    for name, meaning in CLASSES.items():
        assert f"| `{name}` | {meaning} |" in page
    for artefact, field, kind in FIELDS:
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{artefact}` |")]
        assert f"`{field}` {kind}" in row
