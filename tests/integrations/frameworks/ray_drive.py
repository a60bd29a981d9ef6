"""Starts Ray Serve with `ray_app`, asks it, and prints what each process recorded."""

from __future__ import annotations

import json
import socket
import sys
import threading
import urllib.error
import urllib.request

import ray
import ray_app
import told
from ray import serve

import inferscope as scope


def ask(url):
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, None


def main():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ray_app.instrument()
    patient = {"agent_register_timeout_ms": 200_000}  # its agent takes long to import on a busy machine
    ray.init(num_cpus=4, include_dashboard=False, configure_logging=False, _system_config=patient)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    scorer = serve.run(ray_app.Scorer.bind(), name="scorer", route_prefix=None)
    narrow = serve.run(ray_app.Narrow.bind(), name="narrow", route_prefix=None)
    front = serve.run(ray_app.Front.bind(scorer), name="front", route_prefix="/front")
    scorer.remote(0).result(timeout_s=30)  # warm
    scorer.told.remote().result(timeout_s=30)
    told.begin()

    answers = {}

    def one(value):
        with scope.request("outer"):
            answers[value] = scorer.remote(value).result(timeout_s=30)

    threads = [threading.Thread(target=one, args=(value,)) for value in (1, 2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    raised = ""
    try:
        with scope.request("failing"):
            scorer.fail.remote().result(timeout_s=30)
    except Exception as error:  # noqa: BLE001
        raised = type(error).__name__
    driver = told.rows()
    scored, batches, _ = scorer.told.remote().result(timeout_s=30)
    waits = [narrow.remote(value) for value in range(3)]
    alone = sorted(wait.result(timeout_s=30) for wait in waits)
    narrowed = narrow.told.remote().result(timeout_s=30)
    over_http = [ask(f"http://127.0.0.1:{port}/front?value={value}") for value in (21, 13)]
    fronted = front.told.remote().result(timeout_s=30)
    sys.stdout.write(json.dumps({"answers": answers, "raised": raised, "driver": driver, "scorer": scored, "batches": batches, "alone": alone,
                      "narrow": narrowed, "http": over_http, "front": fronted}) + "\n")  # fmt: skip
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
