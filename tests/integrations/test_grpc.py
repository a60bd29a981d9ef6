"""gRPC servers, threaded and asynchronous, with real clients over loopback."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import grpc.aio
import pytest

from inferscope.record import core


def text(value) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


def handlers(**methods):
    """A generic service of bytes: name to (kind, behavior)."""
    made = {name: getattr(grpc, f"{kind}_rpc_method_handler")(behavior) for name, (kind, behavior) in methods.items()}
    return grpc.method_handlers_generic_handler("test.Scoring", made)


class Server:
    def __init__(self, service, *, workers: int = 4, **options) -> None:
        self.server = grpc.server(ThreadPoolExecutor(workers), handlers=(service,), **options)
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()
        self.channel = grpc.insecure_channel(f"127.0.0.1:{self.port}")

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_error: object) -> None:
        self.channel.close()
        self.server.stop(None).wait()

    def ask(self, method: str, kind: str = "unary_unary"):
        return getattr(self.channel, kind)(f"/test.Scoring/{method}")


def by_name(seen) -> dict:
    found: dict = {}
    for record in seen.requests():
        assert sum(record.vector) == record.wall_ns
        found.setdefault(record.key.request, []).append(record)
    return found


def test_a_call_is_a_request_with_its_stages(seen, instrument) -> None:
    instrument("grpc")

    def score(message, _context):
        with core.default.stage("model"):
            time.sleep(0.005)
        return message + b"!"

    with Server(handlers(Score=("unary_unary", score))) as server:
        assert server.ask("Score")(b"x") == b"x!"
    (record,) = by_name(seen)["test.Scoring/Score"]
    assert record.error is None
    assert seen.columns(record)["model"] > 4e6


def test_the_wait_for_a_thread_of_the_pool_is_seen(seen, instrument) -> None:
    instrument("grpc")

    def slow(message, _context):
        time.sleep(0.04)
        return message

    with Server(handlers(Slow=("unary_unary", slow)), workers=1) as server:
        ask = server.ask("Slow")
        for future in [ask.future(b"x") for _ in range(4)]:
            future.result()
    waits = sorted(seen.columns(record).get("queue:backlog", 0) for record in by_name(seen)["test.Scoring/Slow"])
    assert waits[0] < 30e6
    assert waits[-1] > 100e6  # three calls of 40 ms before it


def test_errors_are_the_servers_statuses_and_the_clients_see_the_same(seen, instrument) -> None:
    def broken(_message, _context):
        raise ValueError("private")

    def not_found(_message, context):
        context.abort(grpc.StatusCode.NOT_FOUND, "no")

    def unavailable(_message, context):
        context.set_code(grpc.StatusCode.UNAVAILABLE)
        return b""

    service = {"Broken": broken, "NotFound": not_found, "Unavailable": unavailable}
    heard = {}
    for patched in (False, True):
        if patched:
            instrument("grpc")
        with Server(handlers(**{name: ("unary_unary", behavior) for name, behavior in service.items()})) as server:
            for name in service:
                with pytest.raises(grpc.RpcError) as caught:
                    server.ask(name)(b"")
                heard.setdefault(name, []).append((caught.value.code(), caught.value.details()))
    assert all(before == after for before, after in heard.values())
    assert {name.partition("/")[2]: records[0].error for name, records in by_name(seen).items()} == {
        "Broken": "ValueError",
        "NotFound": None,
        "Unavailable": "UNAVAILABLE",
    }


def test_streams_end_with_their_last_answer(seen, instrument) -> None:
    instrument("grpc")

    def several(message, _context):
        for number in range(3):
            time.sleep(0.01)
            yield message + text(number)

    def join(messages, _context):
        return b"".join(messages)

    def echo(messages, _context):
        yield from messages

    service = handlers(Several=("unary_stream", several), Join=("stream_unary", join), Echo=("stream_stream", echo))
    with Server(service) as server:
        assert list(server.ask("Several", "unary_stream")(b"x")) == [b"x0", b"x1", b"x2"]
        assert server.ask("Join", "stream_unary")(iter([b"a", b"b"])) == b"ab"
        assert list(server.ask("Echo", "stream_stream")(iter([b"a", b"b"]))) == [b"a", b"b"]
    found = by_name(seen)
    assert {name.partition("/")[2] for name in found} == {"Several", "Join", "Echo"}
    assert found["test.Scoring/Several"][0].wall_ns > 28e6


def test_streams_tell_their_first_answer(first_bytes, instrument) -> None:
    instrument("grpc")

    def several(message, _context):
        time.sleep(0.02)
        yield message
        time.sleep(0.05)
        yield message

    def listed(message, _context):
        return [message, message]  # any iterable will do

    def nothing(_message, _context):
        return iter(())

    closed = threading.Event()

    def endless(message, _context):
        try:
            while True:
                yield message
                time.sleep(0.005)
        finally:
            closed.set()

    service = handlers(
        Several=("unary_stream", several), Listed=("unary_stream", listed), Nothing=("unary_stream", nothing),
        Endless=("unary_stream", endless), Score=("unary_unary", lambda message, context: message),
    )  # fmt: skip
    with Server(service) as server:
        begun = time.perf_counter_ns()
        assert list(server.ask("Several", "unary_stream")(b"x")) == [b"x", b"x"]
        lasted = time.perf_counter_ns() - begun
        assert list(server.ask("Listed", "unary_stream")(b"x")) == [b"x", b"x"]
        assert list(server.ask("Nothing", "unary_stream")(b"x")) == []
        assert server.ask("Score")(b"x") == b"x"
        call = server.ask("Endless", "unary_stream")(b"x")
        assert next(call) == b"x"
        call.cancel()
        assert closed.wait(10), "closing reaches the handler"
    found = {name.partition("/")[2]: told for name, told in first_bytes().items()}
    assert {name: count for name, (count, _) in found.items()} == {"Several": 1, "Listed": 1, "Endless": 1}
    assert 19e6 < found["Several"][1] < lasted - 45e6


def test_health_and_unknown_methods_are_no_requests(seen, instrument) -> None:
    instrument("grpc")
    health = grpc.method_handlers_generic_handler(
        "grpc.health.v1.Health", {"Check": grpc.unary_unary_rpc_method_handler(lambda message, context: b"")}
    )
    with Server(health) as server:
        assert server.channel.unary_unary("/grpc.health.v1.Health/Check")(b"") == b""
        with pytest.raises(grpc.RpcError) as caught:
            server.ask("Nothing")(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert seen.requests() == []


def test_the_applications_interceptors_come_after_ours_and_run_as_before(seen, instrument) -> None:
    instrument("grpc")
    order = []

    class Own(grpc.ServerInterceptor):
        def intercept_service(self, continuation, details):
            order.append(details.method)
            return continuation(details)

    with Server(handlers(Score=("unary_unary", lambda message, context: message)), interceptors=(Own(),)) as server:
        assert server.ask("Score")(b"x") == b"x"
    assert order == ["/test.Scoring/Score"]
    assert len(seen.requests()) == 1


def test_a_server_made_while_instrumented_is_quiet_afterwards(seen) -> None:
    from inferscope.integration import Registry

    before = dict(vars(grpc._server._Server))
    registry = Registry()
    registry.instrument(["grpc"])
    with Server(handlers(Score=("unary_unary", lambda message, context: message))) as server:
        server.ask("Score")(b"x")
        registry.uninstrument()
        assert server.ask("Score")(b"y") == b"y"
    assert len(seen.requests()) == 1
    assert dict(vars(grpc._server._Server)) == before


def aio_server(service, check) -> None:
    """Serves while `check(channel)` runs, on a loop of its own thread: the channel and the server share it."""

    async def run() -> None:
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((service,))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            await check(channel)
        await server.stop(None)

    failed: list[BaseException] = []

    def work() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:  # noqa: BLE001  (raised again below, in the test)
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(30)
    if failed:
        raise failed[0]


def test_asynchronous_streams_tell_their_first_answer(first_bytes, instrument) -> None:
    instrument("grpc")
    seen_contexts = []

    async def several(message, _context):
        await asyncio.sleep(0.02)
        yield message
        await asyncio.sleep(0.05)
        yield message

    async def written(message, context):
        seen_contexts.append((context.__class__.__name__, dict(context.invocation_metadata())["key"], context.peer()))
        await context.write(message)
        await asyncio.sleep(0.05)
        await context.write(message)
        context.set_trailing_metadata((("after", "all"),))

    async def joined(messages, context):
        async for message in messages:
            await context.write(message)

    async def nothing(_message, _context):
        pass

    service = handlers(
        Several=("unary_stream", several),
        Written=("unary_stream", written),
        Joined=("stream_stream", joined),
        Nothing=("unary_stream", nothing),
    )
    took = {}

    async def check(channel) -> None:
        for name in ("Several", "Written", "Nothing"):
            begun = time.perf_counter_ns()
            call = channel.unary_stream(f"/test.Scoring/{name}")(b"x", metadata=(("key", "value"),))
            assert [part async for part in call] == ([] if name == "Nothing" else [b"x", b"x"])
            took[name] = time.perf_counter_ns() - begun
            if name == "Written":
                assert dict(await call.trailing_metadata())["after"] == "all"
        assert [part async for part in channel.stream_stream("/test.Scoring/Joined")(iter([b"a", b"b"]))] == [b"a", b"b"]

    aio_server(service, check)
    ((kind, value, peer),) = seen_contexts
    assert (kind, value) == ("_ServicerContext", "value")
    assert peer.startswith("ipv4:")
    found = {name.partition("/")[2]: told for name, told in first_bytes().items()}
    assert {name: count for name, (count, _) in found.items()} == {"Several": 1, "Written": 1, "Joined": 1}
    assert 19e6 < found["Several"][1] < took["Several"] - 45e6
    assert found["Written"][1] < took["Written"] - 45e6


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_asynchronous_servers(seen, instrument) -> None:
    instrument("grpc")

    async def score(message, _context):
        with core.default.stage("model"):
            await asyncio.sleep(0.01)
        return message + b"!"

    async def several(message, _context):
        for number in range(2):
            await asyncio.sleep(0.01)
            yield message + text(number)

    async def written(message, context):
        await context.write(message + b"w")

    async def missing(_message, context):
        await context.abort(grpc.StatusCode.NOT_FOUND, "no")

    async def internal(_message, context):
        await context.abort(grpc.StatusCode.INTERNAL, "no")

    def blocking(message, _context):
        return message + b"b"

    service = handlers(
        Score=("unary_unary", score), Several=("unary_stream", several), Written=("unary_stream", written),
        Missing=("unary_unary", missing), Internal=("unary_unary", internal), Blocking=("unary_unary", blocking),
    )  # fmt: skip

    async def check(channel) -> None:
        def ask(name, kind="unary_unary"):
            return getattr(channel, kind)(f"/test.Scoring/{name}")

        assert sorted(await asyncio.gather(*(ask("Score")(text(number)) for number in range(4)))) == [b"0!", b"1!", b"2!", b"3!"]
        assert [part async for part in ask("Several", "unary_stream")(b"x")] == [b"x0", b"x1"]
        assert [part async for part in ask("Written", "unary_stream")(b"x")] == [b"xw"]
        assert await ask("Blocking")(b"x") == b"xb"
        for name, status in (("Missing", grpc.StatusCode.NOT_FOUND), ("Internal", grpc.StatusCode.INTERNAL)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ask(name)(b"")
            assert caught.value.code() is status

    aio_server(service, check)
    found = {name.partition("/")[2]: records for name, records in by_name(seen).items()}
    assert {name: len(records) for name, records in found.items()} == {
        "Score": 4, "Several": 1, "Written": 1, "Missing": 1, "Internal": 1, "Blocking": 1,
    }  # fmt: skip
    assert all(seen.columns(record)["model"] > 9e6 for record in found["Score"])
    assert found["Several"][0].wall_ns > 19e6
    assert {name: records[0].error for name, records in found.items() if records[0].error} == {"Internal": "INTERNAL"}
