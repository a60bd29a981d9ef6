"""Device timing on a real card: what a span costs its caller, and how well its clock is aligned with the host's.

The truth of a start comes from a kernel that the host sees end: an empty stream is given one event, and the host spins on its query; the event's instant
lies within the spin's last step. Run it on an otherwise idle card. `--device simulated` runs the same code on the simulated accelerator, to see that it
works; its figures are of no card and go to no file of results.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from _device import pairs, ratio
from _harness import Row, arguments, finish, row

RESULTS = Path(__file__).resolve().parent.parent / "results"
"""A full run leaves `gpu-<card>.json` here, to be committed."""


KIND = "cuda"
"""The device type that is measured."""


def here():
    """The device that is measured."""
    import torch

    return torch.device(KIND, torch.accelerator.current_device_index())


def captured(side):
    """A graph, and the block that captures into it."""
    import torch

    if KIND == "cuda":
        graph = torch.cuda.CUDAGraph()
        return torch.cuda.graph(graph, stream=side)
    block = contextlib.ExitStack()
    block.enter_context(side)
    block.enter_context(torch.accelerator.Graph(capture_error_mode="global"))
    return block


def rooms():
    """A harvester of its own on the current card, warm."""
    import torch

    from inferscope.device.backends import CaptureWatch
    from inferscope.device.events import DeviceTimer
    from inferscope.device.harvest import Harvester

    torch.ones(1, device=here())
    timer = DeviceTimer(per_second=10**9)
    harvester = Harvester(timer, None, CaptureWatch())
    channel = timer.channel(here())
    harvester.start()
    for _ in range(60):
        started = channel.begin(None)
        channel.end(started, "warm")
        time.sleep(0.01)
        harvester.run_once()
    return channel, harvester


def cost(rounds: int) -> list[Row]:
    """CPU time of a span against two bare generic records, in turn."""
    import torch

    channel, harvester = rooms()
    ours, plain = pairs(channel, rounds, torch.accelerator.synchronize)
    harvester.after_fork()
    return [
        ratio(ours, plain),
        row("device span", statistics.median(ours), "ns", "<= 5000", holds=statistics.median(ours) <= 5000),
        row("two bare records", statistics.median(plain), "ns", "reported"),
    ]


def queries(rounds: int) -> list[Row]:
    """What one question costs the harvester while the card works: torch's, which holds the interpreter's lock, and the runtime's own."""
    import torch

    from inferscope.device.backends import cuda_query

    side = 2048 if KIND == "cuda" else 16  # the simulator computes on the host
    value = torch.randn(side, side, device=here())
    event = torch.Event(here(), enable_timing=True)
    ask = cuda_query()
    found: dict[str, list[float]] = {"torch": [], "runtime": []}
    for _ in range(rounds):
        for _ in range(20):
            value @ value  # what the card is busy with
        event.record()
        for name, done in (("torch", lambda event: event.query()), ("runtime", ask)):
            if done is None:
                continue
            began = time.perf_counter_ns()
            for _ in range(10):
                done(event)
            found[name].append((time.perf_counter_ns() - began) / 10)
    torch.accelerator.synchronize()
    rows = [row("query under load, torch", statistics.median(found["torch"]), "ns", "reported")]
    if ask is not None:
        rows.append(row("query under load, without the interpreter's lock", statistics.median(found["runtime"]), "ns", "reported"))
    return rows


def captures(number: int) -> list[Row]:
    """Graph captures in the global mode beside a harvester that never rests."""
    import torch

    from inferscope.device.events import timer
    from inferscope.device.harvest import Harvester
    from inferscope.integration import Registry

    registry = Registry()
    registry.instrument(["torch"])
    harvester = Harvester(timer, None)
    harvester.start()
    net, value, side = (
        torch.nn.Linear(256, 256).to(here()),
        torch.randn(64, 256, device=here()),
        torch.cuda.Stream() if KIND == "cuda" else torch.Stream(here()),
    )
    with side:
        net(value)
    torch.accelerator.synchronize()
    stop, killed = threading.Event(), 0

    def harvest() -> None:
        while not stop.is_set():
            harvester.run_once()

    thread = threading.Thread(target=harvest)
    thread.start()
    for _ in range(number):
        net(value)
        try:
            with captured(side):
                net(value)
        except RuntimeError:
            killed += 1
    stop.set()
    thread.join()
    harvester.stop()
    registry.uninstrument()
    harvester.after_fork()
    return [row("graph captures killed by us", killed, "", "0", holds=killed == 0, note=f"of {number:,}")]


def profiler_starts(spans: int) -> list[Row]:
    """Starts against the kernels' own stamps, which CUPTI takes on the card and torch's profiler puts on the host's clock."""
    import torch

    channel, harvester = rooms()
    seen = []
    harvester.sinks.append(seen.append)
    value = torch.randn(512, 512, device=here())
    torch.accelerator.synchronize()
    harvester.run_once()
    seen.clear()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(spans):
            started = channel.begin(None)
            value.relu_()
            channel.end(started, "span")
            torch.accelerator.synchronize()
            time.sleep(0.002)
            harvester.run_once()
    harvester.run_once()
    harvester.after_fork()
    kernels = sorted(event.start_ns() for event in profile.profiler.kineto_results.events() if "elementwise" in event.name())
    placed = [span.start_ns for span in seen if span.start_ns is not None]
    if not kernels or len(kernels) != len(placed):
        return [row("starts against CUPTI", len(placed), "spans", "reported", note=f"{len(kernels)} kernels: not compared")]
    # Kineto stamps wall time, ours is the monotonic clock: one constant between them, and what moves around it is error.
    apart = [kernel - start for kernel, start in zip(kernels, sorted(placed), strict=True)]
    middle = statistics.median(apart)
    near = 100 * sum(abs(each - middle) <= 15_000 for each in apart) / len(apart)
    return [row("starts within 15 us of CUPTI's, one constant apart", near, "%", ">= 99.6", holds=near >= 99.6, note=f"{len(apart)} spans")]


def memory() -> list[Row]:
    """What the driver says through NVML against what torch reserved."""
    import torch

    from inferscope.device.monitor import identity_of, monitor_for

    device = here()
    monitor, identity = monitor_for(device), identity_of(device)
    monitor.run_once()
    uuid = None if identity is None else monitor.find(identity)
    held = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    monitor._asked = 0
    used = next((card.memory_used_bytes for card in monitor.run_once() if card.uuid == uuid), None)
    monitor.close()
    if used is None:
        return []
    return [
        row(
            "driver's used memory at least what torch reserved",
            used - torch.accelerator.memory_reserved(),
            "B",
            ">= 0",
            holds=used >= held.nbytes,
        )
    ]


def alignment(spans: int) -> list[Row]:
    """Starts against the instants between which the host saw the event complete."""
    import torch

    channel, harvester = rooms()
    seen, bounds = [], []
    harvester.sinks.append(seen.append)
    for _ in range(spans):
        torch.accelerator.synchronize()
        started = channel.begin(None)
        before = started[2]  # its issue: it may be done before the first question
        while True:
            asked = time.perf_counter_ns()
            if started[0].query():
                break
            before = asked
        after = time.perf_counter_ns()
        channel.end(started, "span")
        bounds.append((before, after))
        time.sleep(0.01)
        harvester.run_once()
    torch.accelerator.synchronize()
    harvester.run_once()
    pairs = [(span, bound) for span, bound in zip(seen, bounds, strict=True) if span.start_ns is not None]
    outside = sorted(max(0, low - span.start_ns, span.start_ns - high) for span, (low, high) in pairs)
    covered = sum(low - span.error_ns <= span.start_ns <= high + span.error_ns for span, (low, high) in pairs)
    near = 100 * sum(error <= 15_000 for error in outside) / len(pairs)
    status = next(iter(harvester.status().values()))
    harvester.after_fork()
    note = f"{len(pairs)} spans, median {statistics.median(outside) / 1e3:.1f} us, drift {'n/a' if status['drift_ppm'] is None else format(status['drift_ppm'], '.1f')} ppm"
    return [
        row("starts within 15 us of what the host saw", near, "%", ">= 99.6", holds=near >= 99.6, note=note),
        row("starts within their error bar", 100 * covered / len(pairs), "%", ">= 99", holds=covered >= 0.99 * len(pairs)),
    ]


def main() -> int:
    global KIND  # noqa: PLW0603  (one run measures one device)
    asked = arguments(__doc__, lambda parser: parser.add_argument("--device", choices=("cuda", "simulated"), default="cuda"))
    import torch

    simulated = asked.device == "simulated"
    if simulated:
        from inferscope.testing import accelerator

        accelerator.load().operator_cost("aten::addmm", 50.0)
        KIND = "sim"
    elif not torch.cuda.is_available():
        print("torch sees no CUDA device: nothing was measured (benchmarks/device.py runs on the simulated accelerator)")
        return 0
    quick = asked.quick
    rows = [
        *cost(60 if quick else 400),
        *queries(50 if quick else 500),
        *captures(50 if quick else 1000),
        *alignment(500 if quick else 3000),
        *([] if simulated else profiler_starts(100 if quick else 1000)),  # CUPTI's
        *memory(),
    ]
    if simulated:
        return finish(rows, asked.json, distributions=("torch",), device="simulated")
    card = torch.cuda.get_device_name()
    target = asked.json or (None if quick else RESULTS / f"gpu-{card.lower().replace(' ', '-')}.json")
    return finish(rows, target, distributions=("torch",), device=card)


if __name__ == "__main__":
    sys.exit(main())
