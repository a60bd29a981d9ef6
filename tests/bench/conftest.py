"""A service to measure, as a script: `python SERVICE PORT DELAY_S [BIAS]`; and a function to measure."""

from __future__ import annotations

import json
import shlex
import sys

import pytest

SERVICE = """
import asyncio, json, sys
port, delay, bias = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]) if len(sys.argv) > 3 else 0.0
async def talk(reader, writer):
    try:
        while True:
            head = await reader.readuntil(b"\\r\\n\\r\\n")
            size = next((int(line.split(b":")[1]) for line in head.split(b"\\r\\n") if line.lower().startswith(b"content-length")), 0)
            body = await reader.readexactly(size)
            if b"/healthz" not in head:
                await asyncio.sleep(delay)
            if b"/die" in head:
                sys.exit(9)
            out = b"not json" if b"/garbage" in head else json.dumps({"score": (json.loads(body)["a"] if body else 1.0) + bias}).encode()
            status = b"503 Busy" if b"/busy" in head else b"200 OK"
            writer.write(b"HTTP/1.1 %s\\r\\nContent-Length: %d\\r\\n\\r\\n" % (status, len(out)) + out)
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()
async def main():
    async with await asyncio.start_server(talk, "127.0.0.1", port) as server:
        await server.serve_forever()
asyncio.run(main())
"""

FUNCTIONS = """
import ctypes, os, time
import inferscope
def score(x, batch_size=1, precision="fp32"):
    with inferscope.stage("think"):
        time.sleep(0.001)
    return [x["a"], 1.0 - x["a"]] if precision == "fp32" else [float("nan"), 0.0]
def batch(values, batch_size):
    assert len(values) == batch_size
    return [value["a"] for value in values]
def fails(): raise KeyError("secret")
def sometimes(x):
    if x["a"] < 0.5: raise RuntimeError("no")
    return x
def dies(): os._exit(7)
def crashes(): ctypes.string_at(0)
def strange(): return object()
async def later(): return 1
CONSTANT = 3
"""


@pytest.fixture
def command(tmp_path):
    """What starts the service, with {port} still open."""
    path = tmp_path / "service.py"
    path.write_text(SERVICE)
    return lambda *words: shlex.join([sys.executable, str(path), "{port}", *map(str, words)])


@pytest.fixture(scope="session")
def write_functions():
    """Puts the module and a file of inputs into a folder."""

    def write(folder):
        (folder / "functions.py").write_text(FUNCTIONS)
        (folder / "inputs.jsonl").write_text("\n".join(json.dumps({"a": index / 20}) for index in range(20)))

    return write


@pytest.fixture
def functions(tmp_path, monkeypatch, write_functions):
    """A working directory with a module of functions and a file of inputs."""
    write_functions(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path
