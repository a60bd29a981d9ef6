"""Whatever fails inside, the host's result is what it would have been."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from inferscope.record.fallback import Recorder
from inferscope.record.pure import bands, blame, classes, critical, histogram, hold, registry, request, retention, span, state

INTERNALS: list[tuple[Any, str]] = [
    (histogram.Series, "record"),
    (bands.BandTable, "add"),
    (blame.Sites, "find"),
    (blame.Sites, "blame"),
    (blame.Sites, "where"),
    (classes.RequestClass, "count_request"),
    (classes.RequestClass, "count_latency"),
    (classes.RequestClass, "cpu_weight"),
    (critical, "_parents"),
    (hold.Holds, "begin"),
    (hold.Holds, "seen"),
    (hold.Holds, "look"),
    (registry.Registry, "request_class"),
    (registry.Registry, "interval"),
    (registry.Registry, "nested"),
    (registry.Registry, "define_stage"),
    (request, "critical_path"),
    (request, "pack"),
    (request.Request, "_begin"),
    (request.Request, "_start"),
    (request.Request, "_readings"),
    (request.Request, "_close"),
    (request.Request, "_count"),
    (request.Request, "_retain"),
    (request.Request, "elsewhere"),
    (request.Request, "left"),
    (request.Request, "place"),
    (retention.Retention, "decide"),
    (retention.Retention, "put"),
    (span, "get_ident"),
    (hold, "get_ident"),
    (state.ThreadState, "__init__"),
]


def boom(*_: Any, **__: Any) -> Any:
    raise RuntimeError("planted")


def host(recorder: Any) -> list[Any]:
    """A program that uses everything, and what it computes."""
    results: list[Any] = []
    lock = recorder.lock("l", threading.Lock())

    @recorder.request("decorated")
    @recorder.stage("f")
    def function(x):
        if x > 2:
            raise KeyError(x)
        return x * 2

    def other(current):
        with recorder.attach(current), recorder.stage("thread"), lock:
            results.append("thread")

    for x in (1, 2, 3):
        try:
            with recorder.request("outer", started_ns=1) as current, recorder.stage("a"):
                results.append(function(x))
                recorder.interval("copy", "h2d", 1, 2)
                crossing = recorder.stage("late")
                crossing.__enter__()
                with recorder.stage("b"):
                    crossing.__exit__(None, None, None)
                with lock:
                    thread = threading.Thread(target=other, args=(current,))
                    thread.start()
                    thread.join(0.002)
                thread.join()
        except KeyError as error:
            results.append(error.args)
    for item in recorder.stage("g")(lambda: (yield 5))():
        results.append(item)
    return results


EXPECTED = [2, "thread", 4, "thread", (3,), 5]


def test_the_host_program_without_faults():
    recorder = Recorder()
    assert host(recorder) == EXPECTED
    assert recorder.counters()["internal_errors"] == 0


@pytest.mark.parametrize(("owner", "name"), INTERNALS, ids=[f"{getattr(o, '__name__', o)}.{n}" for o, n in INTERNALS])
def test_the_host_program_with_a_failing_part(monkeypatch, owner, name):
    monkeypatch.delenv("INFERSCOPE_STRICT")
    recorder = Recorder()
    monkeypatch.setattr(owner, name, boom)
    assert host(recorder) == EXPECTED
    monkeypatch.undo()
    assert host(recorder) == EXPECTED, "and afterwards as well"
    with recorder.request("again") as request_:
        assert recorder.current() is request_


@pytest.mark.parametrize("failing_call", range(1, 60))
def test_a_clock_that_fails_once(monkeypatch, failing_call):
    monkeypatch.delenv("INFERSCOPE_STRICT")
    calls = [0]

    def clock():
        calls[0] += 1
        if calls[0] == failing_call:
            raise RuntimeError("planted")
        return 1000 + calls[0]

    recorder = Recorder(clock=clock)
    assert host(recorder) == EXPECTED
    if calls[0] >= failing_call:
        assert recorder.counters()["internal_errors"] >= 1
    for row in recorder.drain():
        assert sum(memoryview(row[14]).cast("q")) == row[3], "what is kept still sums to its wall time"


def test_strict_raises_our_failures(monkeypatch):
    monkeypatch.setenv("INFERSCOPE_STRICT", "1")
    recorder = Recorder()
    monkeypatch.setattr(request.Request, "_begin", boom)
    with pytest.raises(RuntimeError, match="planted"), recorder.request("r"):
        pass
    assert recorder.counters()["internal_errors"] == 1
