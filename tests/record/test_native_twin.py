"""Random programs give the same numbers on the C core and on its twin, to the nanosecond."""

from __future__ import annotations

import random
import struct
from array import array
from typing import Any

import pytest

from inferscope.record import fallback

native = pytest.importorskip("inferscope.record._native", reason="the C core was not built")

SPAN = struct.Struct("<qqqIHBB")
STAGES = ("tokenize", "forward", "decode", "respond")


class Clock:
    """A clock that moves only when told."""

    def __init__(self) -> None:
        self.now = 1_000_000

    def __call__(self) -> int:
        return self.now


class Program:
    """One seeded program, run on one recorder.

    Args:
        make: The implementation's Recorder.
        seed: Decides every step.
        orderly: Whether regions are left in the order that `with` gives.
    """

    def __init__(self, make: Any, seed: int, *, orderly: bool) -> None:
        self.clock = Clock()
        self.recorder = make(clock=self.clock)
        self.recorder.cpu_mode = "off"
        self.random = random.Random(seed)
        self.orderly = orderly
        self.requests: list[Any] = []
        self.spans: list[Any] = []
        self.drained: list[tuple[Any, ...]] = []
        self.pins: list[int] = []
        self.moved: list[int] = []

    def run(self, steps: int = 120) -> Program:
        self.recorder.set_edges("score", [3_000, 40_000])
        actions = [self.enter, self.enter, self.leave, self.leave, self.interval, self.begin, self.end, self.mark, self.pin, self.settle]
        for _ in range(steps):
            self.clock.now += self.random.choice((0, 1, 300, 2_500, 7_001))
            self.random.choice(actions)()
        while self.spans:
            self.leave()
        while self.requests:
            self.end()
        if self.random.random() < 0.5:
            self.clock.now += 2_000_000_000
        self.drained += self.recorder.drain()
        return self

    def enter(self) -> None:
        if len(self.spans) < 90:
            self.spans.append(self.recorder.stage(self.random.choice(STAGES)).__enter__())

    def leave(self) -> None:
        error = self.random.random() < 0.1
        place = -1 if self.orderly or self.random.random() < 0.8 else self.random.randrange(max(len(self.spans), 1))
        if self.spans:
            self.spans.pop(place).__exit__(*((ValueError, ValueError(), None) if error else (None, None, None)))

    def interval(self) -> None:
        now = self.clock.now
        start = now - self.random.choice((0, 10, 1_000, 9_000))
        end = start + self.random.choice((0, 5, 500, 12_000))
        kind, name = self.random.choice((("copy", "h2d"), ("lock", "rules"), ("gc", "2"), ("lock.hold", "rules")))
        self.recorder.interval(kind, name, start, end, flags=self.random.choice((0, 1)), aux=self.random.randrange(100))

    def begin(self) -> None:
        if len(self.requests) < 3:
            started = self.clock.now - 5_000 if self.random.random() < 0.3 else None
            request = self.recorder.request(
                self.random.choice(("score", "rank")),
                items=self.random.randrange(1, 5),
                cls=self.random.choice((None, "gold")),
                started_ns=started,
            )
            self.requests.append(request.__enter__())

    def end(self) -> None:
        if not self.requests:
            return
        request = self.requests.pop()
        fate = self.random.random()
        if fate < 0.1:
            request.profiled = True
        elif fate < 0.2:
            request.discard()
        elif fate < 0.3:
            request.finish("TimeoutError")
        error = self.random.random() < 0.1
        request.__exit__(*((KeyError, KeyError(), None) if error else (None, None, None)))

    def pin(self) -> None:
        if self.requests:
            self.pins.append(self.recorder.pin(self.requests[-1]))

    def settle(self) -> None:
        if self.pins:
            ref = self.random.choice(self.pins)
            source, target = (self.random.randrange(7) for _ in range(2))
            self.moved.append(self.recorder.settle(ref, source, target, self.random.choice((1, 400, 60_000))))
            if self.random.random() < 0.4:
                self.pins.remove(ref)
                self.recorder.unpin(ref)

    def mark(self) -> None:
        if self.random.random() < 0.1:
            self.recorder.begin_epoch(breaching=self.random.randrange(4), reservoir=200, slowest=2)
            self.drained += self.recorder.drain()


def spans_of(record: tuple[Any, ...]) -> list[tuple[int, ...]]:
    """The spans of a retained request without their thread."""
    return [(start, end, aux, column, parent, flags) for start, end, aux, _, column, parent, flags in SPAN.iter_unpack(record[15])]


def picture(program: Program) -> dict[str, Any]:
    """Everything that a reader can see, without thread ids."""
    recorder = program.recorder
    columns = [tuple(column) for column in recorder.columns()]
    counts = {}
    for index, kind, labels, digits, lowest, length in recorder.series():
        buffer = array("q", bytes(8 * length))
        totals = recorder.read_counts(index, buffer)
        counts[kind, labels] = digits, lowest, totals, {i: n for i, n in enumerate(buffer) if n}
    classes = {}
    for index, request, model, cls, _, edges in recorder.classes():
        classes[request, model, cls] = edges, recorder.read_class(index), recorder.read_bands(index)
    records = []
    for record in program.drained:
        vector = array("q", record[14])
        assert sum(vector) == record[3]
        records.append((*record[:6], *record[7:14], list(vector), spans_of(record), *record[16:]))
    return {
        "columns": columns,
        "counts": {key: value for key, value in counts.items() if value[2][0]},
        "classes": {key: value for key, value in classes.items() if value[1]["count"]},
        "records": records,
        "counters": recorder.counters(),
        "moved": program.moved,
    }


@pytest.mark.parametrize("orderly", [True, False])
@pytest.mark.parametrize("seed", range(60))
def test_same_numbers(seed: int, orderly: bool) -> None:
    ours = picture(Program(native.Recorder, seed, orderly=orderly).run())
    theirs = picture(Program(fallback.Recorder, seed, orderly=orderly).run())
    for part, value in theirs.items():
        assert ours[part] == value, part
    assert ours["counters"]["internal_errors"] == 0
