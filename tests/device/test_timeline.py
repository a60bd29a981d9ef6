"""A device's stamps on the host's clock: within 15 us with a drifting clock, and an error bar that holds the truth."""

from __future__ import annotations

import random

import pytest


def errors_of(rooms, *, seconds: float, busy: float, seed: int = 1):
    """(start error, error bar) by span, ns, after `seconds` of work at that utilisation with random lengths and pauses."""
    sim, luck = rooms.sim, random.Random(seed)
    sim.virtual_clock()
    sim.configure(call_us=0.5, launch_us=4.0, jitter_us=1.5, drift_ppm=80, offset_s=3.0, log_events=1)
    rooms.prove()
    sim.clear_log()
    until, index = sim.now_ns() + int(seconds * 1e9), 0
    while sim.now_ns() < until:
        length = luck.expovariate(1 / 8.0)
        rooms.span(length, str(index))
        index += 1
        sim.advance_ms(length / busy * luck.uniform(0.6, 1.4))
        rooms.harvester.run_once()
    sim.advance_ms(10_000.0)
    rooms.harvester.run_once()
    truth = sim.reached_ns()
    return [(span.start_ns - truth[span.name], span.error_ns) for span in rooms.spans if span.start_ns is not None]


@pytest.mark.parametrize("busy", [0.35, 0.9, 0.98])
def test_starts_are_aligned_at_any_utilisation(rooms, busy) -> None:
    found = errors_of(rooms, seconds=10.0, busy=busy)
    assert len(found) > 300
    near = sum(abs(error) <= 15_000 for error, _ in found) / len(found)
    covered = sum(abs(error) <= bar for error, bar in found) / len(found)
    assert near >= 0.99
    assert covered >= 0.99
    assert rooms.harvester.status()["sim:0"]["drift_ppm"] == pytest.approx(-80, abs=10)


def test_a_first_span_has_no_start_before_the_clock_is_known(rooms) -> None:
    rooms.sim.virtual_clock()
    rooms.span(1.0)
    rooms.sim.configure(launch_us=100_000.0)  # no anchor comes back in time
    rooms.sim.advance_ms(5.0)
    rooms.harvester.run_once()
    (span,) = rooms.spans
    assert (span.start_ns, span.error_ns, span.queue_wait_ns, span.gap_ns) == (None, None, None, None)
    assert span.exec_ns == pytest.approx(1_000_000, abs=1000)
    assert rooms.harvester.status()["sim:0"]["anchors_missed"] == 1


def test_a_device_clock_that_was_set_starts_afresh(rooms) -> None:
    sim = rooms.sim
    sim.virtual_clock()
    rooms.prove()
    for _ in range(10):
        rooms.span(1.0)
        sim.advance_ms(150.0)
        rooms.harvester.run_once()
    sim.configure(offset_s=5.0)
    rooms.spans.clear()
    sim.clear_log()
    for _ in range(4):
        rooms.span(1.0)
        sim.advance_ms(150.0)
        rooms.harvester.run_once()
    (*_, last), truth = rooms.spans, sim.operations()[-1]
    assert abs(last.start_ns - truth.start_ns) <= last.error_ns < 30_000


def test_an_idle_device_gets_no_anchors(rooms) -> None:
    rooms.sim.virtual_clock()
    rooms.prove()
    rooms.sim.advance_ms(500.0)
    rooms.harvester.run_once()
    before = rooms.sim.counters()["calls:record"]
    for _ in range(20):
        rooms.sim.advance_ms(500.0)
        rooms.harvester.run_once()
    assert rooms.sim.counters()["calls:record"] - before <= 64  # at most the reserve of events
    steady = rooms.sim.counters()["calls:record"]
    rooms.sim.advance_ms(500.0)
    rooms.harvester.run_once()
    assert rooms.sim.counters()["calls:record"] == steady
