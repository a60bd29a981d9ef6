"""One part in sixteen of the time, in bursts that begin at random."""

from __future__ import annotations

import itertools
import random

from inferscope.host.duty import SHARE, Duty

MS = 1_000_000


def test_bursts_take_a_sixteenth_of_the_time_and_keep_no_rhythm():
    duty, begin = Duty(random.Random(3)), 5_000 * MS
    looked, starts, before = 0, [], False
    for moment in range(begin, begin + 512_000 * MS, 10 * MS):
        now = duty.wait_ns(moment) == 0
        looked += now
        if now and not before:
            starts.append(moment)
        before = now
    assert abs(looked / 51_200 - 1 / SHARE) < 0.004
    assert 95 <= len(starts) <= 105
    gaps = [(later - earlier) // MS for earlier, later in itertools.pairwise(starts)]
    assert max(gaps) - min(gaps) > 3_000, "a rhythm of the service could hide between regular bursts"


def test_it_says_when_to_come_again():
    duty, moment = Duty(random.Random(1)), 1
    for _ in range(50):
        wait = duty.wait_ns(moment)
        assert wait >= 0
        if wait == 0:
            moment += 10 * MS
            continue
        assert duty.wait_ns(moment + wait // 2) <= wait
        moment += wait
        assert duty.wait_ns(moment) == 0 or duty.wait_ns(moment) < 5_120 * MS
    assert Duty(random.Random(1)).wait_ns(7) > 300 * MS, "a process that has just begun is left alone"
