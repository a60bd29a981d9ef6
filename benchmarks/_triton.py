"""The Triton rows of `integrations.py`, measured where tritonclient is installed: `python _triton.py ROUNDS fetch|found` prints them as JSON."""

from __future__ import annotations

import json
import sys
import tempfile
import time

import _servers
import numpy as np
import tritonclient.grpc
from _harness import no_collections

from inferscope import remote
from inferscope.integration import Registry
from inferscope.record import core

COST = {"name": "tritonclient infer, unsampled", "unit": "us", "limit": 5}
SPLIT = {"name": "split of one Triton request: what its parts miss of the wall time", "unit": "%", "limit": 2}
PROTOCOLS = ("http", "grpc")


def inputs(module):
    one = module.InferInput("ROWS", [1, 16], "FP32")
    one.set_data_from_numpy(np.ones((1, 16), np.float32))
    return [one]


class _Answer:
    """What the stubbed transport gives."""

    outputs, raw_output_contents = (), ()


def cost(rounds):
    """CPU time that the patches add to `grpc.infer` over a transport that answers at once, in us."""
    client = tritonclient.grpc.InferenceServerClient("127.0.0.1:9")
    client._client_stub.ModelInfer = lambda **_: _Answer()
    kind, asked = type(client), inputs(tritonclient.grpc)
    registry, plain = Registry(), kind.infer
    module = sys.modules["tritonclient.grpc._client"]
    plain_build = module._get_inference_request
    registry.instrument(["tritonclient"])
    ours, our_build = kind.infer, module._get_inference_request
    found, loops = [], 300
    with no_collections():
        for number in range(rounds):
            times = {}
            for patched in (number % 2 == 0, number % 2 == 1):
                kind.infer = ours if patched else plain
                module._get_inference_request = our_build if patched else plain_build
                with core.default.request("benchmark"):
                    client.infer("risk", asked)
                began = time.thread_time_ns()
                for _ in range(loops):
                    with core.default.request("benchmark"):
                        client.infer("risk", asked)
                times[patched] = (time.thread_time_ns() - began) / loops
            found.append((times[True] - times[False]) / 1000)
    kind.infer, module._get_inference_request = ours, our_build
    registry.uninstrument()
    return found


def split(rounds, fetch):
    """Parts of each request against its wall time measured around the call, with the server's own split inside the wire, in % missed."""
    import tritonclient.http

    missed, unheard = [], 0
    with tempfile.TemporaryDirectory() as folder, _servers.serving(_servers.repository(folder), fetch=fetch) as server:
        registry = Registry()
        registry.instrument(["tritonclient"])
        clients = {
            "http": (tritonclient.http.InferenceServerClient(server.http), inputs(tritonclient.http)),
            "grpc": (tritonclient.grpc.InferenceServerClient(server.grpc), inputs(tritonclient.grpc)),
        }
        for client, asked in clients.values():
            for _ in range(20):
                client.infer("risk", asked)
        remote.poll()
        for number in range(rounds):
            client, asked = clients[PROTOCOLS[number % 2]]
            before = _totals()
            began = time.perf_counter_ns()
            client.infer("risk", asked)
            wall = time.perf_counter_ns() - began
            after = _settled(before)  # alone on this server: the difference is this request's
            client_parts = {name: after[name] - before[name] for name in ("serialize_ns", "wire_ns", "read_ns")}
            server_parts = {name: after[name] - before[name] for name in ("queue_ns", "input_ns", "infer_ns", "output_ns")}
            inside = sum(server_parts.values())
            network = client_parts["wire_ns"] - inside
            if after["count"] - before["count"] != 2:  # asked through both protocols; the server was not heard in time, or counted late
                unheard += 1
                continue
            if network < 0:  # the server says that it took longer than the client waited
                missed.append(100.0)
                continue
            parts = client_parts["serialize_ns"] + network + inside + client_parts["read_ns"]
            missed.append(100 * abs(1 - parts / wall))
        registry.uninstrument()
    if unheard > rounds // 5:
        raise _servers.ServerAbsentError(f"the server's statistics were late in {unheard} of {rounds} requests")
    return missed


def _settled(before):
    """Totals once the server has counted the request, which it does after it has answered; at most 1 s."""
    until = time.monotonic() + 1.0
    while True:
        remote.poll()
        after = _totals()
        if after["count"] - before["count"] >= 2 or time.monotonic() > until:
            return after


def _totals():
    seen = remote.evidence()
    found = dict.fromkeys(("serialize_ns", "wire_ns", "read_ns", "queue_ns", "input_ns", "infer_ns", "output_ns", "count"), 0)
    for row in seen["calls"]:
        for name in ("serialize_ns", "wire_ns", "read_ns"):
            found[name] += row[name] or 0
    for row in seen["servers"]:
        found["count"] += row["count"]
        for name in ("queue_ns", "input_ns", "infer_ns", "output_ns"):
            found[name] += row[name] // 2
    return found


def main():
    rounds, fetch = int(sys.argv[1]), sys.argv[2] == "fetch"
    rows = [{**COST, "values": cost(rounds)}]
    try:
        rows.append({**SPLIT, "values": split(rounds, fetch)})
    except _servers.ServerAbsentError as error:
        rows.append({"name": SPLIT["name"], "unit": SPLIT["unit"], "target": f"<= {SPLIT['limit']}", "note": str(error)})
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
