"""Celery tasks as requests, through a real worker and an in-memory broker."""

from __future__ import annotations

import time

import pytest

pytestmark = pytest.mark.servers


def test_tasks_are_requests_and_the_brokers_queue_is_theirs(seen, instrument) -> None:
    celery = pytest.importorskip("celery")
    from celery.contrib.testing.worker import start_worker

    app = celery.Celery("scores", broker="memory://", backend="cache+memory://")

    @app.task(name="scores.score")
    def score(value: int) -> int:
        time.sleep(0.05)
        return 2 * value

    @app.task(name="scores.broken")
    def broken() -> None:
        raise ValueError("private")

    assert instrument("celery")["celery"] == "active"
    waiting = [score.delay(value) for value in (1, 2)]
    failing = broken.delay()
    with start_worker(app, pool="solo", perform_ping_check=False, shutdown_timeout=20):
        assert [each.get(timeout=20) for each in waiting] == [2, 4]
        with pytest.raises(ValueError, match="private"):
            failing.get(timeout=20)
        time.sleep(0.1)
    records = seen.requests()
    assert sorted((record.key.request, record.error) for record in records) == [
        ("scores.broken", "ValueError"),
        ("scores.score", None),
        ("scores.score", None),
    ]
    second = max((record for record in records if record.key.request == "scores.score"), key=lambda record: record.wall_ns)
    assert seen.columns(second)["queue:backlog"] > 40e6  # it lay in the broker while the first one ran
    assert all(sum(record.vector) == record.wall_ns for record in records)
