"""What the receiver is told by servers with many workers: every request once, under four names, whatever ends a worker."""

from __future__ import annotations

import os
import signal
import time

import pytest

from inferscope import semconv
from inferscope.testing.receiver import OtlpReceiver

pytestmark = pytest.mark.soak


def totals(receiver):
    """The last total of each life, by instance and start; and spans that cannot be a request's."""
    found = {}
    for point in receiver.metrics(semconv.REQUESTS):
        key = point.resource["service.instance.id"], point.resource["process.pid"], point.start_unix_ns
        found[key] = max(found.get(key, 0), point.value)
    return found


def drive(server, seconds, until=lambda: False):
    """Requests that were answered; those of a worker that was killed are not."""
    with server.load(path="/score", threads=4, pause_s=0.002) as codes:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not until():
            time.sleep(0.1)
    return sum(code == 200 for code in codes), sum(code != 200 for code in codes)


def test_gunicorn_preloads_forks_and_recycles_four_workers_fifty_times(serve, state_dir):
    pytest.importorskip("gunicorn")
    with OtlpReceiver() as receiver:
        server = serve(
            "gunicorn", "wsgi:app", "--preload", "-k", "gthread", "-w", "4", "--threads", "2", "-b", "127.0.0.1:0", "--log-level", "info",
            "--max-requests", "40", "--max-requests-jitter", "5", OTEL_EXPORTER_OTLP_ENDPOINT=receiver.url,
        )  # fmt: skip
        answered, other = drive(server, 90, lambda: len({pid for _, pid, _ in totals(receiver)}) > 54)
        os.kill(server.process.pid, signal.SIGTERM)
        assert server.process.wait(15) == 0
        counted = totals(receiver)
    assert other == 0
    assert len({pid for _, pid, _ in counted}) >= 50, "lives"
    assert sum(counted.values()) == answered
    assert len({instance for instance, _, _ in counted}) <= 5, "four slots, and one more while a worker takes over from another"
    assert "Traceback" not in server.said()


def test_uvicorn_s_workers_add_up_also_when_one_is_killed(serve, state_dir):
    with OtlpReceiver() as receiver:
        server = serve(
            "uvicorn", "app:app", "--workers", "4", "--port", "0", "--log-level", "info",
            OTEL_EXPORTER_OTLP_ENDPOINT=receiver.url, SERVICE_EXPORT_S="0.2",
        )  # fmt: skip
        answered, _ = drive(server, 6)
        assert receiver.wait(lambda it: sum(totals(it).values()) == answered, 10), (sum(totals(receiver).values()), answered)
        (victim, *_) = server.workers(4)
        before = totals(receiver)
        os.kill(victim, signal.SIGKILL)
        more, _ = drive(server, 6)
        assert receiver.wait(lambda it: sum(totals(it).values()) == answered + more, 10), (sum(totals(receiver).values()), answered + more)
        after = totals(receiver)
        os.kill(server.process.pid, signal.SIGTERM)
        server.process.wait(15)
    assert {instance for instance, _, _ in after} == {instance for instance, _, _ in before}, "the new worker took the free slot"
    assert len({instance for instance, _, _ in after}) == 4
