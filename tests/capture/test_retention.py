"""What the caps drop, what a pin keeps, and what a tombstone still says."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from inferscope import cli
from inferscope.capture import retention
from inferscope.capture.bundle import Bundle, list_incidents, verify
from inferscope.capture.retention import find_tombstone, pin, pinned, prune, tombstones, unpin
from inferscope.types import Breach


def build(root: Path, day: int) -> Bundle:
    identity = f"202601{day:02d}T000000Z-score-0001"
    breach = Breach(identity, "score", "score", 20.0, 0.99, 1, 2, 1_767_225_600_000_000_000, 400, 12, "e_detector", 21.5, 1.4)
    made = Bundle.create(root, breach, {"python": "3.11"}, {"p99_ms": 20.0}, {})
    made.add_json("diagnosis-1.json", {"verdict": "lock:rules 80 %"})
    made.publish("closed")
    return made


@pytest.fixture
def root(tmp_path):
    return tmp_path / "svc" / "0"


def run(capsys, state: Path, *words: str) -> tuple[int, str]:
    status = cli.main([*words, "--state-dir", str(state)])
    said = capsys.readouterr()
    return status, said.out + said.err


def test_what_is_dropped_leaves_a_tombstone_with_its_root_hash(root):
    made = [build(root, day) for day in range(1, 4)]
    assert prune(root, max_bytes=1 << 40, max_count=1) == [made[0].path, made[1].path]
    newest, oldest = tombstones(root)
    assert (newest["incident"], oldest["incident"]) == (made[1].path.name, made[0].path.name)
    assert newest["root_sha256"] == made[1].root_hash
    assert (newest["why"], newest["request"], newest["verdict"], newest["manifests"]) == ("count", "score", "lock:rules 80 %", 1)
    assert newest["bytes"] > 0
    assert stat.S_IMODE((root / "incidents" / ".tombstones.jsonl").stat().st_mode) == 0o600
    assert list_incidents(root.parent.parent) == [made[2].path]


def test_a_pin_keeps_an_incident_whatever_the_caps_say(root):
    made = [build(root, day) for day in range(1, 4)]
    pin(made[0].path, "ticket 4")
    assert pinned(made[0].path)["reason"] == "ticket 4"
    assert prune(root, max_bytes=0, max_count=0) == [made[1].path, made[2].path]
    assert verify(made[0].path) == []
    assert tombstones(root)[0]["why"] == "size"
    assert unpin(made[0].path)
    assert not unpin(made[0].path)
    assert prune(root, max_bytes=0, max_count=0) == [made[0].path]


def test_a_damaged_pin_still_pins(root):
    made = build(root, 1)
    pin(made.path, "x")
    (root / "incidents" / ".pins" / f"{made.path.name}.json").write_bytes(b"[" * 9000)
    assert pinned(made.path) == {}
    assert prune(root, max_bytes=0, max_count=0) == []


def test_tombstones_are_capped_and_damaged_lines_left_out(root, monkeypatch):
    monkeypatch.setattr(retention, "TOMBSTONES", 10)
    for day in range(1, 29):
        build(root, day)
        prune(root, max_bytes=0, max_count=0)
    assert len(tombstones(root)) <= 11
    with (root / "incidents" / ".tombstones.jsonl").open("ab") as file:
        file.write(b'{"incident": 4}\n[]\n\xff\n' + b"[" * 100_000 + b"\n")
    assert tombstones(root)[0]["incident"].startswith("20260128")


def test_a_tombstone_that_cannot_be_written_stops_nothing(root, monkeypatch):
    made = build(root, 1)
    (root / "incidents" / ".tombstones.jsonl").mkdir()
    assert prune(root, max_bytes=0, max_count=0) == [made.path]
    assert tombstones(root) == []


def test_an_incident_without_anything_readable_is_dropped_too(root):
    made = build(root, 1)
    for path in made.path.iterdir():
        if path.is_file():
            path.write_bytes(b"\xff")
    assert prune(root, max_bytes=0, max_count=0) == [made.path]
    assert set(tombstones(root)[0]) >= {"incident", "bytes", "why", "dropped_unix_ns"}


def test_on_the_command_line(root, capsys):
    state = root.parent.parent
    made = [build(root, day) for day in range(1, 3)]
    assert run(capsys, state, "incidents", "pin", "20260101", "--reason", "ticket 4") == (
        0,
        f"{made[0].path.name}: pinned; it stays until it is unpinned\n",
    )
    status, text = run(capsys, state, "incidents")
    assert "pinned: ticket 4" in text
    assert text.count("pinned") == 1
    prune(root, max_bytes=0, max_count=0)
    status, text = run(capsys, state, "incidents", "dropped")
    assert status == 0
    assert made[1].root_hash in text
    status, text = run(capsys, state, "verify", "20260102")
    assert status == 1
    assert f"was dropped on {''}" in text
    assert made[1].root_hash in text
    assert run(capsys, state, "incidents", "unpin", "20260101")[1] == f"{made[0].path.name}: unpinned\n"
    assert run(capsys, state, "incidents", "unpin", "20260101")[1] == f"{made[0].path.name}: was not pinned\n"
    assert run(capsys, state, "incidents", "pin")[0] == 1
    assert run(capsys, state, "incidents", "dropped", "x")[0] == 1


def test_pins_and_tombstones_are_the_owners(root):
    made = build(root, 1)
    pin(made.path, "x" * 500)
    place = root / "incidents" / ".pins"
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    (file,) = place.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    said = json.loads(file.read_text())
    assert (said["uid"], len(said["reason"])) == (os.getuid(), 200)
    assert find_tombstone(root.parent.parent, "20260101") is None
