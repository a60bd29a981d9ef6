"""What the device benchmarks of the simulator and of a real card share: the cost of a span beside two bare records."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from _harness import Row, cpu_ns, median_bounds, no_collections, row

from inferscope.record import core

if TYPE_CHECKING:
    from collections.abc import Callable

LOOPS = 200
"""Spans of one slice; all of them are pending at its end."""


def pairs(channel: Any, rounds: int, finish: Callable[[], object] = lambda: None) -> tuple[list[float], list[float]]:
    """CPU ns of a span and of two bare generic records in each round, in turn.

    Args:
        channel: Warm, and without a harvester that runs meanwhile.
        rounds: How many of each.
        finish: Waits until the device has done what was recorded, so that its queue never grows full.
    """
    import torch

    recorder = core.Recorder()
    events = [torch.Event(channel.device, enable_timing=True) for _ in range(2)]
    for event in events:
        event.record()
    first, second = (event.record for event in events)
    loops = range(LOOPS)

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
        finish()
        while channel.inbox:
            channel.give(*channel.inbox.popleft()[:2])

    spans()
    tidy()
    ours, plain = [], []
    with no_collections():
        for number in range(rounds):
            times = {work: cpu_ns(work) / LOOPS for work in ([bare, spans] if number % 2 else [spans, bare])}
            tidy()
            plain.append(times[bare])
            ours.append(times[spans])
    return ours, plain


def ratio(
    ours: list[float], plain: list[float], *, name: str = "device span / two bare records", judged: bool = True, note: str = ""
) -> Row:
    """The row of the cost; it holds on the bound of the median that is worse for us."""
    low, middle, high = median_bounds([mine / bare for mine, bare in zip(ours, plain, strict=True)])
    note = f"{note}{min(ours):.0f} against {min(plain):.0f} ns; 95 % {low:.2f} to {high:.2f}"
    return row(name, middle, "x", "<= 2.2" if judged else "reported", holds=not judged or high <= 2.2, note=note, high=high)
