"""The rules of `tests/conftest.py` hold, so that other tests may rely on them."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

ELSEWHERE = "192.0.2.1"  # reserved for documentation: nobody is there


def test_strict():
    assert os.environ["INFERSCOPE_STRICT"] == "1"


def test_state_lies_in_the_tests_own_directory(tmp_path, state_dir):
    assert Path(os.environ["INFERSCOPE_STATE_DIR"]) == state_dir
    assert state_dir.is_relative_to(tmp_path)
    assert not state_dir.exists()


def test_no_setting_of_the_developer_is_left():
    left = {name for name in os.environ if name.startswith(("INFERSCOPE_", "OTEL_"))}
    assert left <= {"INFERSCOPE_STRICT", "INFERSCOPE_STATE_DIR", "INFERSCOPE_PURE"}


@pytest.mark.parametrize("method", ["connect", "connect_ex"])
def test_no_connection_leaves_the_machine(method):
    with socket.socket() as sock, pytest.raises(AssertionError, match=ELSEWHERE):
        getattr(sock, method)((ELSEWHERE, 9))


def test_no_datagram_leaves_the_machine():
    with socket.socket(type=socket.SOCK_DGRAM) as sock, pytest.raises(AssertionError, match=ELSEWHERE):
        sock.sendto(b"x", (ELSEWHERE, 9))


def test_no_look_up_leaves_the_machine():
    with pytest.raises(AssertionError, match=r"collector\.invalid"):
        socket.create_connection(("collector.invalid", 4318), timeout=1)


async def test_asyncio_is_guarded_too():
    with pytest.raises(AssertionError, match=ELSEWHERE):
        await asyncio.open_connection(ELSEWHERE, 9)


def test_loopback_works():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(("localhost", server.getsockname()[1])) as client:
        client.sendall(b"x")
        with server.accept()[0] as accepted:
            assert accepted.recv(1) == b"x"


@given(st.integers())
def test_properties_may_be_tested_beside_the_fixtures(number):
    assert number == int(str(number))
