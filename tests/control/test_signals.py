"""A capture by signal; whoever had the signal before still gets it."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from inferscope import guard
from inferscope.control import Control, Options
from inferscope.control.signals import SignalSource
from inferscope.errors import InferscopeError
from inferscope.settings import load


@pytest.fixture
def earlier():
    """An application's own handler."""
    seen = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: seen.append(number))
    yield seen
    signal.signal(signal.SIGUSR2, before)


def test_the_earlier_handler_is_called_and_comes_back(earlier):
    own = signal.getsignal(signal.SIGUSR2)
    woken = []
    source = SignalSource("usr2", lambda: woken.append(1))
    signal.raise_signal(signal.SIGUSR2)
    signal.raise_signal(signal.SIGUSR2)
    assert (source.take(), source.take()) == (True, False)
    assert (earlier, woken) == ([signal.SIGUSR2] * 2, [1, 1])
    source.restore()
    assert signal.getsignal(signal.SIGUSR2) is own


def test_a_later_handler_is_left_alone(earlier):
    source = SignalSource("SIGUSR2", lambda: None)
    later = lambda number, frame: None
    signal.signal(signal.SIGUSR2, later)
    assert not source.active
    source.restore()
    assert signal.getsignal(signal.SIGUSR2) is later


@pytest.mark.parametrize("name", ["SIGKILL", "SIGINT", "SIGSEGV", "nonsense", ""])
def test_other_signals_are_refused(name):
    with pytest.raises(InferscopeError, match="SIGUSR1, SIGUSR2, SIGHUP"):
        SignalSource(name, lambda: None)


def test_only_the_main_thread_can_listen(earlier):
    errors = []

    def work():
        try:
            SignalSource("SIGUSR2", lambda: None)
        except InferscopeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert "main thread" in errors[0]


def test_a_signal_asks_for_one_capture_and_wakes_the_loop(service, directory, earlier, until):
    control = Control(service.operations(), Options(signal="SIGUSR2"), environ={})
    control.open(directory)
    assert control.status()["signal"] == "SIGUSR2"
    stop = threading.Event()
    thread = threading.Thread(target=lambda: [control.serve_once(30.0) for _ in iter(stop.is_set, True)])
    thread.start()
    time.sleep(0.05)
    begun = time.monotonic()
    os.kill(os.getpid(), signal.SIGUSR2)
    until(lambda: service.events)
    assert time.monotonic() - begun < 5.0
    assert service.calls == [("capture", "signal SIGUSR2", 8, "signal")]
    stop.set()
    control.wake()
    thread.join(5)
    control.stop()


def test_a_flood_of_signals_is_one_capture(service, directory, earlier):
    control = Control(service.operations(), Options(signal="SIGUSR2"), environ={})
    control.open(directory)
    for _ in range(200):
        signal.raise_signal(signal.SIGUSR2)
    for _ in range(3):
        control.serve_once(0.0)
    assert len(service.calls) == 1
    assert len(earlier) == 200
    control.stop()


def test_a_signal_when_nobody_serves_is_passed_on_and_forgotten(service, directory, earlier):
    control = Control(service.operations(), Options(signal="SIGUSR2"), environ={})
    control.open(directory)
    control.close()
    signal.raise_signal(signal.SIGUSR2)
    control.open(directory)
    control.serve_once(0.0)
    assert service.calls == []
    control.stop()
    signal.raise_signal(signal.SIGUSR2)
    assert len(earlier) == 2


def test_what_is_wanted_comes_from_keywords_the_environment_and_a_file(monkeypatch, tmp_path):
    def wanted(environ=None, file="", **keywords):
        (tmp_path / "inferscope.toml").write_text(file)
        return Options.of(load(keywords, environ={"INFERSCOPE_STATE_DIR": str(tmp_path), **(environ or {})}, directory=tmp_path))

    assert wanted() == Options()
    assert wanted({"INFERSCOPE_CONTROL": "0", "INFERSCOPE_CONTROL_HTTP": "9000"}) == Options(socket=False)
    assert wanted({"INFERSCOPE_CONTROL_HTTP": "9000"}).http_port == 9000
    assert wanted({"INFERSCOPE_CONTROL_HTTP": "[::1]:9000"}).http_host == "::1"
    assert wanted({"INFERSCOPE_CONTROL_SIGNAL": "SIGUSR2"}).signal == "SIGUSR2"
    assert wanted(file='control_http = 9001\ncontrol_opamp = "http://127.0.0.1:1"').http_port == 9001
    assert wanted({"INFERSCOPE_CONTROL_HTTP": "9000"}, "control_http = 9001", control_http=9002).http_port == 9002
    assert wanted(control_token_file="/run/token", control_signal="USR2").token_file == Path("/run/token")
    assert wanted(control=False).socket is False
    with pytest.raises(InferscopeError, match="port"):
        wanted({"INFERSCOPE_CONTROL_HTTP": "everywhere"})
    monkeypatch.setenv("INFERSCOPE_STRICT", "0")
    guard.reset()
    assert wanted({"INFERSCOPE_CONTROL_HTTP": "99999999"}).http_port is None
    assert wanted({"INFERSCOPE_CONTROL": "perhaps"}).socket is False


def test_switched_off_everything_is_off(service, directory):
    control = Control(service.operations(), Options(socket=False, signal="SIGUSR2", http_port=0), environ={})
    control.open(directory)
    assert list(directory.iterdir()) == []
    assert (control.status()["socket"], control.status()["signal"]) == ("off", "off")
    control.stop()
