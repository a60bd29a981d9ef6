"""Forks: a child counts for itself, a parent is untouched, and the receiver's totals are exact."""

from __future__ import annotations

import os

import pytest

from inferscope.testing.receiver import OtlpReceiver

HEAD = """
import json, os, sys, threading, time
import inferscope as scope

def serve(n):
    for _ in range(n):
        with scope.request("score"):
            with scope.stage("work"):
                pass

def start():
    scope.configure(service="forks", slo=scope.SLO("score", p99_ms=50), tick_s=0.1, export_interval_s=0.2)
"""

FORK = (
    HEAD
    + """
start()
serve(1000)
read, write = os.pipe()
children = []
for n in (1, 7):
    pid = os.fork()
    if pid == 0:
        names = sorted(t.name for t in threading.enumerate())
        fresh = scope.status()
        serve(n)
        deadline = time.monotonic() + 5
        while scope.status()["dormant"] and time.monotonic() < deadline:
            time.sleep(0.02)
        mine = scope.status()
        os.write(write, (json.dumps({
            "slot": mine["slot"], "instance": mine["instance_id"], "threads": mine["threads"], "names": names,
            "dormant": fresh["dormant"], "requests": mine["objectives"]["score"], "pid": os.getpid()}) + "\\n").encode())
        scope.shutdown()
        os._exit(0)
    children.append(pid)
    serve(100)
codes = [os.waitpid(pid, 0)[1] for pid in children]
mine = scope.status()
scope.shutdown()
os.close(write)
print(json.dumps({"codes": codes, "slot": mine["slot"], "instance": mine["instance_id"], "failures": mine["failures"],
                  "children": [json.loads(line) for line in os.fdopen(read)]}))
"""
)


def totals(receiver: OtlpReceiver) -> dict[tuple[str, int], int]:
    """The newest total of `inferscope.requests` by instance and process."""
    from inferscope.export.otlp.decode import metric_points

    found: dict[tuple[str, int], int] = {}
    for request in receiver.requests("/v1/metrics"):
        for point in metric_points(request.body):
            if point.name == "inferscope.requests":
                found[str(point.resource["service.instance.id"]), int(point.resource["process.pid"])] = int(point.value)
    return found


def test_a_forked_child_starts_at_zero_with_its_own_slot_and_threads(script):
    import json

    with OtlpReceiver() as receiver:
        done = script(FORK, OTEL_EXPORTER_OTLP_ENDPOINT=receiver.url)
        assert (done.returncode, done.stderr) == (0, "")
        told = json.loads(done.stdout)
        assert told["codes"] == [0, 0]
        assert told["failures"] == {}
        assert told["slot"] == 0
        assert len({told["instance"], *(child["instance"] for child in told["children"])}) == 3
        for child in told["children"]:
            assert child["slot"] > 0
            assert child["dormant"]
            assert "inferscope-worker" in child["names"]
            assert all(child["threads"].values())
        counted = totals(receiver)
    assert sorted(counted.values()) == [1, 7, 1200]
    assert len({pid for _, pid in counted}) == 3


MULTI = (
    HEAD
    + """
import multiprocessing

def task(n):
    if multiprocessing.get_start_method() == "spawn":
        start()
    serve(n)

if __name__ == "__main__":
    multiprocessing.set_start_method(sys.argv[1] if len(sys.argv) > 1 else METHOD)
    start()
    serve(50)
    workers = [multiprocessing.Process(target=task, args=(n,)) for n in (3, 5)]
    [w.start() for w in workers]
    [w.join() for w in workers]
    print([w.exitcode for w in workers])
"""
)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_of_multiprocessing_deliver_what_they_counted(script, method):
    with OtlpReceiver() as receiver:
        done = script(MULTI.replace("METHOD", repr(method)), OTEL_EXPORTER_OTLP_ENDPOINT=receiver.url)
        assert (done.returncode, done.stderr, done.stdout) == (0, "", "[0, 0]\n")
        counted = totals(receiver)
    assert sorted(counted.values()) == [3, 5, 50]


def test_a_fork_in_mid_traffic_never_hangs_and_loses_nothing(script):
    source = (
        HEAD
        + """
start()
stop = threading.Event()
done = [0] * 3
def work(i):
    while not stop.is_set():
        serve(1)
        done[i] += 1
threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
[t.start() for t in threads]
for _ in range(6):
    time.sleep(0.05)
    pid = os.fork()
    if pid == 0:
        serve(2)
        ok = scope.flush(2.0)
        os._exit(0 if scope.status()["slot"] > 0 else 3)
    assert os.waitpid(pid, 0)[1] == 0
stop.set()
[t.join() for t in threads]
scope.shutdown()
print(sum(done))
"""
    )
    with OtlpReceiver() as receiver:
        done = script(source, OTEL_EXPORTER_OTLP_ENDPOINT=receiver.url)
        assert (done.returncode, done.stderr) == (0, "")
        counted = totals(receiver)
    assert max(counted.values()) == int(done.stdout)
    assert sorted(counted.values())[:-1] == [2] * 6


def test_a_preload_master_of_gunicorn_gives_its_slot_back_and_sends_nothing(serve, state_dir):
    pytest.importorskip("gunicorn")
    with OtlpReceiver() as receiver:
        server = serve(
            "gunicorn", "wsgi:app", "--preload", "-k", "gthread", "-w", "2", "--threads", "2", "-b", "127.0.0.1:0", "--log-level", "info",
            OTEL_EXPORTER_OTLP_ENDPOINT=receiver.url,
        )  # fmt: skip
        with server.load():
            server.wait(lambda: sorted(row["slot"] for row in server.workers(2).values()) == [0, 1])
            master = server.process.pid
            workers = server.workers(2)
            assert master not in workers
            receiver.wait(lambda r: len(totals(r)) >= 2, 10)
        assert server.status()["failures"] == {}
        os.kill(master, 15)
        assert server.process.wait(10) == 0
        counted = totals(receiver)
    assert master not in {pid for _, pid in counted}
    assert {(row["instance_id"], pid) for pid, row in workers.items()} == set(counted)
    assert "Traceback" not in server.said()
