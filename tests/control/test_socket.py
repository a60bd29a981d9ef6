"""The Unix socket: who may come in, what lies there before and after, and what clients cannot do to the service."""

from __future__ import annotations

import json
import os
import random
import socket
import stat
import struct
import subprocess
import sys
import time

import pytest

from inferscope.control import socket as room
from inferscope.control.desk import QUEUE_LIMIT
from inferscope.control.server import CLIENT_LIMIT
from inferscope.errors import InferscopeError


def raw(path):
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(5)
    sock.connect(str(path))
    return sock


def line(sock):
    data = b""
    while not data.endswith(b"\n"):
        part = sock.recv(65536)
        if not part:
            return None
        data += part
    return json.loads(data)


def test_only_the_owner_can_reach_it(running):
    found = running.path.lstat()
    assert stat.S_ISSOCK(found.st_mode)
    assert found.st_mode & 0o777 == 0o600
    assert running.directory.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in running.directory.iterdir()] == ["control.sock"]


def test_reads_are_answered_at_once(running):
    assert running.call("status")["result"] == {"service": "score", "calls": 0}
    answer = running.call("snapshot")
    assert answer["state"] == "done"
    assert answer["result"] == {"requests": {"score": {"count": 3}}, "odd": None}


def test_a_capture_gets_a_ticket_and_is_done_once(running, service, until):
    first = running.call("capture", "c1", reason="slow since noon", requests=4)
    assert (first["state"], first["repeat"]) == ("queued", False)
    ticket = running.ticket("c1")
    assert ticket["result"] == {"incident": "incident-1"}
    again = running.call("capture", "c1", reason="slow since noon", requests=4)
    assert (again["state"], again["repeat"], again["result"]) == ("done", True, {"incident": "incident-1"})
    assert service.calls == [("capture", "slow since noon", 4, "socket")]


def test_an_id_means_one_request(running, service):
    running.call("capture", "c1", reason="slow")
    other = running.call("capture", "c1", reason="another")
    assert other["state"] == "denied"
    assert "id" in other["why"]


def test_a_refusal_is_the_tickets_reason(running, service, until):
    service.refusal = "an incident is open"
    running.call("capture", "c1", reason="slow")
    ticket = running.ticket("c1")
    assert (ticket["state"], ticket["why"]) == ("denied", "an incident is open")
    assert [(event["state"], event["why"]) for event in service.events] == [("denied", "an incident is open")]


def test_a_failure_of_ours_tells_its_type_and_no_message(running, service, until):
    service.failure = RuntimeError("card number 4111")
    running.call("capture", "c1", reason="slow")
    ticket = running.ticket("c1")
    assert ticket["state"] == "denied"
    assert "RuntimeError" in ticket["why"]
    assert "4111" not in json.dumps(ticket)
    assert running.call("status")["state"] == "done"


def test_each_change_is_audited_with_its_actor(running, service, until):
    running.call("disable", "d1", part="capture")
    running.call("set_slo", "s1", name="score", p99_ms=25)
    until(lambda: len(service.events) == 2)
    assert service.calls == [("disable", "capture"), ("set_slo", "score", {"p99_ms": 25})]
    first = service.events[0]
    assert (first["op"], first["id"], first["args"], first["state"]) == ("disable", "d1", {"part": "capture"}, "done")
    assert first["actor"] == {"channel": "socket", "uid": os.geteuid(), "pid": os.getpid(), "peer": None}
    assert abs(first["at_unix_ns"] - time.time_ns()) < 60e9


def test_an_audit_that_fails_loses_no_answer(run, service):
    service.events = None  # the double's audit fails
    running = run()
    running.call("disable", "d1", part="capture")
    assert running.ticket("d1")["state"] == "done"


def test_too_many_changes_are_turned_away_and_may_come_again(running, service, until):
    service.release.clear()
    running.call("capture", "c0", reason="holds the thread")  # queued: the thread is busy with it from now on
    sock = raw(running.path)
    for number in range(1, 60):
        sock.sendall(b'{"schema":1,"id":"n%d","op":"disable","args":{"part":"export"}}\n' % number)
    service.release.set()
    answers = lines(sock, 59)
    sock.close()
    refused = [answer for answer in answers if answer["state"] == "denied"]
    assert 59 - len(refused) >= QUEUE_LIMIT
    assert {answer["why"] for answer in refused} == {"too many changes at once; ask again in a second"}
    again = until(lambda: (found := running.call("disable", refused[0]["id"], part="export"))["state"] != "denied" and found)
    assert again["state"] in {"queued", "done"}


def test_a_slow_operation_does_not_block_the_caller_of_another_process(running, service):
    service.release.clear()
    begun = time.monotonic()
    assert running.call("capture", "c1", reason="slow")["state"] == "queued"
    assert time.monotonic() - begun < 2.0


def test_silent_clients_do_not_keep_others_out(running):
    silent = [raw(running.path) for _ in range(10)]
    for sock in silent[:5]:
        sock.sendall(b'{"schema": 1, ')
    assert running.call("status")["state"] == "done"
    for sock in silent:
        sock.close()


def test_no_more_than_so_many_connections(running, until):
    held = [raw(running.path) for _ in range(CLIENT_LIMIT)]
    late = raw(running.path)
    assert late.recv(10) == b""
    for sock in [*held, late]:
        sock.close()
    until(lambda: not isinstance(attempt(running), Exception))
    assert running.control.status()["turned_away"] >= 1


def attempt(running):
    try:
        return running.call("status")
    except InferscopeError as error:
        return error


def test_an_oversized_line_is_refused_and_closes(running):
    sock = raw(running.path)
    sock.sendall(b'{"schema": 1, "id": "' + b"a" * 40_000)
    answer = line(sock)
    assert answer["state"] == "denied"
    assert "16384 bytes" in answer["why"]
    assert sock.recv(10) == b""
    sock.close()
    assert running.call("status")["state"] == "done"


def test_several_lines_are_answered_in_order(running):
    sock = raw(running.path)
    sock.sendall(b"".join(b'{"schema":1,"id":"r%d","op":"status"}\n' % n for n in range(50)))
    assert [line_["id"] for line_ in lines(sock, 50)] == [f"r{n}" for n in range(50)]
    sock.close()


def lines(sock, wanted):
    data = b""
    while data.count(b"\n") < wanted:
        data += sock.recv(65536)
    return [json.loads(each) for each in data.splitlines()]


def test_a_client_that_never_reads_is_dropped_after_its_time(service, directory):
    from inferscope.control import Control, Options

    moment = [100.0]
    control = Control(service.operations(), Options(), environ={}, clock=lambda: moment[0])
    control.open(directory)
    sock = raw(directory / "control.sock")
    sock.sendall(b'{"schema":1,"id":"a","op":"st')
    for _ in range(4):
        control.serve_once(0.0)
        moment[0] += 2.0
    control.serve_once(0.0)
    assert sock.recv(10) == b""
    sock.close()
    control.stop()


def test_a_connection_may_rest_between_requests(service, directory):
    from inferscope.control import Control, Options

    moment = [100.0]
    control = Control(service.operations(), Options(), environ={}, clock=lambda: moment[0])
    control.open(directory)
    sock = raw(directory / "control.sock")
    control.serve_once(0.0)
    moment[0] += 30.0
    control.serve_once(0.0)
    sock.sendall(b'{"schema":1,"id":"a","op":"status"}\n')
    control.serve_once(0.0)
    assert line(sock)["state"] == "done"
    sock.close()
    control.stop()


def test_a_stale_socket_is_replaced(service, directory, run):
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(directory / "control.sock"))
    left.close()
    assert run().call("status")["state"] == "done"


def test_a_socket_that_somebody_serves_is_left_alone(running, service):
    with pytest.raises(InferscopeError, match="served by another process"):
        room.UnixSocket(running.directory)
    assert running.call("status")["state"] == "done"


@pytest.mark.parametrize("kind", ["file", "link", "directory"])
def test_what_is_no_socket_is_not_touched(directory, kind):
    path = directory / "control.sock"
    if kind == "file":
        path.write_text("mine")
    elif kind == "link":
        path.symlink_to("/dev/null")
    else:
        path.mkdir()
    with pytest.raises(InferscopeError, match="no socket"):
        room.UnixSocket(directory)
    assert path.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of others")
def test_a_squatted_name_is_refused_with_a_line(directory, service, caplog):
    from inferscope.control import Control, Options

    left = socket.socket(socket.AF_UNIX)
    left.bind(str(directory / "control.sock"))
    os.chown(directory / "control.sock", 12345, 12345)
    control = Control(service.operations(), Options(), environ={})
    control.open(directory)
    assert "belongs to user 12345" in control.status()["socket"]
    assert sum("belongs to user 12345" in record.getMessage() for record in caplog.records) == 1
    control.stop()
    left.close()
    assert (directory / "control.sock").exists()


def test_a_directory_that_others_can_write_is_refused(directory):
    directory.chmod(0o777)
    with pytest.raises(InferscopeError, match="chmod 700"):
        room.UnixSocket(directory)


def test_a_path_too_long_for_a_socket_works(directory, run):
    deep = directory / ("d" * 120) / ("e" * 120)
    deep.mkdir(parents=True, mode=0o700)
    running = run(at=deep)
    assert running.call("status")["state"] == "done"
    assert (deep / "control.sock").is_socket()
    running.end()
    assert not (deep / "control.sock").exists()


def test_the_name_goes_when_the_room_closes_and_stays_when_it_is_anothers(run, directory, service):
    running = run()
    running.end()
    assert not running.path.exists()
    first = room.UnixSocket(directory)
    first.listener.close()
    second = room.UnixSocket(directory)
    first.remove()
    assert (directory / "control.sock").exists()
    second.remove()
    second.listener.close()
    assert not (directory / "control.sock").exists()


class Credentials:
    """A socket whose kernel tells what a test wants."""

    def __init__(self, pid, uid):
        self.answer = struct.pack("3i", pid, uid, 0)

    def getsockopt(self, *_):
        return self.answer


def test_the_services_user_and_root_may_ask():
    assert room.peer(Credentials(7, os.geteuid())) == (room.Actor("socket", os.geteuid(), 7), None)
    assert room.peer(Credentials(7, 0))[1] is None


def test_another_user_may_not(monkeypatch):
    actor, why = room.peer(Credentials(7, 4321))
    assert actor.uid == 4321
    assert "user 4321 may not control" in why
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert room.peer(Credentials(7, 1001))[1] is not None
    assert room.peer(Credentials(7, 0))[1] is None


def test_a_process_of_another_pid_namespace_is_told_so(service):
    from inferscope.control.desk import Desk

    actor, why = room.peer(Credentials(0, os.geteuid()))
    assert (actor.pid, actor.peer, why) == (None, "another pid namespace", None)
    client = room.UnixClient(Desk(service.operations()), actor, why)
    client.receive(b'{"schema":1,"id":"a","op":"status"}\n')
    assert "another pid namespace" in json.loads(client.answer())["note"]
    assert "user namespace" in room.peer(Credentials(0, 65534))[1]


def test_a_refused_user_gets_one_answer_and_the_connection_ends(service, directory, run, monkeypatch):
    from inferscope.control import channels

    monkeypatch.setattr(channels, "peer", lambda sock: (room.Actor("socket", 4321, 7), "user 4321 may not control a service of user 0"))
    running = run()
    sock = raw(running.path)
    sock.sendall(b'{"schema":1,"id":"a","op":"disable","args":{"part":"capture"}}\n')
    answer = line(sock)
    assert (answer["state"], answer["why"]) == ("denied", "user 4321 may not control a service of user 0")
    assert sock.recv(10) == b""
    sock.close()
    assert service.calls == []
    assert running.control.status()["requests"]["unauthorised"] == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user")
def test_the_kernel_tells_another_user(running, service):
    """With the door wide open, as a volume mounted elsewhere could have it."""
    running.directory.chmod(0o755)
    running.path.chmod(0o666)
    code = (
        "import os, socket, sys; os.setgid(4321); os.setuid(4321); s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]);"
        's.sendall(b\'{"schema":1,"id":"a","op":"disable","args":{"part":"capture"}}\\n\'); print(s.recv(4096).decode())'
    )
    done = subprocess.run([sys.executable, "-c", code, str(running.path)], capture_output=True, text=True, check=True, cwd="/")
    assert "user 4321 may not control" in json.loads(done.stdout)["why"]
    assert service.calls == []


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_leaves_the_parents_socket_alone(running):
    pid = os.fork()
    if pid == 0:
        try:
            running.control.after_fork()
            os._exit(0 if running.path.exists() and running.control.status()["socket"] == "off" else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert running.call("status")["state"] == "done"


def test_closing_from_another_thread_ends_the_wait(running):
    begun = time.monotonic()
    running.control.close()
    assert not running.path.exists()
    running.control.open(running.directory)
    assert running.call("status")["state"] == "done"
    assert time.monotonic() - begun < 3.0


def test_a_crowd_of_broken_clients_hurts_nobody(running, service):
    chance = random.Random(7)
    good = b'{"schema":1,"id":"a","op":"status"}\n'
    begun = time.monotonic()
    for number in range(300):
        sock = raw(running.path)
        kind = number % 5
        try:
            if kind == 0:
                sock.sendall(chance.randbytes(chance.randrange(1, 3000)))
            elif kind == 1:
                sock.sendall(good[: chance.randrange(1, len(good))])
            elif kind == 2:
                sock.sendall(good * chance.randrange(1, 200))  # and never reads
            elif kind == 3:
                sock.sendall(b"[" * 30_000)
            else:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        except OSError:
            pass  # it was thrown out while it sent
        sock.close()
        if number % 50 == 0:
            assert running.call("status")["state"] == "done"
    assert running.call("status")["state"] == "done"
    assert time.monotonic() - begun < 10
    assert service.calls == []
    assert running.control.status()["requests"]["malformed"] > 0
