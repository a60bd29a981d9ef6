"""A service that uses the library, measured through the integration beside it.

python -m examples.custom_integration.serve "some text" "another, longer text"
"""

from __future__ import annotations

import json
import sys

import inferscope as scope
from examples.custom_integration.inferscope_tokenizer import TokenizerIntegration
from examples.custom_integration.slow_tokenizer import Tokenizer
from inferscope.integration import registry

scope.configure(service="tokens", slo=scope.SLO("count", p99_ms=20))
registry.add(TokenizerIntegration())  # what scope.instrument("slow_tokenizer") does for an integration that is installed
tokenizer = Tokenizer()


@scope.request("count")
def count(text: str) -> int:
    """Number of tokens."""
    return len(tokenizer.encode(text))


if __name__ == "__main__":
    counts = [count(text) for text in sys.argv[1:]]
    print(
        json.dumps(
            {
                "counts": counts,
                "stages": [row.labels[0] for row in scope.snapshot().series if row.kind == "stage"],
                "integrations": scope.status()["integrations"],
            }
        )
    )
