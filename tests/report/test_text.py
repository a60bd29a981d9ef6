"""The terminal report, character by character."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from inferscope.costs import StageCost
from inferscope.report import text
from inferscope.types import Latency

EXPECTED = """\
P99 of score at most 20 ms: BROKEN   20240101T000000Z-score-abcd  diagnosed
P99 48.1 ms: the objective P99 of 20 ms is broken; the tail's excess is copy:h2d 62 %, lock:rules 38
%.

P50 8.72 ms   P95 19.0 ms   P99 48.1 ms   P99.9 n/a   jitter 39.3 ms
2000 requests/s · 120 000 requests · 12 profiled · 7 680 above the objective (6.4 %) · 3 errors ·
device busy 35 %

Where slow requests lose their time: 39.5 ms more than an ordinary request
              share of it                                   slow  ordinary  mean profile
  copy:h2d    ███████████████·········    62 % ± 5       24.9 ms   0.38 ms          13 %
  lock:rules  █████████···············    38 % ± 5       15.0 ms   0.00 ms          10 %
  forward     ························     0 % ± <1      5.30 ms   5.30 ms          50 %
  A mean profile would point at forward (50 % of all time), which owns 0 % of what slow requests
  take longer.

P99 if a cause cost every request no more than its median (estimate)
  copy:h2d               37.8 ms
  copy:h2d + lock:rules  15.4 ms  meets the objective

Findings
  1 HIGH  H2D_SYNC_PAGEABLE  communication, confidence high, score (serve.py:20)
    Requests block on h2d copies.
      - share of the tail's excess: 62 % [57, 67]
      - copies that blocked the host: 90 of 100 copies
      - pairs: 4 pairs (captures/c1.trace.json)
    P99 without it: about 37.8 ms
    Fix: Use pinned memory.
    Refuted if: Pin the buffer on one replica.
    Back out: Use the old buffer.

Captures
  c1: tier 1, slow request 77, 1 234 events, stall 0.75 ms; operators by stage: rules 30.5 ms,
  forward 5.12 ms

Notes
  Tail: requests above 20 ms.

Incident: state/risk/0/incidents/20240101T000000Z-score-abcd
"""


def test_whole_report(incident):
    assert text.render(incident) == EXPECTED


def test_color_changes_no_character(incident):
    colored = text.render(incident, color=True)
    assert "\x1b[1;31m" in colored
    plain = re.sub(r"\x1b\[[0-9;]*m", "", colored)
    assert [line.rstrip() for line in plain.splitlines()] == EXPECTED.splitlines()


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_lines_keep_to_the_width(incident, width):
    plain = replace(incident, path="x", findings=())
    assert max(map(len, text.render(plain, width=width).splitlines())) <= max(width, 76)


def test_withheld_attribution_shows_no_bars(incident):
    found = text.render(replace(incident, withheld="not enough evidence: 4 slow episodes"))
    assert "Where slow requests lose their time\n  Not enough evidence: 4 slow episodes.\n" in found
    assert "█" not in found


def test_objective_that_holds_and_nothing_found(incident):
    found = text.render(replace(incident, exceeding=1200, findings=(), captures=(), notes=(), what_if=()))
    assert found.startswith("P99 of score at most 20 ms: HOLDS")
    assert "\nFindings\n  none\n\nIncident: " in found
    assert "Captures" not in found


def test_unknown_values_are_said(incident):
    found = text.render(replace(incident, latency_ms=Latency(None, None, None, None), jitter_ms=None, device_busy=None))
    assert "P50 n/a   P95 n/a   P99 n/a   P99.9 n/a   jitter n/a" in found
    assert "device busy n/a" in found


def test_share_without_interval(incident):
    share = replace(incident.attribution[0], ci=None)
    assert "62 % ± n/a" in text.render(replace(incident, attribution=(share,)))


def test_no_objective(incident):
    breach = replace(incident.breach, threshold_ms=0.0)
    assert text.render(replace(incident, breach=breach)).startswith("No objective for score   ")


def test_many_captures_are_one_line_a_kind(incident) -> None:
    first = incident.captures[0]
    slow = [replace(first, id=f"c{n}", requests=(n,), threads=(n % 3,), stall_ms=0.5 + n / 10, events=100 + n) for n in range(8)]
    healthy = replace(first, id="h1", slow=False)
    found = text.render(replace(incident, captures=(*slow, healthy)), width=200)
    assert (
        "  8 slow requests on 3 threads: stall 0.50 to 1.20 ms each, 100 to 107 events; operators by stage, medians: rules 30.5 ms, forward 5.12 ms\n"
    ) in found
    assert "  h1: tier 1, healthy request 77, 1 234 events, stall 0.75 ms" in found


def test_stages_stand_beside_what_they_cost(incident):
    costs = (
        StageCost("forward", 5.3, 5.2, 4.9, None, 262_144.0, None, 3 << 20),
        StageCost("rules", 0.5, 0.4, None, None, None, None, None),
    )
    found = text.render(replace(incident, stages=costs))
    assert "  forward  5.30 ms / 5.20 ms  4.90 ms / n/a  256 KiB / n/a  3.00 MiB\n" in found
    assert "  rules    0.50 ms / 0.40 ms  n/a / n/a      n/a / n/a      n/a\n" in found


def test_a_mean_profile_that_is_right_is_not_called_wrong(incident):
    assert "A mean profile would point at" in text.render(incident)
    right = replace(incident.attribution[0], mean_share=0.7)
    assert "A mean profile" not in text.render(replace(incident, attribution=(right, *incident.attribution[1:])))
