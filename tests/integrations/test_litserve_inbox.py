"""What LitServe's processes tell each other by a socket of ours: private, bounded, gone afterwards."""

from __future__ import annotations

import os
import stat
import struct

import pytest

from inferscope.record import carried, core
from inferscope.record.carried import Inbox
from inferscope_integrations import litserve


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    path = tmp_path / "between"
    monkeypatch.setattr(litserve, "_directory", lambda: path)
    return path


@pytest.fixture
def outbox():
    made = litserve._Worker()
    yield made
    made.close()


def test_only_this_user_can_reach_it_and_it_goes_with_the_process(folder) -> None:
    inbox = Inbox(litserve._place(0), "litserve")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [path.name for path in folder.iterdir()] == ["0.sock"]
    inbox.close()
    assert not folder.exists()


def test_a_directory_that_others_can_write_is_refused(folder, outbox) -> None:
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    with pytest.raises(PermissionError, match="not this user's own"):
        Inbox(litserve._place(0), "litserve")
    outbox._outbox.send(litserve._place(0), "uid", (1, (), b"", False))  # nothing is sent there either
    assert list(folder.iterdir()) == []


def test_what_a_worker_packed_lands_in_the_request_that_waited_and_nowhere_else(seen, outbox) -> None:
    inbox = Inbox(litserve._place(3), "litserve")
    with core.default.request("predict") as request, core.default.stage("handler"):
        inbox.waiting["known"] = (request, request.start_ns)
        for uid in ("known", "unknown"):
            outbox.taken(uid, 3)
        outbox.work.begin("predict")
        outbox.work.end()
        for uid in ("known", "unknown"):
            outbox.answered(uid)
        assert outbox.work is None
        inbox.collect()
    inbox.close()
    (record,) = seen.requests()
    assert {"predict", "queue:litserve"} <= set(seen.columns(record))
    assert sum(record.vector) == record.wall_ns
    assert inbox.waiting == {}


def test_a_request_that_timed_out_before_the_work_does_not_end_it(seen, outbox) -> None:
    outbox.taken("late", 0)
    outbox.taken("good", 0)
    outbox.answered("late")
    assert outbox.work is not None
    outbox.work.begin("decode")
    outbox.answered("good")
    assert outbox.work is None
    assert core.default.current() is None
    assert seen.requests() == []


def test_answers_that_never_come_are_forgotten(seen) -> None:
    inbox = Inbox(litserve._place(0), "litserve")
    for number in range(carried._WAITING + 10):
        with core.default.request("predict") as request:
            inbox.waiting[str(number)] = (request, request.start_ns)
    inbox.collect()
    inbox.close()
    assert inbox.waiting == {}


def test_a_full_socket_costs_the_datagram_and_not_the_worker(outbox) -> None:
    inbox = Inbox(litserve._place(0), "litserve")
    spans = struct.pack("<q", 1) * 500
    for _ in range(2000):
        outbox._outbox.send(inbox.path, "uid", (os.getpid(), (("stage", "x"),), spans, False))
    with pytest.raises(BlockingIOError):
        outbox._outbox._socket.sendto(spans, str(inbox.path))
    inbox.collect()
    assert outbox._outbox._socket.sendto(spans, str(inbox.path)) == len(spans), "there is room again"
    inbox.close()
    outbox._outbox.send(litserve._place(0), "uid", (1, (), b"", False))
    assert not inbox.path.exists()
