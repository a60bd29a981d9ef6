"""Markdown, HTML, JSON, time line and percentile table."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from inferscope.costs import StageCost
from inferscope.report import document, hgrm, html, markdown, perfetto

MARKDOWN = """\
## ❌ P99 of score at most 20 ms: BROKEN

P99 48.1 ms: the objective P99 of 20 ms is broken; the tail's excess is copy:h2d 62 %, lock:rules 38 %.

| P50 | P95 | P99 | P99.9 | jitter |
|---:|---:|---:|---:|---:|
| 8.72 ms | 19.0 ms | 48.1 ms | n/a | 39.3 ms |

2000 requests/s · 120 000 requests · 12 profiled · 7 680 above the objective (6.4 %) · 3 errors · device busy 35 %

### Where slow requests lose their time

39.5 ms more than an ordinary request:

| column | share | slow | ordinary | mean profile |
|---|---:|---:|---:|---:|
| copy:h2d | 62 % ± 5 | 24.9 ms | 0.38 ms | 13 % |
| lock:rules | 38 % ± 5 | 15.0 ms | 0.00 ms | 10 % |
| forward | 0 % ± <1 | 5.30 ms | 5.30 ms | 50 % |

A mean profile would point at forward (50 % of all time), which owns 0 % of what slow requests take longer.

### P99 if a cause cost every request no more than its median (estimate)

| fixed | P99 | objective |
|---|---:|---|
| copy:h2d | 37.8 ms | ❌ broken |
| copy:h2d + lock:rules | 15.4 ms | ✅ meets |

### Findings

- 🔴 **H2D_SYNC_PAGEABLE** (communication, high, confidence high) at `score (serve.py:20)`
  Requests block on h2d copies.
  - share of the tail's excess: 62 % \\[57, 67\\]
  - copies that blocked the host: 90 of 100 copies
  - pairs: 4 pairs (captures/c1.trace.json)
  - P99 without it: about 37.8 ms
  - Fix: Use pinned memory.
  - Refuted if: Pin the buffer on one replica.
  - Back out: Use the old buffer.

### Captures

- c1: tier 1, slow request 77, 1 234 events, stall 0.75 ms; operators by stage: rules 30.5 ms, forward 5.12 ms

### Notes

- Tail: requests above 20 ms.

Incident: `state/risk/0/incidents/20240101T000000Z-score-abcd`
"""


def test_whole_markdown(incident):
    assert markdown.render(incident) == MARKDOWN


def test_markdown_escapes_names(incident):
    share = replace(incident.attribution[0], name="a|b<img>_c_")
    assert "| a\\|b\\<img\\>\\_c\\_ |" in markdown.render(replace(incident, attribution=(share,)))


def test_markdown_withheld(incident):
    found = markdown.render(replace(incident, withheld="not enough evidence"))
    assert "❔ not enough evidence.\n" in found
    assert "| column |" not in found


def test_json_has_the_agreed_keys(incident):
    found = json.loads(json.dumps(document.to_json(incident)))
    assert {
        "slo",
        "latency_ms",
        "requests",
        "errors",
        "throughput_rps",
        "jitter_ms",
        "device_busy",
        "attribution",
        "what_if",
        "findings",
        "captures",
        "incident",
    } <= found.keys()
    assert found["latency_ms"] == {"p50": 8.72, "p95": 19.04, "p99": 48.06, "p999": None}
    assert found["slo"]["broken"] is True
    assert {"name", "kind", "share", "ci"} <= found["attribution"][0].keys()
    assert found["what_if"][1] == {"fix": ["copy:h2d", "lock:rules"], "p99_ms": 15.4, "meets_objective": True, "ci": None}
    assert {
        "id",
        "class",
        "severity",
        "confidence",
        "where",
        "evidence",
        "what_if_p99_ms",
        "refute_by",
        "fix",
    } <= found["findings"][0].keys()
    assert found["findings"][0]["evidence"][0] == {
        "metric": "share of the tail's excess",
        "value": 62.0,
        "unit": "%",
        "ci": [57.0, 67.0],
        "artefact": None,
    }
    assert {"id", "tier", "requests", "events", "stall_ms", "threads"} <= found["captures"][0].keys()
    assert found["incident"] == incident.path


class Checker(HTMLParser):
    """Balanced tags, and whatever a browser would load or run."""

    VOID = frozenset({"meta", "line", "rect", "br"})

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.loads, self.text = [], set(), [], []

    def handle_starttag(self, tag, attrs):
        self.seen.add(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        self.loads += [value for name, value in attrs if name in {"src", "href", "srcset"} or name.startswith("on")]

    def handle_startendtag(self, tag, attrs):
        self.seen.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def parsed(source):
    checker = Checker()
    checker.feed(source)
    checker.close()
    assert checker.open == []
    return checker


def test_html_is_one_self_contained_file(incident):
    source = html.render(incident)
    found = parsed(source)
    assert found.loads == []
    assert "script" not in found.seen
    assert "url(" not in source
    assert len(source) < 100_000
    said = "".join(found.text)
    for words in (
        "BROKEN",
        "copy:h2d",
        "62 % ± 5",
        "39.5 ms more",
        "15.4 ms",
        "H2D_SYNC_PAGEABLE",
        "Use pinned memory.",
        "stall 0.75 ms",
        incident.path,
    ):
        assert words in said


def test_html_bars_have_the_shares_lengths(incident):
    source = html.render(incident)
    assert '<rect class="slow" width="62.0" height="6"/>' in source
    assert '<line class="ci" x1="57.0" x2="67.0" y1="3" y2="3"/>' in source


def test_html_escapes_everything(incident):
    bad = '<script>alert("x")</script>'
    share = replace(incident.attribution[0], name=bad)
    finding = replace(incident.findings[0], where=bad, claim=bad, fix=bad)
    source = html.render(replace(incident, attribution=(share,), findings=(finding,), path=bad, verdict=bad, notes=(bad,)))
    assert "script" not in parsed(source).seen


def test_html_withheld(incident):
    source = html.render(replace(incident, withheld="not enough evidence", findings=(), what_if=(), captures=(), notes=()))
    assert "<svg" not in source
    assert "not enough evidence." in source
    assert "<p>None.</p>" in source


EVIDENCE = {
    "slot": 3,
    "pid": 99,
    "unix_offset_ns": 1_000_000,
    "columns": [["unattributed", "unattributed"], ["other", "other"], ["copy", "h2d"]],
    "classes": [
        {
            "request": "sc\x01ore",
            "slowest": [
                {
                    "id": 5,
                    "start_ns": 2_000,
                    "wall_ns": 3_000,
                    "thread_id": 7,
                    "size": 8,
                    "error": None,
                    "spans": [[2, 2_500, 4_500, -1, 8, 3, 4096]],
                }
            ],
        }
    ],
}


def test_time_line_of_the_slowest():
    source = perfetto.render([EVIDENCE])
    assert source.isascii()
    process, request, span = json.loads(source)["traceEvents"]
    assert process["args"]["name"] == "slot 3 (pid 99)"
    assert (request["name"], request["ts"], request["dur"], request["pid"], request["tid"]) == ("sc\x01ore", 1002.0, 3.0, 3, 7)
    assert (span["name"], span["ts"], span["dur"], span["tid"]) == ("copy:h2d", 1002.5, 2.0, 8)
    assert span["args"] == {"request": 5, "flags": 3, "aux": 4096}


def test_percentile_table_matches_hdrhistogram():
    hdrh = pytest.importorskip("hdrh.histogram")
    histogram = hdrh.HdrHistogram(1, 60_000_000_000, 3)
    buckets = [(n * 1e6, n * 1e6, 10) for n in range(1, 101)]
    for n in range(1, 101):
        histogram.record_value(n, 10)
    rows = [line.split() for line in hgrm.render(buckets).splitlines() if line and not line.startswith(("#", " " * 7 + "Value"))]
    assert [row[1][:6] for row in rows[:7]] == ["0.0000", "0.1000", "0.2000", "0.3000", "0.4000", "0.5000", "0.5500"]
    for value, percentile, seen, *_ in rows:
        assert float(value) == histogram.get_value_at_percentile(100 * float(percentile)), percentile
        assert int(seen) == 10 * float(value)
    assert rows[-1] == ["100.000", "1.000000000000", "1000"]


def test_percentile_table_of_nothing():
    assert hgrm.render([]).endswith("#[Max     =        0.000, Total count    =            0]\n")


def test_reports_load_neither_torch_nor_numpy_nor_rich():
    code = (
        "import sys; from inferscope.report import document, hgrm, html, markdown, perfetto, text; "
        "sys.exit(', '.join({'torch', 'numpy', 'rich', 'opentelemetry'} & {n.partition('.')[0] for n in sys.modules}) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_stages_are_in_every_document(incident):
    costs = (StageCost("forward", 5.3, 5.2, 4.9, None, 262_144.0, None, 3 << 20),)
    held = replace(incident, stages=costs)
    assert "| forward | 5.30 ms / 5.20 ms | 4.90 ms / n/a | 256 KiB / n/a | 3.00 MiB |" in markdown.render(held)
    assert "<td>forward</td><td>5.30 ms / 5.20 ms</td>" in html.render(held)
    assert document.to_json(held)["stages"][0]["ordinary_cpu_ms"] is None
