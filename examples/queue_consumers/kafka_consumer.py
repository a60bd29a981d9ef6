"""Reads scores to make from a Kafka topic; answers go to the topic `scored`.

pip install inferscope-sdk confluent-kafka
inferscope run --service scores --slo "score:p99_ms=100" -- python -m examples.queue_consumers.kafka_consumer 127.0.0.1:9092
"""

from __future__ import annotations

import sys
from typing import Final

from confluent_kafka import Consumer, Producer

import inferscope as scope
from examples.queue_consumers.work import score

TOPIC: Final = "to-score"


def consume(servers: str) -> None:
    """Take messages until the process is told to end."""
    consumer = Consumer({"bootstrap.servers": servers, "group.id": "scorers", "auto.offset.reset": "earliest"})
    producer = Producer({"bootstrap.servers": servers})
    consumer.subscribe([TOPIC])
    while True:
        message = consumer.poll(1.0)
        if message is None or message.error() is not None:
            continue
        _, published_ms = message.timestamp()  # the producer's clock, or the broker's where the topic says LogAppendTime
        body = message.value()
        if body is not None:
            producer.produce("scored", key=message.key(), value=str(score(body, published_ms)))
            producer.poll(0)


if __name__ == "__main__":
    scope.configure(service="scores", slo=scope.SLO("score", p99_ms=100))
    consume(sys.argv[1])
