"""Device timing on a real card: what a span costs its caller, and how well its clock is aligned with the host's.

The truth of a start comes from a kernel that the host sees end: an empty stream is given one event, and the host spins on its query; the event's instant
lies within the spin's last step. Run it on an otherwise idle card.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from _harness import Row, arguments, cpu_ns, finish, median_bounds, no_collections, row


def rooms():
    """A harvester of its own on the current card, warm."""
    import torch

    from inferscope.device.backends import CaptureWatch
    from inferscope.device.events import DeviceTimer
    from inferscope.device.harvest import Harvester

    torch.ones(1, device="cuda")
    timer = DeviceTimer(per_second=10**9)
    harvester = Harvester(timer, None, CaptureWatch())
    channel = timer.channel(torch.device("cuda", torch.cuda.current_device()))
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

    from inferscope.record import core

    channel, harvester = rooms()
    recorder = core.Recorder()
    events = [torch.Event(channel.device, enable_timing=True) for _ in range(2)]
    for event in events:
        event.record()
    first, second = (event.record for event in events)
    loops = range(100)

    def bare() -> None:
        for _ in loops:
            first()
            second()

    def spans() -> None:
        current, begin, end = recorder.current, channel.begin, channel.end
        for _ in loops:
            started = begin(current())
            end(started, "forward")

    def tidy() -> None:
        torch.cuda.synchronize()
        while channel.inbox:
            channel.give(*channel.inbox.popleft()[:2])

    spans()
    tidy()
    ours, plain = [], []
    with no_collections():
        for number in range(rounds):
            times = {work: cpu_ns(work) / len(loops) for work in ([bare, spans] if number % 2 else [spans, bare])}
            tidy()
            plain.append(times[bare])
            ours.append(times[spans])
    harvester.after_fork()
    low, middle, high = median_bounds([mine / two for mine, two in zip(ours, plain, strict=True)])
    note = f"95 % {low:.2f} to {high:.2f}"
    return [
        row("device span / two bare records", middle, "x", "<= 2.2", holds=low <= 2.2, note=note, high=high),
        row("device span", statistics.median(ours), "ns", "<= 5000", holds=statistics.median(ours) <= 5000),
        row("two bare records", statistics.median(plain), "ns", "reported"),
    ]


def alignment(spans: int) -> list[Row]:
    """Starts against the instants between which the host saw the event complete."""
    import torch

    channel, harvester = rooms()
    seen, bounds = [], []
    harvester.sinks.append(seen.append)
    for _ in range(spans):
        torch.cuda.synchronize()
        started = channel.begin(None)
        before = time.perf_counter_ns()
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
    torch.cuda.synchronize()
    harvester.run_once()
    pairs = [(span, bound) for span, bound in zip(seen, bounds, strict=True) if span.start_ns is not None]
    outside = sorted(max(0, low - span.start_ns, span.start_ns - high) for span, (low, high) in pairs)
    covered = sum(low - span.error_ns <= span.start_ns <= high + span.error_ns for span, (low, high) in pairs)
    near = 100 * sum(error <= 15_000 for error in outside) / len(pairs)
    status = next(iter(harvester.status().values()))
    harvester.after_fork()
    note = f"{len(pairs)} spans, median {statistics.median(outside) / 1e3:.1f} us, drift {status['drift_ppm']:.1f} ppm"
    return [
        row("starts within 15 us of what the host saw", near, "%", ">= 99.6", holds=near >= 99.6, note=note),
        row("starts within their error bar", 100 * covered / len(pairs), "%", ">= 99", holds=covered >= 0.99 * len(pairs)),
    ]


def main() -> int:
    asked = arguments(__doc__)
    import torch

    if not torch.cuda.is_available():
        print("torch sees no CUDA device: nothing was measured (benchmarks/device.py runs on the simulated accelerator)")
        return 0
    rows = [*cost(60 if asked.quick else 400), *alignment(500 if asked.quick else 3000)]
    return finish(rows, asked.json, distributions=("torch",), device=torch.cuda.get_device_name())


if __name__ == "__main__":
    sys.exit(main())
