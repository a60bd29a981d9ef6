"""The ring survives crashes, stays in its size and is its owner's alone."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from inferscope.export.ring import Ring, read_ring


def line(number, size=200):
    return json.dumps({"n": number, "fill": "x" * size})


def numbers(directory):
    return [value["n"] for value in read_ring(directory, "metrics")]


def ring(directory, **keywords):
    moments = itertools.count(1_700_000_000_000_000_000)
    return Ring(directory, "metrics", unix_ns=lambda: next(moments), **keywords)


def test_lines_come_back_in_order_over_parts(tmp_path):
    mine = ring(tmp_path, part_bytes=1000)
    assert all(mine.append(line(i)) for i in range(50))
    assert numbers(tmp_path) == list(range(50))
    parts = sorted(tmp_path.glob("*.gz"))
    assert len(parts) > 5
    assert (tmp_path / "metrics.jsonl").stat().st_size <= 1000
    assert json.loads(gzip.decompress(parts[0].read_bytes()).splitlines()[0])["n"] == 0
    mine.close()


def test_the_oldest_parts_go_when_the_ring_is_full(tmp_path):
    mine = ring(tmp_path, part_bytes=2000, total_bytes=8000)
    for i in range(2000):
        mine.append(json.dumps({"n": i, "fill": os.urandom(60).hex()}))
    mine.close()
    kept = numbers(tmp_path)
    assert kept == list(range(kept[0], 2000))
    assert 20 < len(kept) < 1000
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 8000


def test_files_are_the_owners_alone(tmp_path):
    old = os.umask(0)
    try:
        mine = ring(tmp_path / "new" / "slot", part_bytes=500)
        for i in range(10):
            mine.append(line(i))
        mine.close()
    finally:
        os.umask(old)
    assert (tmp_path / "new" / "slot").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "new" / "slot").iterdir()} == {0o600}


@pytest.mark.parametrize("tail", [b'{"n": 7, "fil', b'{"n": 7}', b"\xff\xfe\x00", b"\n\n", b'["no request"]'])
def test_a_torn_last_line_costs_itself_only(tmp_path, tail):
    mine = ring(tmp_path)
    for i in range(3):
        mine.append(line(i))
    mine.close()
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(tail)
    again = ring(tmp_path)
    again.append(line(100))
    again.close()
    assert [number for number in numbers(tmp_path) if number != 7] == [0, 1, 2, 100]


@pytest.mark.parametrize("state", ["renamed", "half compressed", "compressed"])
def test_a_crash_during_rotation_loses_and_doubles_nothing(tmp_path, state):
    text = "".join(line(i) + "\n" for i in range(5)).encode()
    plain = tmp_path / "metrics-00000000000000000001.jsonl"
    plain.write_bytes(text)
    if state == "half compressed":
        (tmp_path / "metrics-00000000000000000001.jsonl.tmp").write_bytes(gzip.compress(text)[:30])
    if state == "compressed":
        (tmp_path / "metrics-00000000000000000001.jsonl.gz").write_bytes(gzip.compress(text))
    assert numbers(tmp_path) == [0, 1, 2, 3, 4]
    mine = ring(tmp_path)
    mine.append(line(5))
    mine.close()
    assert numbers(tmp_path) == [0, 1, 2, 3, 4, 5]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics-00000000000000000001.jsonl.gz", "metrics.jsonl"]


def test_a_cut_part_gives_what_it_has(tmp_path):
    whole = gzip.compress("".join(line(i, 2000) + "\n" for i in range(200)).encode())
    (tmp_path / "metrics-1.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "metrics-2.jsonl.gz").write_bytes(b"not gzip")
    kept = numbers(tmp_path)
    assert kept == list(range(len(kept)))
    assert 0 < len(kept) < 200


def test_a_directory_that_cannot_be_made_is_said_once_and_given_up(tmp_path, lines):
    (tmp_path / "file").write_text("")
    mine = ring(tmp_path / "file" / "slot")
    assert [mine.append(line(0)), mine.append(line(1))] == [False, False]
    assert len(lines()) == 1
    assert "not kept on disk" in lines()[0]
    assert (mine.lost, mine.written) == (1, 0)
    assert mine.problem


def test_a_planted_link_is_not_followed(tmp_path, lines):
    secret = tmp_path / "secret"
    secret.write_text("keep")
    (tmp_path / "slot").mkdir()
    (tmp_path / "slot" / "metrics.jsonl").symlink_to(secret)
    assert not ring(tmp_path / "slot").append(line(0))
    assert secret.read_text() == "keep"
    assert len(lines()) == 1


def test_memory_only_writes_nothing():
    mine = Ring(None, "metrics")
    assert not mine.append("{}")
    assert (mine.lost, mine.problem) == (0, None)


WRITER = """
import json, pathlib, sys
from inferscope.export.ring import Ring
ring = Ring(pathlib.Path(sys.argv[1]), "metrics", part_bytes=20_000)
print("on", flush=True)
for i in range(10**7):
    ring.append(json.dumps({"n": i, "fill": "x" * (i % 3000)}))
"""


def test_kill_while_writing_leaves_a_readable_ring(tmp_path):
    count = 0
    for round_ in range(3):
        directory = tmp_path / str(round_)
        child = subprocess.Popen([sys.executable, "-c", WRITER, str(directory)], stdout=subprocess.PIPE)
        child.stdout.readline()
        time.sleep(0.15 + 0.05 * round_)
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        before = numbers(directory)
        assert before == list(range(len(before)))
        again = Ring(directory, "metrics")
        assert again.append(line(len(before)))
        again.close()
        assert numbers(directory) == list(range(len(before) + 1))
        assert not list(directory.glob("*.tmp"))
        count += len(before)
    assert count > 10


def test_reading_while_writing_sees_whole_requests(tmp_path):
    mine = ring(tmp_path, part_bytes=5000)
    stop = threading.Event()

    def write():
        for i in itertools.count():
            mine.append(line(i))
            if stop.is_set():
                return

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(20):
            seen = numbers(tmp_path)
            assert seen == sorted(set(seen))
    finally:
        stop.set()
        thread.join()
        mine.close()


def test_a_forked_child_never_writes_the_parents_ring(tmp_path):
    mine = ring(tmp_path)
    mine.append(line(0))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if not mine.append(line(1)) else 2
            mine.close()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert mine.append(line(2))
    assert numbers(tmp_path) == [0, 2]
    mine.close()


def test_a_line_in_many_pieces_is_one_line_also_when_the_disk_takes_parts(tmp_path, monkeypatch):
    real = os.writev
    monkeypatch.setattr(os, "writev", lambda file, pieces: real(file, [b"".join(pieces)[:700]]))
    ring = Ring(tmp_path, "metrics")
    pieces = [b'{"a":[0', *(b",%d" % i for i in range(1, 3000)), b"]}"]
    assert ring.append(pieces)
    assert ring.append('{"a":1}')
    ring.close()
    assert list(read_ring(tmp_path, "metrics")) == [{"a": list(range(3000))}, {"a": 1}]
