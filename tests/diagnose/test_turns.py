"""Who had the device while slow requests' work stood in its queue."""

from __future__ import annotations

from types import SimpleNamespace

from inferscope.diagnose.device import DeviceSpan
from inferscope.diagnose.rules.turns import turns

MS = 1_000_000
USUAL = {"copy:h2d": 0.2, "forward": 2.0}


def judged(spans, slow):
    context = SimpleNamespace(horizon=SimpleNamespace(device=SimpleNamespace(spans={key: tuple(rows) for key, rows in spans.items()})))
    return turns(context, [SimpleNamespace(slot=0, id=number) for number in slow])


def request(at_ms, *rows, wait_ms=0.0):
    """Spans of one request, one after another: name and length; the first stands `wait_ms` in the queue."""
    made, issue, start = [], at_ms, at_ms + wait_ms
    for name, length in rows:
        made.append(DeviceSpan(name, round(issue * MS), round(start * MS), round(length * MS), round((start - issue) * MS)))
        issue, start = issue + 0.01, start + length
    return made


def ordinary(count=200):
    return {(0, number): request(1000.0 + 100 * number, *USUAL.items()) for number in range(count)}


def test_copies_and_kernels_that_take_long_alike_are_somebody_elses_doing():
    spans = ordinary()
    for number in range(20):
        at = 50_000.0 + 100 * number
        stretched = (("copy:h2d", 40.0), ("forward", 2.0)) if number % 2 else (("copy:h2d", 0.2), ("forward", 41.0))
        spans[0, 1000 + number] = request(at, *stretched)
        spans[0, 2000 + number] = request(at + 5, *USUAL.items(), wait_ms=36.0)  # behind it, on the same stream
    found = judged(spans, [*range(1000, 1020), *range(2000, 2020)])
    assert found.foreign
    assert found.stretched > 0.4 * found.waited > 0
    assert found.requests == 40


def test_one_kind_of_work_that_is_heavy_is_our_own():
    spans = ordinary()
    for number in range(20):
        at = 50_000.0 + 100 * number
        spans[0, 3000 + number] = request(at, ("report", 40.0))
        spans[0, 2000 + number] = request(at + 5, *USUAL.items(), wait_ms=35.0)
    found = judged(spans, range(2000, 2020))
    assert (found.foreign, found.longest) == (False, "report")
    assert found.stretched == 0.0
    heavy = ordinary()
    for number in range(20):  # the same kind, heavier now and then
        at = 50_000.0 + 100 * number
        heavy[0, 3000 + number] = request(at, ("copy:h2d", 0.2), ("forward", 40.0))
        heavy[0, 2000 + number] = request(at + 5, *USUAL.items(), wait_ms=35.2)
    found = judged(heavy, range(2000, 2020))
    assert (found.foreign, found.longest) == (False, "forward")
    assert found.stretched > 0


def test_too_few_requests_say_nothing():
    assert judged(ordinary(9), range(9)) is None
    assert judged({}, range(50)) is None
