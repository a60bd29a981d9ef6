"""The load generator: its arrivals, its reading of HTTP, and what it makes of a server that stalls."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import ssl
import subprocess
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferscope.bench import load, open_loop


class Server:
    """A bare HTTP server on a thread of its own; `stall(seconds)` blocks it as a long collection would."""

    def __init__(
        self, answer: bytes = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok", delay_s: float = 0.002, tls: ssl.SSLContext | None = None
    ) -> None:
        self.answer, self.delay_s, self.tls = answer, delay_s, tls
        self.seen: list[bytes] = []
        self.connections = 0
        self._writers: list[asyncio.StreamWriter] = []
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def __enter__(self) -> Server:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/score?x=1"

    def stall_at(self, delay_s: float, seconds: float) -> None:
        self.loop.call_soon_threadsafe(self.loop.call_later, delay_s, time.sleep, seconds)

    async def _serve(self) -> None:
        self.loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._talk, "127.0.0.1", 0, ssl=self.tls)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.sleep(0)

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next((int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")), 0)
                self.seen.append(head + await reader.readexactly(length))
                await asyncio.sleep(self.delay_s)
                writer.write(self.answer)
                if b"close" in self.answer or (b"content-length" not in self.answer and b"chunked" not in self.answer):
                    break
        writer.close()


def test_poisson_arrivals_have_independent_exponential_gaps():
    times = load.arrivals(500, 40, seed=7)
    gaps = np.diff(times) / 1e9
    assert len(times) == pytest.approx(20_000, rel=0.03)
    assert gaps.mean() == pytest.approx(1 / 500, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(1, abs=0.03)
    # Kolmogorov-Smirnov distance to the exponential distribution; 1.95/sqrt(n) is its 0.1 % point.
    ordered = np.sort(gaps)
    distance = np.abs(1 - np.exp(-500 * ordered) - (np.arange(len(ordered)) + 0.5) / len(ordered)).max()
    assert distance < 1.95 / len(ordered) ** 0.5
    counts = np.bincount((times // 100_000_000).astype(int), minlength=400)
    assert counts.var() / counts.mean() == pytest.approx(1, abs=0.25)
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 0.03


def test_arrivals_follow_the_seed_and_stay_inside_the_schedule():
    assert np.array_equal(load.arrivals(100, 5, 1), load.arrivals(100, 5, 1))
    assert not np.array_equal(load.arrivals(100, 5, 1), load.arrivals(100, 5, 2))
    times = load.arrivals(100, 5, 1)
    assert (np.diff(times) >= 0).all()
    assert times[0] >= 0
    assert times[-1] < 5_000_000_000


def test_constant_arrivals_are_evenly_spaced():
    assert np.diff(load.arrivals(200, 2, 0, "constant")).tolist() == [5_000_000] * 399


@pytest.mark.parametrize(("rate", "seconds", "process"), [(0, 1, "poisson"), (1, 0, "poisson"), (1, 1, "bursts")])
def test_an_impossible_schedule_is_refused(rate, seconds, process):
    with pytest.raises(ValueError, match=r"above 0|poisson or constant"):
        load.arrivals(rate, seconds, 0, process)


def test_a_stall_is_seen_by_everyone_who_would_have_asked_meanwhile():
    """Coordinated omission: one connection, so that the requests behind the stall are sent only after it."""
    with Server() as server:
        server.stall_at(1.0, 0.5)
        result = load.generate(load.LoadPlan(server.url, rate=100, seconds=2.0, process="constant", connections=1))
    summary = result.summary()
    assert summary["ok"] == 200
    assert np.count_nonzero(result.service_ns > 50e6) <= 3, "a closed loop would have reported one slow request"
    assert 30 <= np.count_nonzero(result.latency_ns > 50e6) <= 150
    assert summary["latency_ms"]["p90"] > 200
    assert summary["latency_ms"]["max"] > 450
    assert summary["latency_ms"]["p50"] < 100


def test_own_lateness_is_measured_and_part_of_the_latency():
    class Busy(open_loop.OpenLoopDriver):
        async def run(self) -> None:
            asyncio.get_running_loop().call_later(0.3, time.sleep, 0.2)
            await super().run()

    with Server() as server:
        offsets = load.arrivals(100, 0.8, 0, "constant").tolist()
        payload = b"GET / HTTP/1.1\r\n\r\n"
        driver = Busy("127.0.0.1", server.port, [payload] * len(offsets), offsets, connections=8, drain_s=5)
        open_loop.drive(driver)
    arrays = {name: np.asarray(getattr(driver, name)) for name in ("intended_ns", "launched_ns", "sent_ns", "done_ns", "status")}
    result = load.LoadResult(load.LoadPlan("", 100, 0.8), **arrays)
    assert result.lag_ns.min() >= 0
    assert result.lag_ns.max() > 150e6
    assert result.latency_ns.max() > 150e6
    assert 10 <= np.count_nonzero(result.lag_ns > 20e6) <= 40


def test_instants_are_in_order_and_a_fast_server_is_met_in_time():
    with Server() as server:
        result = load.generate(load.LoadPlan(server.url, rate=100, seconds=1.0, seed=3))
    assert result.answered.all()
    for earlier, later in (("intended_ns", "launched_ns"), ("launched_ns", "sent_ns"), ("sent_ns", "done_ns")):
        assert (getattr(result, earlier) <= getattr(result, later)).all()
    assert np.median(result.lag_ns) < 5e6
    assert result.summary()["latency_ms"]["p50"] >= 2


def test_bodies_are_posted_whole_and_connections_reused():
    bodies = [b'{"a": 1}', b'{"bb": 22}']
    with Server() as server:
        result = load.generate(load.LoadPlan(server.url, rate=50, seconds=1.0), bodies)
    assert result.summary()["ok"] == len(server.seen)
    assert {request.partition(b"\r\n\r\n")[2] for request in server.seen} == set(bodies)
    assert all(request.startswith(b"POST /score?x=1 HTTP/1.1\r\nHost: 127.0.0.1:") for request in server.seen)
    assert server.connections <= 16 < len(server.seen)


def test_without_bodies_it_gets():
    with Server() as server:
        load.generate(load.LoadPlan(server.url, rate=50, seconds=0.2))
    assert all(request.startswith(b"GET /score?x=1 ") for request in server.seen)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 201 Created\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\nuntil the end",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    ],
)
def test_every_way_to_end_an_answer_is_understood(answer):
    with Server(answer) as server:
        result = load.generate(load.LoadPlan(server.url, rate=100, seconds=0.4))
    assert result.answered.all()
    assert set(result.status.tolist()) == {int(answer[9:12])}


def test_errors_and_silence_are_counted_and_not_averaged_away():
    with Server(b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n") as server:
        refused = load.generate(load.LoadPlan(server.url, rate=50, seconds=0.4))
    assert refused.summary()["ok"] == 0
    assert refused.summary()["status"] == {"503": len(refused.status)}
    with Server(delay_s=30) as server:
        silent = load.generate(load.LoadPlan(server.url, rate=50, seconds=0.3, drain_s=0.2))
    summary = silent.summary()
    assert summary["answered"] == 0
    assert summary["unanswered"] == len(silent.status) > 0
    assert summary["latency_ms"]["p50"] is None
    assert silent.share_over(20) == 1.0


def test_nobody_listening_is_no_crash():
    result = load.generate(load.LoadPlan("http://127.0.0.1:9/", rate=50, seconds=0.2, drain_s=1))
    assert result.summary()["answered"] == 0


def test_percentiles_need_enough_requests():
    zeros = np.zeros(500, dtype=np.int64)
    done = np.arange(1, 501, dtype=np.int64) * 1_000_000
    result = load.LoadResult(load.LoadPlan("", 1, 1), zeros, zeros, zeros, done, zeros + 200)
    latency = result.summary()["latency_ms"]
    assert (latency["p50"], latency["p99"], latency["max"]) == (250.0, 495.0, 500.0)
    assert latency["p999"] is None
    assert result.share_over(450) == pytest.approx(0.1)


def test_a_separate_process_gives_the_same_result_back(tmp_path):
    with Server() as server:
        result = load.measure(load.LoadPlan(server.url, rate=100, seconds=0.5, seed=4), [b"{}"])
    assert result.plan.seed == 4
    assert result.summary()["ok"] == len(load.arrivals(100, 0.5, 4)) == len(server.seen)
    assert load.LoadResult.from_json(json.loads(json.dumps(result.to_json()))).latency_ns.tolist() == result.latency_ns.tolist()
    with pytest.raises(ValueError, match="schema 99"):
        load.LoadResult.from_json({"schema": 99})


def test_command_line_says_what_is_wrong(capsys):
    assert load.main(["--url", "ftp://127.0.0.1/", "--rate", "1", "--seconds", "1"]) == 64
    assert "http://" in capsys.readouterr().err


ANSWERS = st.lists(
    st.sampled_from(
        [
            (200, b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"),
            (204, b"HTTP/1.1 204 No Content\r\n\r\n"),
            (503, b"HTTP/1.1 503 Busy\r\ncontent-length:0\r\n\r\n"),
            (200, b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2;x=y\r\n\r\n\r\n0\r\n\r\n"),
        ]
    ),
    min_size=1,
    max_size=4,
)


@given(ANSWERS, st.integers(1, 9))
def test_an_answer_may_arrive_in_any_pieces(answers, size):
    parser = open_loop.ReplyParser()
    found = []
    for status, raw in answers:
        pieces = [raw[start : start + size] for start in range(0, len(raw), size)]
        found += [(index == len(pieces) - 1, got) for index, piece in enumerate(pieces) if (got := parser.feed(piece)) is not None]
        assert found[-1] == (True, status)
    assert len(found) == len(answers)


def test_what_is_not_http_is_refused():
    with pytest.raises(ValueError, match="not an HTTP"):
        open_loop.ReplyParser().feed(b"SSH-2.0\r\n\r\n")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_https_is_spoken_and_certificates_are_checked(tmp_path, monkeypatch):
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", "-subj"]
    command += ["/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    with Server(tls=context) as server:
        url = server.url.replace("http:", "https:")
        untrusted = load.generate(load.LoadPlan(url, rate=50, seconds=0.2, drain_s=1))
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        trusted = load.generate(load.LoadPlan(url, rate=50, seconds=0.4))
    assert untrusted.summary()["answered"] == 0
    assert trusted.fine.all()
