"""A stateful machine drives both cores side by side: regions that nest and that do not, requests inside requests, batches, late data."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from inferscope.record import fallback

native = pytest.importorskip("inferscope.record._native", reason="the C core was not built")

DONE = (None, None, None)
FAILED = (ValueError, ValueError(), None)
NAMES = st.sampled_from(("tokenize", "forward", "decode"))


class Side:
    """One core and what the machine holds of it."""

    def __init__(self, make: Any, now: list[int]) -> None:
        self.recorder = make(clock=lambda: now[0])
        self.recorder.cpu_mode = "off"
        self.recorder.set_edges("score", [2_000])


class Cores(RuleBasedStateMachine):
    """Both cores are told the same; whatever can be read of them must be the same, and must add up."""

    spans, refs = Bundle("spans"), Bundle("refs")

    def __init__(self) -> None:
        super().__init__()
        self.now = [1_000_000]
        self.sides = [Side(native.Recorder, self.now), Side(fallback.Recorder, self.now)]
        self.requests: list[list[Any]] = []

    def both(self, action: Any) -> list[Any]:
        return [action(side.recorder, index) for index, side in enumerate(self.sides)]

    @rule(ns=st.integers(0, 5_000))
    def time_passes(self, ns: int) -> None:
        self.now[0] += ns

    @precondition(lambda self: len(self.requests) < 3)
    @rule(name=st.sampled_from(("score", "rank")))
    def request_begins(self, name: str) -> None:
        self.requests.append(self.both(lambda recorder, _: recorder.request(name).__enter__()))

    @precondition(lambda self: self.requests)
    @rule(failed=st.booleans(), discarded=st.booleans())
    def request_ends(self, failed: bool, discarded: bool) -> None:
        for request in self.requests.pop():
            if discarded:
                request.discard()
            request.__exit__(*(FAILED if failed else DONE))

    @rule(target=spans, name=NAMES)
    def span_begins(self, name: str) -> list[Any]:
        return self.both(lambda recorder, _: recorder.stage(name).__enter__())

    @rule(spans=consumes(spans), failed=st.booleans())
    def span_ends(self, spans: list[Any], failed: bool) -> None:
        for span in spans:
            span.__exit__(*(FAILED if failed else DONE))

    @rule(name=NAMES, ago=st.integers(0, 9_000), length=st.integers(0, 9_000))
    def interval(self, name: str, ago: int, length: int) -> None:
        start = self.now[0] - ago
        self.both(lambda recorder, _: recorder.interval("copy", name, start, start + length))

    @precondition(lambda self: self.requests)
    @rule(target=refs)
    def pinned(self) -> list[int]:
        return self.both(lambda recorder, index: recorder.pin(self.requests[-1][index]))

    @rule(refs=refs, source=st.integers(0, 6), to=st.integers(0, 6), ns=st.integers(1, 6_000))
    def settled(self, refs: list[int], source: int, to: int, ns: int) -> None:
        moved = self.both(lambda recorder, index: recorder.settle(refs[index], source, to, ns))
        assert moved[0] == moved[1] <= ns

    @rule(refs=consumes(refs))
    def unpinned(self, refs: list[int]) -> None:
        self.both(lambda recorder, index: recorder.unpin(refs[index]))

    @precondition(lambda self: self.requests)
    @rule(target=refs, steps=st.lists(st.tuples(NAMES, st.integers(0, 900)), max_size=4), early=st.booleans())
    def batch(self, steps: list[tuple[str, int]], early: bool) -> list[int]:
        """Work of a batcher, which is no part of the current context, hung into every open request; with a device span."""

        def work(recorder: Any, index: int) -> int:
            self.now[0] = begun
            with recorder.attach(None), recorder.carrier("work") as carrier:
                ref = recorder.pin(carrier)
                for name, ns in steps:
                    with recorder.stage(name):
                        self.now[0] += ns
            if early:
                recorder.settle(ref, 3, 2, 400)
            for request in self.requests:
                recorder.splice(carrier.packed, request[index])
            return ref

        begun = self.now[0]
        return self.both(work)

    @rule()
    def read(self) -> None:
        rows = self.both(lambda recorder, _: [(*row[:6], *row[7:15], *row[16:]) for row in recorder.drain()])
        assert rows[0] == rows[1]
        for row in rows[0]:
            vector = array("q", row[13])
            assert sum(vector) == row[3], "the vector is the wall time, to the nanosecond"

    @invariant()
    def same(self) -> None:
        ours, theirs = self.both(
            lambda recorder, _: (recorder.columns(), recorder.counters(), [recorder.read_bands(c[0]) for c in recorder.classes()])
        )
        assert ours == theirs
        assert ours[1]["internal_errors"] == 0
        counts = self.both(
            lambda recorder, _: {(s[1], s[2]): recorder.read_counts(s[0], array("q", bytes(8 * s[5]))) for s in recorder.series()}
        )
        assert counts[0] == counts[1]


Cores.TestCase.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
TestCores = Cores.TestCase
