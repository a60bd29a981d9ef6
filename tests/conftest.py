"""Rules for every test: failures inside inferscope raise, state lies in the test's own directory, nothing leaves the machine."""

from __future__ import annotations

import ipaddress
import os
import socket
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings as hypothesis_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

# Before inferscope is imported by any test: the developer's own settings must not decide what a test sees.
for _name in [name for name in os.environ if name.startswith(("INFERSCOPE_", "OTEL_")) and name != "INFERSCOPE_PURE"]:
    del os.environ[_name]
os.environ["INFERSCOPE_STRICT"] = "1"

# A deadline for one example measures the machine's load, not the code.
hypothesis_settings.register_profile("inferscope", deadline=None)
hypothesis_settings.load_profile("inferscope")


class NetworkError(AssertionError):
    """A test tried to reach another machine."""


def _local(address: Any) -> bool:
    """Whether a socket address stays on this machine: a Unix socket, loopback, or the port of an unbound address."""
    if not isinstance(address, tuple):
        return True
    host = address[0]
    if host in {"", "localhost"}:
        return True
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return False
    return ip.is_loopback or ip.is_unspecified


def _guarded(original: Callable[..., Any]) -> Callable[..., Any]:
    """A socket's method, refusing when its last argument is an address elsewhere."""

    def call(sock: socket.socket, *args: Any) -> Any:
        if not _local(args[-1]):
            message = f"tests reach no other machine: {original.__name__}{args[-1]!r}"
            raise NetworkError(message)
        return original(sock, *args)

    return call


@pytest.fixture(autouse=True, scope="session")
def no_network() -> Iterable[None]:
    """Refuse connections, datagrams and name look-ups that leave the machine."""
    patch = pytest.MonkeyPatch()
    for name in ("connect", "connect_ex", "sendto"):
        patch.setattr(socket.socket, name, _guarded(getattr(socket.socket, name)))
    original = socket.getaddrinfo

    def getaddrinfo(host: Any, *args: Any, **kwargs: Any) -> Any:
        text = host.decode() if isinstance(host, bytes) else host
        if text is not None and not _local((text,)):
            message = f"tests look up no other machine: {text}"
            raise NetworkError(message)
        return original(host, *args, **kwargs)

    patch.setattr(socket, "getaddrinfo", getaddrinfo)
    yield
    patch.undo()


@pytest.fixture(autouse=True)
def state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The state directory of this test, also for the processes that it starts."""
    path = tmp_path / "state"
    monkeypatch.setenv("INFERSCOPE_STATE_DIR", str(path))
    return path


def _accelerator() -> bool:
    """Whether torch sees a CUDA device."""
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


def pytest_addoption(parser: pytest.Parser) -> None:
    """What the tests marked gpu run on."""
    parser.addoption("--device", choices=("cuda", "simulated"), default="cuda", help="what tests marked gpu run on")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what needs an accelerator where there is none; torch is loaded only when such a test was collected."""
    wanting = [item for item in items if item.get_closest_marker("gpu")]
    if config.getoption("device") == "simulated":
        wanting = [item for item in wanting if "card" not in getattr(item, "fixturenames", ())]
    if wanting and not _accelerator():
        for item in wanting:
            item.add_marker(pytest.mark.skip(reason="needs an accelerator"))
