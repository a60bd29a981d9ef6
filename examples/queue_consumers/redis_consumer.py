"""Reads scores to make from a Redis stream; answers go to the stream `scored`.

pip install inferscope-sdk redis
inferscope run --service scores --slo "score:p99_ms=100" -- python -m examples.queue_consumers.redis_consumer redis://127.0.0.1:6379
redis-cli XADD to-score '*' values '[1, 2, 3]'
"""

from __future__ import annotations

import contextlib
import sys
from typing import Final

import redis

import inferscope as scope
from examples.queue_consumers.work import score

STREAM: Final = "to-score"
GROUP: Final = "scorers"


def consume(url: str) -> None:
    """Take messages until the process is told to end."""
    client = redis.Redis.from_url(url)
    with contextlib.suppress(redis.ResponseError):  # it exists
        client.xgroup_create(STREAM, GROUP, id="0", mkstream=True)
    while True:
        for _, entries in client.xreadgroup(GROUP, "one", {STREAM: ">"}, count=10, block=1000):
            for entry, fields in entries:
                published_ms = int(entry.split(b"-")[0])  # Redis makes the ids of entries from its own clock
                found = score(fields[b"values"], published_ms)
                client.xadd("scored", {"entry": entry, "score": found})
                client.xack(STREAM, GROUP, entry)


if __name__ == "__main__":
    scope.configure(service="scores", slo=scope.SLO("score", p99_ms=100))
    consume(sys.argv[1])
