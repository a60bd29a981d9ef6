"""Reading the stacks of threads that run: once a second in a service, here as fast as it goes, while the stacks move."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, sys, threading, time

def deep(n):
    return n if n == 0 else deep(n - 1)

def numbers():
    for n in range(20):
        yield deep(3)

async def waits():
    await asyncio.sleep(0)
    return deep(2)

class Cycle(threading.local):
    pass

def work(stop):
    while not stop.is_set():
        deep(30)
        sum(numbers())
        asyncio.run(waits())
        local = Cycle()
        local.itself = local
        [[] for _ in range(300)]

stop = threading.Event()
threads = [threading.Thread(target=work, args=(stop,), daemon=True) for _ in range(4)]
for thread in threads:
    thread.start()
sys.setswitchinterval(1e-5)
end = time.monotonic() + 4
reads = found = 0
if sys.argv[1] == "native":
    from inferscope.record import core
    wanted = {("deep", "<string>"): None, ("work", "<string>"): None}
    read = lambda ident: core.default._within(ident, wanted)
else:
    from inferscope.record.sites import site_of_thread
    read = site_of_thread
while time.monotonic() < end:
    for thread in threads:
        reads += 1
        found += read(thread.ident) not in (None, "unknown")
stop.set()
print(reads, found)
"""


@pytest.mark.parametrize("core", ["native", "pure"])
def test_stacks_that_move_can_be_read(core: str) -> None:
    if core == "native":
        pytest.importorskip("inferscope.record._native")
    environ = {**os.environ, "INFERSCOPE_PURE": "" if core == "native" else "1"}
    command = [sys.executable, "-X", "faulthandler", "-c", PROGRAM, core]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environ)
    assert done.returncode == 0, done.stderr[-2000:]
    reads, found = map(int, done.stdout.split())
    assert reads > 100
    assert found > reads / 2
