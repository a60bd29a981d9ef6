"""A KServe model; started with its HTTP port and its gRPC port. `/told` answers what this process recorded."""

from __future__ import annotations

import asyncio
import sys
import time

import kserve
import told

import inferscope as scope

scope.instrument("kserve", "asgi", "grpc")
told.begin()


class Scorer(kserve.Model):
    def __init__(self) -> None:
        super().__init__("scorer")
        self.ready = True

    def preprocess(self, payload, headers=None):
        time.sleep(0.01)
        return payload["instances"] if isinstance(payload, dict) else payload.inputs[0].as_numpy().ravel().tolist()

    async def predict(self, payload, headers=None, response_headers=None):
        with scope.stage("inner"):
            await asyncio.sleep(0.02)
        if 13 in payload:
            raise ValueError("private")
        return [2 * value for value in payload]

    def postprocess(self, result, headers=None, response_headers=None):
        return {"predictions": result, "told": {"rows": told.rows()} if result == [0] else None}


if __name__ == "__main__":
    kserve.ModelServer(http_port=int(sys.argv[1]), grpc_port=int(sys.argv[2]), enable_docs_url=False).start([Scorer()])
