"""Who had the device while slow requests' work stood in its queue."""

from __future__ import annotations

from types import SimpleNamespace

from inferscope.diagnose.device import DeviceSpan
from inferscope.diagnose.rules.turns import turns

MS = 1_000_000
USUAL = {"copy:h2d": 0.2, "forward": 2.0}


def judged(spans, slow):
    device = SimpleNamespace(spans={key: tuple(rows) for key, rows in spans.items()})
    context = SimpleNamespace(horizon=SimpleNamespace(device=device), threshold_ns=20.0 * MS)
    return turns(context, [request_of(number) for number in slow], [request_of(number) for number in range(100)])


def request_of(number):
    """Those from 3000 up are large, those from 4000 up have no size."""
    return SimpleNamespace(slot=0, id=number, size=None if number >= 4000 else 50.0 if number >= 3000 else 1.0 + number % 2)


def request(at_ms, *rows, wait_ms=0.0):
    """Spans of one request, one after another: name and length; the first stands `wait_ms` in the queue."""
    made, issue, start = [], at_ms, at_ms + wait_ms
    for name, length in rows:
        made.append(DeviceSpan(name, round(issue * MS), round(start * MS), round(length * MS), round((start - issue) * MS)))
        issue, start = issue + 0.01, start + length
    return made


def ordinary(count=200):
    return {(0, number): request(1000.0 + 100 * number, *USUAL.items()) for number in range(count)}


def test_work_that_lasts_long_alone_though_its_request_is_no_larger_is_somebody_elses_doing():
    spans = ordinary()
    for number in range(20):
        at = 50_000.0 + 100 * number
        spans[0, 1000 + number] = request(at, ("copy:h2d", 0.2), ("forward", 41.0))
        spans[0, 2000 + number] = request(at + 5, *USUAL.items(), wait_ms=36.0)  # behind it, on the same stream
    found = judged(spans, [*range(1000, 1020), *range(2000, 2020)])
    assert (found.foreign, found.alone, found.heavy, found.requests) == (True, 20, 0, 40)


def test_heavy_work_of_our_own_is_named():
    spans = ordinary()
    for number in range(20):
        at = 50_000.0 + 100 * number
        spans[0, 3000 + number] = request(at, ("report", 40.0))
        # the report was launched between the marks around this copy, which seems to last as long
        behind = (("copy:h2d", 35.0), ("forward", 2.0)) if number % 2 else tuple(USUAL.items())
        spans[0, 2000 + number] = request(at + 5, *behind, wait_ms=0.0 if number % 2 else 35.0)
    found = judged(spans, range(2000, 2020))
    assert (found.foreign, found.alone, found.behind) == (False, 0, "report")
    heavy = ordinary()
    for number in range(20):  # the same kind of work, heavier now and then
        at = 50_000.0 + 100 * number
        heavy[0, 3000 + number] = request(at, ("copy:h2d", 0.2), ("forward", 40.0))
        heavy[0, 2000 + number] = request(at + 5, *USUAL.items(), wait_ms=35.2)
    found = judged(heavy, [*range(2000, 2020), *range(3000, 3020)])
    assert (found.foreign, found.alone, found.heavy, found.behind) == (False, 0, 20, "forward")
    unsized = {(slot, number + 1000 if number >= 3000 else number): rows for (slot, number), rows in heavy.items()}
    assert not judged(unsized, [*range(2000, 2020), *range(4000, 4020)]).foreign, "nobody knows how heavy they are"


def test_too_few_requests_say_nothing():
    assert judged(ordinary(9), range(9)) is None
    assert judged({}, range(50)) is None
