from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inferscope.capture import bundle as bundle_module
from inferscope.capture.bundle import Bundle, list_incidents, verify, write_atomic
from inferscope.capture.chain import digest, encode
from inferscope.capture.retention import prune
from inferscope.errors import EvidenceError
from inferscope.types import Breach

ID = "20260101T000000Z-score-00ff"


def breach(identity: str = ID) -> Breach:
    return Breach(identity, "score", "score", 20.0, 0.99, 1, 2, 3, 400, 12, "e_detector", 21.5, 1.4)


def build(root: Path, identity: str = ID) -> Bundle:
    made = Bundle.create(root, breach(identity), {"python": "3.11"}, {"p99_ms": 20.0}, {"service": "1.4.2"})
    made.add_json("evidence-0-1.json", {"columns": [["stage", "forward"]], "count": 400})
    made.publish("open")
    (made.path / "captures" / "s0-r7.trace.json").write_bytes(b'{"traceEvents": []}\n')
    made.add_file(made.path / "captures" / "s0-r7.trace.json")
    made.publish("captured")
    made.add_json("diagnosis-1.json", {"verdict": "rules"})
    made.publish("diagnosed")
    return made


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    return build(tmp_path_factory.mktemp("root"))


def rewrite(path: Path, **changes: object) -> None:
    """Forge a manifest that is consistent in itself."""
    document = {**json.loads(path.read_bytes()), **changes}
    document["digest"] = digest(document)
    path.write_bytes(encode(document))


def test_a_bundle_verifies(pristine):
    assert verify(pristine.path) == []
    assert verify(pristine.path, pristine.root_hash) == []
    last = (pristine.path / "manifest-3.json").read_bytes()
    assert pristine.root_hash == hashlib.sha256(last).hexdigest()
    assert json.loads(last)["previous_sha256"] == hashlib.sha256((pristine.path / "manifest-2.json").read_bytes()).hexdigest()
    assert json.loads(last)["state"] == "diagnosed"


def test_only_the_owner_may_look(pristine):
    for path in [pristine.path, *pristine.path.rglob("*")]:
        if path.name != "s0-r7.trace.json":
            assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path


def files_of(path: Path) -> list[str]:
    return sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())


@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_flipped_byte_is_found_and_its_file_named(pristine, data):
    name = data.draw(st.sampled_from(files_of(pristine.path)))
    path = pristine.path / name
    content = path.read_bytes()
    position = data.draw(st.integers(0, len(content) - 1))
    mask = data.draw(st.integers(1, 255))
    try:
        path.write_bytes(content[:position] + bytes([content[position] ^ mask]) + content[position + 1 :])
        problems = verify(pristine.path)
        assert any(name in problem for problem in problems), (name, position, mask, problems)
    finally:
        path.write_bytes(content)
    assert verify(pristine.path) == []


def test_every_byte_of_the_last_manifest_counts(pristine):
    path = pristine.path / "manifest-3.json"
    content = path.read_bytes()
    try:
        for position in range(len(content)):
            path.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
            assert verify(pristine.path), position
    finally:
        path.write_bytes(content)


@pytest.fixture
def copy(pristine, tmp_path):
    return Path(shutil.copytree(pristine.path, tmp_path / "copy" / "incidents" / ID))


def test_expected_root_hash_unmasks_a_consistent_forgery(copy, pristine):
    rewrite(copy / "manifest-3.json", state="closed")
    assert verify(copy) == []
    assert any("root hash" in problem for problem in verify(copy, pristine.root_hash))


def test_rewritten_history_breaks_the_chain(copy):
    rewrite(copy / "manifest-2.json", state="closed")
    assert any("manifest-3.json does not follow" in problem for problem in verify(copy))


def test_artefact_replaced_between_manifests(copy):
    (copy / "evidence-0-1.json").write_bytes(b"{}\n")
    last = json.loads((copy / "manifest-3.json").read_bytes())
    for row in last["artefacts"]:
        if row["path"] == "evidence-0-1.json":
            row.update(bytes=3, sha256=hashlib.sha256(b"{}\n").hexdigest())
    rewrite(copy / "manifest-3.json", artefacts=last["artefacts"])
    assert verify(copy) == ["evidence-0-1.json changed between manifests, in manifest-3.json"]


@pytest.mark.parametrize("name", ["manifest-1.json", "manifest-2.json", "breach.json", "captures/s0-r7.trace.json"])
def test_missing_files_are_named(copy, name):
    (copy / name).unlink()
    assert any(name in problem for problem in verify(copy))


def test_stray_files_are_named_and_unfinished_ones_are_not(copy):
    (copy / "captures" / "added.json").write_text("{}")
    (copy / "captures" / ".s0-r8.json.12.tmp").write_text("{")
    (copy / "elsewhere").symlink_to("/etc")
    assert verify(copy) == ["captures/added.json is in no manifest", "elsewhere is in no manifest"]


def test_an_artefact_replaced_by_a_link_is_found(copy):
    content = (copy / "breach.json").read_bytes()
    (copy / "breach.json").unlink()
    (copy.parent / "outside").write_bytes(content)
    (copy / "breach.json").symlink_to(copy.parent / "outside")
    assert any("breach.json" in problem for problem in verify(copy))


def test_nothing_to_verify(tmp_path):
    assert verify(tmp_path / "absent") == ["absent: no such incident"]
    assert verify(tmp_path) == [f"{tmp_path.name}: no manifest"]


def test_open_continues(copy):
    again = Bundle.open(copy)
    assert again.state == "diagnosed"
    assert "captures/s0-r7.trace.json" in again.artefacts
    before = again.root_hash
    again.add_json("diagnosis-2.json", {"verdict": "load"})
    assert again.publish("closed") != before
    assert verify(copy, again.root_hash) == []


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[]", "not a manifest"),
        (b'{"schema": "1"}', "not a manifest"),
        (b'{"schema": 2}', "has schema 2, this version reads 1 to 1"),
        (b'{"schema": 1}', "digest"),
        (encode({"schema": 1, "digest": digest({"schema": 1})}), "missing"),
    ],
)
def test_damaged_or_newer_manifests_are_one_clear_line(copy, content, says):
    (copy / "manifest-3.json").write_bytes(content)
    with pytest.raises(EvidenceError) as caught:
        Bundle.open(copy)
    assert says in str(caught.value)
    assert "manifest-3.json" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert any("manifest-3.json" in problem for problem in verify(copy))


def test_published_content_never_changes(copy):
    again = Bundle.open(copy)
    with pytest.raises(EvidenceError, match="published already"):
        again.add_json("diagnosis-1.json", {"verdict": "other"})
    again.add_json("diagnosis-1.json", {"verdict": "rules"})
    (copy / "evidence-0-1.json").write_text("{}")
    with pytest.raises(EvidenceError, match=r"evidence-0-1\.json changed after"):
        again.add_file(Path("evidence-0-1.json"))


@pytest.mark.parametrize("name", ["../x.json", "/etc/passwd", "a/../../x", ".hidden", "manifest-9.json", "", "a//b\n", "é.json"])
def test_names_stay_inside(copy, name):
    with pytest.raises(EvidenceError):
        Bundle.open(copy).add_json(name, {})


@pytest.mark.parametrize("identity", ["../x", "a/b", "", ".x", "x" * 300])
def test_identities_are_file_names(tmp_path, identity):
    with pytest.raises(EvidenceError):
        Bundle.create(tmp_path, breach(identity), {}, {})
    assert list(tmp_path.iterdir()) == []


def test_an_incident_is_created_once(tmp_path):
    build(tmp_path)
    with pytest.raises(EvidenceError, match="File exists"):
        build(tmp_path)


def test_two_writers_do_not_overwrite_each_other(copy):
    one, other = Bundle.open(copy), Bundle.open(copy)
    one.publish("closed")
    with pytest.raises(EvidenceError, match="another process"):
        other.publish("closed")
    assert verify(copy, one.root_hash) == []


def test_unknown_states_and_values_are_refused(copy):
    with pytest.raises(EvidenceError, match="no state"):
        Bundle.open(copy).publish("lost")
    with pytest.raises(EvidenceError, match="cannot be written"):
        Bundle.open(copy).add_json("x.json", {"x": float("nan")})


def test_files_of_other_workers_are_taken_in(copy):
    again = Bundle.open(copy)
    (copy / "evidence-1-1.json").write_text("{}")
    (copy / ".evidence-2-1.json.77.tmp").write_text("{")
    assert again.add_rest() == ("evidence-1-1.json",)
    assert verify(copy, again.publish("closed")) == []


def test_a_full_disk_leaves_earlier_work_intact(copy, pristine, monkeypatch):
    again = Bundle.open(copy)

    def full(_descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(bundle_module.os, "fsync", full)
    with pytest.raises(EvidenceError, match="No space left on device"):
        again.add_json("diagnosis-2.json", {})
    with pytest.raises(EvidenceError, match="No space left on device"):
        again.publish("closed")
    monkeypatch.undo()
    assert verify(copy, pristine.root_hash) == []
    assert not list(copy.rglob("*.tmp"))


def test_a_write_that_the_kernel_cuts_short(copy, pristine):
    code = (
        "import resource, sys; from pathlib import Path; from inferscope.capture.bundle import Bundle\n"
        "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "from inferscope.errors import EvidenceError\n"
        "try: Bundle.open(Path(sys.argv[1])).add_json('big.json', ['x' * 100] * 1000)\n"
        "except EvidenceError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(copy)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "big.json cannot be written: File too large"
    assert verify(copy, pristine.root_hash) == []


TRACE = """
import resource, signal, sys, json
from pathlib import Path
import torch
from inferscope.capture import saving, session
from inferscope.capture.session import Options, Session
from inferscope.errors import EvidenceError
root, limit = Path(sys.argv[1]), int(sys.argv[2])
one = Session(1, "score", 10**9)
one.open(torch, Options())
for _ in range(500): torch.add(torch.ones(2), 1)
one.close()
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
kept = saving.Kept("s0-r1", root, one, True, "score", 1, 1, requests=(1,))
import time
try: saving.save_trace(kept, time.perf_counter_ns); print("saved")
except EvidenceError as error: print(error)
print(json.dumps(sorted(path.name for path in root.rglob("*") if path.is_file())))
"""


@pytest.mark.parametrize("limit", [0, 20_000])
def test_a_trace_for_which_the_disk_has_no_room_leaves_nothing_and_harms_nothing(copy, pristine, limit):
    """torch says nothing when it cannot write; what it wrote is looked at."""
    done = subprocess.run([sys.executable, "-c", TRACE, str(copy), str(limit)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said, files = [line for line in done.stdout.splitlines() if line.startswith(("s0-r1", "saved", "["))]
    assert "s0-r1.trace.json" in said
    assert "s0-r1.trace.json" not in files
    assert not [name for name in json.loads(files) if name.startswith(".")]
    assert verify(copy, pristine.root_hash) == []


def test_a_directory_that_is_read_only(copy, pristine, monkeypatch):
    again, real = Bundle.open(copy), os.open

    def read_only(path, flags, *rest):
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(path, flags, *rest)

    monkeypatch.setattr(bundle_module.os, "open", read_only)
    with pytest.raises(EvidenceError, match="Read-only file system"):
        again.add_json("x.json", {})
    with pytest.raises(EvidenceError, match="Read-only file system"):
        again.publish("closed")
    monkeypatch.undo()
    assert verify(copy, pristine.root_hash) == []


def test_a_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "incidents").write_text("a file where the directory should be")
    with pytest.raises(EvidenceError, match="cannot be written"):
        Bundle.create(tmp_path, breach(), {}, {})


def test_write_atomic_replaces_whole(tmp_path):
    write_atomic(tmp_path / "x", b"one")
    write_atomic(tmp_path / "x", b"two")
    assert (tmp_path / "x").read_bytes() == b"two"
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_incidents_of_all_workers_newest_first(tmp_path):
    for where, identity in [("a/0", "20260101T000000Z-x-0001"), ("a/1", "20260103T000000Z-x-0002"), ("b/0", "20260102T000000Z-x-0003")]:
        build(tmp_path / where, identity)
    (tmp_path / "a" / "slots").mkdir()
    assert [path.name[6:8] for path in list_incidents(tmp_path)] == ["03", "02", "01"]
    assert list_incidents(tmp_path / "absent") == []


def test_the_oldest_go_first(tmp_path):
    made = [build(tmp_path, f"2026010{n}T000000Z-x-0001").path for n in range(1, 6)]
    assert prune(tmp_path, max_bytes=1 << 40, max_count=3) == made[:2]
    assert sorted(path.name for path in (tmp_path / "incidents").glob("[!.]*")) == [path.name for path in made[2:]]
    assert prune(tmp_path, max_bytes=0, max_count=3, keep={made[2]}) == made[3:]
    assert verify(made[2]) == []
    assert prune(tmp_path / "absent", max_bytes=0, max_count=0) == []


def test_reading_incidents_needs_no_torch():
    code = "import sys, inferscope.capture.bundle; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_root_hash_of_before_an_extension_still_holds(copy, pristine):
    earlier = hashlib.sha256((copy / "manifest-1.json").read_bytes()).hexdigest()
    assert verify(copy, earlier) == []
    assert verify(copy, pristine.root_hash) == []
    rewrite(copy / "manifest-1.json", state="closed")
    assert any("expected" in problem for problem in verify(copy, earlier))
