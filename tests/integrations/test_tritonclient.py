"""tritonclient over http, grpc, http.aio and grpc.aio against a real Triton server with a torch model behind it."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
import time

import numpy as np
import pytest

from inferscope import remote
from inferscope.record import core

pytestmark = [
    pytest.mark.servers,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # geventhttpclient and grpc.aio leave sockets open
]
http = pytest.importorskip("tritonclient.http", reason="tritonclient is not installed; 'make test-integrations' installs it")
grpc = pytest.importorskip("tritonclient.grpc")
http_aio = pytest.importorskip("tritonclient.http.aio")
grpc_aio = pytest.importorskip("tritonclient.grpc.aio")


@pytest.fixture(autouse=True)
def fresh():
    remote.forget()
    yield
    remote.forget()


def rows(module, size=1, *, seed=0, **how):
    value = np.random.default_rng(seed).standard_normal((size, 16)).astype(np.float32)
    one = module.InferInput("ROWS", [size, 16], "FP32")
    one.set_data_from_numpy(value, **how)
    return [one]


def calls() -> dict[str, dict]:
    return {row["method"]: row for row in remote.evidence()["calls"]}


def label(seen):
    (record,) = seen.requests()
    assert sum(record.vector) == record.wall_ns
    return record, seen.columns(record)


def spans_of(seen, record, name):
    labels = [f"{kind}:{each}" if kind != "stage" else each for kind, each in core.default.columns()]
    return [span for span in record.spans if labels[span.column] == name]


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_call_is_a_stage_with_its_message_and_its_wire(triton, seen, instrument, protocol: str) -> None:
    module = http if protocol == "http" else grpc
    client = module.InferenceServerClient(getattr(triton, protocol))
    plain = client.infer("risk", rows(module)).as_numpy("SCORE")
    instrument("tritonclient")
    with core.default.request("score"):
        answer = client.infer("risk", rows(module)).as_numpy("SCORE")
    np.testing.assert_array_equal(answer, plain)
    record, columns = label(seen)
    assert {"triton:risk", "triton.serialize", "io:triton:risk"} <= set(columns)
    assert columns["io:triton:risk"] > 2e6  # the model sleeps 2 ms
    (call,) = spans_of(seen, record, "triton:risk")
    parts = columns["triton:risk"] + columns["triton.serialize"] + columns["io:triton:risk"]
    assert parts == call.end_ns - call.start_ns
    row = calls()[f"{protocol}.infer"]
    assert (row["count"], row["errors"], row["binary_bytes"], row["server"]) == (1, 0, 64, getattr(triton, protocol))
    client.close()


def test_the_sleep_of_async_infer_is_measured(triton, seen, instrument) -> None:
    instrument("tritonclient")
    client = http.InferenceServerClient(triton.http, concurrency=2)
    with core.default.request("score"):
        pending = [client.async_infer("risk", rows(http, seed=seed)) for seed in range(2)]
        answers = [each.get_result().as_numpy("SCORE") for each in pending]
    assert len(answers) == 2
    row = calls()["http.async_infer"]
    assert (row["count"], row["submitted"]) == (2, 2)
    assert row["submit_ns"] / 2 >= 10e6
    assert 2e6 < row["wall_ns"] / 2 < 60e6
    _, columns = label(seen)
    assert "io:triton:risk" in columns
    client.close()


def test_callbacks_of_async_infer_find_their_request_again(triton, seen, instrument) -> None:
    instrument("tritonclient")
    client = grpc.InferenceServerClient(triton.grpc)
    done, found = threading.Event(), []

    def callback(result, error) -> None:
        with core.default.stage("after"):
            found.append((result.as_numpy("SCORE").shape, error))
        done.set()

    with core.default.request("score"):
        client.async_infer("risk", rows(grpc), callback)
        assert done.wait(10)
    assert found == [((1, 1), None)]
    _, columns = label(seen)
    assert columns["io:triton:risk"] > 1e6
    assert "after" in columns
    client.close()


def test_streams_match_answers_by_request_id(triton, instrument) -> None:
    instrument("tritonclient")
    client = grpc.InferenceServerClient(triton.grpc)
    answers: list[str] = []
    client.start_stream(lambda result, error: answers.append(result.get_response().id if error is None else "error"))
    for number in range(6):
        client.async_stream_infer("risk", rows(grpc, seed=number), request_id=str(number))
    client.stop_stream()
    client.close()
    assert sorted(answers) == list("012345")
    row = calls()["grpc.stream"]
    assert (row["count"], row["submitted"], row["errors"]) == (6, 6, 0)
    assert row["wall_ns"] / 6 > 2e6


def test_a_stream_that_fails_is_the_callers_to_hear(triton, instrument) -> None:
    instrument("tritonclient")
    client = grpc.InferenceServerClient(triton.grpc)
    errors = []
    client.start_stream(lambda result, error: errors.append(error))
    client.async_stream_infer("no_such_model", rows(grpc), request_id="1")
    client.stop_stream()
    client.close()
    assert len(errors) == 1
    assert "no_such_model" in str(errors[0])


async def test_asynchronous_clients(triton, seen, instrument) -> None:
    instrument("tritonclient")
    over_http = http_aio.InferenceServerClient(triton.http)
    over_grpc = grpc_aio.InferenceServerClient(triton.grpc)
    with core.default.request("score"):
        first = (await over_http.infer("risk", rows(http_aio))).as_numpy("SCORE")
        second = (await over_grpc.infer("risk", rows(grpc_aio))).as_numpy("SCORE")
    np.testing.assert_array_equal(first, second)

    async def requests():
        for number in range(4):
            yield {"model_name": "risk", "inputs": rows(grpc_aio, seed=number), "request_id": str(number)}

    answers = [result.get_response().id async for result, error in over_grpc.stream_infer(requests()) if error is None]
    assert sorted(answers) == list("0123")
    await over_http.close()
    await over_grpc.close()
    seen_calls = calls()
    assert {name: row["count"] for name, row in seen_calls.items()} == {"http.aio.infer": 1, "grpc.aio.infer": 1, "grpc.aio.stream": 4}
    assert all(row["server"] in {triton.http, triton.grpc} for row in seen_calls.values())
    _, columns = label(seen)
    assert columns["io:triton:risk"] > 4e6


async def test_tasks_share_a_client_and_keep_their_own_requests(triton, seen, instrument) -> None:
    instrument("tritonclient")
    client = grpc_aio.InferenceServerClient(triton.grpc)

    async def one(number: int) -> None:
        with core.default.request("score", size=number):
            await client.infer("risk", rows(grpc_aio, seed=number))

    await asyncio.gather(*(one(number) for number in range(8)))
    await client.close()
    records = seen.requests()
    assert len(records) == 8
    for record in records:
        assert sum(record.vector) == record.wall_ns
        assert len(spans_of(seen, record, "io:triton:risk")) == 1


def test_threads_share_a_grpc_client(triton, seen, instrument) -> None:
    instrument("tritonclient")
    client = grpc.InferenceServerClient(triton.grpc)
    failures = []

    def work(number: int) -> None:
        try:
            for _ in range(5):
                with core.default.request("score"):
                    client.infer("risk", rows(grpc, seed=number))
        except Exception as error:  # noqa: BLE001  (asserted below)
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    client.close()
    assert failures == []
    assert calls()["grpc.infer"]["count"] == 20
    assert all(len(spans_of(seen, record, "io:triton:risk")) == 1 for record in seen.requests())


def test_errors_are_the_librarys_own_and_counted(triton, instrument) -> None:
    from tritonclient.utils import InferenceServerException

    client, other = http.InferenceServerClient(triton.http), grpc.InferenceServerClient(triton.grpc)
    heard = {}
    for patched in (False, True):
        if patched:
            instrument("tritonclient")
        for one, module in ((client, http), (other, grpc)):
            with pytest.raises(InferenceServerException) as caught:
                one.infer("no_such_model", rows(module))
            heard.setdefault(module, []).append(str(caught.value))
            with pytest.raises(TypeError):
                one.infer()
    assert all(before == after for before, after in heard.values())
    assert {name: (row["count"], row["errors"]) for name, row in calls().items()} == {"http.infer": (1, 1), "grpc.infer": (1, 1)}
    client.close()
    other.close()


def test_encodings_and_bytes(triton, instrument) -> None:
    instrument("tritonclient")
    client = http.InferenceServerClient(triton.http)
    client.infer("risk", rows(http, 8, binary_data=True))
    client.infer("risk", rows(http, 4, binary_data=False))
    row = calls()["http.infer"]
    assert (row["binary_bytes"], row["json_inputs"], row["json_elements"], row["largest_bytes"]) == (8 * 64, 1, 64, 512)
    shm = pytest.importorskip("tritonclient.utils.shared_memory")
    region = shm.create_shared_memory_region("rows", "/inferscope_rows", 64)
    try:
        shm.set_shared_memory_region(region, [np.ones((1, 16), np.float32)])
        client.register_system_shared_memory("rows", "/inferscope_rows", 64)
        one = http.InferInput("ROWS", [1, 16], "FP32")
        one.set_shared_memory("rows", 64)
        client.infer("risk", [one])
    finally:
        client.unregister_system_shared_memory("rows")
        shm.destroy_shared_memory_region(region)
    assert calls()["http.infer"]["shared_inputs"] == 1
    client.close()


def test_what_the_server_counted_comes_through_a_client_of_ours(triton, instrument) -> None:
    instrument("tritonclient")
    own = {"http": http.InferenceServerClient(triton.http), "grpc": grpc.InferenceServerClient(triton.grpc)}
    modules = {"http": http, "grpc": grpc}
    for protocol, client in own.items():
        client.infer("risk", rows(modules[protocol]))
    remote.poll()
    for _ in range(10):
        own["http"].infer("risk", rows(http))
    time.sleep(0.05)
    remote.poll()
    found = {row["server"]: row for row in remote.evidence()["servers"]}
    assert set(found) == {triton.http, triton.grpc}
    for row in found.values():
        assert row["state"] == "watched"
        assert (row["count"], row["inferences"], row["instances"], row["max_queue_delay_ns"]) == (10, 10, 1, 500_000)
        parts = row["queue_ns"] + row["input_ns"] + row["infer_ns"] + row["output_ns"]
        assert abs(parts / row["total_ns"] - 1) < 0.05
    assert found[triton.http]["own"] == 10
    assert found[triton.grpc]["own"] == 0  # somebody else's, as seen from the gRPC client
    for client in own.values():
        client.close()


def test_a_server_without_the_model_is_not_asked_for_ever(triton, instrument) -> None:
    from inferscope.remote import Calls
    from inferscope_integrations.tritonclient.statistics import GrpcPoller, HttpPoller

    for kind, server in ((HttpPoller, triton.http), (GrpcPoller, triton.grpc)):
        poller = kind(server, "no_such_model", Calls("triton", "x", "no_such_model", server))
        poller.poll()
        assert poller.totals.state.startswith("off: the server answers")
        unreachable = kind("127.0.0.1:9", "risk", Calls("triton", "x", "risk", "127.0.0.1:9"))
        for _ in range(3):
            unreachable.poll()
        assert unreachable.totals.state.startswith("off: it cannot be reached")


def test_a_busy_instance_shows_as_queue_and_busy_time(triton, instrument) -> None:
    instrument("tritonclient")
    client = grpc.InferenceServerClient(triton.grpc)
    client.infer("busy", rows(grpc, 64))
    remote.poll()
    started = time.monotonic()
    threads = [threading.Thread(target=lambda: [client.infer("busy", rows(grpc, 64)) for _ in range(6)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    time.sleep(0.05)
    remote.poll()
    client.close()
    (row,) = remote.evidence()["servers"]
    assert row["queue_ns"] > 0.5 * row["total_ns"]
    assert row["busy_ns"] / row["window_ns"] > 0.7, (row, time.monotonic() - started)


@contextlib.contextmanager
def span_of(*, sampled: bool):
    """The application's own OpenTelemetry span."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider, sampling

    provider = TracerProvider(sampler=sampling.ALWAYS_ON if sampled else sampling.ALWAYS_OFF)
    with trace.use_span(provider.get_tracer("test").start_span("call"), end_on_exit=True) as span:
        yield span.get_span_context()
    provider.shutdown()


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_traceparent_goes_out_with_sampled_spans_only_and_the_callers_headers_stay(triton, instrument, protocol: str) -> None:
    instrument("tritonclient")
    module = http if protocol == "http" else grpc
    client = module.InferenceServerClient(getattr(triton, protocol))
    headers = {"x-tenant": "gold"}
    with span_of(sampled=False) as unsampled:
        client.infer("risk", rows(module), headers=headers)
    client.infer("risk", rows(module))
    with span_of(sampled=True) as sampled:
        client.infer("risk", rows(module), headers=headers)
    assert headers == {"x-tenant": "gold"}
    deadline = time.monotonic() + 10
    wanted = f"{sampled.trace_id:032x}"
    while time.monotonic() < deadline and not any(span["traceId"].lower() == wanted for span in triton.traces.spans()):
        time.sleep(0.1)
    mine = [span for span in triton.traces.spans() if span["traceId"].lower() == wanted]
    assert any(span.get("parentSpanId", "").lower() == f"{sampled.span_id:016x}" for span in mine)
    assert not [span for span in triton.traces.spans() if span["traceId"].lower() == f"{unsampled.trace_id:032x}"]
    client.close()


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_tritons_spans_divide_a_request_as_its_statistics_do(triton, instrument, protocol: str) -> None:
    from inferscope_integrations.tritonclient.spans import PARTS, split

    instrument("tritonclient")
    module = http if protocol == "http" else grpc
    client = module.InferenceServerClient(getattr(triton, protocol))
    client.infer("risk", rows(module))
    time.sleep(0.05)
    remote.poll()
    found, deadline = None, time.monotonic() + 30
    sent = 0
    while found is None and time.monotonic() < deadline:  # Triton loses a context now and then
        with span_of(sampled=True) as context:
            client.infer("risk", rows(module))
        sent += 1
        until = time.monotonic() + 3
        while found is None and time.monotonic() < until:
            time.sleep(0.1)
            found = split(triton.traces.spans(), f"{context.trace_id:032x}")
    remote.poll()
    client.close()
    assert found is not None
    assert all(value >= 0 for value in found.values())
    assert found["infer_ns"] > 2e6  # the model sleeps 2 ms
    (row,) = remote.evidence()["servers"]
    assert row["count"] == sent
    if sent == 1:
        assert all(abs(found[part] - row[part]) < 0.3e6 for part in PARTS), (found, row)
    assert split(triton.traces.spans(), "0" * 32) is None


def test_instrument_and_undo_is_the_identity() -> None:
    from inferscope.integration import Registry

    places = {
        http.InferenceServerClient: ("infer", "async_infer", "_post"),
        http.InferAsyncRequest: ("get_result",),
        grpc.InferenceServerClient: ("infer", "async_infer", "start_stream", "async_stream_infer"),
        grpc._client: ("_get_inference_request",),
        http_aio.InferenceServerClient: ("infer", "_post"),
        grpc_aio.InferenceServerClient: ("infer", "stream_infer"),
        grpc_aio: ("_get_inference_request",),
    }
    before = {owner: dict(vars(owner)) for owner in places}
    signatures = {(owner, name): inspect.signature(getattr(owner, name)) for owner, names in places.items() for name in names}
    registry = Registry()
    assert set(registry.instrument(["tritonclient"]).values()) == {"active"}
    for owner, names in places.items():
        for name in names:
            assert vars(owner)[name] is not before[owner][name]
            assert inspect.signature(getattr(owner, name)) == signatures[owner, name]
    patched = {owner: dict(vars(owner)) for owner in places}
    registry.instrument(["tritonclient"])
    assert {owner: dict(vars(owner)) for owner in places} == patched
    registry.uninstrument()
    assert {owner: dict(vars(owner)) for owner in places} == before


def test_a_reloaded_library_works_as_without_us(triton) -> None:
    import importlib

    from inferscope.integration import Registry

    registry = Registry()
    registry.instrument(["tritonclient"])
    module = importlib.reload(importlib.import_module("tritonclient.http._client"))
    client = module.InferenceServerClient(triton.http)
    assert client.infer("risk", rows(http)).as_numpy("SCORE").shape == (1, 1)
    client.close()
    assert set(registry.uninstrument().values()) == {"off"}
